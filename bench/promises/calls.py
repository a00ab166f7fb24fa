"""Calls as clients make them, and when their tokens came."""

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
    """Times are those of time.perf_counter.

    due       when it was to be sent
    arrivals  one entry a token, of all its sequences
    tokens    by sequence
    is_over   its last token has come; else it runs, or was refused, or its deadline passed
    has_begun set when its first token has come, and at its end
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
    """To its end, which may be a deadline or a refusal. With `call`, what has come so far can be seen from outside."""
    call = call or Call(time.perf_counter(), len(prompt))
    asked: GenerateOptions = {"ignore_eos": True, "text": False, "bypass_cache": True, **options}
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
    """One after the other until it is cancelled; each is in `calls` from its beginning."""
    while True:
        calls.append(call := Call(time.perf_counter(), prompt_len))
        await send(call)


async def cancelled(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Ends them; what one of them raised before is raised here."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def gaps_ms(arrivals: Sequence[float], start: float, end: float) -> list[float]:
    """Between one stream's tokens, those that overlap the time from `start` to `end`: a stall counts where it was."""
    return [1e3 * (later - earlier) for earlier, later in pairwise(arrivals) if later > start and earlier < end]


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
