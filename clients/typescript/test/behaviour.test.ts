/** What the vectors do not tell: cancelling, closing, the other calls, and what is refused before any call. */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { Cancelled, InvalidArgument, NotFound, Pagoda, Unauthenticated, Unavailable } from "pagoda-client";
import type { GenerateOptions, Input, TextInput } from "pagoda-client";
import { EngineState, FinishReason, ServerState } from "pagoda-client/protos";
import { type Connection, optionsFor, start, stop } from "./servers.js";

const LONG = { maxTokens: 20_000, ignoreEos: true };

let connections: Record<string, Connection>;
let client: Pagoda;
before(async () => {
  connections = await start();
  client = new Pagoda(connections["plain"]?.address);
});
after(async () => {
  client.close();
  await stop();
});

/** Waits until no engine holds anything. */
async function idle(): Promise<void> {
  for (let tries = 0; tries < 500; tries += 1) {
    const load = await client.load();
    if (load.engines.every((engine) => engine.running + engine.waiting + engine.blocksReferenced === 0)) return;
    await sleep(10);
  }
  assert.fail("the engine is not idle after 5 s");
}

/** An address at which nothing listens. */
async function closedAddress(): Promise<string> {
  const server = createServer();
  await new Promise<void>((resolve) => void server.listen(0, "127.0.0.1", resolve));
  const address = server.address();
  await new Promise((resolve) => server.close(resolve));
  assert.ok(typeof address === "object" && address !== null);
  return `127.0.0.1:${address.port}`;
}

test("a whole answer has each sequence, its end and the usage", async () => {
  const options = { maxTokens: 5, ignoreEos: true, n: 2, promptIds: true };
  const answer = await client.generate({ prompt: "siblings" }, options);
  assert.deepEqual(answer.promptIds, [...Buffer.from("siblings")]);
  assert.equal(answer.sequences.length, 2);
  for (const sequence of answer.sequences) {
    assert.equal(sequence.tokens.length, 5);
    assert.equal(sequence.text, answer.text);
    assert.equal(sequence.finishReason, "length");
  }
  assert.equal(answer.usage?.completionTokens, 10);
  assert.ok((answer.timing?.totalS ?? 0) > 0);
  assert.notEqual(answer.requestId, "");
});

test("leaving the loop cancels the call and frees its blocks", async () => {
  let read = 0;
  for await (const _ of client.stream({ prompt: "left" }, LONG)) if ((read += 1) === 3) break;
  await idle();
});

test("a signal that is aborted later ends a waiting loop with its reason and frees the blocks", async () => {
  const reason = new Error("enough");
  const abort = new AbortController();
  setTimeout(() => abort.abort(reason), 100);
  await assert.rejects(client.generate({ prompt: "later" }, { ...LONG, signal: abort.signal }), reason);
  await idle();
});

test("a signal that is aborted already makes no call", async () => {
  const stream = client.stream({ prompt: "never" }, { requestId: "never", signal: AbortSignal.abort() });
  await assert.rejects(stream.next(), { name: "AbortError" });
});

test("a signal ends the wait before a retry", async () => {
  const nowhere = new Pagoda(await closedAddress(), { retries: 1000 });
  const begun = performance.now();
  await assert.rejects(nowhere.generate("x", { signal: AbortSignal.timeout(500) }), { name: "TimeoutError" });
  assert.ok(performance.now() - begun < 5000);
  nowhere.close();
});

test("a signal serves many calls", async () => {
  const { signal } = new AbortController();
  for (let at = 0; at < 12; at += 1) await client.tokenize("x", { signal });
});

test("a stream that is not read makes no call", async () => {
  client.stream({ prompt: "unread" }, { ...LONG, requestId: "unread" });
  await sleep(100);
  await assert.rejects(client.abort("unread"), NotFound);
});

test("closing a client cancels its streams and waits; later calls are refused", async () => {
  const other = new Pagoda(connections["plain"]?.address);
  const stream = other.stream({ prompt: "closed" }, LONG);
  await stream.next();
  const nowhere = new Pagoda(await closedAddress(), { retries: 1000 });
  const waiting = assert.rejects(nowhere.generate("x"), Cancelled);
  await sleep(200);
  other.close();
  nowhere.close();
  await assert.rejects(async () => {
    for await (const _ of stream);
  }, Cancelled);
  await waiting;
  await assert.rejects(other.load(), Cancelled);
  await idle();
});

