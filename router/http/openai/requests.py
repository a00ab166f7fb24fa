"""Requests of the OpenAI API: their JSON as messages of the protocol.

A field that this server does not know, or whose value it cannot follow, is refused by its own name. Limits and ranges
are checked afterwards, by validation.py, which knows the protocol's names: `own_name` translates them back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pagoda.v1 import inference_pb2

from ....settings.request import MAX_LOGPROBS
from ....settings.sampling import LOGIT_BIAS
from ...errors import InvalidArgument, Unimplemented
from ...request.fields import Limits, check_count, check_number
from ...request.json_body import MAX_UINT32, Fields, Json, integers_of, json_object, shown, translating
from ...request.structured_outputs import schema_text, structured_outputs
from ..field_names import FieldNames, FieldPlaces
from .chats import add_chat

DEFAULT_COMPLETION_TOKENS = 16  # the API's own default, not the protocol's
MAX_WHOLE_LOGPROBS = 1 << 16  # in an answer that is not streamed: it is kept in memory until it is complete

Prompt: TypeAlias = str | list[int]

_IGNORED = ("user", "safety_identifier", "metadata", "prompt_cache_key")  # they change no answer
_HINTS = {  # wishes that need not be followed; a template that reads such a variable gets it by chat_template_kwargs
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),
    "verbosity": ("low", "medium", "high"),
}
_NEEDLESS = {  # fields that may only ask for what the server does anyway
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
    "typical_p": (1, 1.0),
}


@dataclass(slots=True)
class Asked:
    """What an answer has to be like.

    has_timings      the answer's end says how long its parts took
    logprobs         None: none; 0: of each token; N: also of the N most likely
    is_echo          a completion begins with its prompt
    is_resumable     a stream's events have ids, and its client may go on from any of them
    prompts          a completion's prompts: texts or token ids
    failed_prompt    which of them an error is about
    drops_output     only the prompt is wanted, with its log-probabilities
    created          seconds since 1970
    places           the names of fields that have several, by the protocol's names
    """

    is_chat: bool
    is_stream: bool = False
    has_usage: bool = False
    has_timings: bool = False
    logprobs: int | None = None
    is_echo: bool = False
    is_resumable: bool = False
    prompts: Sequence[Prompt] = ("",)
    failed_prompt: int = 0
    drops_output: bool = False
    n: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    places: FieldPlaces = field(default_factory=dict)


def translated(raw: bytes, limits: Limits, asked: Asked) -> inference_pb2.GenerateRequest:
    """Translate a body, and note in `asked` what the answer has to be like. Raises InvalidArgument, Unimplemented."""
    given = Fields(json_object(raw, limits))
    request = inference_pb2.GenerateRequest()
    with translating():
        _refuse_unsupported(given)
        asked.is_echo = given.flag("echo")
        if asked.is_chat:
            if asked.is_echo:
                raise Unimplemented("echo")
            add_chat(given, request.chat, limits, asked.places)
        else:
            asked.prompts = _prompts(given, limits)
            set_prompt(request, asked.prompts[0])
        _generation(given, request, limits, asked)
        _guided(given, request, asked)
        request.resumable = asked.is_resumable = _is_resumable(given, asked)
    given.none_left()
    return request


def _refuse_unsupported(given: Fields) -> None:
    for name in _IGNORED:
        given.take(name)
    for name, known in _HINTS.items():
        if (hint := given.take(name, str, "a string")) is not None and hint not in known:
            raise InvalidArgument(name, f"must be one of {', '.join(known)}")
    for name, harmless in _NEEDLESS.items():
        value = given.take(name)
        if value is None or any(value == each and type(value) is type(each) for each in harmless):
            continue
        raise Unimplemented(name)


def _generation(given: Fields, request: inference_pb2.GenerateRequest, limits: Limits, asked: Asked) -> None:
    """The fields that both kinds of request have."""
    request.model = given.text("model")
    asked.is_stream = given.flag("stream")
    _stream_options(given, asked)
    asked.has_timings = given.flag("timings")
    if asked.has_timings and len(asked.prompts) > 1:
        raise InvalidArgument("timings", "needs a single prompt")
    sampling, stopping, output = request.sampling, request.stopping, request.output
    given.put_parameters(sampling)
    if (seed := given.integer("seed", -(1 << 63), (1 << 64) - 1)) is not None:
        sampling.seed = seed % (1 << 64)
    if (n := given.integer("n", 1, limits.max_n)) is not None:
        sampling.n = asked.n = n
    if (num_prompts := len(asked.prompts)) * asked.n > limits.max_n:
        raise InvalidArgument("prompt", f"holds {num_prompts} prompts, times n = {asked.n}; at most {limits.max_n}")
    for id, bias in _logit_bias(given, limits).items():
        sampling.logit_bias[id] = bias
    sampling.allowed_token_ids.extend(given.integers("allowed_token_ids", limits.vocab_size))
    sampling.bad_words.extend(given.texts("bad_words", limits.max_bad_words))
    max_tokens = _max_tokens(given, asked)
    if max_tokens == 0 and asked.is_echo:  # how evaluations ask for a prompt's log-probabilities
        asked.drops_output, max_tokens = True, 1
    if max_tokens is not None:
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
    if asked.is_echo:
        output.prompt = output.token_bytes = True
    if asked.logprobs is not None:
        output.logprobs = asked.logprobs
        output.token_bytes = True
        if asked.is_echo:
            output.prompt_logprobs = asked.logprobs
        if not asked.is_stream:
            check_whole(len(asked.prompts) * asked.n * stopping.max_tokens * (1 + asked.logprobs))


def check_whole(num_logprobs: int) -> None:
    """Check that an answer that is not streamed is not too large. Raises InvalidArgument."""
    if num_logprobs > MAX_WHOLE_LOGPROBS:
        raise InvalidArgument("stream", f"must be true for more than {MAX_WHOLE_LOGPROBS} log-probabilities")


def _guided(given: Fields, request: inference_pb2.GenerateRequest, asked: Asked) -> None:
    """The format of the answer: OpenAI's `response_format`, or vLLM's `structured_outputs`, which has more formats."""
    wanted, others, guided = given.take("response_format"), given.take("structured_outputs"), inference_pb2.Guided()
    if wanted is not None:
        fields = Fields(wanted, "response_format.")
        match fields.take("type"):
            case "json_object":
                guided.json_object = True
            case "json_schema":
                schema = Fields(fields.take("json_schema"), "response_format.json_schema.")
                for name in ("name", "description"):
                    schema.text(name)
                schema.flag("strict")  # every answer is
                guided.json_schema = schema_text(schema.take("schema"), "response_format.json_schema.schema")
                schema.none_left()
            case "text":
                pass
            case kind:
                raise InvalidArgument(
                    "response_format.type", "is missing" if kind is None else "must be text, json_object or json_schema"
                )
        fields.none_left()
    if others is not None:
        if guided.WhichOneof("format"):
            raise InvalidArgument("structured_outputs", "cannot be given beside response_format")
        guided = structured_outputs(others, "structured_outputs")
        asked.places["guided"] = "structured_outputs"
    if guided.WhichOneof("format"):
        request.guided.CopyFrom(guided)


def _stream_options(given: Fields, asked: Asked) -> None:
    options = given.take("stream_options")
    if options is None:
        return
    if not asked.is_stream:
        raise InvalidArgument("stream_options", "needs stream to be true")
    fields = Fields(options, "stream_options.")
    asked.has_usage = fields.flag("include_usage")
    if fields.flag("include_obfuscation"):
        raise Unimplemented("stream_options.include_obfuscation")
    fields.none_left()


def _is_resumable(given: Fields, asked: Asked) -> bool:
    if not given.flag("resumable"):
        return False
    if not asked.is_stream:
        raise InvalidArgument("resumable", "needs stream to be true")
    if asked.is_echo:
        raise InvalidArgument("resumable", "cannot be given beside echo")
    if len(asked.prompts) > 1:
        raise InvalidArgument("resumable", "needs a single prompt")
    return True


def _max_tokens(given: Fields, asked: Asked) -> int | None:
    older = given.integer("max_tokens")
    if not asked.is_chat:
        return DEFAULT_COMPLETION_TOKENS if older is None else older
    newer = given.integer("max_completion_tokens")
    if newer is None:
        return older
    if older is not None and older != newer:
        raise InvalidArgument("max_tokens", "is the older name of max_completion_tokens, which has another value")
    asked.places["stopping.max_tokens"] = "max_completion_tokens"
    return newer


def _chat_logprobs(given: Fields) -> int | None:
    is_asked, most = given.flag("logprobs"), given.integer("top_logprobs", 0, MAX_LOGPROBS)
    if not is_asked:
        if most:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        return None
    return most or 0


def _logit_bias(given: Fields, limits: Limits) -> dict[int, float]:
    found: dict[int, float] = {}
    biases: dict[str, Json] = given.take("logit_bias", dict, "an object") or {}
    check_count(len(biases), "logit_bias", limits.max_logit_bias)
    for key, bias in biases.items():
        name = f"logit_bias[{shown(key)}]"
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_UINT32):
            raise InvalidArgument(name, "must be a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise InvalidArgument(name, "must be a number")
        check_number(bias, name, LOGIT_BIAS)
        found[int(key)] = bias
    return found


def _stop(given: Fields, limits: Limits) -> list[str]:
    stop = given.take("stop", (str, list), "a string or a list of strings")
    return [stop] if isinstance(stop, str) else given.texts("stop", limits.max_stop)


def _prompts(given: Fields, limits: Limits) -> list[Prompt]:
    prompt = given.take("prompt", (str, list), "a string, a list of token ids, or a list of these")
    if prompt is None:
        raise InvalidArgument("prompt", "is missing")
    if isinstance(prompt, str) or not (prompt and isinstance(prompt[0], str | list)):
        return [_one_prompt(prompt, "prompt", limits)]
    check_count(len(prompt), "prompt", limits.max_n)
    return [_one_prompt(each, f"prompt[{index}]", limits) for index, each in enumerate(prompt)]


def _one_prompt(prompt: Json, name: str, limits: Limits) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise InvalidArgument(name, "must be a string or a list of token ids")
    check_count(len(prompt), name, limits.max_model_len - 1)
    return integers_of(prompt, name)


def set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Make this the request's input."""
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids[:] = prompt
        request.token_ids.SetInParent()  # an empty list is refused as empty, not as missing


