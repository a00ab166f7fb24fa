"""From the arguments of a Python call to the request messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from google.protobuf.duration_pb2 import Duration

from pagoda.conversation import ChatMessage, chat
from pagoda.fields import assign, wrong
from pagoda.v1 import control_pb2, inference_pb2

WATCH_INTERVAL_S = (0.05, 3600)


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` and `chat`; each is the server's default where it is left out or None.

    Ranges and meanings are those of protos/pagoda/v1/inference.proto.
    """

    raw: bool | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_n_sigma: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    n: int | None
    beams: int | None
    length_penalty: float | None
    early_stopping: Literal["estimated", "enough", "best"] | None
    logprobs: int | None
    text: bool | None
    prompt_ids: bool | None
    special_tokens: bool | None
    cache_salt: str | None
    bypass_cache: bool | None
    priority: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    model: str | None
    request_id: str | None


# Option → field of GenerateRequest.
_FIELDS = {
    "raw": "raw",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    **{name: f"sampling.{name}" for name in inference_pb2.Sampling.DESCRIPTOR.fields_by_name if name != "beam_search"},
    "beams": "sampling.beam_search.width",
    "length_penalty": "sampling.beam_search.length_penalty",
    "early_stopping": "sampling.beam_search.early_stopping",
    "logprobs": "output.logprobs",
    "text": "output.text",
    "prompt_ids": "output.prompt",
    "special_tokens": "output.special_tokens",
    "cache_salt": "cache.salt",
    "bypass_cache": "cache.bypass",
    "priority": "priority",
    "ttft_ms": "slo.ttft_ms",
    "tpot_ms": "slo.tpot_ms",
    "model": "model",
    "request_id": "request_id",
}

_EARLY_STOPPING = {
    "estimated": inference_pb2.EARLY_STOPPING_ESTIMATED,
    "enough": inference_pb2.EARLY_STOPPING_ENOUGH,
    "best": inference_pb2.EARLY_STOPPING_BEST,
}


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument for a value that does not fit its field, TypeError for an unknown option."""
    request = inference_pb2.GenerateRequest()
    if isinstance(prompt, str):
        assign(request, "text", prompt)
    else:
        request.token_ids.SetInParent()  # an empty prompt is the server's to refuse, not "no input"
        assign(request, "token_ids.ids", prompt)
    return _with_options(request, options)


def chat_request(
    messages: str | Sequence[ChatMessage], continue_last: bool, options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument, TypeError for an unknown option."""
    return _with_options(inference_pb2.GenerateRequest(chat=chat(messages, continue_last)), options)


def tokenize_request(
    content: str | Sequence[ChatMessage], raw: bool, add_special_tokens: bool, model: str
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(raw=raw, add_special_tokens=add_special_tokens)
    assign(request, "model", model)
    if isinstance(content, str):
        assign(request, "text", content)
    else:
        request.chat.CopyFrom(chat(content))
    return request


def detokenize_request(token_ids: Sequence[int], special_tokens: bool, model: str) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest(special_tokens=special_tokens)
    assign(request, "model", model)
    assign(request, "token_ids", token_ids)
    return request


def model_info_request(model: str) -> control_pb2.GetModelInfoRequest:
    request = control_pb2.GetModelInfoRequest()
    assign(request, "model", model)
    return request


def watch_load_request(interval_s: float) -> control_pb2.WatchLoadRequest:
    low, high = WATCH_INTERVAL_S
    if not isinstance(interval_s, int | float) or not low <= interval_s <= high:  # NaN is not either
        raise wrong("interval_s", f"is {interval_s!r}, must be from {low} to {high}")
    interval = Duration()
    interval.FromNanoseconds(round(interval_s * 1e9))
    return control_pb2.WatchLoadRequest(interval=interval)


def abort_request(request_id: str) -> control_pb2.AbortRequest:
    request = control_pb2.AbortRequest()
    assign(request, "request_id", request_id)
    return request


def trace_request(last_s: float | None) -> control_pb2.TraceRequest:
    request = control_pb2.TraceRequest()
    if last_s is not None:
        assign(request, "last_s", last_s)
    return request


def _with_options(
    request: inference_pb2.GenerateRequest, options: Mapping[str, object]
) -> inference_pb2.GenerateRequest:
    for name, value in options.items():
        if name not in _FIELDS:
            raise TypeError(f"unknown option {name!r}; known: {', '.join(_FIELDS)}")
        if name == "early_stopping" and value is not None:
            if value not in _EARLY_STOPPING:
                raise wrong(_FIELDS[name], f"{value!r} is none of {', '.join(_EARLY_STOPPING)}")
            value = _EARLY_STOPPING[str(value)]
        if value is not None:
            assign(request, _FIELDS[name], value)
    return request
