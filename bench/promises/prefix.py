"""Two requests share a system prompt."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.promises.calls import generate
from bench.promises.scenario import Bound, Figures, Turn, Variant
from bench.workloads import Draw
from pagoda import AsyncClient


@dataclass(slots=True)
class SharedPrefix:
    """Pairs of requests, each pair with its own system prompt, one request after another on an idle server."""

    name: str = "prefix"
    variants: tuple[Variant, ...] = (Variant("as served"),)
    num_pairs: int = 4
    prefix_len: int = 2048
    own_len: int = 30

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        draw = Draw(np.random.default_rng(turn), vocab_size)
        first: list[float] = []
        second: list[float] = []
        async with AsyncClient(address, retries=0) as client:
            await generate(client, draw.prompt(8), max_tokens=4)  # connects
            for _ in range(self.num_pairs):
                prefix = draw.prompt(self.prefix_len)
                for times in (first, second):
                    call = await generate(client, prefix + draw.prompt(self.own_len), max_tokens=1, bypass_cache=False)
                    times.append(call.ttft_ms)
        return {
            "TTFT, first request ms": median(first),
            "TTFT, second request ms": median(second),
            "highest ratio, second ÷ first": max(later / earlier for earlier, later in zip(first, second, strict=True)),
        }

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        of = [turn[self.variants[0].name] for turn in turns]
        ratios = [figures["TTFT, second request ms"] / figures["TTFT, first request ms"] for figures in of]
        return [Bound("TTFT behind a shared 2k system prompt, second ÷ first", 0.15, ratios, digits=3)]