# -- names ------------------------------------------------------------------------------------------------------------

_NAMES = FieldNames(
    (r"^chat\.template_kwargs\b", "chat_template_kwargs"),
    (r"^chat\.tool_choice\.mode$", "tool_choice"),
    (r"^chat\.tool_choice\.tool$", "tool_choice.function.name"),
    (r"^output\.prompt_logprobs$", "echo"),
    (r"^token_ids\.ids\b", "prompt"),
    (r"^(chat\.messages\b.*)\.parts\b", r"\1.content"),
    (r"^guided\.json_schema$", "response_format.json_schema.schema"),
    (r"^guided\b.*", "response_format"),
    (r"^structured_outputs\.json_schema$", "structured_outputs.json"),
    (r"^structured_outputs\.ebnf_grammar$", "structured_outputs.grammar"),
    (r"^structured_outputs\.choice\.options$", "structured_outputs.choice"),
    (
        r"^chat\.(messages\[\d+\]\.tool_calls\[\d+\]|tools\[\d+\])\.(name|arguments|description|parameters)$",
        r"\1.function.\2",
    ),
)


def own_name(path: str, asked: Asked) -> str:
    """The API's name of a field that an error names as the protocol does."""
    if path in ("input", "chat"):
        name = "messages" if asked.is_chat else "prompt"
    elif path.startswith("received"):
        name = "last-event-id"
    elif path == "output.logprobs" and asked.is_chat:
        name = "top_logprobs"
    else:
        name = _NAMES.of(path, asked.places)
    if len(asked.prompts) > 1 and path.startswith(("prompt", "token_ids", "input")):
        name = name.replace("prompt", f"prompt[{asked.failed_prompt}]", 1)
    return name
