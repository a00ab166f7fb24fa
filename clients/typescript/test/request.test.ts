/** What the options of a call become. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { DescMessage } from "@bufbuild/protobuf";
import { GenerateRequestSchema, Pooling } from "pagoda-client/protos";
import { embedRequest, FIELDS, generateRequest, scoreRequest } from "../src/request.js";

const NOT_SUPPORTED = ["sampling.beam_search", "sampling.typical_p"]; // by the server
const INPUTS = ["prompt", "message", "chat", "token_ids"];

/** The paths of all fields of a message and of the messages inside it. */
function paths(message: DescMessage, prefix = ""): string[] {
  return message.fields.flatMap((field) => {
    const path = prefix + field.name;
    if (INPUTS.includes(path) || NOT_SUPPORTED.includes(path)) return [];
    return field.fieldKind === "message" ? paths(field.message, `${path}.`) : [path];
  });
}

test("every field of a request that the server supports has one option", () => {
  assert.deepEqual(Object.values(FIELDS).sort(), paths(GenerateRequestSchema).sort());
});

test("options reach their fields, and zero is not left out", () => {
  const request = generateRequest("x", {
    temperature: 0,
    topK: 0,
    seed: 2n ** 64n - 1n,
    logitBias: { 5: -1.5 },
    allowedTokenIds: new Set([5, 6]),
    stop: "one",
    text: false,
    logprobs: 0,
    priority: -3,
    tpotS: 0.05,
    maxTokens: undefined,
  });
  const { sampling, stopping, output } = request;
  assert.deepEqual(request.input, { case: "message", value: "x" });
  assert.deepEqual([sampling?.temperature, sampling?.topK, sampling?.topP], [0, 0, undefined]);
  assert.equal(sampling?.seed, 2n ** 64n - 1n);
  assert.deepEqual(sampling?.logitBias, { 5: -1.5 });
  assert.deepEqual(sampling?.allowedTokenIds, [5, 6]);
  assert.deepEqual([stopping?.stop, stopping?.maxTokens], [["one"], undefined]);
  assert.deepEqual([output?.text, output?.logprobs], [false, 0]);
  assert.deepEqual([request.priority, request.slo?.tpotS, request.cache], [-3, 0.05, undefined]);
});

test("a format is a schema as an object or text, or one of the others, and only one", () => {
  const schema = { type: "object", properties: { b: {}, a: {} } };
  for (const jsonSchema of [schema, JSON.stringify(schema)]) {
    const { format } = generateRequest("x", { jsonSchema }).guided ?? {};
    assert.deepEqual(format, { case: "jsonSchema", value: '{"type":"object","properties":{"b":{},"a":{}}}' });
  }
  assert.deepEqual(generateRequest("x", { jsonObject: true }).guided?.format, { case: "jsonObject", value: true });
  const { format } = generateRequest("x", { choice: ["yes", "no"] }).guided ?? {};
  assert.deepEqual(format?.case === "choice" && format.value.options, ["yes", "no"]);
  assert.throws(() => generateRequest("x", { regex: "a", grammar: "start: A" }), { name: "InvalidArgument", field: "guided" });
});

test("texts and token ids are read out, and what does not fit is named", () => {
  const { inputs, pooling, dimensions, normalize } = embedRequest(["a", [7]], { pooling: "cls", dimensions: 3 });
  assert.deepEqual(inputs.map((each) => each.input.case), ["text", "tokenIds"]);
  assert.deepEqual([pooling, dimensions, normalize], [Pooling.CLS, 3, undefined]);
  const wrong: [() => unknown, string][] = [
    [() => embedRequest("a", {}), "inputs"],
    [() => embedRequest(["a", [1.5]], {}), "inputs[1].token_ids.ids"],
    [() => embedRequest(["a"], { pooling: "max" as "mean" }), "pooling"],
    [() => scoreRequest({ prompt: "x" }, ["\ud800"], {}), "continuations[0].text"],
    [() => scoreRequest({ prompt: "x" }, ["a"], { tools: [] }), "tools"],
  ];
  for (const [call, field] of wrong) assert.throws(call, { name: "InvalidArgument", field });
  assert.throws(() => scoreRequest("x", ["a"], { maxTokens: 3 } as object), TypeError);
});
