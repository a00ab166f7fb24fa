"""A crowd of requests, and among them one of a higher or of a lower priority."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.promises.calls import Call, Send, cancelled, closed_loop, generate
from bench.promises.scenario import Bound, Figures, Turn, Variant
from bench.workloads import Draw
from pagoda import AsyncClient

AGEING_S = 4.0
HIGH, LOW = 1, -1
SEQUENCES = ("--max-num-seqs", "8")  # few places, so that a few dozen calls are a crowd
PROMPT_LEN, OUTPUT_LEN = 64, 32
WAIT_LIMIT_S = 60.0  # limit of a wait that may have no bound


@dataclass(slots=True)
class Priorities:
    """Clients in a closed loop, so many that requests always wait.

    Their requests have priority 0. First, a request of priority 1 arrives now and then, and its TTFT is measured under
    both policies. Then a request of priority -1 arrives. Under `priority` only requests that arrive less than one step
    of ageing later can pass it, so its wait has a bound: that step, plus the time in which the engine serves the
    requests ahead of it, as many as there are clients, at the rate measured meanwhile. Under `fcfs` no request passes
    another.
    """

    name: str = "priority"
    variants: tuple[Variant, ...] = (
        Variant("priority", ("--policy", "priority", "--priority-ageing-s", str(AGEING_S), *SEQUENCES)),
        Variant("fcfs", ("--policy", "fcfs", *SEQUENCES)),
    )
    num_clients: int = 40
    num_high: int = 6
    settle_s: float = 2.0

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        draw = Draw(np.random.default_rng(turn), vocab_size)
        crowd: list[Call] = []
        async with AsyncClient(address, retries=0) as client:

            def send_as(priority: int) -> Send:
                return lambda call: generate(
                    client, draw.prompt(PROMPT_LEN), max_tokens=OUTPUT_LEN, call=call, priority=priority
                )

            loops = [asyncio.create_task(closed_loop(send_as(0), PROMPT_LEN, crowd)) for _ in range(self.num_clients)]
            await asyncio.sleep(self.settle_s)
            high = []
            for _ in range(self.num_high):
                high.append(await send_as(HIGH)(Call(time.perf_counter(), PROMPT_LEN)))
                await asyncio.sleep(self.settle_s / self.num_high)
            low = Call(time.perf_counter(), PROMPT_LEN)
            waits = asyncio.create_task(send_as(LOW)(low))
            await asyncio.wait_for(low.has_begun.wait(), WAIT_LIMIT_S)
            await cancelled([waits, *loops])
        began, started = low.due, low.arrivals[0]
        served = sum(began <= call.arrivals[0] < started for call in crowd if call.arrivals)
        passed = sum(began < call.due and call.arrivals[0] < started for call in crowd if call.arrivals)
        rate = served / (started - began)
        return {
            "TTFT, high priority ms": median(call.ttft_ms for call in high),
            "TTFT p50, crowd ms": median(call.ttft_ms for call in crowd if call.arrivals),
            "starts/s": rate,
            "wait, low priority s": started - began,
            "bound of that wait s": AGEING_S + self.num_clients / rate,
            "requests that passed it": float(passed),
        }

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        ratios = [turn["fcfs"]["TTFT, high priority ms"] / turn["priority"]["TTFT, high priority ms"] for turn in turns]
        waits = [turn["priority"]["wait, low priority s"] / turn["priority"]["bound of that wait s"] for turn in turns]
        return [
            Bound("TTFT of a high-priority request in a crowd, fcfs ÷ priority", 5.0, ratios, is_floor=True, digits=1),
            Bound("wait of a low-priority request in a crowd ÷ its bound", 1.0, waits),
        ]
