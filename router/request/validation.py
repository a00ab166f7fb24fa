"""Check every field of a request once, before anything is allocated. Sizes come first, so huge requests cost little."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ...settings.request import MAX_DRAFT_TOKENS, MAX_SLO_S
from ...settings.sampling import Interval
from ..answers.lark import Calls, Tool
from ..errors import InvalidArgument
from ..tenants.caller import ANYONE, Caller
from ..text.chat_template import Chat, Message
from ..text.tokenizer import Prompt
from .chat import calls_due, chat_from, tools_of
from .fields import (
    Limits,
    check_bytes,
    check_count,
    check_ids,
    check_integer,
    check_number,
)
from .guided import guided_from
from .sampling import sampling_from

log = logging.getLogger("pagoda.router")

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

# The headers by which the gateway llm-d asks for latencies.
SLO_KEYS = {"x-llm-d-slo-ttft-ms": "ttft_s", "x-llm-d-slo-tpot-ms": "tpot_s"}
_SLO = Interval(0, MAX_SLO_S, includes_low=False)
_MILLISECONDS = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")
PROMPT_FIELDS = {"prompt": "prompt", "message": "message", "chat": "chat", "token_ids": "token_ids.ids"}


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A valid request with its defaults filled in.

    prompt_field          the input field that is set, as errors name it
    sampling              every field is set, the seed included, except bad_words
    bad_words             words that the output must not contain
    max_tokens            None: as many as the context leaves, or the server's default (see `check_prompt`)
    logprobs              None: none; 0: of the chosen token; N: also of the N most likely
    max_draft_tokens      None: as many as the engine finds worth its time
    has_text              whether the response carries text besides token ids
    has_prompt            whether the response begins with the prompt's token ids
    prompt_logprobs       as `logprobs`, for the prompt's tokens
    has_token_bytes       whether each token carries its bytes
    keeps_special_tokens  whether the text keeps special tokens
    includes_stop         whether the text includes the stop string or token that ended it
    is_resumable          whether the stream is kept, so that Resume can continue it
    guided                the format that the client asks for, whose grammar is checked later (router/request/guided.py)
    is_parsed             whether reasoning and tool calls are separated from the text, if the model's format is known
    tools                 what the answer may call
    calls_due             what it has to call; None: the model decides
    ends_with_call        whether the first call ends an output that no grammar ends there
    """

    request_id: str
    prompt: Prompt
    prompt_field: str
    sampling: inference_pb2.Sampling
    bad_words: tuple[str, ...]
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    has_text: bool
    logprobs: int | None
    max_draft_tokens: int | None
    has_prompt: bool
    prompt_logprobs: int | None
    has_token_bytes: bool
    keeps_special_tokens: bool
    includes_stop: bool
    cache_salt: str
    bypasses_cache: bool
    priority: int
    slo: inference_pb2.Slo
    is_resumable: bool
    guided: inference_pb2.Guided | None
    is_parsed: bool
    tools: tuple[Tool, ...]
    calls_due: Calls | None
    ends_with_call: bool

    @property
    def n(self) -> int:
        """Sequences to return."""
        return self.sampling.n

    @property
    def is_chat(self) -> bool:
        return self.prompt_field in ("chat", "message")

    @property
    def has_open_length(self) -> bool:
        """Whether outputs may end long before max_tokens."""
        return self.max_tokens is None


def validate_generate(
    request: inference_pb2.GenerateRequest, limits: Limits, metadata: Metadata = ()
) -> GenerateParams:
    """Check everything that can be checked before the prompt is tokenized.

    metadata  of the call; it may name targets of latency

    Raises InvalidArgument, Unimplemented for a field that this server does not support.
    """
    check_integer(request.priority, "priority", -limits.max_priority, limits.max_priority)
    check_bytes(request.cache.salt, "cache.salt", limits.max_salt_bytes)
    stopping, output = request.stopping, request.output
    check_ids(stopping.stop_token_ids, "stopping.stop_token_ids", limits.max_stop_ids, limits.vocab_size)
    has_text = output.text if output.HasField("text") else True
    if stopping.stop and not has_text:
        raise InvalidArgument("stopping.stop", "needs output.text, which is off")
    if request.resumable and output.HasField("prompt_logprobs"):
        raise InvalidArgument("resumable", "is set; a stream with output.prompt_logprobs is not kept")
    prompt = prompt_from(request, limits)
    tools = tools_of(prompt) if isinstance(prompt, Chat) else ()
    return GenerateParams(
        request_id=request_id_from(request.request_id, limits),
        prompt=prompt,
        prompt_field=PROMPT_FIELDS[request.WhichOneof("input")],
        sampling=sampling_from(request.sampling, limits),
        bad_words=tuple(request.sampling.bad_words),
        max_tokens=_max_tokens(stopping, limits),
        min_tokens=_min_tokens(stopping, limits),
        stop=_stop(stopping.stop, limits),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        has_text=has_text,
        logprobs=_logprobs(output, "logprobs", limits),
        max_draft_tokens=_max_draft_tokens(request),
        has_prompt=output.prompt or output.HasField("prompt_logprobs"),
        prompt_logprobs=_logprobs(output, "prompt_logprobs", limits),
        has_token_bytes=output.token_bytes,
        keeps_special_tokens=output.special_tokens,
        includes_stop=stopping.include_stop_in_output,
        cache_salt=request.cache.salt,
        bypasses_cache=request.cache.bypass,
        priority=request.priority,
        slo=_slo(request.slo, metadata),
        is_resumable=request.resumable,
        guided=guided_from(request.guided) if request.HasField("guided") else None,
        is_parsed=isinstance(prompt, Chat) and has_text and not output.unparsed,
        tools=tools,
        calls_due=(due := _calls_due(request, tools, limits)),
        ends_with_call=request.chat.tool_choice.at_most_one and due is None,
    )


