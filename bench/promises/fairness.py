"""Two tenants, one of which sends ten times as many requests as the other."""

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
from pagoda_server.engine.scheduling.tenants import OUTPUT_WEIGHT, PROMPT_WEIGHT

LIGHT, HEAVY = "light", "heavy"
SEQUENCES = ("--max-num-seqs", "8")  # few places, so that a few dozen calls saturate the engine
PROMPT_LEN, OUTPUT_LEN = 64, 32
MODEST_SHARE = 0.2  # of the engine's service, requested by the light tenant in the second part


@dataclass(slots=True)
class Fairness:
    """Both tenants send the same requests, and the heavy one keeps the engine saturated throughout, in a closed loop.

    First the light tenant runs a closed loop too, a tenth as wide but wider than the batch: it always has requests
    waiting, and its fair share is half of the service. Then it sends requests at an even pace, for a fifth of the
    service measured before. That is less than half, so its fair share is all that it requests. Service is counted from
    the tokens that arrive here, as `fair` counts it, and compared with what GetLoad reports.
    """

    name: str = "fairness"
    variants: tuple[Variant, ...] = (
        Variant("fair", ("--policy", "fair", *SEQUENCES)),
        Variant("fcfs", ("--policy", "fcfs", *SEQUENCES)),
    )
    light_clients: int = 12
    heavy_clients: int = 120
    settle_s: float = 2.0
    measured_s: float = 10.0

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        draw = Draw(np.random.default_rng(turn), vocab_size)
        async with (
            AsyncClient(address, retries=0, tenant=LIGHT) as light,
            AsyncClient(address, retries=0, tenant=HEAVY) as heavy,
        ):

            def send_as(client: AsyncClient) -> Send:
                return lambda call: generate(client, draw.prompt(PROMPT_LEN), max_tokens=OUTPUT_LEN, call=call)

            def loops(client: AsyncClient, count: int, calls: list[Call]) -> list[asyncio.Task[None]]:
                return [asyncio.create_task(closed_loop(send_as(client), PROMPT_LEN, calls)) for _ in range(count)]

            of_light: list[Call] = []
            of_heavy: list[Call] = []
            heavy_loops = loops(heavy, self.heavy_clients, of_heavy)
            light_loops = loops(light, self.light_clients, of_light)
            await asyncio.sleep(self.settle_s)
            began = time.perf_counter()
            await asyncio.sleep(self.measured_s)
            ended = time.perf_counter()
            told = {tenant.name: tenant.share for tenant in (await light.load()).tenants}
            lights, heavies = service(of_light, began, ended), service(of_heavy, began, ended)
            await cancelled(light_loops)

            every_s = request_service() * (ended - began) / (MODEST_SHARE * (lights + heavies))
            modest: list[Call] = []
            paced = asyncio.create_task(_pace(send_as(light), every_s, modest))
            await asyncio.sleep(self.settle_s)
            resumed = time.perf_counter()
            await asyncio.sleep(self.measured_s)
            over = time.perf_counter()
            await cancelled([paced, *heavy_loops])
        asked = request_service() * (over - resumed) / every_s
        return {
            "service/s": (lights + heavies) / (ended - began),
            "light tenant's share, always waiting": lights / (lights + heavies),
            "the same, from GetLoad": told.get(LIGHT, 0.0),
            "service ÷ requested, requesting a fifth": service(modest, resumed, over) / asked,
            "TTFT p50, requesting a fifth ms": median(
                [call.ttft_ms for call in modest if call.arrivals] or [float("inf")]
            ),
        }

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        off = [abs(turn["fair"]["light tenant's share, always waiting"] / 0.5 - 1) for turn in turns]
        short = [1 - turn["fair"]["service ÷ requested, requesting a fifth"] for turn in turns]
        return [
            Bound("light tenant always waiting: deviation of its service from half", 0.1, off),
            Bound("light tenant requesting a fifth: shortfall of its service", 0.1, short),
        ]


def request_service() -> float:
    return PROMPT_WEIGHT * PROMPT_LEN + OUTPUT_WEIGHT * OUTPUT_LEN


def service(calls: list[Call], start: float, end: float) -> float:
    """Return the service of that time; a prompt counts when its first token arrives."""
    total = 0.0
    for call in calls:
        if call.arrivals and start <= call.arrivals[0] < end:
            total += PROMPT_WEIGHT * call.prompt_len
        total += OUTPUT_WEIGHT * sum(start <= arrival < end for arrival in call.arrivals)
    return total


async def _pace(send: Send, every_s: float, calls: list[Call]) -> None:
    """Send calls in an open loop: each when it is due, whether or not earlier ones have ended."""
    async with asyncio.TaskGroup() as group:
        due = time.perf_counter()
        while True:
            calls.append(call := Call(due, PROMPT_LEN))
            group.create_task(send(call))
            due += every_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
