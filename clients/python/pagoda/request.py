"""Convert the arguments of Python calls to request messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from google.protobuf.message import Message

from pagoda.conversation import ChatMessage, Tool, ToolChoice, chat, json_text
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

    json_schema  a JSON Schema that the answer matches: a dict, its text, or a class with `model_json_schema`, such as
                 pydantic's
    regex, grammar, choice, json_object
                 instead of it: a regular expression, a grammar, texts of which the answer is one, True for any object
    unparsed     leave reasoning and tool calls in the text
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
    no_repeat_ngram_size: int | None
    bad_words: Sequence[str] | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    n: int | None
    logprobs: int | None
    text: bool | None
    token_bytes: bool | None
    prompt_ids: bool | None
    special_tokens: bool | None
    unparsed: bool | None
    prompt_logprobs: int | None
    json_schema: str | Mapping[str, Any] | type | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    json_object: bool | None
    max_draft_tokens: int | None
    cache_salt: str | None
    bypass_cache: bool | None
    priority: int | None
    ttft_s: float | None
    tpot_s: float | None
    model: str | None
    lora_name: str | None
    request_id: str | None
    resumable: bool | None


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`. An option that is None or left out has the server's default.

    pooling     which hidden states become the vector: of the last token, the mean of all, or of the first token
    normalize   scale each vector to a length of 1
    dimensions  keep the first ones alone, before scaling
    """

    pooling: Literal["last", "mean", "cls"] | None
    normalize: bool | None
    dimensions: int | None
    cache_salt: str | None
    bypass_cache: bool | None
    priority: int | None
    model: str | None
    lora_name: str | None
    request_id: str | None


class ScoreOptions(ChatOptions, total=False):
    """Options of `score`. An option that is None or left out has the server's default."""

    token_bytes: bool | None
    cache_salt: str | None
    bypass_cache: bool | None
    priority: int | None
    model: str | None
    lora_name: str | None
    request_id: str | None


# Option → field of GenerateRequest.
_FIELDS = {
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop_in_output": "stopping.include_stop_in_output",
    **{name: f"sampling.{name}" for name in inference_pb2.Sampling.DESCRIPTOR.fields_by_name if name != "beam_search"},
    "logprobs": "output.logprobs",
    "text": "output.text",
    "token_bytes": "output.token_bytes",
    "prompt_ids": "output.prompt",
    "special_tokens": "output.special_tokens",
    "unparsed": "output.unparsed",
    "prompt_logprobs": "output.prompt_logprobs",
    "json_schema": "guided.json_schema",
    "regex": "guided.regex",
    "grammar": "guided.ebnf_grammar",
    "choice": "guided.choice.options",
    "json_object": "guided.json_object",
    "max_draft_tokens": "max_draft_tokens",
    "cache_salt": "cache.salt",
    "bypass_cache": "cache.bypass",
    "priority": "priority",
    "ttft_s": "slo.ttft_s",
    "tpot_s": "slo.tpot_s",
    "model": "model",
    "lora_name": "lora_name",
    "request_id": "request_id",
    "resumable": "resumable",
}

_FORMATS = ("json_schema", "regex", "grammar", "choice", "json_object")  # of which at most one is given
_READOUT_FIELDS = {
    "cache_salt": "cache.salt",
    "bypass_cache": "cache.bypass",
    "priority": "priority",
    "model": "model",
    "lora_name": "lora_name",
    "request_id": "request_id",
}
_EMBED_FIELDS = {"pooling": "pooling", "normalize": "normalize", "dimensions": "dimensions"} | _READOUT_FIELDS
_SCORE_FIELDS = {"token_bytes": "token_bytes"} | _READOUT_FIELDS

_CHAT_OPTIONS = ("continue_last", "tools", "tool_choice", "template_kwargs")

