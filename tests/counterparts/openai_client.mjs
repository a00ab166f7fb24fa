// Run by test_openai.py with the `openai` package of npm: checks what that client makes of a server's answers.
// Arguments: the server's URL, its token, the requests that it admits at once, and `checks` or `abort`.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const { OpenAI } = createRequire(join(process.cwd(), "index.js"))("openai");
const [url, token, maxRequests, what] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: token, maxRetries: 0, timeout: 60_000 });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "Hi" },
];
const model = "synthetic";
const long = { model, prompt: "x", max_tokens: 20_000, stream: true, ignore_eos: true };

async function models() {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
}

async function chat() {
  const answer = await client.chat.completions.create({
    model, messages, max_completion_tokens: 12, n: 2, temperature: 0, logprobs: true, top_logprobs: 2, ignore_eos: true,
  });
  const [first, second] = answer.choices;
  assert.deepEqual([first.index, second.index, first.finish_reason], [0, 1, "length"]);
  const raw = Buffer.from(first.logprobs.content.flatMap((each) => each.bytes));
  assert.equal(new TextDecoder().decode(raw), first.message.content);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 24);
}

async function streamedChat() {
  const options = { model, messages, max_tokens: 12, temperature: 0 };
  const whole = (await client.chat.completions.create(options)).choices[0];
  const chunks = [];
  const stream = await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.map((each) => each.choices[0]?.delta.content ?? "").join(""), whole.message.content);
  assert.equal(chunks.at(-2).choices[0].finish_reason, whole.finish_reason);
  assert.ok(chunks.at(-1).usage.total_tokens > 12);
}

async function completions() {
  const options = { model, prompt: "Hello", max_tokens: 20, temperature: 0, ignore_eos: true };
  const { text, logprobs } = (await client.completions.create({ ...options, logprobs: 3 })).choices[0];
  assert.equal(logprobs.tokens.length, 20);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...options, stream: true })) {
    streamed += chunk.choices[0].text;
  }
  assert.equal(streamed, text);
}

async function refused(kind, changes) {
  try {
    await client.chat.completions.create({ model, messages, max_tokens: 2, ...changes });
  } catch (error) {
    assert.ok(error instanceof kind, `${error}`);
    return error;
  }
  throw new Error(`not refused: ${JSON.stringify(changes)}`);
}

async function errors() {
  assert.equal((await refused(OpenAI.BadRequestError, { temperature: 101 })).param, "temperature");
  assert.equal((await refused(OpenAI.BadRequestError, { tempersture: 1 })).param, "tempersture");
  assert.equal((await refused(OpenAI.NotFoundError, { model: "other" })).code, "model_not_found");
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
}

async function overload() {
  const streams = [];
  for (let at = 0; at < Number(maxRequests); at++) streams.push(await client.completions.create(long));
  assert.equal((await refused(OpenAI.RateLimitError, {})).code, "queue_full");
  for (const stream of streams) stream.controller.abort();
  await client.withOptions({ maxRetries: 5 }).completions.create({ model, prompt: "x", max_tokens: 1 });
}

async function abort() {
  const lines = createInterface(process.stdin)[Symbol.asyncIterator]();
  const stream = await client.completions.create(long);
  for await (const _ of stream) {
    console.log("streaming");
    await lines.next();
    break; // aborts the request
  }
  console.log("closed");
  await lines.next();
  process.exit(0);
}

if (what === "abort") await abort();
for (const check of [models, chat, streamedChat, completions, errors, overload]) {
  await check();
  console.log(check.name);
}