test("a server that cannot be reached is unavailable after the retries", async () => {
  const nowhere = new Pagoda(await closedAddress(), { retries: 1 });
  await assert.rejects(nowhere.load(), Unavailable);
  nowhere.close();
});

test("many streams share a client", async () => {
  const options = { maxTokens: 20, ignoreEos: true };
  const prompts = Array.from({ length: 32 }, (_, at) => `stream ${at}`);
  const together = await Promise.all(prompts.map((prompt) => client.generate({ prompt }, options)));
  const again = await client.generate({ prompt: "stream 17" }, options);
  assert.deepEqual(together[17]?.sequences, again.sequences);
});

test("a slow reader gets everything", async () => {
  const text: string[] = [];
  for await (const chunk of client.stream({ prompt: "slow" }, { maxTokens: 200, ignoreEos: true })) {
    if (text.length % 20 === 0) await sleep(20);
    text.push(...chunk.tokens.map(String));
  }
  assert.equal(text.length, 200);
});

test("a live request is aborted by its id, and its stream says so", async () => {
  const stream = client.stream({ prompt: "aborted" }, { ...LONG, requestId: "aborted" });
  await stream.next();
  await client.abort("aborted");
  let end;
  for await (const chunk of stream) end = chunk.finishReason ?? end;
  assert.equal(end, "cancelled");
  await assert.rejects(client.abort("aborted"), NotFound);
});

test("a client's calls are for its tenant, whose requests are its own", async () => {
  const ann = new Pagoda(connections["plain"]?.address, { tenant: "ann" });
  const stream = ann.stream({ prompt: "ann" }, { ...LONG, requestId: "of ann" });
  await stream.next();
  await assert.rejects(client.abort("of ann"), NotFound);
  await client.abort("of ann", { tenant: "ann" });
  for await (const _ of stream);
  ann.close();
});

test("a Unix socket is an address", async () => {
  const [host, port] = connections["plain"]?.address.split(":") ?? [];
  const folder = mkdtempSync(join(tmpdir(), "pagoda-"));
  const path = join(folder, "socket");
  const server = createServer((near) => {
    const far = connect(Number(port), host);
    for (const [from, to] of [[near, far], [far, near]] as const) from.pipe(to).on("error", () => from.destroy());
  });
  await new Promise<void>((resolve) => void server.listen(path, resolve));
  const local = new Pagoda(`unix:${path}`);
  assert.deepEqual(await local.tokenize({ prompt: "x" }), [120]);
  local.close();
  server.close();
  rmSync(folder, { recursive: true });
});

test("the short calls answer with the messages of the protos", async () => {
  const info = await client.serverInfo();
  assert.equal(info.model, "synthetic");
  assert.equal(info.state, ServerState.SERVING);
  assert.equal(info.engines[0]?.state, EngineState.READY);
  const [model] = await client.models();
  assert.equal(model?.vocabSize, 258);
  assert.equal(typeof (await client.flushCache()), "number");
  assert.equal(FinishReason.STOP, 1);
});

test("the load and the step trace are streams", async () => {
  let seen = 0;
  for await (const load of client.watchLoad(0.05)) {
    assert.equal(load.engines.length, 1);
    if ((seen += 1) === 3) break;
  }
  for await (const part of client.stepTrace(10)) assert.equal(part.isPartial, false);
});

test("a token is needed where the server asks for one, and TLS needs its authority", async () => {
  const guarded = connections["guarded"] as Connection;
  const wrong = new Pagoda(guarded.address, { ...optionsFor(guarded), token: "wrong" });
  await assert.rejects(wrong.load(), Unauthenticated);
  wrong.close();
  const unknown = new Pagoda(guarded.address, { tls: true, retries: 0 });
  await assert.rejects(unknown.load(), Unavailable);
  unknown.close();
  assert.throws(() => new Pagoda(guarded.address, { tls: "/no/such/file" }), /ENOENT/);
});

test("one deadline holds for a call, and the client's own where the call has none", async () => {
  const hasty = new Pagoda(connections["plain"]?.address, { timeoutS: 0.2 });
  await assert.rejects(hasty.generate({ prompt: "long" }, LONG), { code: "DEADLINE_EXCEEDED" });
  const answer = await hasty.generate({ prompt: "x" }, { maxTokens: 150, ignoreEos: true, timeoutS: Infinity });
  assert.equal(answer.usage?.completionTokens, 150);
  hasty.close();
});