def check_prompt(params: GenerateParams, prompt_len: int, limits: Limits) -> int:
    """Check that prompt and output fit, once the prompt is tokenized. Returns the resolved max_tokens.

    Raises InvalidArgument.
    """
    field = params.prompt_field
    if prompt_len == 0:
        raise InvalidArgument(field, "becomes a prompt of 0 tokens, must be at least 1")
    longest = min(limits.max_model_len, limits.kv_token_capacity)
    what = "the context" if longest == limits.max_model_len else "the KV cache"
    if prompt_len >= longest:
        raise InvalidArgument(
            field, f"is a prompt of {prompt_len} tokens; {what} holds {longest}, of which the output needs at least 1"
        )
    room = longest - prompt_len
    if params.max_tokens is None:
        max_tokens = min(limits.default_max_tokens or room, room)
        _check_min_tokens(params.min_tokens, max_tokens)
        return max_tokens
    if params.max_tokens > room:
        raise InvalidArgument(
            "stopping.max_tokens",
            f"is {params.max_tokens}; {what} holds {longest} tokens and the prompt takes {prompt_len}, leaving {room}",
        )
    return params.max_tokens


def to_submit(
    params: GenerateParams,
    prompt_ids: Sequence[int],
    max_tokens: int,
    eos_token_ids: Collection[int],
    timeout_s: float | None = None,
    caller: Caller = ANYONE,
    guided: inference_pb2.Guided | None = None,
    bad_words: Iterable[Sequence[int]] = (),
) -> engine_pb2.Submit:
    """Convert a request for the engine; the channel numbers its sequences.

    max_tokens  as `check_prompt` resolved it
    timeout_s   counts from now; None: no deadline
    caller      for whom it is
    guided      the grammar of the output
    bad_words   tokens of the words that the output must not contain
    """
    stop_ids = {*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids}
    readout = None
    if params.prompt_logprobs is not None:
        readout = engine_pb2.Readout(logprobs_from=1, num_top=params.prompt_logprobs)
    return engine_pb2.Submit(
        prompt=prompt_ids,
        sampling=params.sampling,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(stop_ids),
        logprobs=params.logprobs,
        max_draft_tokens=params.max_draft_tokens,
        cache=inference_pb2.Cache(salt=caller.cache_salt(params.cache_salt), bypass=params.bypasses_cache),
        priority=params.priority,
        timeout_s=timeout_s,
        tenant=caller.tenant,
        slo=params.slo,
        request_id=params.request_id,
        readout=readout,
        guided=guided,
        bad_words=(inference_pb2.TokenIds(ids=ids) for ids in bad_words),
    )


def validate_resume(request: inference_pb2.ResumeRequest, limits: Limits) -> inference_pb2.ResumeRequest:
    """Check what can be checked before the kept stream is found. Raises InvalidArgument."""
    if not request.request_id:
        raise InvalidArgument("request_id", "is empty")
    check_count(len(request.received), "received", limits.max_n)
    return request


@dataclass(frozen=True, slots=True)
class TokenizeParams:
    """A valid request with its defaults filled in."""

    prompt: str | Chat
    add_special_tokens: bool


def validate_tokenize(request: inference_pb2.TokenizeRequest, limits: Limits) -> TokenizeParams:
    """Check a Tokenize request; its text may be empty. Raises InvalidArgument."""
    adds_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
    prompt = _text_input(request, limits)
    if prompt is None:
        raise InvalidArgument("input", "is missing: set one of prompt, message, chat")
    if isinstance(prompt, Chat) and not adds_special_tokens:
        raise InvalidArgument("add_special_tokens", "must be true for a message or a chat, whose template adds them")
    return TokenizeParams(prompt, adds_special_tokens)


def validate_detokenize(request: inference_pb2.DetokenizeRequest, limits: Limits) -> tuple[int, ...]:
    """Check a Detokenize request and return its ids. Raises InvalidArgument."""
    check_ids(request.token_ids, "token_ids", limits.max_model_len, limits.vocab_size)
    return tuple(request.token_ids)


