/** Converts the arguments of calls to request messages. */
import { create } from "@bufbuild/protobuf";
import { type ChatMessage, type ChatOptions, chatFrom } from "./conversation.js";
import { invalid } from "./errors.js";
import { assign } from "./fields.js";
import * as pb from "./protos.js";

/**
 * What to answer or continue: a user's message (a text), a conversation (a list of messages), or one of these.
 *
 * message   a user's message, answered through the model's chat template
 * prompt    a text to continue as it stands
 * chat      a conversation; or a user's message, if it needs tools or templateKwargs
 * tokenIds  token ids to continue as they are
 */
export type Input =
  | TextInput
  | { message?: never; prompt?: never; chat?: never; tokenIds: Iterable<number> };

/** What can be tokenized: every Input but token ids. */
export type TextInput =
  | string
  | readonly ChatMessage[]
  | { message: string; prompt?: never; chat?: never; tokenIds?: never }
  | { message?: never; prompt: string; chat?: never; tokenIds?: never }
  | { message?: never; prompt?: never; chat: string | readonly ChatMessage[]; tokenIds?: never };

/** How a call is made. */
export interface CallOptions {
  /** Deadline of the call, all its attempts included; the client's own unless it is set. */
  timeoutS?: number | undefined;
  /** Cancels the call, which then throws the signal's reason. */
  signal?: AbortSignal | undefined;
}

/** Options of `stream` and `generate`. The server has defaults; protos/pagoda/v1/inference.proto has all meanings. */
export interface GenerateOptions extends ChatOptions, CallOptions {
  maxTokens?: number | undefined;
  minTokens?: number | undefined;
  stop?: string | Iterable<string> | undefined;
  stopTokenIds?: Iterable<number> | undefined;
  ignoreEos?: boolean | undefined;
  includeStopInOutput?: boolean | undefined;
  temperature?: number | undefined;
  topK?: number | undefined;
  topP?: number | undefined;
  minP?: number | undefined;
  topNSigma?: number | undefined;
  repetitionPenalty?: number | undefined;
  presencePenalty?: number | undefined;
  frequencyPenalty?: number | undefined;
  logitBias?: Readonly<Record<number, number>> | undefined;
  allowedTokenIds?: Iterable<number> | undefined;
  noRepeatNgramSize?: number | undefined;
  badWords?: Iterable<string> | undefined;
  seed?: number | bigint | undefined;
  n?: number | undefined;
  logprobs?: number | undefined;
  text?: boolean | undefined;
  tokenBytes?: boolean | undefined;
  promptIds?: boolean | undefined;
  specialTokens?: boolean | undefined;
  /** Leave reasoning and tool calls in the text. */
  unparsed?: boolean | undefined;
  promptLogprobs?: number | undefined;
  /** A JSON Schema that the answer matches, as an object or as text: JSON.parse reads the answer then. */
  jsonSchema?: string | object | undefined;
  /** Instead of a schema: a regular expression, a grammar, texts of which the answer is one, or true for any object. */
  regex?: string | undefined;
  grammar?: string | undefined;
  choice?: Iterable<string> | undefined;
  jsonObject?: boolean | undefined;
  maxDraftTokens?: number | undefined;
  cacheSalt?: string | undefined;
  bypassCache?: boolean | undefined;
  priority?: number | undefined;
  ttftS?: number | undefined;
  tpotS?: number | undefined;
  model?: string | undefined;
  loraName?: string | undefined;
  requestId?: string | undefined;
  /** Go on after the server, its engine or the connection broke; each token comes once. */
  resumable?: boolean | undefined;
}

export interface TokenizeOptions extends ChatOptions, CallOptions {
  /** False: leave out the tokenizer's own special tokens; for a prompt only. */
  addSpecialTokens?: boolean | undefined;
  model?: string | undefined;
}

export interface DetokenizeOptions extends CallOptions {
  specialTokens?: boolean | undefined;
  model?: string | undefined;
}

/** Options of `embed`. The server has defaults. */
export interface EmbedOptions extends ReadoutOptions {
  /** Which hidden states become the vector: of the last token, the mean of all, or of the first token. */
  pooling?: keyof typeof POOLINGS | undefined;
  /** Scale each vector to a length of 1. */
  normalize?: boolean | undefined;
  /** Keep the first ones alone, before scaling. */
  dimensions?: number | undefined;
}

/** Options of `score`. The server has defaults. */
export interface ScoreOptions extends ReadoutOptions, ChatOptions {
  tokenBytes?: boolean | undefined;
}

interface ReadoutOptions extends CallOptions {
  cacheSalt?: string | undefined;
  bypassCache?: boolean | undefined;
  priority?: number | undefined;
  model?: string | undefined;
  loraName?: string | undefined;
  requestId?: string | undefined;
}

