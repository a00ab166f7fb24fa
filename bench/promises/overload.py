"""Three times as many requests as the engine can serve, each with targets and a deadline."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bench.measure import Targets
from bench.promises.calls import Call, cancelled, generate
from bench.promises.scenario import Bound, Figures, Turn, Variant
from bench.workloads import Draw, Request
from pagoda import AsyncClient

NUM_SEQUENCES = 16
SEQUENCES = ("--max-num-seqs", str(NUM_SEQUENCES))
LOAD = 3.0  # arrivals ÷ capacity
SLACK = 2.0  # targets and deadlines ÷ the times from which they are derived


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a full batch achieved. capacity: requests finished per second."""

    capacity: float
    targets: Targets

    def timeout_s(self, output_len: int) -> float:
        return SLACK * (self.targets.ttft_ms + output_len * self.targets.tpot_ms) / 1e3


@dataclass(slots=True)
class Overload:
    """Poisson arrivals at three times the capacity; goodput counts requests that met both targets and ended in time.

    No target and no rate is set by hand. On the turn's first server, as many clients as the batch has places send one
    request after another, so that the batch is full and no request waits: the rate at which requests end is the
    capacity. The TPOT target is twice the median TPOT there, which a full batch meets. The TTFT target is the time in
    which the engine serves one full batch, places ÷ capacity. A client gives up after twice the time that both targets
    allow. Prompts and outputs are log-normal, 8 to 256 and 8 to 64 tokens. Both servers of a turn get the same requests
    at the same times.
    """

    name: str = "overload"
    variants: tuple[Variant, ...] = (
        Variant("deadline", ("--policy", "deadline", *SEQUENCES)),
        Variant("fcfs", ("--policy", "fcfs", *SEQUENCES)),
    )
    calibrated_s: float = 6.0
    sent_s: float = 15.0
    calibrations: dict[int, Calibration] = field(default_factory=dict)  # by turn

    async def run(self, address: str, vocab_size: int, turn: int) -> Figures:
        async with AsyncClient(address, retries=0) as client:
            if turn not in self.calibrations:
                self.calibrations[turn] = await self._calibrate(client, vocab_size)
            calibration = self.calibrations[turn]
            requests = poisson(vocab_size, turn, LOAD * calibration.capacity, self.sent_s)
            began = time.perf_counter()
            calls = await asyncio.gather(*(_send(client, request, began, calibration) for request in requests))
        met = sum(call.is_over and call.times.meets(calibration.targets) for call in calls)
        first = [call.ttft_ms for call in calls if call.arrivals]
        return {
            "capacity requests/s": calibration.capacity,
            "TTFT target ms": calibration.targets.ttft_ms,
            "TPOT target ms": calibration.targets.tpot_ms,
            "requests": float(len(calls)),
            "ended": float(sum(call.is_over for call in calls)),
            "met both": float(met),
            "goodput/s": met / self.sent_s,
            "TTFT p50 ms": median(first) if first else float("nan"),
        }

    async def _calibrate(self, client: AsyncClient, vocab_size: int) -> Calibration:
        draw = Draw(np.random.default_rng(0), vocab_size)
        ended: list[tuple[float, Call]] = []

        async def one_after_the_other() -> None:
            while True:
                (request,) = _requests(draw, 1)
                call = await generate(client, request.prompt, max_tokens=request.output_len)
                ended.append((time.perf_counter(), call))

        loops = [asyncio.create_task(one_after_the_other()) for _ in range(NUM_SEQUENCES)]
        await asyncio.sleep(self.calibrated_s / 6)  # until the batch is full
        began = time.perf_counter()
        await asyncio.sleep(self.calibrated_s)
        now = time.perf_counter()
        await cancelled(loops)
        measured = [call for at, call in ended if began <= at < now]
        capacity = len(measured) / (now - began)
        tpot_ms = SLACK * median(1e3 * call.times.tpot_s for call in measured)
        return Calibration(capacity, Targets(1e3 * NUM_SEQUENCES / capacity, tpot_ms))

    def bounds(self, turns: list[Turn]) -> list[Bound]:
        # If no request met the targets under fcfs, one is assumed, which lowers the ratio.
        ratios = [turn["deadline"]["met both"] / max(1.0, turn["fcfs"]["met both"]) for turn in turns]
        return [Bound("goodput at three times the capacity, deadline ÷ fcfs", 2.0, ratios, is_floor=True, digits=1)]


def poisson(vocab_size: int, seed: int, rate: float, sent_s: float) -> list[Request]:
    """Draw requests with independent arrivals, `rate` per second on average, for `sent_s` seconds."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    arrivals: list[float] = []
    at = draw.random.exponential(1 / rate)
    while at < sent_s:
        arrivals.append(float(at))
        at += draw.random.exponential(1 / rate)
    requests = _requests(draw, len(arrivals))
    return [
        Request(request.prompt, request.output_len, arrival_s)
        for request, arrival_s in zip(requests, arrivals, strict=True)
    ]


def _requests(draw: Draw, number: int) -> list[Request]:
    prompt_lens, output_lens = draw.lengths(number, 4.2, 0.8, 8, 256), draw.lengths(number, 3.2, 0.6, 8, 64)
    return [Request(draw.prompt(length), output) for length, output in zip(prompt_lens, output_lens, strict=True)]


async def _send(client: AsyncClient, request: Request, began: float, calibration: Calibration) -> Call:
    call = Call(began + request.arrival_s, len(request.prompt))
    await asyncio.sleep(call.due - time.perf_counter())
    return await generate(
        client,
        request.prompt,
        max_tokens=request.output_len,
        call=call,
        timeout_s=calibration.timeout_s(request.output_len),
        ttft_s=calibration.targets.ttft_ms / 1e3,
        tpot_s=calibration.targets.tpot_ms / 1e3,
    )
