/** The client. */
import { create, fromBinary, type Message, toBinary } from "@bufbuild/protobuf";
import type { GenMessage } from "@bufbuild/protobuf/codegenv2";
import { Client, type ClientReadableStream, type Metadata } from "@grpc/grpc-js";
import { type Answer, answerFrom, type Chunk, chunkFrom, type Score, scoreFrom } from "./chunk.js";
import { Attempts, callMetadata, CHANNEL_OPTIONS, credentialsFor } from "./connection.js";
import { closed, errorFrom, PagodaError } from "./errors.js";
import { assign } from "./fields.js";
import * as pb from "./protos.js";
import {
  type CallOptions,
  type DetokenizeOptions,
  detokenizeRequest,
  type EmbedOptions,
  embedRequest,
  type GenerateOptions,
  generateRequest,
  type Input,
  type ScoreOptions,
  scoreRequest,
  type TextInput,
  type TokenizeOptions,
  tokenizeRequest,
} from "./request.js";
import { Resumption } from "./resume.js";

export interface ClientOptions {
  /** Sent as `authorization: Bearer …`. */
  token?: string | undefined;
  /** The tenant that the calls are for. A server that knows tenants by their tokens needs no name. */
  tenant?: string | undefined;
  /** True: TLS with the system's authorities; a path: TLS with the authorities in that PEM file. */
  tls?: boolean | string | undefined;
  /** Default deadline of a call, all its attempts included; no deadline unless it is set. */
  timeoutS?: number | undefined;
  /**
   * Further attempts of a call that failed before its first message because the server was unavailable or overloaded;
   * of a resumable stream, each time that it breaks. Default 3.
   */
  retries?: number | undefined;
}

/** A method of a service, as in the generated descriptors. */
interface Method<I extends Message, O extends Message> {
  name: string;
  parent: { typeName: string };
  input: GenMessage<I>;
  output: GenMessage<O>;
}

type Call = { cancel(): void };

const { generate, resume, tokenize, detokenize, embed, score } = pb.Inference.method;
const { getServerInfo, listModels, getLoad, watchLoad, getStepTrace } = pb.Control.method;
const { abort, drain, flushCache } = pb.Admin.method;

/**
 * A connection to a server: HOST:PORT or unix:PATH. `close` it when it is no longer needed.
 *
 * A call that fails throws PagodaError. A wrong argument throws InvalidArgument, an unknown option TypeError. A stream
 * starts when it is first read. Leaving its loop cancels the call, and the server frees everything that the call held.
 */
export class Pagoda {
  private readonly channel: Client;
  private readonly metadata: Metadata;
  private readonly timeoutS: number | undefined;
  private readonly retries: number;
  private readonly calls = new Set<Call>();
  private isClosed = false;

  constructor(address = "127.0.0.1:50051", options: ClientOptions = {}) {
    this.metadata = callMetadata(options.token, options.tenant);
    this.channel = new Client(address, credentialsFor(options.tls ?? false), CHANNEL_OPTIONS);
    this.timeoutS = options.timeoutS;
    this.retries = options.retries ?? 3;
  }

  /** Streams the answer to, or the continuation of, an input. */
  stream(input: Input, options: GenerateOptions = {}): AsyncGenerator<Chunk, void, undefined> {
    const request = generateRequest(input, options);
    const attempts = this.attempts(options.timeoutS);
    if (request.resumable) return this.resumable(new Resumption(request, attempts), attempts, options.signal);
    return mapped(this.responses(generate, request, attempts, options.signal), chunkFrom);
  }

  /** Waits for the whole answer. */
  async generate(input: Input, options: GenerateOptions = {}): Promise<Answer> {
    return answerFrom(this.stream(input, options));
  }

  /** A vector of the model's last hidden states for each input: a text, or token ids. */
  async embed(inputs: Iterable<string | Iterable<number>>, options: EmbedOptions = {}): Promise<number[][]> {
    return (await this.call(embed, embedRequest(inputs, options), options)).embeddings.map(({ values }) => values);
  }

  /** The log-probabilities of continuations of one input. Each is a text, which is tokenized by itself, or token ids. */
  async score(
    input: Input,
    continuations: Iterable<string | Iterable<number>>,
    options: ScoreOptions = {},
  ): Promise<Score[]> {
    return (await this.call(score, scoreRequest(input, continuations, options), options)).scores.map(scoreFrom);
  }

  /** The token ids that `generate` would use for the same input. */
  async tokenize(input: TextInput, options: TokenizeOptions = {}): Promise<number[]> {
    return (await this.call(tokenize, tokenizeRequest(input, options), options)).tokenIds;
  }

  async detokenize(tokenIds: Iterable<number>, options: DetokenizeOptions = {}): Promise<string> {
    return (await this.call(detokenize, detokenizeRequest(tokenIds, options), options)).text;
  }

  async serverInfo(options: CallOptions = {}): Promise<pb.ServerInfo> {
    return this.call(getServerInfo, create(pb.GetServerInfoRequestSchema), options);
  }

  /** The models that a request may name, and what each can do. */
  async models(options: CallOptions = {}): Promise<pb.ModelInfo[]> {
    return (await this.call(listModels, create(pb.ListModelsRequestSchema), options)).models;
  }

  async load(options: CallOptions = {}): Promise<pb.Load> {
    return this.call(getLoad, create(pb.GetLoadRequestSchema), options);
  }

  /** Streams the load every `intervalS` seconds, until its loop is left. The client's `timeoutS` does not apply. */
  watchLoad(intervalS = 1, options: CallOptions = {}): AsyncGenerator<pb.Load, void, undefined> {
    const request = create(pb.WatchLoadRequestSchema);
    assign(pb.WatchLoadRequestSchema, request, "interval_s", intervalS);
    return this.responses(watchLoad, request, new Attempts(this.retries, options.timeoutS), options.signal);
  }

