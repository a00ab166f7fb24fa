"""Check every field of a request to embed or to score, and fill in defaults."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.v1 import inference_pb2

from ..errors import InvalidArgument
from ..text.tokenizer import Prompt
from .fields import Limits, check_bytes, check_count, check_ids, check_integer
from .validation import PROMPT_FIELDS, prompt_from, request_id_from


@dataclass(frozen=True, slots=True)
class ReadoutParams:
    """A valid request with its defaults filled in.

    shared        what all sequences begin with; Embed has none
    shared_field  the field that it comes from, as errors name it
    parts         what follows it in each sequence
    part_fields   the fields that they come from
    """

    request_id: str
    shared: Prompt
    shared_field: str
    parts: tuple[Prompt, ...]
    part_fields: tuple[str, ...]
    cache: inference_pb2.Cache
    priority: int


@dataclass(frozen=True, slots=True)
class EmbedParams(ReadoutParams):
    pooling: inference_pb2.Pooling
    normalizes: bool
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class ScoreParams(ReadoutParams):
    has_token_bytes: bool


def validate_embed(request: inference_pb2.EmbedRequest, limits: Limits) -> EmbedParams:
    """Check all but the lengths of tokenized texts. Raises InvalidArgument."""
    common = _check_common(request, len(request.inputs), "inputs", limits)
    if request.pooling not in inference_pb2.Pooling.values():
        raise InvalidArgument("pooling", f"is {request.pooling}, which is not a known value")
    if request.HasField("dimensions"):
        check_integer(request.dimensions, "dimensions", 1, limits.hidden_size)
    names = [f"inputs[{index}]" for index in range(len(request.inputs))]
    found = [_text_or_ids(each, name, limits) for each, name in zip(request.inputs, names, strict=True)]
    return EmbedParams(
        request_id=common,
        shared=(),
        shared_field="",
        parts=tuple(part for part, _ in found),
        part_fields=tuple(name for _, name in found),
        cache=request.cache,
        priority=request.priority,
        pooling=request.pooling or limits.pooling,
        normalizes=request.normalize if request.HasField("normalize") else True,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
    )


def validate_score(request: inference_pb2.ScoreRequest, limits: Limits) -> ScoreParams:
    """Check all but the lengths of tokenized texts. Raises InvalidArgument."""
    common = _check_common(request, len(request.continuations), "continuations", limits)
    shared = prompt_from(request, limits)
    names = [f"continuations[{index}]" for index in range(len(request.continuations))]
    found = [_text_or_ids(each, name, limits) for each, name in zip(request.continuations, names, strict=True)]
    return ScoreParams(
        request_id=common,
        shared=shared,
        shared_field=PROMPT_FIELDS[request.WhichOneof("input")],
        parts=tuple(part for part, _ in found),
        part_fields=tuple(name for _, name in found),
        cache=request.cache,
        priority=request.priority,
        has_token_bytes=request.token_bytes,
    )


def _check_common(
    request: inference_pb2.EmbedRequest | inference_pb2.ScoreRequest,
    count: int,
    field: str,
    limits: Limits,
) -> str:
    """Check what both requests have. Returns the request's id.

    count, field  of the sequences that it asks for
    """
    if not count:
        raise InvalidArgument(field, "is empty")
    check_count(count, field, limits.max_readouts)
    check_integer(request.priority, "priority", -limits.max_priority, limits.max_priority)
    check_bytes(request.cache.salt, "cache.salt", limits.max_salt_bytes)
    return request_id_from(request.request_id, limits)


def _text_or_ids(
    given: inference_pb2.EmbedInput | inference_pb2.Continuation, name: str, limits: Limits
) -> tuple[Prompt, str]:
    """A text or token ids, and the field's path."""
    if given.HasField("text"):
        path = f"{name}.text"
        if not given.text:
            raise InvalidArgument(path, "is empty")
        check_bytes(given.text, path, limits.max_text_bytes)
        return given.text, path
    if given.HasField("token_ids"):
        path = f"{name}.token_ids.ids"
        if not given.token_ids.ids:
            raise InvalidArgument(path, "is empty")
        check_ids(given.token_ids.ids, path, limits.max_model_len - 1, limits.vocab_size)
        return tuple(given.token_ids.ids), path
    raise InvalidArgument(name, "is missing: set one of text, token_ids")
