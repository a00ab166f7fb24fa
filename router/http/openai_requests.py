"""Requests of the OpenAI API: their JSON as messages of the protocol.

A field that this server does not know, or whose value it cannot follow, is refused by its own name. Limits and ranges
are checked afterwards, by validation.py, which knows the protocol's names: `own_name` translates them back.
"""

from __future__ import annotations

import json
import json.scanner
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # the decoder in Python
from typing import Any, NoReturn, TypeAlias

from pagoda.v1 import chat_pb2, inference_pb2
from pagoda_server.router.errors import InvalidArgument, Unimplemented
from pagoda_server.router.request.fields import Limits, check_count, check_integer, too_many
from pagoda_server.router.request.wire import MAX_FIELDS
from pagoda_server.settings.request import MAX_LOGPROBS
from pagoda_server.settings.sampling import PARAMETERS

DEFAULT_TEMPERATURE = 1.0  # these two are the API's own defaults, not the protocol's
DEFAULT_COMPLETION_TOKENS = 16
FEW_VALUES = 1 << 14  # which the fast decoder takes no more than a few milliseconds for
MAX_WHOLE_LOGPROBS = 1 << 16  # in an answer that is not streamed: it is kept in memory until it is complete

_MAX_UINT32 = (1 << 32) - 1
_MAX_SHOWN = 64  # characters of a client's own text in an error
_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}
_IGNORED = ("user", "safety_identifier", "metadata", "prompt_cache_key")  # they change no answer
_NEEDLESS = {  # fields that may only ask for what the server does anyway
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}

Json: TypeAlias = Any


@dataclass(slots=True)
class Asked:
    """What an answer has to be like.

    logprobs         None: none; 0: of each token; N: also of the N most likely
    created          seconds since 1970
    max_tokens_name  the name by which the client knows that field
    """

    is_chat: bool
    is_stream: bool = False
    has_usage: bool = False
    logprobs: int | None = None
    n: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    max_tokens_name: str = "max_tokens"


# -- JSON -------------------------------------------------------------------------------------------------------------


class _TooMany(Exception):
    pass


def json_object(raw: bytes, limits: Limits) -> dict[str, Json]:
    """Parse a body that must be a JSON object. Raises InvalidArgument, whose text holds nothing of the body.

    Python's fast decoder keeps the interpreter's lock for the whole body. A body of many values is therefore decoded by
    the decoder in Python, between whose steps the event loop runs, and which counts the values.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("body", "is not UTF-8") from None
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    if sum(map(raw.count, (b",", b":", b"[", b"{"))) > FEW_VALUES:
        _make_countable(decoder, MAX_FIELDS + limits.max_model_len + limits.vocab_size)
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise InvalidArgument("body", "is nested too deep") from None
    except _TooMany:
        raise InvalidArgument("body", "has too many values") from None
    except _Repeated as error:
        raise InvalidArgument(_shown(error.name), "is given twice") from None
    except ValueError:
        raise InvalidArgument("body", "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument("body", "is not a JSON object")
    return value


def _make_countable(decoder: json.JSONDecoder, most: int) -> None:
    """Let the decoder in Python take over. It raises _TooMany for more than so many values."""
    left = most

    def counted(scan: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
        def scan_and_count(text: str, at: int) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise _TooMany
            return scan(text, at)

        return scan_and_count

    decoder.parse_array = lambda place, scan: JSONArray(place, counted(scan))  # type: ignore[attr-defined]
    decoder.parse_object = (  # type: ignore[attr-defined]
        lambda place, strict, scan, *rest: JSONObject(place, strict, counted(scan), *rest)
    )
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]


class _Repeated(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _shown(name: str) -> str:
    """A client's own text as an error may show it."""
    return ascii(name)[1:-1][:_MAX_SHOWN]