def request_id_from(request_id: str, limits: Limits) -> str:
    """The client's id, or a new one. Raises InvalidArgument."""
    if not request_id:
        return secrets.token_hex(16)
    if len(request_id) > limits.max_request_id:
        raise InvalidArgument("request_id", f"has {len(request_id)} characters, at most {limits.max_request_id}")
    if not request_id.isprintable():
        raise InvalidArgument("request_id", "holds characters that are not printable")
    return request_id


def prompt_from(request: inference_pb2.GenerateRequest | inference_pb2.ScoreRequest, limits: Limits) -> Prompt:
    """Check a request's input. Raises InvalidArgument."""
    field = request.WhichOneof("input")
    if field in ("prompt", "message") and not getattr(request, field):
        raise InvalidArgument(field, "is empty")
    if field == "token_ids":
        ids = request.token_ids.ids
        if not ids:
            raise InvalidArgument("token_ids.ids", "is empty")
        check_ids(ids, "token_ids.ids", limits.max_model_len - 1, limits.vocab_size)
        return tuple(ids)
    prompt = _text_input(request, limits)
    if prompt is None:
        raise InvalidArgument("input", "is missing: set one of prompt, message, chat, token_ids")
    return prompt


def _text_input(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.ScoreRequest, limits: Limits
) -> str | Chat | None:
    """The input's text or chat; None if neither is given."""
    match request.WhichOneof("input"):
        case "prompt":
            check_bytes(request.prompt, "prompt", limits.max_text_bytes)
            return request.prompt
        case "message":
            check_bytes(request.message, "message", limits.max_text_bytes)
            _check_chats(limits, "message")
            return Chat((Message("user", request.message),))
        case "chat":
            _check_chats(limits, "chat")
            return chat_from(request.chat, limits)
    return None


def _calls_due(request: inference_pb2.GenerateRequest, tools: tuple[Tool, ...], limits: Limits) -> Calls | None:
    due = calls_due(request.chat.tool_choice, tools)
    if due is None:
        return None
    field = f"chat.tool_choice.{request.chat.tool_choice.WhichOneof('choice')}"
    if not limits.has_tool_format:
        raise InvalidArgument(field, "requires a call; how this model writes calls is not known: see --tool-format")
    if request.HasField("guided"):
        raise InvalidArgument(field, "requires a call, so the answer cannot have a format as well")
    return due


def _check_chats(limits: Limits, field: str) -> None:
    if not limits.has_chat_template:
        raise InvalidArgument(field, "the model served here has no chat template; send prompt or token_ids")


def _slo(given: inference_pb2.Slo, metadata: Metadata) -> inference_pb2.Slo:
    """The request's targets, and those in the metadata that it lacks."""
    resolved = inference_pb2.Slo()
    for key, value in metadata:
        if (name := SLO_KEYS.get(key)) is not None:
            setattr(resolved, name, _seconds_in(key, value))
    if given.HasField("ttft_s"):
        check_number(given.ttft_s, "slo.ttft_s", _SLO)
        resolved.ttft_s = given.ttft_s
    if given.HasField("tpot_s"):
        check_number(given.tpot_s, "slo.tpot_s", _SLO)
        resolved.tpot_s = given.tpot_s
    return resolved


def _seconds_in(key: str, milliseconds: str | bytes) -> float:
    if not isinstance(milliseconds, str) or not _MILLISECONDS.fullmatch(milliseconds):
        raise InvalidArgument(key, "is not a number of milliseconds")
    check_number(float(milliseconds), key, Interval(0, 1e3 * MAX_SLO_S, includes_low=False))
    return float(milliseconds) / 1e3


def _max_tokens(stopping: inference_pb2.Stopping, limits: Limits) -> int | None:
    if not stopping.HasField("max_tokens"):
        return None
    check_integer(stopping.max_tokens, "stopping.max_tokens", 1, limits.max_model_len - 1)
    return stopping.max_tokens


def _max_draft_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    if not request.HasField("max_draft_tokens"):
        return None
    check_integer(request.max_draft_tokens, "max_draft_tokens", 0, MAX_DRAFT_TOKENS)
    return request.max_draft_tokens


def _min_tokens(stopping: inference_pb2.Stopping, limits: Limits) -> int:
    longest = limits.default_max_tokens or limits.max_model_len - 1
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else longest
    _check_min_tokens(stopping.min_tokens, max_tokens)
    return stopping.min_tokens


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidArgument("stopping.min_tokens", f"is {min_tokens}, more than max_tokens, which is {max_tokens}")


def _stop(stops: Sequence[str], limits: Limits) -> tuple[str, ...]:
    check_count(len(stops), "stopping.stop", limits.max_stop)
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidArgument(f"stopping.stop[{index}]", "is empty")
        check_bytes(stop, f"stopping.stop[{index}]", limits.max_stop_bytes)
    return tuple(stops)


def _logprobs(output: inference_pb2.Output, name: Literal["logprobs", "prompt_logprobs"], limits: Limits) -> int | None:
    if not output.HasField(name):
        return None
    count: int = getattr(output, name)
    check_integer(count, f"output.{name}", 0, limits.max_logprobs)
    return count
