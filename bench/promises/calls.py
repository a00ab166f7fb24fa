"""Calls as clients make them, and the arrival times of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, Unpack

import numpy as np

from bench.measure import RequestTimes
from pagoda import AsyncClient
from pagoda.errors import DeadlineExceeded, Overloaded
from pagoda.request import GenerateOptions


@dataclass(slots=True)
class Call:
    """One call. Times are those of time.perf_counter.

    due       when it was due to be sent
    arrivals  one entry per token, of all its sequences
    tokens    by sequence
    is_over   its last token has arrived; otherwise it still runs, was refused, or missed its deadline
    has_begun set when its first token arrives, and when it ends
    """

    due: float
    prompt_len: int
    arrivals: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    is_over: bool = False
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.due, self.arrivals)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * self.times.ttft_s


Send: TypeAlias = Callable[[Call], Coroutine[Any, Any, Call]]


async def generate(
    client: AsyncClient,
    prompt: Sequence[int],
    *,
    call: Call | None = None,
    timeout_s: float | None = None,
    **options: Unpack[GenerateOptions],
) -> Call:
    """Call `Generate` until it ends, also by deadline or refusal. A given `call` shows the progress to others."""
    call = call or Call(time.perf_counter(), len(prompt))
    asked: GenerateOptions = {
        "temperature": 0.0,
        "ignore_eos": True,
        "text": False,
        "bypass_cache": True,
        **options,
    }
    try:
        async for chunk in client.generate(token_ids=prompt, timeout_s=timeout_s, **asked):
            call.arrivals += [time.perf_counter()] * len(chunk.tokens)
            call.tokens.setdefault(chunk.index, []).extend(chunk.tokens)
            call.has_begun.set()
        call.is_over = True
    except (DeadlineExceeded, Overloaded):
        pass
    finally:
        call.has_begun.set()
    return call


async def closed_loop(send: Send, prompt_len: int, calls: list[Call]) -> None:
    """Send calls one after another until cancelled; each is in `calls` from its start."""
    while True:
        calls.append(call := Call(time.perf_counter(), prompt_len))
        await send(call)


async def cancelled(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel tasks and wait for them. Raise what one of them raised before."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def gaps_ms(arrivals: Sequence[float], start: float, end: float) -> list[float]:
    """Gaps between one stream's tokens that overlap the time from `start` to `end`, also in part."""
    return [1e3 * (later - earlier) for earlier, later in pairwise(arrivals) if later > start and earlier < end]


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