class _Fields:
    """The fields of a JSON object. Each is taken once; null is the same as no field."""

    def __init__(self, given: Json, path: str = "") -> None:
        if not isinstance(given, dict):
            raise InvalidArgument(path.rstrip("."), "must be an object")
        self._given = given
        self._left = set(given)
        self._path = path

    def name(self, name: str) -> str:
        return self._path + name

    def take(self, name: str, kind: type | tuple[type, ...] = object, what: str = "") -> Json:
        """A field's value; None if it is not given. `what` tells its type in words."""
        self._left.discard(name)
        value = self._given.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            if kind is object:
                return value
            raise InvalidArgument(self.name(name), f"must be {what}")
        return value

    def text(self, name: str) -> str:
        return self.take(name, str, "a string") or ""

    def flag(self, name: str) -> bool:
        return self.take(name, bool, "true or false") or False

    def integer(self, name: str, low: int = 0, high: int = _MAX_UINT32) -> int | None:
        value: int | None = self.take(name, int, "a whole number")
        if value is not None:
            _check_integer(value, self.name(name), low, high)
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name, (int, float), "a number")
        return None if value is None else _float(value)

    def entries(self, name: str, most: int) -> list[Json]:
        value: list[Json] = self.take(name, list, "a list") or []
        check_count(len(value), self.name(name), most)
        return value

    def integers(self, name: str, most: int) -> list[int]:
        return _integers(self.entries(name, most), self.name(name))

    def none_left(self) -> None:
        """Refuse the first field that has not been taken."""
        for name in self._given:
            if name in self._left and self._given[name] is not None:
                raise InvalidArgument(self.name(_shown(name)), "is not a field that this server knows")


def _check_integer(value: int, name: str, low: int, high: int) -> None:
    if abs(value) > 1 << 64:
        raise InvalidArgument(name, f"must be from {low} to {high}")
    check_integer(value, name, low, high)


def _integers(values: list[Json], name: str) -> list[int]:
    for at, value in enumerate(values):
        if type(value) is not int:
            raise InvalidArgument(f"{name}[{at}]", "must be a whole number")
        if not 0 <= value <= _MAX_UINT32:
            _check_integer(value, f"{name}[{at}]", 0, _MAX_UINT32)
    return values


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


# -- requests ---------------------------------------------------------------------------------------------------------


