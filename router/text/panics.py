"""The tokenizers library panics on some inputs, and a panic is no Exception: it would end more than its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import Internal

Result = TypeVar("Result")


def contained(work: Callable[[], Result]) -> Result:
    """Call the library. Raises Internal if it panics, and what it raises otherwise."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise Internal("the tokenizer panicked") from error