const POOLINGS = { last: pb.Pooling.LAST, mean: pb.Pooling.MEAN, cls: pb.Pooling.CLS };

/** Option → field of GenerateRequest. */
export const FIELDS: Record<Exclude<keyof GenerateOptions, keyof ChatOptions | keyof CallOptions>, string> = {
  maxTokens: "stopping.max_tokens",
  minTokens: "stopping.min_tokens",
  stop: "stopping.stop",
  stopTokenIds: "stopping.stop_token_ids",
  ignoreEos: "stopping.ignore_eos",
  includeStopInOutput: "stopping.include_stop_in_output",
  temperature: "sampling.temperature",
  topK: "sampling.top_k",
  topP: "sampling.top_p",
  minP: "sampling.min_p",
  topNSigma: "sampling.top_n_sigma",
  repetitionPenalty: "sampling.repetition_penalty",
  presencePenalty: "sampling.presence_penalty",
  frequencyPenalty: "sampling.frequency_penalty",
  logitBias: "sampling.logit_bias",
  allowedTokenIds: "sampling.allowed_token_ids",
  noRepeatNgramSize: "sampling.no_repeat_ngram_size",
  badWords: "sampling.bad_words",
  seed: "sampling.seed",
  n: "sampling.n",
  logprobs: "output.logprobs",
  text: "output.text",
  tokenBytes: "output.token_bytes",
  promptIds: "output.prompt",
  specialTokens: "output.special_tokens",
  unparsed: "output.unparsed",
  promptLogprobs: "output.prompt_logprobs",
  jsonSchema: "guided.json_schema",
  regex: "guided.regex",
  grammar: "guided.ebnf_grammar",
  choice: "guided.choice.options",
  jsonObject: "guided.json_object",
  maxDraftTokens: "max_draft_tokens",
  cacheSalt: "cache.salt",
  bypassCache: "cache.bypass",
  priority: "priority",
  ttftS: "slo.ttft_s",
  tpotS: "slo.tpot_s",
  model: "model",
  loraName: "lora_name",
  requestId: "request_id",
  resumable: "resumable",
};

const READOUT_FIELDS = {
  cacheSalt: "cache.salt",
  bypassCache: "cache.bypass",
  priority: "priority",
  model: "model",
  loraName: "lora_name",
  requestId: "request_id",
};
/** Option → field of EmbedRequest. */
const EMBED_FIELDS: Record<string, string> = {
  ...READOUT_FIELDS, pooling: "pooling", normalize: "normalize", dimensions: "dimensions",
};
/** Option → field of ScoreRequest. */
const SCORE_FIELDS: Record<string, string> = { ...READOUT_FIELDS, tokenBytes: "token_bytes" };

/** At most one of them is given. */
const FORMATS = ["jsonSchema", "regex", "grammar", "choice", "jsonObject"] as const;
const CHAT_OPTIONS = ["continueLast", "tools", "toolChoice", "templateKwargs"] as const;
const CALL_OPTIONS = ["timeoutS", "signal"];
const INPUTS = ["message", "prompt", "chat", "tokenIds"];

/** Builds a request. Throws InvalidArgument for a value that does not fit, TypeError for an unknown option. */
export function generateRequest(input: Input, options: GenerateOptions): pb.GenerateRequest {
  const request = create(pb.GenerateRequestSchema);
  request.input = inputFrom(input, options);
  const formats = FORMATS.filter((name) => options[name] != null);
  if (formats.length > 1) throw invalid("guided", `is ${formats.join(" and ")}; give one`);
  for (const [name, value] of given(options, [...Object.keys(FIELDS), ...CHAT_OPTIONS])) {
    if (!Object.hasOwn(FIELDS, name)) continue;
    assign(pb.GenerateRequestSchema, request, FIELDS[name as keyof typeof FIELDS], converted(name, value));
  }
  return request;
}

/** Builds a request. Throws InvalidArgument, TypeError for an unknown option. */
export function tokenizeRequest(input: TextInput, options: TokenizeOptions): pb.TokenizeRequest {
  const found = inputFrom(input, options);
  if (found.case === "tokenIds") throw invalid("input", "is tokenIds, must be a text");
  const request = create(pb.TokenizeRequestSchema, { input: found });
  for (const [name, value] of given(options, ["addSpecialTokens", "model", ...CHAT_OPTIONS])) {
    if (name === "addSpecialTokens") assign(pb.TokenizeRequestSchema, request, "add_special_tokens", value);
    if (name === "model") assign(pb.TokenizeRequestSchema, request, "model", value);
  }
  return request;
}

