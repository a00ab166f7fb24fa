// Run by test_openai.py with the `openai` package of npm: checks what that client makes of a server's answers.
// Arguments: the server's URL, its token, the requests that it admits at once, and `checks`, `programs` or `abort`.
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
  const several = { ...options, n: 2, temperature: 1, seed: 3, logprobs: true, top_logprobs: 2, ignore_eos: true };
  const answers = (await client.chat.completions.create(several)).choices;
  const streamed = (await client.chat.completions.stream(several).finalChatCompletion()).choices;
  for (const [at, answer] of answers.entries()) {
    assert.equal(streamed[at].message.content, answer.message.content);
    assert.deepEqual(streamed[at].logprobs.content, answer.logprobs.content);
    assert.equal(answer.logprobs.content.length, 12);
  }
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

// -- what programs ask for, of the default model -------------------------------------------------------------------

const greedy = { model: "smollm2-135m-instruct", temperature: 0 };
const user = (content) => ({ role: "user", content });
const closed = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
});
const person = closed({ name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 120 } });
const city = closed({ city: { type: "string", maxLength: 20 }, unit: { enum: ["C", "F"] } });
const tools = Object.entries({ weather: city, now: closed({}) }).map(([name, parameters]) => ({
  type: "function", function: { name, parameters },
}));

async function formats() {
  const asked = { ...greedy, messages: [user("Make up a person with a name and an age, as JSON.")], max_tokens: 200 };
  const response_format = { type: "json_schema", json_schema: { name: "person", schema: person, strict: true } };
  const whole = (await client.chat.completions.parse({ ...asked, response_format })).choices[0];
  assert.equal(whole.finish_reason, "stop");
  assert.deepEqual(Object.keys(whole.message.parsed), ["name", "age"]);
  const stream = client.chat.completions.stream({ ...asked, response_format });
  assert.equal(await stream.finalContent(), whole.message.content);
  const free = await client.chat.completions.create({ ...asked, response_format: { type: "json_object" } });
  assert.equal(typeof JSON.parse(free.choices[0].message.content), "object");
}

async function toolCalls() {
  for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
    const asked = { ...greedy, messages: [user("What is the weather in Paris?")], tools, tool_choice, max_tokens: 300 };
    const whole = (await client.chat.completions.create(asked)).choices[0];
    const calls = whole.message.tool_calls.map((call) => call.function);
    if (tool_choice !== "required") {
      assert.deepEqual([calls.length, calls[0].name, whole.finish_reason], [1, "weather", "tool_calls"]);
      assert.deepEqual(Object.keys(JSON.parse(calls[0].arguments)), ["city", "unit"]);
    }
    const stream = client.chat.completions.stream(asked);
    const streamed = (await stream.finalChatCompletion()).choices[0];
    assert.equal(streamed.finish_reason, whole.finish_reason);
    assert.deepEqual(
      streamed.message.tool_calls.map((call) => [call.function.name, call.function.arguments]),
      calls.map((call) => [call.name, call.arguments]),
    );
  }
}

async function reasoning() {
  const before = [[1, "two"], [2, "four"], [4, "eight"]].flatMap(([number, word]) => [
    user(`${number}+${number}?`),
    { role: "assistant", content: `<think>${number} and ${number} is ${word}.</think>${2 * number}` },
  ]); // the model does as it has done before
  const asked = { ...greedy, messages: [...before, user("3+3?")], max_tokens: 60 };
  const { message } = (await client.chat.completions.create(asked)).choices[0];
  assert.ok(message.reasoning_content && message.content);
  const told = { reasoning_content: "", content: "" };
  for await (const { choices } of await client.chat.completions.create({ ...asked, stream: true })) {
    for (const name of Object.keys(told)) told[name] += choices[0].delta[name] ?? "";
  }
  assert.deepEqual(told, { reasoning_content: message.reasoning_content, content: message.content });
}

async function embeddings() {
  const input = ["a text", "another one"];
  const { data, usage } = await client.embeddings.create({ model: greedy.model, input }); // in base64
  assert.deepEqual(data.map((each) => each.embedding.length), [576, 576]);
  assert.ok(Math.abs(Math.hypot(...data[0].embedding) - 1) < 1e-5);
  assert.equal(usage.prompt_tokens, usage.total_tokens);
  const cut = (await client.embeddings.create({ model: greedy.model, input, dimensions: 4 })).data[0].embedding;
  const length = Math.hypot(...data[0].embedding.slice(0, 4));
  cut.forEach((value, at) => assert.ok(Math.abs(value - data[0].embedding[at] / length) < 1e-5));
  const asked = { model: greedy.model, input: [[1, 2], [3]], dimensions: 4, encoding_format: "float" };
  assert.deepEqual((await client.embeddings.create(asked)).data.map((each) => each.embedding.length), [4, 4]);
}

async function echo() {
  const asked = { ...greedy, prompt: "The sky is", echo: true, logprobs: 2, max_tokens: 0 };
  const { text, logprobs } = (await client.completions.create(asked)).choices[0];
  assert.equal(text, "The sky is");
  assert.equal(logprobs.tokens.join(""), text);
  assert.equal(logprobs.token_logprobs[0], null);
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
const programs = [formats, toolCalls, reasoning, embeddings, echo];
const checks = [models, chat, streamedChat, completions, errors, overload];
for (const check of what === "programs" ? programs : checks) {
  await check();
  console.log(check.name);
}
