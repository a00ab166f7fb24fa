"""The figures of one stream, as this side of the wire sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamMeter:
    """Counts tokens as they arrive; the clock starts when it is made."""

    clock: Callable[[], float] = time.monotonic
    num_tokens: int = 0
    start: float = field(init=False)
    first: float | None = None
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.last = self.clock()

    def add(self, num_tokens: int) -> None:
        if num_tokens:
            self.last = self.clock()
            self.first = self.last if self.first is None else self.first
            self.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.start

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first message; None before there are any."""
        if self.first is None or self.last <= self.first:
            return None
        return (self.num_tokens - 1) / (self.last - self.first)

    def __str__(self) -> str:
        if self.ttft_s is None:
            return "no tokens"
        rate = "" if self.tokens_per_s is None else f" · {self.tokens_per_s:.1f} tokens/s"
        return f"{self.num_tokens} tokens · TTFT {1e3 * self.ttft_s:.0f} ms{rate}"
