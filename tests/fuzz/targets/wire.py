"""A client's request in any protocol: the first byte chooses the method, the rest is the message."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError, Message

from pagoda.engine.v1.engine_pb2 import Submit
from pagoda.v1.inference_pb2 import DetokenizeRequest, EmbedRequest, GenerateRequest, ScoreRequest, TokenizeRequest
from pagoda_server.engine.serving.codec import check_submit
from pagoda_server.router.adapters import kserve_tensors as kserve
from pagoda_server.router.adapters import vllm
from pagoda_server.router.adapters.protocols.kserve_pb2 import ModelInferRequest
from pagoda_server.router.adapters.protocols.vllm_engine_pb2 import GenerateRequest as VllmRequest
from pagoda_server.router.errors import InvalidArgument, PagodaError, to_status
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.readout_validation import validate_embed, validate_score
from pagoda_server.router.request.validation import (
    check_prompt,
    to_submit,
    validate_detokenize,
    validate_generate,
    validate_tokenize,
)
from pagoda_server.router.request.wire import Malformed, check_entries, most_entries

# So low that a few hundred bytes reach each of them.
LIMITS = Limits(
    max_model_len=32, vocab_size=64, kv_token_capacity=48, max_text_bytes=200, max_messages=4, max_parts=3,
    max_tools=2, max_json_bytes=64, max_json_depth=4, max_kwargs_values=6, max_kwargs_depth=3, max_stop=3,
    max_stop_bytes=8, max_stop_ids=5, max_logit_bias=4,
)  # fmt: skip
MOST = {**most_entries(LIMITS), **vllm.most_entries(LIMITS), **kserve.most_entries(LIMITS)}
KINDS = (
    GenerateRequest,
    TokenizeRequest,
    DetokenizeRequest,
    VllmRequest,
    ModelInferRequest,
    EmbedRequest,
    ScoreRequest,
)
EOS_IDS = (0, 99)  # the second has no row in the embedding, as some models' have none
LONGEST_STATUS = 1000  # bytes: headers of more than 8 KB may be refused on the way


def check(data: bytes) -> bool:
    kind, raw = KINDS[data[0] % len(KINDS) if data else 0], data[1:]
    counted = _counts(raw, kind)
    try:
        request = kind.FromString(raw)
    except DecodeError:
        return False
    assert counted is not None, "the parser takes what the scan calls malformed"
    is_over = _is_over(request, MOST)
    assert not (is_over and counted), "the scan lets a list through that is too long"
    request.DiscardUnknownFields()
    assert _counts(request.SerializeToString(), kind) is not is_over, "the scan counts what is not there"
    try:
        _use(request)
    except PagodaError as error:
        status = to_status(error)
        assert sum(len(value) for _, value in status.trailing_metadata) < LONGEST_STATUS
        return False
    return True


def _counts(raw: bytes, kind: type[Message]) -> bool | None:
    """Whether the entries keep their limits; None if the scan finds the bytes malformed."""
    try:
        check_entries(raw, kind.DESCRIPTOR, MOST)  # type: ignore[arg-type]
    except Malformed:
        return None
    except InvalidArgument:
        return False
    return True


def _is_over(message: Message, most: Mapping[str, int]) -> bool:
    """Whether a list in the message has more entries than its limit."""
    for field, value in message.ListFields():
        if field.is_repeated and len(value) > most.get(field.full_name, len(value)):
            return True
        if field.message_type is None:
            continue
        is_map = field.message_type.GetOptions().map_entry
        inner = value.values() if is_map else value if field.is_repeated else [value]
        if any(isinstance(each, Message) and _is_over(each, most) for each in inner):
            return True
    return False


def _use(request: Message) -> None:
    match request:
        case TokenizeRequest():
            validate_tokenize(request, LIMITS)
        case DetokenizeRequest():
            validate_detokenize(request, LIMITS)
        case EmbedRequest():
            validate_embed(request, LIMITS)
        case ScoreRequest():
            validate_score(request, LIMITS)
        case VllmRequest():
            _use(vllm.request_from(request, LIMITS))
        case ModelInferRequest():
            asked = kserve.asked_from(request, LIMITS)
            assert asked.outputs
            _use(asked.request)
        case GenerateRequest():
            params = validate_generate(request, LIMITS)
            ids = params.prompt if isinstance(params.prompt, tuple) else (1, 2, 3)
            submit = to_submit(params, ids, check_prompt(params, len(ids), LIMITS), EOS_IDS, 1.5)
            # An engine that refuses a field ends its router's connection.
            received = Submit.FromString(submit.SerializeToString())
            check_submit(received, LIMITS.vocab_size, LIMITS.max_model_len)
