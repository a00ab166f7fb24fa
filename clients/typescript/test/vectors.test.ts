/** The vectors that the clients of all languages share. */
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { Pagoda, PagodaError } from "pagoda-client";
import type { Chunk, EmbedOptions, GenerateOptions, Input, ScoreOptions, TextInput } from "pagoda-client";
import { FIELDS } from "../src/request.js";
import { type Connection, optionsFor, ROOT, start, stop } from "./servers.js";

type Json = Record<string, unknown>;

interface Expected {
  code?: string;
  field?: string;
  reason?: string;
  queue_depth?: number;
  has_retry_delay?: boolean;
  messages?: number;
  within_s?: number;
  not_before_s?: number;
  request_id?: string;
  prompt_ids?: number[];
  sequences?: {
    tokens: number[];
    text: string;
    finish_reason: string;
    stop_string?: string;
    stop_token_id?: number;
    grammar?: boolean;
  }[];
  logprobs?: { logprob: number; top: [number, number][] }[];
  token_bytes?: string[];
  usage?: { prompt_tokens: number; completion_tokens: number; cached_tokens?: number };
  is_idle?: boolean;
  token_ids?: number[];
  text?: string;
  vectors?: number[][];
  scores?: { logprob: number; tokens: number[]; logprobs: number[] }[];
}

interface Vector {
  name: string;
  server?: string;
  call?: "Generate" | "Tokenize" | "Detokenize" | "Embed" | "Score";
  request: Json;
  retries?: number;
  timeout_s?: number;
  token?: string;
  beside?: Json;
  cancel_after?: number;
  faults?: Json[];
  expect: Expected;
}

const { vectors } = JSON.parse(readFileSync(`${ROOT}tests/vectors/calls.json`, "utf8")) as { vectors: Vector[] };

let connections: Record<string, Connection>;
before(async () => void (connections = await start()));
after(stop);

/** The client's arguments for a request that is written as protobuf JSON. */
function argumentsOf(request: Json): [Input, GenerateOptions] {
  const input: Json = {};
  const options: Json = {};
  for (const [name, value] of Object.entries(request)) {
    if (name === "message" || name === "prompt") input[name] = value;
    else if (name === "token_ids") input["tokenIds"] = (value as { ids: number[] }).ids;
    else if (name === "chat") input["chat"] = chatOf(value as Json, options);
    else if (["sampling", "stopping", "output", "cache"].includes(name)) {
      for (const [part, each] of Object.entries(value as Json)) options[optionOf(`${name}.${part}`)] = each;
    } else if (name === "guided") {
      const [[kind, each]] = Object.entries(value as Json) as [[string, unknown]];
      if (kind === "choice") options["choice"] = (each as Json)["options"];
      else options[optionOf(`guided.${kind}`)] = each;
    } else options[camel(name)] = value;
  }
  return [input as unknown as Input, options];
}

function chatOf({ messages, ...rest }: Json, options: Json): Json[] {
  for (const [name, value] of Object.entries(rest)) {
    options[camel(name)] = name === "tool_choice" ? nameOf((value as Json)["mode"], "TOOL_CHOICE_MODE_") : value;
  }
  return (messages as Json[]).map((message) => ({ ...message, role: nameOf(message["role"], "ROLE_") }));
}

function optionOf(path: string): string {
  const [option] = Object.entries(FIELDS).find(([, field]) => field === path) ?? [];
  assert.ok(option, `no option for ${path}`);
  return option;
}

/** Texts and lists of token ids, of an Embed or a Score. */
function textsOf(entries: unknown): (string | number[])[] {
  const given = entries as { text?: string; token_ids?: { ids: number[] } }[];
  return given.map(({ text, token_ids: ids }) => text ?? ids?.ids ?? []);
}

function camel(name: string): string {
  return name.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase());
}

function nameOf(value: unknown, prefix: string): string {
  return String(value).slice(prefix.length).toLowerCase();
}

/** What came of a call. */
interface Outcome {
  chunks: Chunk[];
  value?: unknown;
  error?: unknown;
}

async function ask(client: Pagoda, { call, request, cancel_after }: Vector, outcome: Outcome): Promise<void> {
  const { inputs, continuations, pooling, ...rest } = request;
  const [input, options] = argumentsOf(rest);
  if (call === "Tokenize") outcome.value = await client.tokenize(input as TextInput, options);
  else if (call === "Detokenize") {
    const { token_ids: ids, special_tokens: specialTokens } = request;
    outcome.value = await client.detokenize(ids as number[], { specialTokens: specialTokens as boolean });
  } else if (call === "Embed") {
    const how = { ...options, ...(pooling ? { pooling: nameOf(pooling, "POOLING_") } : {}) } as EmbedOptions;
    outcome.value = await client.embed(textsOf(inputs), how);
  } else if (call === "Score") {
    const scores = await client.score(input, textsOf(continuations), options as ScoreOptions);
    outcome.value = scores.map(({ logprob, tokens, logprobs }) => ({ logprob, tokens, logprobs }));
  } else {
    const abort = new AbortController();
    try {
      for await (const chunk of client.stream(input, { ...options, signal: abort.signal })) {
        outcome.chunks.push(chunk);
        if (outcome.chunks.length === cancel_after) abort.abort();
      }
    } catch (error) {
      if (error !== abort.signal.reason) throw error;
    }
  }
}

