"""Limits of a request, and checks of single fields.

Each check raises InvalidArgument with the field's path, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field

from pagoda.v1 import inference_pb2

from ...settings import RouterSettings
from ...settings.request import (
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PRIORITY,
    MAX_REQUEST_ID,
    MAX_SALT_BYTES,
    MAX_STOP_IDS,
)
from ...settings.sampling import Interval
from ..errors import InvalidArgument

MAX_DIGITS = 32  # of an integer that an error repeats whole


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. The engine's are known when it is ready; with several engines, the smallest applies.

    max_model_len      tokens of prompt + output
    vocab_size         rows of the model's embedding: ids are below it
    kv_token_capacity  tokens that the engine's whole KV cache holds
    has_chat_template  whether the model takes a message or a chat
    has_tool_format    whether it is known how the model writes tool calls
    max_text_bytes     UTF-8 bytes of a text, or of a chat's texts together; ChatTemplate limits the rendered text
    max_messages       messages of a chat
    max_parts          parts of a message's content
    max_tools          tools that a chat offers, or that a message calls
    max_json_bytes     JSON of a chat's tools and tool calls together
    max_json_depth     nesting of objects and lists in that JSON
    max_kwargs_values  values in a chat's template_kwargs, nested ones included
    max_kwargs_depth   nesting of objects and lists in template_kwargs
    hidden_size        length of a hidden state
    pooling            of a request to embed that leaves it out
    max_n              sequences from one input
    max_readouts       inputs to embed, or continuations to score, in one call
    max_request_id     characters of a request's id
    other_name         another name that requests may give the model; empty: none
    recommended        sampling parameters of a request that leaves them out; those that it lacks change nothing
    """

    max_model_len: int
    vocab_size: int
    kv_token_capacity: int
    has_chat_template: bool = True
    has_tool_format: bool = True
    max_text_bytes: int = RouterSettings.max_text_bytes
    max_messages: int = 4096
    max_parts: int = 256
    max_tools: int = 128
    max_json_bytes: int = 256 << 10
    max_json_depth: int = 32
    max_kwargs_values: int = 1024
    max_kwargs_depth: int = 16
    hidden_size: int = 0
    pooling: inference_pb2.Pooling = inference_pb2.POOLING_LAST
    max_n: int = MAX_N
    max_readouts: int = 256
    max_logprobs: int = MAX_LOGPROBS
    max_stop: int = 16
    max_stop_bytes: int = 256
    max_stop_ids: int = MAX_STOP_IDS
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_bad_words: int = MAX_BAD_WORDS
    max_bad_word_bytes: int = MAX_BAD_WORD_BYTES
    max_request_id: int = MAX_REQUEST_ID
    max_salt_bytes: int = MAX_SALT_BYTES
    max_priority: int = MAX_PRIORITY
    default_max_tokens: int | None = RouterSettings.default_max_tokens
    other_name: str = ""
    recommended: inference_pb2.Sampling = field(default_factory=inference_pb2.Sampling)


def too_many(field: str, most: int) -> InvalidArgument:
    return InvalidArgument(field, f"has more than {most} entries, the limit")


def check_count(count: int, field: str, most: int) -> None:
    if count > most:
        raise too_many(field, most)


def check_bytes(text: str, field: str, most: int) -> None:
    check_size(len(text.encode()), field, most)


def check_size(num_bytes: int, field: str, most: int) -> None:
    if num_bytes > most:
        raise InvalidArgument(field, f"has {num_bytes} bytes, at most {most} are allowed")


def check_integer(value: int, field: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(field, f"is {_digits(value)}, must be from {low} to {high}")


def check_number(value: float, field: str, interval: Interval) -> None:
    if value not in interval:
        low = f"{'[' if interval.includes_low else '('}{_digits(interval.low)}"
        raise InvalidArgument(field, f"is {_digits(value)}, must be in {low}, {_digits(interval.high)}]")


def check_id(id: int, field: str, vocab_size: int) -> None:
    if id >= vocab_size:
        raise InvalidArgument(field, f"token id {id} is not below {vocab_size}, the size of the vocabulary")


def check_ids(ids: Sequence[int], field: str, most: int, vocab_size: int) -> None:
    check_count(len(ids), field, most)
    if ids and max(ids) >= vocab_size:
        at, id = next((at, id) for at, id in enumerate(ids) if id >= vocab_size)
        check_id(id, f"{field}[{at}]", vocab_size)


def _digits(value: float) -> str:
    """The fewest digits that identify the value, so that a value just above a limit does not look like it.

    A client may write an integer of thousands of digits: the middle of a long one is left out.
    """
    if isinstance(value, int):
        whole = str(value)
        return whole if len(whole) <= MAX_DIGITS else f"{whole[:10]}…{whole[-10:]} ({len(whole)} digits)"
    for digits in range(1, 17):
        rounded = float(f"{value:.{digits}g}")
        if value in (rounded, c_float(rounded).value):  # most fields hold 32 bits: 0.1 is 0.10000000149 there
            return repr(rounded).removesuffix(".0")
    return repr(value)