  /** Streams the engines' step traces of the last `lastS` seconds, in parts; of all that they keep unless it is set. */
  stepTrace(lastS?: number, options: CallOptions = {}): AsyncGenerator<pb.StepTracePart, void, undefined> {
    const request = create(pb.GetStepTraceRequestSchema);
    if (lastS !== undefined) assign(pb.GetStepTraceRequestSchema, request, "last_s", lastS);
    return this.responses(getStepTrace, request, this.attempts(options.timeoutS), options.signal);
  }

  /** Ends a live request, of this client's tenant unless another is named; its stream finishes as `cancelled`. */
  async abort(requestId: string, options: CallOptions & { tenant?: string | undefined } = {}): Promise<void> {
    const request = create(pb.AbortRequestSchema);
    assign(pb.AbortRequestSchema, request, "request_id", requestId);
    if (options.tenant !== undefined) assign(pb.AbortRequestSchema, request, "tenant", options.tenant);
    await this.call(abort, request, options);
  }

  /** Makes the server refuse new requests, and resolves when none is live. */
  async drain(options: CallOptions = {}): Promise<void> {
    await this.call(drain, create(pb.DrainRequestSchema), options);
  }

  /** Forgets every cached prefix that no sequence uses. Resolves to the number of freed blocks. */
  async flushCache(options: CallOptions = {}): Promise<number> {
    return (await this.call(flushCache, create(pb.FlushCacheRequestSchema), options)).freedBlocks;
  }

  /** Cancels running calls; later calls throw Cancelled. */
  close(): void {
    this.isClosed = true;
    for (const call of this.calls) call.cancel();
    this.channel.close();
  }

  private attempts(timeoutS: number | undefined): Attempts {
    return new Attempts(this.retries, timeoutS ?? this.timeoutS);
  }

  private async call<I extends Message, O extends Message>(
    method: Method<I, O>,
    request: I,
    { timeoutS, signal }: CallOptions,
  ): Promise<O> {
    let answer: O | undefined;
    for await (const response of this.responses(method, request, this.attempts(timeoutS), signal)) answer = response;
    if (answer === undefined) throw new PagodaError(`${method.name} answered nothing`, "INTERNAL");
    return answer;
  }

  /** The responses of a call that is tried again as long as none has arrived. */
  private async *responses<I extends Message, O extends Message>(
    method: Method<I, O>,
    request: I,
    attempts: Attempts,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<O, void, undefined> {
    let hasBegun = false;
    for (;;) {
      try {
        for await (const response of this.attempt(method, request, attempts, signal)) {
          hasBegun = true;
          yield response;
        }
        return;
      } catch (error) {
        await this.wait(attempts.delayAfter(error, hasBegun), signal);
      }
    }
  }

  private async *resumable(
    stream: Resumption,
    attempts: Attempts,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<Chunk, void, undefined> {
    for (;;) {
      try {
        const method = (stream.resumes ? resume : generate) as Method<Message, pb.GenerateResponse>;
        for await (const response of this.attempt(method, stream.request(), attempts, signal)) {
          if (stream.takes(response)) yield chunkFrom(response);
        }
        return;
      } catch (error) {
        const delayS = stream.delayAfter(error);
        if (delayS === undefined) return;
        await this.wait(delayS, signal);
      }
    }
  }

  /** The responses of one attempt. A unary call is one whose stream has one response: on the wire both are the same. */
  private async *attempt<I extends Message, O extends Message>(
    method: Method<I, O>,
    request: I,
    attempts: Attempts,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<O, void, undefined> {
    signal?.throwIfAborted();
    if (this.isClosed) throw closed();
    const remainingS = attempts.remainingS();
    const call: ClientReadableStream<O> = this.channel.makeServerStreamRequest(
      `/${method.parent.typeName}/${method.name}`,
      (message: I) => Buffer.from(toBinary(method.input, message)),
      (bytes) => fromBinary(method.output, bytes),
      request,
      this.metadata,
      { deadline: remainingS === undefined ? Infinity : Date.now() + 1e3 * remainingS },
    );
    const cancel = (): void => call.cancel();
    call.on("error", () => {}); // an error after the reader has left is of no interest; before, the loop throws it
    signal?.addEventListener("abort", cancel);
    this.calls.add(call);
    try {
      for await (const response of call) yield response as O;
    } catch (error) {
      signal?.throwIfAborted();
      throw this.isClosed ? closed() : errorFrom(error);
    } finally {
      signal?.removeEventListener("abort", cancel);
      this.calls.delete(call);
      call.cancel();
    }
  }

  /** Sleeps. Throws the signal's reason if it is aborted meanwhile, and Cancelled if the client is closed. */
  private wait(seconds: number, signal: AbortSignal | undefined): Promise<void> {
    return new Promise((resolve, reject) => {
      const sleep: Call = { cancel: () => end(() => reject(closed())) };
      const abort = (): void => end(() => reject(signal?.reason));
      const timer = setTimeout(() => end(resolve), 1e3 * seconds);
      const end = (settle: () => void): void => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
        this.calls.delete(sleep);
        settle();
      };
      this.calls.add(sleep);
      signal?.addEventListener("abort", abort);
      if (signal?.aborted) abort();
    });
  }
}

async function* mapped<T, U>(values: AsyncGenerator<T>, convert: (value: T) => U): AsyncGenerator<U, void, undefined> {
  for await (const value of values) yield convert(value);
}