def translated(raw: bytes, limits: Limits, asked: Asked) -> inference_pb2.GenerateRequest:
    """Translate a body, and note in `asked` what the answer has to be like. Raises InvalidArgument, Unimplemented."""
    given = _Fields(json_object(raw, limits))
    request = inference_pb2.GenerateRequest()
    try:
        _refuse_unsupported(given, asked.is_chat)
        if asked.is_chat:
            _chat(given, request, limits)
        else:
            _prompt(given, request, limits)
        _generation(given, request, limits, asked)
    except UnicodeEncodeError:  # the protocol's texts are UTF-8
        raise InvalidArgument("body", "holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise InvalidArgument("body", "is nested too deep") from None
    given.none_left()
    return request


def _refuse_unsupported(given: _Fields, is_chat: bool) -> None:
    for name in _IGNORED:
        given.take(name)
    hides_tools = given.take("tool_choice") == "none"
    for name, harmless in _NEEDLESS.items():
        value = given.take(name)
        if value is None or any(value == each and type(value) is type(each) for each in harmless):
            continue
        if name == "tools" and hides_tools and is_chat:
            continue
        raise Unimplemented(name)


def _generation(given: _Fields, request: inference_pb2.GenerateRequest, limits: Limits, asked: Asked) -> None:
    """The fields that both kinds of request have."""
    request.model = given.text("model")
    asked.is_stream = given.flag("stream")
    _stream_options(given, asked)
    sampling, stopping, output = request.sampling, request.stopping, request.output
    if not limits.recommended.HasField("temperature"):
        sampling.temperature = DEFAULT_TEMPERATURE
    for each in PARAMETERS:
        value = given.integer(each.name) if each.is_integer else given.number(each.name)
        if value is not None:
            setattr(sampling, each.name, value)
    if (seed := given.integer("seed", -(1 << 63), (1 << 64) - 1)) is not None:
        sampling.seed = seed % (1 << 64)
    if (n := given.integer("n")) is not None:
        sampling.n = asked.n = n
    for id, bias in _logit_bias(given, limits).items():
        sampling.logit_bias[id] = bias
    sampling.allowed_token_ids.extend(given.integers("allowed_token_ids", limits.vocab_size))
    sampling.bad_words.extend(_texts(given, "bad_words", limits.max_bad_words))
    if (max_tokens := _max_tokens(given, asked)) is not None:
        stopping.max_tokens = max_tokens
    stopping.min_tokens = given.integer("min_tokens") or 0
    stopping.stop.extend(_stop(given, limits))
    stopping.stop_token_ids.extend(given.integers("stop_token_ids", limits.max_stop_ids))
    stopping.ignore_eos = given.flag("ignore_eos")
    stopping.include_stop_in_output = given.flag("include_stop_in_output")
    output.special_tokens = given.flag("special_tokens")
    request.cache.salt = given.text("cache_salt")
    request.priority = given.integer("priority", -limits.max_priority, limits.max_priority) or 0
    asked.logprobs = _chat_logprobs(given) if asked.is_chat else given.integer("logprobs", 0, MAX_LOGPROBS)
    if asked.logprobs is not None:
        output.logprobs = asked.logprobs
        output.token_bytes = True
        tokens = stopping.max_tokens if stopping.HasField("max_tokens") else limits.default_max_tokens
        if not asked.is_stream and asked.n * tokens * (1 + asked.logprobs) > MAX_WHOLE_LOGPROBS:
            raise InvalidArgument("stream", f"must be true for more than {MAX_WHOLE_LOGPROBS} log-probabilities")


def _stream_options(given: _Fields, asked: Asked) -> None:
    options = given.take("stream_options")
    if options is None:
        return
    if not asked.is_stream:
        raise InvalidArgument("stream_options", "needs stream to be true")
    fields = _Fields(options, "stream_options.")
    asked.has_usage = fields.flag("include_usage")
    if fields.flag("include_obfuscation"):
        raise Unimplemented("stream_options.include_obfuscation")
    fields.none_left()


def _max_tokens(given: _Fields, asked: Asked) -> int | None:
    older = given.integer("max_tokens")
    if not asked.is_chat:
        return DEFAULT_COMPLETION_TOKENS if older is None else older
    newer = given.integer("max_completion_tokens")
    if newer is None:
        return older
    if older is not None and older != newer:
        raise InvalidArgument("max_tokens", "is the older name of max_completion_tokens, which has another value")
    asked.max_tokens_name = "max_completion_tokens"
    return newer


def _chat_logprobs(given: _Fields) -> int | None:
    is_asked, most = given.flag("logprobs"), given.integer("top_logprobs", 0, MAX_LOGPROBS)
    if not is_asked:
        if most:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        return None
    return most or 0


def _logit_bias(given: _Fields, limits: Limits) -> dict[int, float]:
    found: dict[int, float] = {}
    biases: dict[str, Json] = given.take("logit_bias", dict, "an object") or {}
    check_count(len(biases), "logit_bias", limits.max_logit_bias)
    for key, bias in biases.items():
        name = f"logit_bias[{_shown(key)}]"
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= _MAX_UINT32):
            raise InvalidArgument(name, "must be a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise InvalidArgument(name, "must be a number")
        found[int(key)] = _float(bias)
    return found


def _stop(given: _Fields, limits: Limits) -> list[str]:
    stop = given.take("stop", (str, list), "a string or a list of strings")
    return [stop] if isinstance(stop, str) else _texts(given, "stop", limits.max_stop)


def _texts(given: _Fields, name: str, most: int) -> list[str]:
    texts = given.entries(name, most)
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidArgument(f"{name}[{at}]", "must be a string")
    return texts


def _prompt(given: _Fields, request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    prompt = given.take("prompt", (str, list), "a string or a list of token ids")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if prompt is None:
        raise InvalidArgument("prompt", "is missing")
    if isinstance(prompt, str):
        request.prompt = prompt
        return
    if prompt and isinstance(prompt[0], str | list):
        raise InvalidArgument("prompt", "holds several prompts; send each in a request of its own")
    check_count(len(prompt), "prompt", limits.max_model_len - 1)
    request.token_ids.ids.extend(_integers(prompt, "prompt"))


# -- chats ------------------------------------------------------------------------------------------------------------


def _chat(given: _Fields, request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    messages = given.entries("messages", limits.max_messages)
    if not messages:
        raise InvalidArgument("messages", "is missing or empty")
    if not limits.has_chat_template:
        raise InvalidArgument("messages", "the model served here has no chat template; use /v1/completions")
    for at, message in enumerate(messages):
        request.chat.messages.append(_message(_Fields(message, f"messages[{at}]."), limits))
    request.chat.continue_last = given.flag("continue_last")
    variables = given.take("chat_template_kwargs", dict, "an object") or {}
    if len(variables) > limits.max_kwargs_values:
        raise too_many("chat_template_kwargs", limits.max_kwargs_values)
    try:
        request.chat.template_kwargs.update(variables)
    except UnicodeEncodeError:
        raise
    except (ValueError, TypeError, OverflowError):
        raise InvalidArgument("chat_template_kwargs", "holds a value that is out of range") from None


def _message(given: _Fields, limits: Limits) -> chat_pb2.ChatMessage:
    role = given.take("role", str, "a string")
    if role not in _ROLES:
        raise InvalidArgument(given.name("role"), f"must be one of {', '.join(_ROLES)}")
    message = chat_pb2.ChatMessage(
        role=_ROLES[role],
        reasoning=given.text("reasoning") or given.text("reasoning_content"),
        tool_call_id=given.text("tool_call_id"),
        name=given.text("name"),
    )
    given.take("reasoning_content")
    content = given.take("content", (str, list), "a string or a list of parts")
    if isinstance(content, list):
        check_count(len(content), given.name("content"), limits.max_parts)
        for at, part in enumerate(content):
            message.parts.add(text=_text_part(_Fields(part, given.name(f"content[{at}]."))))
    elif content is not None:
        message.content = content
    calls = given.entries("tool_calls", limits.max_tools)
    if content is None and not (role == "assistant" and calls):
        raise InvalidArgument(given.name("content"), "is missing")
    for at, call in enumerate(calls):
        message.tool_calls.append(_tool_call(_Fields(call, given.name(f"tool_calls[{at}]."))))
    if given.take("annotations"):  # a client may send an answer back as it came, with an empty list
        raise Unimplemented(given.name("annotations"))
    given.none_left()
    return message


def _text_part(given: _Fields) -> str:
    if (kind := given.take("type", str, "a string")) != "text":
        if kind is None:
            raise InvalidArgument(given.name("type"), "is missing")
        raise Unimplemented(given.name(_shown(kind)))
    text: str | None = given.take("text", str, "a string")
    if text is None:
        raise InvalidArgument(given.name("text"), "is missing")
    given.none_left()
    return text


def _tool_call(given: _Fields) -> chat_pb2.ToolCall:
    if given.take("type") not in (None, "function"):
        raise Unimplemented(given.name("type"))
    given.take("index")  # of a streamed call
    function = _Fields(given.take("function"), given.name("function."))
    call = chat_pb2.ToolCall(id=given.text("id"), name=function.text("name"), arguments=function.text("arguments"))
    function.none_left()
    given.none_left()
    return call


# -- names ------------------------------------------------------------------------------------------------------------

_OWN_NAMES: Mapping[str, str] = {
    "cache.salt": "cache_salt",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.tool_choice.mode": "tool_choice",
    "chat.tool_choice.tool": "tool_choice",
    "request": "body",
    "request_id": "x-request-id",
    "token_ids.ids": "prompt",
}
_INSIDE = (
    (re.compile(r"^(sampling|stopping|output|chat)\."), ""),
    (re.compile(r"^token_ids\.ids\["), "prompt["),
    (re.compile(r"\.parts\b"), ".content"),
    (re.compile(r"(tool_calls\[\d+\]|^tools\[\d+\])\.(name|arguments|description|parameters)$"), r"\1.function.\2"),
)


def own_name(path: str, asked: Asked) -> str:
    """The API's name of a field that an error names as the protocol does."""
    if path in _OWN_NAMES:
        return _OWN_NAMES[path]
    if path in ("input", "chat"):
        return "messages" if asked.is_chat else "prompt"
    if path == "output.logprobs" and asked.is_chat:
        return "top_logprobs"
    if path == "stopping.max_tokens":
        return asked.max_tokens_name
    for pattern, replacement in _INSIDE:
        path = pattern.sub(replacement, path)
    return path
