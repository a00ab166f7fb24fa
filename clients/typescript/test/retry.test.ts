/** The rules of retries in simulated time, and what is new of a stream that comes again. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { NotFound, Overloaded, Unavailable } from "pagoda-client";
import { GenerateRequestSchema, GenerateResponseSchema } from "pagoda-client/protos";
import type { GenerateRequest, GenerateResponse, ResumeRequest } from "pagoda-client/protos";
import { Attempts } from "../src/connection.js";
import { Resumption } from "../src/resume.js";

const stopped = (): number => 0;
const longest = (): number => 1;

function unavailable(retryAfterS?: number): Unavailable {
  return new Unavailable("gone", "UNAVAILABLE", { retryAfterS });
}

function overloaded(retryAfterS?: number): Overloaded {
  return new Overloaded("full", "RESOURCE_EXHAUSTED", { retryAfterS });
}

test("the backoff doubles up to two seconds, and jitter only shortens it", () => {
  const attempts = new Attempts(7, undefined, stopped, longest);
  const delays = Array.from({ length: 7 }, () => attempts.delayAfter(unavailable(), false));
  assert.deepEqual(delays, [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]);
  assert.throws(() => attempts.delayAfter(unavailable(), false), Unavailable);
  assert.equal(new Attempts(1, undefined, stopped, () => 0).delayAfter(unavailable(), false), 0.05);
});

test("a suggested delay replaces the backoff and is spread, unless it is more than 30 s", () => {
  const attempts = new Attempts(3, undefined, stopped, longest);
  assert.equal(attempts.delayAfter(unavailable(2), false), 2.5);
  assert.equal(attempts.delayAfter(overloaded(4), false), 5);
  assert.throws(() => attempts.delayAfter(overloaded(30.1), false), Overloaded);
  assert.throws(() => attempts.delayAfter(overloaded(), false), Overloaded);
});

test("one deadline holds for all attempts", () => {
  let now = 100;
  const attempts = new Attempts(5, 1, () => now, longest);
  assert.equal(attempts.remainingS(), 1);
  now += 0.75;
  assert.equal(attempts.remainingS(), 0.25);
  assert.equal(attempts.delayAfter(unavailable(), false), 0.1);
  assert.throws(() => attempts.delayAfter(unavailable(0.25), false), Unavailable);
  now += 5;
  assert.equal(attempts.remainingS(), 0);
});

function message(init: MessageInitShape<typeof GenerateResponseSchema>): GenerateResponse {
  return create(GenerateResponseSchema, init);
}

function tokens(index: number, count: number): GenerateResponse {
  const ids = Array.from({ length: count }, () => ({ id: 7 }));
  return message({ event: { case: "tokens", value: { index, tokens: ids } } });
}

function end(index: number, isLast = false): GenerateResponse {
  const event = { case: "finished", value: { index } } as const;
  return message(isLast ? { event, usage: { promptTokens: 1 } } : { event });
}

function resumption(): Resumption {
  const request = create(GenerateRequestSchema, { resumable: true });
  return new Resumption(request, new Attempts(3, undefined, stopped, longest));
}

const PROMPT = { event: { case: "prompt", value: {} } } as const;

test("a resumption says how many tokens of each sequence have arrived", () => {
  const stream = resumption();
  const first = stream.request() as GenerateRequest;
  assert.notEqual(first.requestId, "", "so that a stream whose first message is lost can be resumed");
  for (const each of [message(PROMPT), tokens(2, 3), tokens(0, 1), tokens(2, 2), end(0)]) assert.ok(stream.takes(each));
  assert.equal(stream.delayAfter(unavailable()), 0.1);
  const again = stream.request() as ResumeRequest;
  assert.deepEqual([again.requestId, again.received], [first.requestId, [1, 0, 5]]);
});

test("what comes again is taken once, and the usage even with an end that is known", () => {
  const stream = resumption();
  for (const each of [message(PROMPT), tokens(0, 2), tokens(0, 0), end(0), tokens(1, 1)]) assert.ok(stream.takes(each));
  stream.delayAfter(unavailable());
  for (const each of [message(PROMPT), tokens(0, 0), end(0)]) assert.ok(!stream.takes(each));
  assert.ok(stream.takes(end(1)));
  const last = end(0, true);
  assert.ok(stream.takes(last));
  assert.equal(last.event.case, undefined);
  assert.equal(stream.delayAfter(unavailable()), undefined, "it is complete");
});

test("an end may add several messages without tokens", () => {
  const stream = resumption();
  for (const each of [tokens(0, 2), tokens(0, 0), tokens(0, 0)]) assert.ok(stream.takes(each));
  for (const known of [2, 3, 3]) {
    stream.delayAfter(unavailable());
    assert.deepEqual([0, 1, 2].map(() => stream.takes(tokens(0, 0))), [0, 1, 2].map((at) => at >= known));
  }
});

test("a stream that the server does not know begins anew, or ends with what broke it", () => {
  const stream = resumption();
  const unknown = new NotFound("no stream is kept", "NOT_FOUND");
  stream.delayAfter(unavailable());
  assert.ok(stream.resumes);
  assert.equal(stream.delayAfter(unknown), 0);
  assert.ok(!stream.resumes);
  assert.ok(stream.takes(tokens(0, 1)));
  const broken = unavailable();
  stream.delayAfter(broken);
  assert.throws(() => stream.delayAfter(unknown), broken);
});

test("attempts count anew when a stream has gone on", () => {
  const stream = resumption();
  for (let at = 0; at < 10; at += 1) {
    assert.equal(stream.delayAfter(unavailable()), 0.1);
    stream.takes(tokens(0, 1));
  }
});
