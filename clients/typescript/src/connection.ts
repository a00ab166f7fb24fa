/** How calls reach a server: channel options, TLS, metadata, and when a failed call is tried again. */
import { readFileSync } from "node:fs";
import { type ChannelCredentials, type ChannelOptions, credentials, Metadata } from "@grpc/grpc-js";
import { invalid, Overloaded, type PagodaError, Unavailable } from "./errors.js";

export const CHANNEL_OPTIONS: ChannelOptions = {
  "grpc.max_receive_message_length": 64 << 20,
  // By default a channel waits 1 s after a refused connection before it tries another: longer than most retries.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 2000,
  // Pings detect a peer that has vanished, even on a quiet stream.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
};

/** Credentials for a connection: without TLS, with the system's authorities, or with those in a PEM file. */
export function credentialsFor(tls: boolean | string): ChannelCredentials {
  if (tls === false) return credentials.createInsecure();
  return tls === true ? credentials.createSsl() : credentials.createSsl(readFileSync(tls));
}

/** The metadata of each call. Throws InvalidArgument for a value that metadata cannot carry. */
export function callMetadata(token: string | undefined, tenant: string | undefined): Metadata {
  for (const [name, value] of Object.entries({ token, tenant })) {
    if (value !== undefined && !/^[ -~]*$/.test(value)) {
      throw invalid(name, "must be printable ASCII text"); // omits the value, which may be a secret
    }
  }
  const metadata = new Metadata();
  if (token) metadata.set("authorization", `Bearer ${token}`);
  if (tenant !== undefined) metadata.set("x-pagoda-tenant", tenant);
  return metadata;
}

const FIRST_BACKOFF_S = 0.1;
const MAX_BACKOFF_S = 2;
const MAX_SUGGESTED_S = 30;
const SPREAD = 0.25; // of a suggested delay
const MAX_TIMEOUT_S = 1e9;

/**
 * The attempts of one call, which share its retries and its deadline.
 *
 * A call is retried if the server was unavailable, after an exponential backoff with jitter, or if the server was
 * overloaded and suggested a delay, after that delay and up to a quarter more. A call is not retried once a message has
 * arrived, because what the caller has seen cannot be taken back (a resumable one goes on: see resume.ts); nor if the
 * wait would outlast the deadline, or the server suggests more than 30 s. Nothing here waits.
 */
export class Attempts {
  private retriesLeft: number;
  private backoffS = FIRST_BACKOFF_S;
  private readonly deadline: number | undefined;

  constructor(
    private readonly retries: number,
    timeoutS?: number,
    private readonly clock: () => number = () => performance.now() / 1e3,
    private readonly jitter: () => number = Math.random,
  ) {
    if (timeoutS !== undefined && (typeof timeoutS !== "number" || Number.isNaN(timeoutS))) {
      throw invalid("timeoutS", `is ${String(timeoutS)}, must be a number of seconds`);
    }
    this.retriesLeft = retries;
    this.deadline = timeoutS === undefined || timeoutS > MAX_TIMEOUT_S ? undefined : clock() + timeoutS;
  }

  /** Counts retries from zero: the last attempt was of use. The deadline stays. */
  renew(): void {
    this.retriesLeft = this.retries;
    this.backoffS = FIRST_BACKOFF_S;
  }

  /** Time left for the next attempt; undefined without a deadline. */
  remainingS(): number | undefined {
    return this.deadline === undefined ? undefined : Math.max(0, this.deadline - this.clock());
  }

  /** Seconds to wait before the next attempt. Throws the error if there must be none. */
  delayAfter(error: unknown, hasBegun: boolean): number {
    const delayS = this.delayOf(error);
    const remainingS = this.remainingS() ?? Infinity;
    if (hasBegun || delayS === undefined || delayS >= remainingS || this.retriesLeft === 0) throw error;
    this.retriesLeft -= 1;
    return delayS;
  }

  private delayOf(error: unknown): number | undefined {
    if (!(error instanceof Unavailable || error instanceof Overloaded)) return undefined;
    const suggestedS = (error as PagodaError).retryAfterS;
    if (suggestedS !== undefined) {
      // The server tells all that it refuses at once the same delay: they must not come back at once.
      return suggestedS <= MAX_SUGGESTED_S ? suggestedS * (1 + SPREAD * this.jitter()) : undefined;
    }
    if (error instanceof Overloaded) return undefined;
    const backoffS = this.backoffS;
    this.backoffS = Math.min(2 * backoffS, MAX_BACKOFF_S);
    return backoffS * (0.5 + 0.5 * this.jitter());
  }
}
