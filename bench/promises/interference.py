"""A long prompt arrives while streams decode."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from bench.promises.calls import Call, cancelled, gaps_ms, generate, percentile
from bench.promises.scenario import Bound, Figures, Turn, Variant
from bench.workloads import Draw
from pagoda import AsyncClient

TARGET_ITL_MS = 80
NO_TARGET = ("--target-itl-ms", "0")
PACED, WHOLE = f"--target-itl-ms {TARGET_ITL_MS}", "prompts whole"


@dataclass(slots=True)
class Interference:
    """Eight streams decode alone; a prompt arrives and is computed beside them; then they decode alone again.

    Gaps between tokens that overlap the time from the prompt's arrival to its first token are compared with those
    before and after it: decodes slow down as contexts grow, and as other work shares the machine. Without chunked
    prefill each stream has one gap in that time, the whole prompt. The server is fresh: it has not seen a prompt of
    that length, and learns its step times as it goes.
    """

    name: str = "interference"
    variants: tuple[Variant, ...] = (
        Variant(PACED, ("--target-itl-ms", str(TARGET_ITL_MS))),
        Variant("no target, prompts cut", NO_TARGET),
        Variant(WHOLE, (*NO_TARGET, "--token-budget", "8192")),
    )
    num_streams: int = 8
    prompt_len: int = 4096
    stream_len: int = 4000  # tokens, more than arrive in that time
    alone_s: float = 5.0  # before the prompt, and again after it

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        draw = Draw(np.random.default_rng(turn), vocab_size)
        async with AsyncClient(address, retries=0) as client:
            streams = [Call(time.perf_counter(), 64) for _ in range(self.num_streams)]
            tasks = [
                asyncio.create_task(
                    generate(client, draw.prompt(call.prompt_len), max_tokens=self.stream_len, call=call)
                )
                for call in streams
            ]
            await asyncio.gather(*(call.has_begun.wait() for call in streams))
            await asyncio.sleep(self.alone_s / 5)  # until the batch is full and steady
            began = time.perf_counter()
            await asyncio.sleep(self.alone_s)
            prompt = await generate(client, draw.prompt(self.prompt_len), max_tokens=1)
            await asyncio.sleep(self.alone_s)
            ended = time.perf_counter()
            await cancelled(tasks)
        computed = prompt.arrivals[0]
        before = [gap for call in streams for gap in gaps_ms(call.arrivals, began, prompt.due)]
        since = [
            [at for at in call.arrivals if at >= computed] for call in streams
        ]  # excludes the gap that spans `computed`
        after = [gap for arrivals in since for gap in gaps_ms(arrivals, computed, ended)]
        alone = before + after
        beside = [gap for call in streams for gap in gaps_ms(call.arrivals, prompt.due, computed)]
        return {
            "ITL p50 alone ms": percentile(alone, 50),
            "ITL p50 with the prompt ms": percentile(beside, 50),
            "ITL p99 before the prompt ms": percentile(before, 99),
            "ITL p99 after it ms": percentile(after, 99),
            "ITL p99 alone ms": percentile(alone, 99),
            "ITL p99 with the prompt ms": percentile(beside, 99),
            "longest alone ms": max(alone),
            "longest with the prompt ms": max(beside),
            "TTFT of the prompt ms": prompt.ttft_ms,
        }

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        def ratios(figure: str) -> list[float]:
            return [turn[WHOLE][figure] / turn[PACED][figure] for turn in turns]

        held = [turn[PACED]["ITL p99 with the prompt ms"] / TARGET_ITL_MS for turn in turns]
        return [
            Bound(f"{PACED}: ITL p99 while a 4k prompt is computed ÷ the target", 1.0, held),
            Bound("that ITL p99, prompts whole ÷ with the target", 5.0, ratios("ITL p99 with the prompt ms"), True, 1),
            Bound("longest gap, prompts whole ÷ with the target", 5.0, ratios("longest with the prompt ms"), True, 1),
        ]
