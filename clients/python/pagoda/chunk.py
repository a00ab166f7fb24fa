"""The messages of a stream as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagoda.v1 import inference_pb2


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"
    OTHER = "other"  # a newer server's reason that this client does not know


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural logarithm).

    top        (id, logprob) of the most likely tokens, best first
    top_bytes  the bytes of their texts, if requested
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    top_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call. The first part has id and name; the joined arguments are a JSON object."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. completion_tokens counts all sequences; cached_tokens were prompt tokens found in the cache.

    drafted_tokens    drafted by speculative decoding, of which accepted_tokens became output
    forced_tokens     of the output, that were not computed one by one because the format allowed no others
    reasoning_tokens  of the output
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Times and counts of the request's slowest sequence, as the server measured them.

    preempted_s    waiting to run again after a preemption; not part of prefill_s and decode_s
    saved_tokens   preempted tokens that were copied to host memory
    loaded_tokens  preempted tokens that were copied back
    pulled_tokens  tokens whose keys and values came from another engine
    adapter_s      the part of queue_s and preempted_s in which it waited for its LoRA adapter's place on the device
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    time_to_first_token_s: float
    total_s: float
    preemptions: int
    recomputed_tokens: int
    preempted_tokens: int
    saved_tokens: int
    loaded_tokens: int
    pulled_tokens: int = 0
    adapter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream: new tokens of one sequence, or its end.

    index          which of the request's n sequences
    text           text that the tokens add; joined over the stream it is the full text
    reasoning      reasoning that they add, if the server separates it from the answer
    tool_call      part of a tool call that they add, if the server separates calls from text
    tokens         new ids; often one, more if the reader is slower than the server
    logprobs       one per id if requested, else empty
    token_bytes    one per id if requested, else empty; a token's bytes need not be whole characters
    prompt_ids     the prompt's ids, on the first chunk, if requested; `logprobs` is theirs then, without the first's.
                   A long prompt with log-probabilities comes on several chunks
    finish_reason  set when the sequence ends
    matched        the stop string or token id that ended it; True: its format, which allows no more
    usage, timing  on the last chunk of the stream
    """

    request_id: str
    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    token_bytes: tuple[bytes, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """What the model thinks of a continuation.

    logprob      the sum of its tokens' log-probabilities
    logprobs     one per token
    token_bytes  one per token if requested, else empty
    """

    logprob: float
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    token_bytes: tuple[bytes, ...] = ()


def score_from(score: inference_pb2.ContinuationScore) -> Score:
    return Score(
        score.logprob,
        tuple(token.id for token in score.tokens),
        tuple(token.logprob for token in score.tokens),
        tuple(token.bytes for token in score.tokens) if any(token.bytes for token in score.tokens) else (),
    )


_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    inference_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


def chunk_from(response: inference_pb2.GenerateResponse) -> Chunk:
    """Convert one message of the stream."""
    usage = _usage(response.usage) if response.HasField("usage") else None
    timing = _timing(response.timing) if response.HasField("timing") else None
    match response.WhichOneof("event"):
        case "tokens":
            event = response.tokens
            return Chunk(
                response.request_id,
                index=event.index,
                text=event.text,
                reasoning=event.reasoning,
                tool_call=_tool_call(event.tool_call) if event.HasField("tool_call") else None,
                tokens=tuple(token.id for token in event.tokens),
                logprobs=tuple(_logprob(token) for token in event.tokens if token.HasField("logprob")),
                token_bytes=tuple(token.bytes for token in event.tokens) if any(t.bytes for t in event.tokens) else (),
                usage=usage,
                timing=timing,
            )
        case "finished":
            end = response.finished
            matched = end.WhichOneof("matched")
            return Chunk(
                response.request_id,
                index=end.index,
                finish_reason=_REASONS.get(end.reason, FinishReason.OTHER),
                matched=None if matched is None else getattr(end, matched),
                usage=usage,
                timing=timing,
            )
        case "prompt":
            tokens = response.prompt.tokens
            return Chunk(
                response.request_id,
                prompt_ids=tuple(token.id for token in tokens),
                logprobs=tuple(_logprob(token) for token in tokens if token.HasField("logprob")),
                usage=usage,
                timing=timing,
            )
    return Chunk(response.request_id, usage=usage, timing=timing)


def _logprob(token: inference_pb2.Token) -> TokenLogprob:
    top_bytes = tuple(top.bytes for top in token.top) if any(top.bytes for top in token.top) else ()
    return TokenLogprob(token.logprob, tuple((top.id, top.logprob) for top in token.top), top_bytes)


def _tool_call(delta: inference_pb2.ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(delta.index, delta.id, delta.name, delta.arguments)


def _usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.drafted_tokens,
        usage.accepted_tokens,
        usage.forced_tokens,
        usage.reasoning_tokens,
    )


def _timing(timing: inference_pb2.Timing) -> Timing:
    return Timing(
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        decode_s=timing.decode_s,
        preempted_s=timing.preempted_s,
        time_to_first_token_s=timing.time_to_first_token_s,
        total_s=timing.total_s,
        preemptions=timing.preemptions,
        recomputed_tokens=timing.recomputed_tokens,
        preempted_tokens=timing.preempted_tokens,
        saved_tokens=timing.saved_tokens,
        loaded_tokens=timing.loaded_tokens,
        pulled_tokens=timing.pulled_tokens,
        adapter_s=timing.adapter_s,
    )