/** Starts a request that runs meanwhile. Returns how to cancel it. */
async function runBeside(client: Pagoda, request: Json): Promise<() => void> {
  const abort = new AbortController();
  const [input, options] = argumentsOf(request);
  const stream = client.stream(input, { ...options, signal: abort.signal });
  for (let read = 0; read < 3; read += 1) await stream.next();
  return () => abort.abort();
}

for (const vector of vectors) {
  test(vector.name, async () => {
    const { expect, faults, request } = vector;
    const connection = connections[vector.server ?? "plain"] as Connection;
    const { token = connection.token } = vector;
    const { timeout_s: timeoutS, retries = 0 } = vector;
    const client = new Pagoda(connection.address, { ...optionsFor(connection), token, timeoutS, retries });
    const other = new Pagoda(connection.address, optionsFor(connection));
    const cancel = vector.beside && (await runBeside(other, vector.beside));
    const asked = faults ? { ...request, request_id: `${String(request["request_id"])}/${randomUUID()}` } : request;
    const outcome: Outcome = { chunks: [] };
    const begun = performance.now();
    try {
      await ask(client, { ...vector, request: asked }, outcome);
    } catch (error) {
      outcome.error = error;
    }
    const tookS = (performance.now() - begun) / 1e3;
    cancel?.();
    client.close();
    other.close();
    assert.ok(tookS >= (expect.not_before_s ?? 0) && tookS <= (expect.within_s ?? 60), `took ${tookS} s`);
    if (expect.code !== undefined) return checkError(outcome, expect);
    assert.equal(outcome.error, undefined);
    if (expect.is_idle) await checkIdle();
    else if (vector.call !== undefined) {
      assert.deepEqual(outcome.value, expect.token_ids ?? expect.text ?? expect.vectors ?? expect.scores);
    } else checkAnswer(outcome.chunks, expect);
  });
}

function checkError({ error, chunks }: Outcome, expect: Expected): void {
  assert.ok(error instanceof PagodaError, String(error));
  assert.equal(error.code, expect.code, error.message);
  if (expect.field !== undefined) assert.equal(error.field, expect.field);
  if (expect.reason !== undefined) assert.equal(error.reason, expect.reason);
  if (expect.queue_depth !== undefined) assert.equal(error.queueDepth, expect.queue_depth);
  if (expect.has_retry_delay !== undefined) assert.equal(error.retryAfterS !== undefined, expect.has_retry_delay);
  if (expect.messages !== undefined) assert.equal(chunks.length, expect.messages);
}

async function checkIdle(): Promise<void> {
  const client = new Pagoda(connections["plain"]?.address);
  for (let tries = 0; ; tries += 1) {
    const { engines } = await client.load();
    if (engines.every((engine) => engine.running + engine.blocksReferenced === 0)) break;
    assert.ok(tries < 500, "the engine is not idle after 5 s");
    await sleep(10);
  }
  client.close();
}

function checkAnswer(chunks: Chunk[], expect: Expected): void {
  const sequences = expect.sequences ?? [];
  if (expect.request_id !== undefined) {
    assert.deepEqual([...new Set(chunks.map((chunk) => chunk.requestId))], [expect.request_id]);
  }
  const prompts = chunks.flatMap(({ promptIds }, at) => (promptIds === undefined ? [] : [[at, promptIds]]));
  assert.deepEqual(prompts, expect.prompt_ids === undefined ? [] : [[0, expect.prompt_ids]]);
  assert.deepEqual(new Set(chunks.map((chunk) => chunk.index)), new Set(sequences.keys()));
  for (const [index, sequence] of sequences.entries()) {
    const own = chunks.filter((chunk) => chunk.index === index);
    assert.deepEqual(own.flatMap((chunk) => chunk.tokens), sequence.tokens);
    assert.equal(own.map((chunk) => chunk.text).join(""), sequence.text);
    const ends = own.flatMap(({ finishReason: reason, matched }) => (reason === undefined ? [] : [[reason, matched]]));
    assert.deepEqual(ends, [[sequence.finish_reason, sequence.stop_string ?? sequence.stop_token_id ?? sequence.grammar]]);
  }
  const first = chunks.filter((chunk) => chunk.index === 0);
  const logprobs = first.flatMap((chunk) => chunk.logprobs);
  assert.deepEqual(
    logprobs.map(({ logprob, top }) => ({ logprob, top: top.map((each) => [each.id, each.logprob]) })),
    expect.logprobs ?? [],
  );
  const bytes = first.flatMap((chunk) => chunk.tokenBytes);
  assert.deepEqual(bytes.map((each) => Buffer.from(each).toString("base64")), expect.token_bytes ?? []);
  assert.deepEqual(chunks.flatMap(({ usage }, at) => (usage ? [at] : [])), [chunks.length - 1]);
  const usage = chunks.at(-1)?.usage;
  assert.equal(usage?.promptTokens, expect.usage?.prompt_tokens);
  assert.equal(usage?.completionTokens, expect.usage?.completion_tokens);
  if (expect.usage?.cached_tokens !== undefined) assert.equal(usage?.cachedTokens, expect.usage.cached_tokens);
}