const REFUSED: [string, Input, Record<string, unknown>, string][] = [
  ["no input", {} as Input, {}, "input"],
  ["two inputs", { prompt: "x", message: "y" } as unknown as Input, {}, "input"],
  ["a negative count", "x", { maxTokens: -1 }, "stopping.max_tokens"],
  ["a fraction of a token", "x", { maxTokens: 1.5 }, "stopping.max_tokens"],
  ["a text for a number", "x", { temperature: "hot" }, "sampling.temperature"],
  ["a number for a text", { prompt: 5 } as unknown as Input, {}, "prompt"],
  ["half a character", { prompt: "\ud83c" }, {}, "prompt"],
  ["an id beyond 32 bits", { tokenIds: [2 ** 32] }, {}, "token_ids.ids"],
  ["ids that are none", { tokenIds: 5 } as unknown as Input, {}, "token_ids.ids"],
  ["a bias of a text", "x", { logitBias: { 5: "much" } }, "sampling.logit_bias"],
  ["a seed beyond 64 bits", "x", { seed: 1n << 64n }, "sampling.seed"],
  ["a stop that is no text", "x", { stop: ["fine", 5] }, "stopping.stop"],
  ["a time that is none", "x", { timeoutS: "soon" }, "timeoutS"],
  ["an unknown role", [{ role: "robot", content: "x" }] as unknown as Input, {}, "chat.messages[0].role"],
  ["a message without content", [{ role: "user" }], {}, "chat.messages[0].content"],
  ["an unknown key", [{ role: "user", content: "x", colour: 1 }] as unknown as Input, {}, "chat.messages[0]"],
  ["a picture", [{ role: "user", content: [{ type: "image" }] }] as never, {}, "chat.messages[0].content[0]"],
  ["tools without a chat", "x", { tools: [{ name: "f" }] }, "tools"],
  ["a mode of no tools", [{ role: "user", content: "x" }], { toolChoice: "maybe" }, "chat.tool_choice"],
  ["a variable that is no JSON", { chat: "x" }, { templateKwargs: { at: Symbol("x") } }, "chat.template_kwargs"],
];
for (const [name, input, options, field] of REFUSED) {
  test(`${name} is refused by its field before any call`, () => {
    assert.throws(
      () => client.stream(input, options as GenerateOptions),
      (error) => error instanceof InvalidArgument && error.field === field && error.message.startsWith(field),
    );
  });
}

test("an unknown option is a mistake", async () => {
  assert.throws(() => client.stream("x", { max_tokens: 5 } as GenerateOptions), TypeError);
  await assert.rejects(client.tokenize("x", { maxTokens: 5 } as object), TypeError);
  await assert.rejects(client.tokenize({ tokenIds: [1] } as unknown as TextInput), InvalidArgument);
});

test("metadata that cannot travel is refused without its value", () => {
  assert.throws(
    () => new Pagoda("127.0.0.1:1", { token: "s3cret\n" }),
    (error) => error instanceof InvalidArgument && error.field === "token" && !error.message.includes("s3cret"),
  );
});

test("a conversation in OpenAI's format is rendered as one of the protocol's", async () => {
  const call = { id: "1", type: "function", function: { name: "now", arguments: { zone: "UTC" } } } as const;
  const tools = [{ type: "function", function: { name: "now", description: "The time", parameters: {} } }] as const;
  const templateKwargs = { deep: [1, null] };
  const answer = await client.generate(
    [
      { role: "user", content: [{ type: "text", text: "Ti" }, { type: "text", text: "me?" }] },
      { role: "assistant", content: null, tool_calls: [call] },
      { role: "tool", tool_call_id: "1", content: "noon" },
    ],
    { maxTokens: 1, promptIds: true, tools, toolChoice: "auto", templateKwargs },
  );
  const text = await client.detokenize(answer.promptIds ?? []);
  assert.equal(text, "user\nTi\nme?\nassistant\n\ntool\nnoon\nassistant\n");
});

test("the README's example runs as it stands", async () => {
  const readme = readFileSync(new URL("../../README.md", import.meta.url), "utf8");
  const [, example] = /```ts\n(.*?)```/s.exec(readme) ?? [];
  assert.ok(example !== undefined && example.includes("127.0.0.1:50051"));
  const file = fileURLToPath(new URL("example.mjs", import.meta.url)); // where Node finds the package by its name
  writeFileSync(file, example.replace("127.0.0.1:50051", connections["plain"]?.address ?? ""));
  const { stdout, stderr } = await promisify(execFile)(process.execPath, [file]);
  assert.equal(stderr, "");
  assert.equal(stdout, (await client.generate("Why is the sky blue?", { maxTokens: 64 })).text);
});
