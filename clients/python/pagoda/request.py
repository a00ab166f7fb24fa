"""Convert the arguments of Python calls to request messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from pagoda.conversation import ChatMessage, Tool, ToolChoice, chat
from pagoda.fields import assign, wrong
from pagoda.v1 import admin_pb2, control_pb2, inference_pb2, trace_pb2


class ChatOptions(TypedDict, total=False):
    """Options of a conversation. An option that is None or left out has the server's default.

    continue_last    continue the last message, which must be the assistant's
    tools            functions that the model may call
    tool_choice      "auto", "none", "required" or {"name": …}
    template_kwargs  variables of the model's chat template, such as enable_thinking
    """

    continue_last: bool | None
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice | None
    template_kwargs: Mapping[str, Any] | None


class GenerateOptions(ChatOptions, total=False):
    """Options of `generate` and `chat`. An option that is None or left out has the server's default.

    protos/pagoda/v1/inference.proto gives meanings and ranges. With `resumable`, the iterator goes on by itself after
    the server, its engine or the connection broke, and yields each token once.

    json_schema  the answer's JSON schema, as a dict or as its text
    json_object  the answer is any JSON object
    regex        the whole answer matches this regular expression
    grammar      the answer matches this grammar, in the notation of Lark or GBNF
    choice       the answer is one of these texts
    """

    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_in_output: bool | None
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
    token_bytes: bool | None
    prompt_ids: bool | None
    special_tokens: bool | None
    cache_salt: str | None
    bypass_cache: bool | None
    priority: int | None
    ttft_s: float | None
    tpot_s: float | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    model: str | None
    request_id: str | None
    resumable: bool | None


# Option → field of GenerateRequest.
_FIELDS = {
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop_in_output": "stopping.include_stop_in_output",
    **{name: f"sampling.{name}" for name in inference_pb2.Sampling.DESCRIPTOR.fields_by_name if name != "beam_search"},
    "beams": "sampling.beam_search.width",
    "length_penalty": "sampling.beam_search.length_penalty",
    "early_stopping": "sampling.beam_search.early_stopping",
    "logprobs": "output.logprobs",
    "text": "output.text",
    "token_bytes": "output.token_bytes",
    "prompt_ids": "output.prompt",
    "special_tokens": "output.special_tokens",
    "cache_salt": "cache.salt",
    "bypass_cache": "cache.bypass",
    "priority": "priority",
    "ttft_s": "slo.ttft_s",
    "tpot_s": "slo.tpot_s",
    "json_schema": "guided.json_schema",
    "json_object": "guided.json_object",
    "regex": "guided.regex",
    "grammar": "guided.ebnf_grammar",
    "choice": "guided.choice.options",
    "model": "model",
    "request_id": "request_id",
    "resumable": "resumable",
}

_CHAT_OPTIONS = ("continue_last", "tools", "tool_choice", "template_kwargs")

_FORMATS = ("json_schema", "json_object", "regex", "grammar", "choice")

_EARLY_STOPPING = {
    "estimated": inference_pb2.EARLY_STOPPING_ESTIMATED,
    "enough": inference_pb2.EARLY_STOPPING_ENOUGH,
    "best": inference_pb2.EARLY_STOPPING_BEST,
}


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a call; exactly one field is set."""

    message: str | None = None
    prompt: str | None = None
    chat: str | Sequence[ChatMessage] | None = None
    token_ids: Sequence[int] | None = None

    def put_into(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, options: ChatOptions
    ) -> None:
        """Write the input to a request. Raises InvalidArgument for none, for two, and for options without a chat."""
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise wrong("input", f"is {found}; give one of {', '.join(field.name for field in fields(self))}")
        chat_options = {name: options[name] for name in _CHAT_OPTIONS if options.get(name) is not None}  # type: ignore[literal-required]
        if self.chat is not None:
            request.chat.CopyFrom(chat(self.chat, **chat_options))
        elif chat_options:
            raise wrong(next(iter(chat_options)), f"goes with chat, not with {given[0]}")
        elif self.token_ids is not None:
            assert isinstance(request, inference_pb2.GenerateRequest), "Tokenize has no token ids"
            request.token_ids.SetInParent()  # the server refuses an empty prompt; it is not "no input"
            assign(request, "token_ids.ids", self.token_ids)
        else:
            assign(request, given[0], getattr(self, given[0]))


def generate_request(asked: Input, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Build a request. Raises InvalidArgument for a value that does not fit, TypeError for an unknown option."""
    request = inference_pb2.GenerateRequest()
    asked.put_into(request, options)
    formats = [name for name in _FORMATS if options.get(name) is not None]
    if len(formats) > 1:
        raise wrong(_FIELDS[formats[1]], f"goes without {formats[0]}: an answer has one format")
    for name, value in options.items():
        if name not in _FIELDS and name not in _CHAT_OPTIONS:
            raise TypeError(f"unknown option {name!r}; known: {', '.join((*_FIELDS, *_CHAT_OPTIONS))}")
        if name == "early_stopping" and value is not None:
            if value not in _EARLY_STOPPING:
                raise wrong(_FIELDS[name], f"{value!r} is none of {', '.join(_EARLY_STOPPING)}")
            value = _EARLY_STOPPING[str(value)]
        if name == "json_schema" and isinstance(value, Mapping):
            value = _json(value)
        if value is not None and name in _FIELDS:
            assign(request, _FIELDS[name], value)
    return request


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise wrong("guided.json_schema", f"cannot be JSON: {error}") from error


def tokenize_request(
    asked: Input, options: ChatOptions, add_special_tokens: bool, model: str
) -> inference_pb2.TokenizeRequest:
    """Build a request. Raises InvalidArgument, TypeError for an unknown option."""
    request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    assign(request, "model", model)
    if unknown := options.keys() - set(_CHAT_OPTIONS):
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; known: {', '.join(_CHAT_OPTIONS)}")
    asked.put_into(request, options)
    return request


def detokenize_request(token_ids: Sequence[int], special_tokens: bool, model: str) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest(special_tokens=special_tokens)
    assign(request, "model", model)
    assign(request, "token_ids", token_ids)
    return request


def watch_load_request(interval_s: float) -> control_pb2.WatchLoadRequest:
    request = control_pb2.WatchLoadRequest()
    assign(request, "interval_s", interval_s)
    return request


def abort_request(request_id: str, tenant: str | None) -> admin_pb2.AbortRequest:
    request = admin_pb2.AbortRequest()
    assign(request, "request_id", request_id)
    if tenant is not None:
        assign(request, "tenant", tenant)
    return request


def step_trace_request(last_s: float | None) -> trace_pb2.GetStepTraceRequest:
    request = trace_pb2.GetStepTraceRequest()
    if last_s is not None:
        assign(request, "last_s", last_s)
    return request
