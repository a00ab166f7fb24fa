/** The TypeScript client of Pagoda: `Pagoda` streams tokens and throws typed errors. */
export type { Answer, Chunk, FinishReason, Score, Sequence, TokenLogprob, ToolCallDelta } from "./chunk.js";
export { type ClientOptions, Pagoda } from "./client.js";
export type { ChatMessage, ChatOptions, Tool, ToolCall, ToolChoice } from "./conversation.js";
export {
  AlreadyExists,
  Cancelled,
  type Code,
  DeadlineExceeded,
  InvalidArgument,
  NotFound,
  Overloaded,
  PagodaError,
  PermissionDenied,
  Unauthenticated,
  Unavailable,
  Unimplemented,
} from "./errors.js";
export type {
  CallOptions,
  DetokenizeOptions,
  EmbedOptions,
  GenerateOptions,
  Input,
  ScoreOptions,
  TextInput,
  TokenizeOptions,
} from "./request.js";
