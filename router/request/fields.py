"""Checks of single fields. Each raises InvalidArgument with the field's path, the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

from pagoda_server.router.errors import InvalidArgument


def check_count(count: int, field: str, most: int) -> None:
    if count > most:
        raise InvalidArgument(field, f"has {count} entries, at most {most} are allowed")


def check_bytes(text: str, field: str, most: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > most:
        raise InvalidArgument(field, f"has {num_bytes} bytes, at most {most} are allowed")


def check_integer(value: int, field: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(field, f"is {value}, must be from {low} to {high}")


def check_number(value: float, field: str, low: float, high: float, *, is_low_allowed: bool = True) -> None:
    # Written so that NaN, for which every comparison is false, is refused.
    if not (low <= value <= high and (is_low_allowed or value > low)):
        interval = f"{'[' if is_low_allowed else '('}{_digits(low)}, {_digits(high)}]"
        raise InvalidArgument(field, f"is {_digits(value)}, must be in {interval}")


def check_id(id: int, field: str, vocab_size: int) -> None:
    if id >= vocab_size:
        raise InvalidArgument(field, f"token id {id} is not below {vocab_size}, the size of the vocabulary")


def check_ids(ids: Sequence[int], field: str, most: int, vocab_size: int) -> None:
    check_count(len(ids), field, most)
    if ids and max(ids) >= vocab_size:
        at, id = next((at, id) for at, id in enumerate(ids) if id >= vocab_size)
        check_id(id, f"{field}[{at}]", vocab_size)


def _digits(value: float) -> str:
    """As few as tell the value from others: a little above a limit does not look like the limit."""
    for digits in range(1, 17):
        rounded = float(f"{value:.{digits}g}")
        if value in (rounded, c_float(rounded).value):  # most fields hold 32 bits: 0.1 is 0.10000000149 there
            return repr(rounded).removesuffix(".0")
    return repr(value)
