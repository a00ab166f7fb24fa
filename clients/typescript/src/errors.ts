/** Errors of failed calls, made from the gRPC status and its google.rpc details. */
import { fromBinary, type Message } from "@bufbuild/protobuf";
import type { GenMessage } from "@bufbuild/protobuf/codegenv2";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { type ServiceError, status } from "@grpc/grpc-js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RetryInfoSchema,
  type Status,
  StatusSchema,
} from "./gen/google/rpc/details_pb.js";

/** The name of a gRPC status. */
export type Code = keyof typeof status;

/** What a server may say of a failure besides its status and message. */
export interface Details {
  /** Seconds that the server suggests to wait before a retry. */
  retryAfterS?: number | undefined;
  /** Path of the wrong or unsupported field, such as `sampling.temperature`. */
  field?: string | undefined;
  /** A constant of the server, such as QUEUE_FULL, QUOTA_EXCEEDED or RESUMABLE. */
  reason?: string | undefined;
  /** Requests that the server has admitted. */
  queueDepth?: number | undefined;
}

/** A call failed. Statuses without a subclass raise this class itself. */
export class PagodaError extends Error {
  readonly code: Code;
  readonly retryAfterS: number | undefined;
  readonly field: string | undefined;
  readonly reason: string | undefined;
  readonly queueDepth: number | undefined;

  constructor(message: string, code: Code, details: Details = {}) {
    super(message);
    this.name = new.target.name;
    this.code = code;
    this.retryAfterS = details.retryAfterS;
    this.field = details.field;
    this.reason = details.reason;
    this.queueDepth = details.queueDepth;
  }
}

/** An argument is wrong; `field` is its path, if the server names it. */
export class InvalidArgument extends PagodaError {}

/** The token is missing or wrong. */
export class Unauthenticated extends PagodaError {}

/** The token does not have a right that the call needs; the message names it. */
export class PermissionDenied extends PagodaError {}

/** There is no such model, or the tenant has no live request, or no kept stream, with this id. */
export class NotFound extends PagodaError {}

/** A live request of the tenant has this id. */
export class AlreadyExists extends PagodaError {}

/** The queue is full, a quota is used up, the message too large, or this client has stopped reading: see `reason`. */
export class Overloaded extends PagodaError {}

/** `timeoutS` has passed. */
export class DeadlineExceeded extends PagodaError {}

/** The server cannot be reached, is draining, or has no running engine. */
export class Unavailable extends PagodaError {}

/** The call was cancelled from elsewhere, or its client is closed. An AbortSignal throws its own reason instead. */
export class Cancelled extends PagodaError {}

/** The server does not support a call or a feature; `field` is the path of the feature's field. */
export class Unimplemented extends PagodaError {}

const KINDS: Partial<Record<Code, typeof PagodaError>> = {
  INVALID_ARGUMENT: InvalidArgument,
  UNAUTHENTICATED: Unauthenticated,
  PERMISSION_DENIED: PermissionDenied,
  NOT_FOUND: NotFound,
  ALREADY_EXISTS: AlreadyExists,
  RESOURCE_EXHAUSTED: Overloaded,
  DEADLINE_EXCEEDED: DeadlineExceeded,
  UNAVAILABLE: Unavailable,
  CANCELLED: Cancelled,
  UNIMPLEMENTED: Unimplemented,
};

/** Makes a typed error of a failed call. What is not a call's failure is returned as it is. */
export function errorFrom(failure: unknown): unknown {
  if (!isServiceError(failure)) return failure;
  const code = (status[failure.code] ?? "UNKNOWN") as Code;
  return new (KINDS[code] ?? PagodaError)(failure.details || code, code, detailsOf(failure));
}

export function invalid(field: string, description: string): InvalidArgument {
  return new InvalidArgument(`${field}: ${description}`, "INVALID_ARGUMENT", { field });
}

export function closed(): Cancelled {
  return new Cancelled("the client is closed", "CANCELLED");
}

function isServiceError(failure: unknown): failure is ServiceError {
  return failure instanceof Error && "metadata" in failure && "code" in failure && typeof failure.code === "number";
}

function detailsOf(failure: ServiceError): Details {
  const told = statusOf(failure);
  if (told === undefined) return {};
  const delay = detail(told, RetryInfoSchema)?.retryDelay;
  const info = detail(told, ErrorInfoSchema);
  const depth = info?.metadata["queue_depth"] ?? "";
  return {
    retryAfterS: delay && Number(delay.seconds) + delay.nanos / 1e9,
    field: detail(told, BadRequestSchema)?.fieldViolations[0]?.field,
    reason: info?.reason,
    queueDepth: /^\d+$/.test(depth) ? Number(depth) : undefined,
  };
}

function statusOf(failure: ServiceError): Status | undefined {
  const [bytes] = failure.metadata.get("grpc-status-details-bin");
  try {
    return typeof bytes === "object" ? fromBinary(StatusSchema, bytes) : undefined;
  } catch {
    return undefined; // the status says what happened even without details
  }
}

function detail<T extends Message>(told: Status, schema: GenMessage<T>): T | undefined {
  for (const each of told.details) {
    const unpacked = anyUnpack(each, schema);
    if (unpacked !== undefined) return unpacked;
  }
  return undefined;
}
