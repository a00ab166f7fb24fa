/** Go on with a stream that broke: what has arrived of it, what to call next, and what of the answer is new. */
import { randomUUID } from "node:crypto";
import { create } from "@bufbuild/protobuf";
import type { Attempts } from "./connection.js";
import { NotFound, Unimplemented } from "./errors.js";
import { type GenerateRequest, type GenerateResponse, type ResumeRequest, ResumeRequestSchema } from "./protos.js";

/**
 * One resumable stream over several calls: Generate first, then Resume with the tokens that have arrived.
 *
 * Attempts are counted anew each time that the stream goes on. Nothing here waits or calls.
 */
export class Resumption {
  /** Whether the next call is Resume. */
  resumes = false;
  private break: unknown; // what broke the stream
  private readonly received: number[] = [];
  private hasBegun = false;
  private hasPrompt = false;
  private readonly numLate = new Map<number, number>(); // by sequence: messages without tokens, which its end adds
  private readonly numLateNow = new Map<number, number>(); // those of this call, which has all of them again
  private readonly finished = new Set<number>();
  private isComplete = false;

  /** The request gets a request id if it has none. */
  constructor(
    private readonly generateRequest: GenerateRequest,
    private readonly attempts: Attempts,
  ) {
    generateRequest.requestId ||= randomUUID();
  }

  /** The request of the next call. */
  request(): GenerateRequest | ResumeRequest {
    if (!this.resumes) return this.generateRequest;
    return create(ResumeRequestSchema, { requestId: this.generateRequest.requestId, received: this.received });
  }

  /** Whether a message has anything that has not arrived before; what has arrived before is removed. */
  takes(response: GenerateResponse): boolean {
    this.hasBegun = true;
    const isNew = this.isNew(response);
    if (isNew) this.attempts.renew();
    this.isComplete = response.usage !== undefined;
    if (!isNew && this.isComplete) response.event = { case: undefined };
    return isNew || this.isComplete;
  }

  /** Seconds to wait before the next call; undefined: the stream is complete. Throws an error if there must be none. */
  delayAfter(error: unknown): number | undefined {
    if (this.isComplete) return undefined;
    if (this.resumes && (error instanceof NotFound || error instanceof Unimplemented)) {
      if (this.hasBegun && this.break !== undefined) throw this.break;
      this.resumes = false; // the server does not know of the stream: nothing is lost, it begins
      return 0;
    }
    const delayS = this.attempts.delayAfter(error, false);
    this.break = error;
    this.resumes = true;
    this.numLateNow.clear();
    return delayS;
  }

  private isNew({ event }: GenerateResponse): boolean {
    switch (event.case) {
      case "prompt": {
        const hadPrompt = this.hasPrompt;
        this.hasPrompt = true;
        return !hadPrompt;
      }
      case "tokens": {
        const { index, tokens } = event.value;
        if (tokens.length === 0) {
          if (counted(this.numLateNow, index) <= (this.numLate.get(index) ?? 0)) return false;
          counted(this.numLate, index);
          return true;
        }
        while (this.received.length <= index) this.received.push(0);
        this.received[index] = (this.received[index] ?? 0) + tokens.length;
        return true;
      }
      case "finished":
        return isAdded(this.finished, event.value.index);
      default:
        return true;
    }
  }
}

/** Counts one more of a key. Returns how many there are. */
function counted(counts: Map<number, number>, key: number): number {
  const count = (counts.get(key) ?? 0) + 1;
  counts.set(key, count);
  return count;
}

/** Adds a value to a set. Returns whether it is new. */
function isAdded(to: Set<number>, value: number): boolean {
  const { size } = to;
  return to.add(value).size > size;
}
