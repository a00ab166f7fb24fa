"""Parts of the GPU benchmark that fail in the ways that a card makes them fail."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu.rows import Bench, Row, Work, measure


def raises(bench: Bench) -> Iterator[Row]:
    """One case fails, and then the part does."""
    yield measure(_work("good", lambda: 0.0), bench)
    yield measure(_work("bad", lambda: 1 // 0), bench)
    raise LookupError("planted in the part")


def dies(bench: Bench) -> Iterator[Row]:
    """End as a driver ends a process, without an exception."""
    yield measure(_work("good", lambda: 0.0), bench)
    ctypes.string_at(0)


def hangs(bench: Bench) -> Iterator[Row]:
    yield measure(_work("good", lambda: 0.0), bench)
    time.sleep(1000)


def loses_the_card(bench: Bench) -> Iterator[Row]:
    """The second of three cases reads out of bounds: the process has no card from then on."""
    yield measure(_work("first", lambda: 0.0), bench)
    yield measure(_work("out of bounds", _fault), bench)
    yield measure(_work("third", lambda: 0.0), bench)


def _fault() -> float:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    _get_current_dispatch_mode().is_broken = True  # type: ignore[union-attr]
    torch.cuda.synchronize()
    return 0.0


def _work(case: str, error: Callable[[], float]) -> Work:
    return Work("planted", case, 1000.0, 0.0, lambda: [lambda: None], error, 0.1)