_POOLINGS = {
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
    "cls": inference_pb2.POOLING_CLS,
}


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a call; exactly one field is set."""

    message: str | None = None
    prompt: str | None = None
    chat: str | Sequence[ChatMessage] | None = None
    token_ids: Sequence[int] | None = None

    def put_into(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.ScoreRequest,
        options: ChatOptions,
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
            assert not isinstance(request, inference_pb2.TokenizeRequest), "Tokenize has no token ids"
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
        raise wrong("guided", f"is {' and '.join(formats)}; give one")
    for name, value in options.items():
        if name not in _FIELDS and name not in _CHAT_OPTIONS:
            raise TypeError(f"unknown option {name!r}; known: {', '.join((*_FIELDS, *_CHAT_OPTIONS))}")
        if name == "json_schema" and value is not None:
            value = _schema_text(value)
        if value is not None and name in _FIELDS:
            assign(request, _FIELDS[name], value)
    return request


def one_answer(options: GenerateOptions) -> GenerateOptions:
    """The options of a call that returns one answer. Raises InvalidArgument for n above 1."""
    if (options.get("n") or 1) != 1:
        raise wrong("sampling.n", "gives several answers; `generate` streams them")
    return options


def _schema_text(schema: object) -> str:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return json_text(schema, "guided.json_schema")


def embed_request(inputs: Sequence[str | Sequence[int]], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    """Build a request. Raises InvalidArgument for a value that does not fit, TypeError for an unknown option."""
    request = inference_pb2.EmbedRequest()
    _put_texts(request.inputs, "inputs", inputs)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if (pooling := given.get("pooling")) is not None:
        if pooling not in _POOLINGS:
            raise wrong("pooling", f"{pooling!r} is none of {', '.join(_POOLINGS)}")
        given["pooling"] = _POOLINGS[pooling]
    _put_options(request, given, _EMBED_FIELDS)
    return request


def score_request(
    asked: Input, continuations: Sequence[str | Sequence[int]], options: ScoreOptions
) -> inference_pb2.ScoreRequest:
    """Build a request. Raises InvalidArgument for a value that does not fit, TypeError for an unknown option."""
    request = inference_pb2.ScoreRequest()
    asked.put_into(request, options)
    _put_texts(request.continuations, "continuations", continuations)
    given = {name: value for name, value in options.items() if value is not None and name not in _CHAT_OPTIONS}
    _put_options(request, given, _SCORE_FIELDS)
    return request


def _put_texts(entries: Any, field: str, given: Sequence[str | Sequence[int]]) -> None:
    """Add texts and lists of token ids to a repeated field. Raises InvalidArgument."""
    if isinstance(given, str):
        raise wrong(field, "is a text, must be a list of texts or of token ids")
    for index, each in enumerate(given):
        entry = entries.add()
        if isinstance(each, str):
            assign(entry, "text", each, called=f"{field}[{index}].text")
        else:
            entry.token_ids.SetInParent()  # the server refuses an empty list; it is not "nothing"
            assign(entry, "token_ids.ids", each, called=f"{field}[{index}].token_ids.ids")


def _put_options(request: Message, given: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    for name, value in given.items():
        if name not in fields:
            raise TypeError(f"unknown option {name!r}; known: {', '.join(fields)}")
        assign(request, fields[name], value)


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


def load_lora_request(name: str, path: str, model: str, replace: bool, pinned: bool) -> admin_pb2.LoadLoraRequest:
    request = admin_pb2.LoadLoraRequest(replace=replace, pinned=pinned)
    assign(request, "lora_name", name)
    assign(request, "lora_path", path)
    assign(request, "model", model)
    return request


def unload_lora_request(name: str) -> admin_pb2.UnloadLoraRequest:
    request = admin_pb2.UnloadLoraRequest()
    assign(request, "lora_name", name)
    return request


def step_trace_request(last_s: float | None) -> trace_pb2.GetStepTraceRequest:
    request = trace_pb2.GetStepTraceRequest()
    if last_s is not None:
        assign(request, "last_s", last_s)
    return request
