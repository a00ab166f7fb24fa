/** The messages of a stream as plain values. */
import {
  type ContinuationScore,
  FinishReason as Reason,
  type GenerateResponse,
  type Timing,
  type Token,
  type Usage,
} from "./protos.js";

/** `other` is a newer server's reason that this client does not know. */
export type FinishReason = "stop" | "length" | "cancelled" | "tool_calls" | "other";

/** A token's log-probability (natural logarithm), and the most likely tokens, best first. */
export interface TokenLogprob {
  logprob: number;
  top: { id: number; logprob: number; bytes?: Uint8Array }[];
}

/** A part of a tool call. The first part has id and name; the joined arguments are a JSON object. */
export interface ToolCallDelta {
  index: number;
  id: string;
  name: string;
  arguments: string;
}

/** One message of a stream: new tokens of one sequence, or its end. */
export interface Chunk {
  requestId: string;
  /** Which of the request's n sequences. */
  index: number;
  /** Text that the tokens add; joined over the stream it is the full text. */
  text: string;
  /** Reasoning that they add, if the server separates it from the answer. */
  reasoning: string;
  /** Part of a tool call that they add, if the server separates calls from text. */
  toolCall?: ToolCallDelta;
  /** New ids; often one, more if the reader is slower than the server. */
  tokens: number[];
  /** One per id if requested, else empty. */
  logprobs: TokenLogprob[];
  /** One per id if requested, else empty; a token's bytes need not be whole characters. */
  tokenBytes: Uint8Array[];
  /** The prompt's ids, on the first chunk, if requested; `logprobs` is theirs then, without the first one's. */
  promptIds?: number[];
  /** Set when the sequence ends. */
  finishReason?: FinishReason;
  /** The stop string or token id that ended it; true: its format, which allows no more. */
  matched?: string | number | boolean;
  /** On the last chunk of the stream. */
  usage?: Usage;
  /** On the last chunk of the stream. */
  timing?: Timing;
}

/** One whole sequence of an answer. Its fields are those of its chunks, joined. */
export interface Sequence {
  text: string;
  reasoning: string;
  toolCalls: ToolCallDelta[];
  tokens: number[];
  logprobs: TokenLogprob[];
  tokenBytes: Uint8Array[];
  finishReason: FinishReason;
  matched?: string | number | boolean;
}

/** A whole answer. `text` and `finishReason` are those of its first sequence. */
export interface Answer {
  requestId: string;
  text: string;
  finishReason: FinishReason;
  sequences: Sequence[];
  promptIds?: number[];
  promptLogprobs?: TokenLogprob[];
  usage?: Usage;
  timing?: Timing;
}

/** The log-probability of a continuation: the sum of its tokens', which `logprobs` has one by one. */
export interface Score {
  logprob: number;
  tokens: number[];
  logprobs: number[];
  /** One per id if requested, else empty. */
  tokenBytes: Uint8Array[];
}

const REASONS: Partial<Record<Reason, FinishReason>> = {
  [Reason.STOP]: "stop",
  [Reason.LENGTH]: "length",
  [Reason.CANCELLED]: "cancelled",
  [Reason.TOOL_CALLS]: "tool_calls",
};

/** Converts one message of the stream. */
export function chunkFrom(response: GenerateResponse): Chunk {
  const { event, requestId, usage, timing } = response;
  const chunk: Chunk = { requestId, index: 0, text: "", reasoning: "", tokens: [], logprobs: [], tokenBytes: [] };
  if (event.case === "tokens") {
    const { index, tokens, delta } = event.value;
    chunk.index = index;
    if (delta.case === "text") chunk.text = delta.value;
    if (delta.case === "reasoning") chunk.reasoning = delta.value;
    if (delta.case === "toolCall") {
      const { index: call, id, name, arguments: given } = delta.value;
      chunk.toolCall = { index: call, id, name, arguments: given };
    }
    chunk.tokens = tokens.map((token) => token.id);
    chunk.logprobs = tokens.flatMap(logprobOf);
    chunk.tokenBytes = bytesOf(tokens);
  } else if (event.case === "finished") {
    const { index, reason, matched } = event.value;
    chunk.index = index;
    chunk.finishReason = REASONS[reason] ?? "other";
    if (matched.case !== undefined) chunk.matched = matched.value;
  } else if (event.case === "prompt") {
    chunk.promptIds = event.value.tokens.map((token) => token.id);
    chunk.logprobs = event.value.tokens.flatMap(logprobOf);
  }
  if (usage !== undefined) chunk.usage = usage;
  if (timing !== undefined) chunk.timing = timing;
  return chunk;
}

export function scoreFrom({ logprob, tokens }: ContinuationScore): Score {
  return {
    logprob,
    tokens: tokens.map((token) => token.id),
    logprobs: tokens.map((token) => token.logprob ?? NaN),
    tokenBytes: bytesOf(tokens),
  };
}

function bytesOf(tokens: Token[]): Uint8Array[] {
  return tokens.some((token) => token.bytes.length > 0) ? tokens.map((token) => token.bytes) : [];
}

function logprobOf(token: Token): TokenLogprob[] {
  if (token.logprob === undefined) return [];
  const top = token.top.map(({ id, logprob, bytes }) => (bytes.length > 0 ? { id, logprob, bytes } : { id, logprob }));
  return [{ logprob: token.logprob, top }];
}

/** Joins the chunks of a stream. */
export async function answerFrom(chunks: AsyncIterable<Chunk>): Promise<Answer> {
  const answer: Answer = { requestId: "", text: "", finishReason: "other", sequences: [] };
  for await (const chunk of chunks) {
    answer.requestId = chunk.requestId;
    if (chunk.promptIds !== undefined) {
      answer.promptIds = chunk.promptIds;
      if (chunk.logprobs.length > 0) answer.promptLogprobs = chunk.logprobs;
    } else add(chunk, sequenceAt(answer.sequences, chunk.index));
    if (chunk.usage !== undefined) answer.usage = chunk.usage;
    if (chunk.timing !== undefined) answer.timing = chunk.timing;
  }
  const [first] = answer.sequences;
  if (first !== undefined) {
    answer.text = first.text;
    answer.finishReason = first.finishReason;
  }
  return answer;
}

function sequenceAt(sequences: Sequence[], index: number): Sequence {
  while (sequences.length <= index) {
    sequences.push({
      text: "",
      reasoning: "",
      toolCalls: [],
      tokens: [],
      logprobs: [],
      tokenBytes: [],
      finishReason: "other",
    });
  }
  return sequences[index] as Sequence;
}

function add(chunk: Chunk, to: Sequence): void {
  to.text += chunk.text;
  to.reasoning += chunk.reasoning;
  to.tokens.push(...chunk.tokens);
  to.logprobs.push(...chunk.logprobs);
  to.tokenBytes.push(...chunk.tokenBytes);
  if (chunk.toolCall !== undefined) {
    const part = chunk.toolCall;
    const call = to.toolCalls.find((each) => each.index === part.index);
    if (call === undefined) to.toolCalls.push({ ...part });
    else call.arguments += part.arguments;
  }
  if (chunk.finishReason !== undefined) to.finishReason = chunk.finishReason;
  if (chunk.matched !== undefined) to.matched = chunk.matched;
}