/** Builds a request. Throws InvalidArgument, TypeError for an unknown option. */
export function detokenizeRequest(tokenIds: Iterable<number>, options: DetokenizeOptions): pb.DetokenizeRequest {
  const request = create(pb.DetokenizeRequestSchema);
  assign(pb.DetokenizeRequestSchema, request, "token_ids", tokenIds);
  for (const [name, value] of given(options, ["specialTokens", "model"])) {
    assign(pb.DetokenizeRequestSchema, request, name === "model" ? "model" : "special_tokens", value);
  }
  return request;
}

/** Builds a request. Throws InvalidArgument, TypeError for an unknown option. */
export function embedRequest(inputs: Iterable<string | Iterable<number>>, options: EmbedOptions): pb.EmbedRequest {
  const request = create(pb.EmbedRequestSchema);
  request.inputs = textsFrom(inputs, "inputs").map((input) => create(pb.EmbedInputSchema, { input }));
  for (const [name, value] of given(options, Object.keys(EMBED_FIELDS))) {
    const field = EMBED_FIELDS[name] as string;
    assign(pb.EmbedRequestSchema, request, field, name === "pooling" ? valueOf(POOLINGS, value, field) : value);
  }
  return request;
}

/** Builds a request. Throws InvalidArgument, TypeError for an unknown option. */
export function scoreRequest(
  input: Input,
  continuations: Iterable<string | Iterable<number>>,
  options: ScoreOptions,
): pb.ScoreRequest {
  const request = create(pb.ScoreRequestSchema, { input: inputFrom(input, options) });
  request.continuations = textsFrom(continuations, "continuations").map((continuation) =>
    create(pb.ContinuationSchema, { continuation }),
  );
  for (const [name, value] of given(options, [...Object.keys(SCORE_FIELDS), ...CHAT_OPTIONS])) {
    const field = SCORE_FIELDS[name];
    if (field !== undefined) assign(pb.ScoreRequestSchema, request, field, value);
  }
  return request;
}

/** Texts and lists of token ids. */
function textsFrom(texts: Iterable<string | Iterable<number>>, field: string): pb.EmbedInput["input"][] {
  if (typeof texts === "string") throw invalid(field, "is a text, must be a list of texts or of token ids");
  return [...texts].map((each, at) => {
    const message = create(pb.EmbedInputSchema);
    const isText = typeof each === "string";
    if (!isText) message.input = { case: "tokenIds", value: create(pb.TokenIdsSchema) }; // even an empty list is one
    const path = isText ? "text" : "token_ids.ids";
    assign(pb.EmbedInputSchema, message, path, each, `${field}[${at}].${path}`);
    return message.input;
  });
}

function inputFrom(input: Input, options: ChatOptions): pb.GenerateRequest["input"] {
  const message = create(pb.GenerateRequestSchema);
  const set = isConversation(input) ? { chat: input } : typeof input === "string" ? { message: input } : input;
  const names = INPUTS.filter((name) => (set as Record<string, unknown> | null)?.[name] != null);
  if (names.length !== 1) {
    throw invalid("input", `is ${names.join(" and ") || "nothing"}; give one of ${INPUTS.join(", ")}`);
  }
  if (set.chat != null) return { case: "chat", value: chatFrom(set.chat, options) };
  const lost = CHAT_OPTIONS.find((name) => options[name] != null);
  if (lost !== undefined) throw invalid(lost, `goes with chat, not with ${names.join()}`);
  if (set.tokenIds != null) {
    message.input = { case: "tokenIds", value: create(pb.TokenIdsSchema) };
    assign(pb.GenerateRequestSchema, message, "token_ids.ids", set.tokenIds);
  } else if (set.message != null) {
    assign(pb.GenerateRequestSchema, message, "message", set.message);
  } else {
    assign(pb.GenerateRequestSchema, message, "prompt", set.prompt);
  }
  return message.input;
}

function isConversation(input: Input): input is readonly ChatMessage[] {
  return Array.isArray(input);
}

/** The options that are set. */
function given(options: object, known: readonly string[]): [string, unknown][] {
  const set = Object.entries(options).filter(([name, value]) => value != null && !CALL_OPTIONS.includes(name));
  const unknown = set.find(([name]) => !known.includes(name));
  if (unknown !== undefined) throw new TypeError(`unknown option ${unknown[0]}; known: ${known.join(", ")}`);
  return set;
}

/** An option's value as its field takes it. */
function converted(name: string, value: unknown): unknown {
  if (name !== "jsonSchema" || typeof value === "string") return value;
  return JSON.stringify(value);
}

/** The value of an enum by its name. */
function valueOf(names: Record<string, number>, name: unknown, field: string): number {
  const found = names[name as string];
  if (found === undefined) throw invalid(field, `${String(name)} is none of ${Object.keys(names).join(", ")}`);
  return found;
}
