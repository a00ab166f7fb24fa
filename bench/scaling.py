"""`python -m bench.scaling`: a simulated day of a fleet whose number of engines follows its load.

The rule is the server's own (`fleet/policy.py`), and so are its thresholds. Engines are those of `bench.fleet`. A
request goes to the one with the fewest sequences, and a new engine serves some time after it was asked for. A day has a
quiet night, a busy afternoon, and bursts of ten minutes. It is compared with an oracle that knows each five minutes'
requests in advance, starts and ends engines in no time, and takes the fewest that keep the target at a steady rate.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated

import typer

from bench.fleet import Engine, Machine, Request
from pagoda_server.fleet.policy import Load, Since, Targets, decide

DAY_S = 86_400.0
LOOK_S = 1.0
WINDOW_S = 300.0
LATE = 0.05  # the part of the requests that may miss the target
# An engine on a CPU, roughly: a step of 32 sequences takes half a second.
MACHINE = Machine(num_strides=20_000, max_num_seqs=32, token_budget=512, base_s=0.2, decode_s=0.01, token_s=0.0005)
PROMPT_LEN, OUTPUT_LEN = 256, 50


@dataclass(slots=True)
class Sent:
    """What stands for a router's view of an engine: nothing is kept."""

    num_own: int = 0

    def begun(self, request: Request) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class Serving:
    """An engine of the fleet; it ends once it is idle, if it leaves."""

    engine: Engine
    ready_at: float
    is_leaving: bool = False
    is_idle: bool = True

    def load(self) -> Load:
        machine = self.engine.machine
        rate = machine.token_budget / (machine.base_s + machine.token_s * machine.token_budget)
        return Load(self.engine.num_sequences, machine.max_num_seqs, self.engine.num_uncomputed, rate)


@dataclass(frozen=True, slots=True)
class Day:
    """
    late          the part of the requests whose first token came later than the target
    engine_hours  from the moment that an engine was asked for until it had ended
    changes       of the number of engines, each with its time in seconds
    """

    late: float
    engine_hours: float
    changes: list[tuple[float, int]]
    num_requests: int


Rule = Callable[[float, Sequence[Load], int], int]


def simulate(
    requests: Sequence[Request],
    rule: Rule,
    *,
    least: int = 1,
    most: int = 64,
    start_s: float = 60.0,
    target_s: float = 2.0,
    machine: Machine = MACHINE,
) -> Day:
    """Serve the requests, in the order of their arrival, with as many engines as a rule asks for once a second.

    rule  is given the time, the loads of engines that serve, and how many are coming; it returns a change of the number
    """
    numbers = itertools.count()
    fleet = [Serving(Engine(f"engine-{next(numbers)}", machine), 0.0) for _ in range(least)]
    events: list[tuple[float, int, Request | Serving | None]] = []
    order = itertools.count()

    def at(time: float, what: Request | Serving | None) -> None:
        heapq.heappush(events, (time, next(order), what))

    for request in requests:
        at(request.arrived, request)
    at(0.0, None)
    last, hours, num_left, changes = 0.0, 0.0, len(requests), [(0.0, least)]
    while num_left:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Request):
            ready = [each for each in fleet if each.ready_at <= now and not each.is_leaving]
            chosen = min(ready, key=lambda each: each.engine.num_sequences)
            event.view = Sent()  # type: ignore[assignment]
            chosen.engine.waiting.append(event)
            if chosen.is_idle:
                chosen.is_idle = False
                at(now, chosen)
        elif isinstance(event, Serving):
            before = event.engine.num_served
            event.is_idle = not event.engine.num_sequences
            if not event.is_idle:
                at(event.engine.step(now), event)
            num_left -= event.engine.num_served - before
            event.engine.changes.clear()
        else:
            hours += len(fleet) * (now - last) / 3600
            last = now
            fleet = [each for each in fleet if not (each.is_leaving and each.is_idle)]
            live = [each for each in fleet if not each.is_leaving]
            loads = [each.load() for each in live if each.ready_at <= now]
            change = rule(now, loads, len(live) - len(loads))
            if change > 0 and len(live) < most:
                fleet.append(Serving(Engine(f"engine-{next(numbers)}", machine), now + start_s))
            elif change < 0 and len(live) > least:
                min(live, key=lambda each: each.engine.num_sequences).is_leaving = True
            if (count := sum(not each.is_leaving for each in fleet)) != changes[-1][1]:
                changes.append((now, count))
            at(now + LOOK_S, None)
    late = sum(each.ttft_s > target_s for each in requests) / len(requests)
    return Day(late, hours, changes, len(requests))


def by_load(targets: Targets) -> Rule:
    """The server's rule."""
    since = Since()

    def rule(now: float, loads: Sequence[Load], num_coming: int) -> int:
        nonlocal since
        since, change = decide(since, targets, now, loads, num_coming)
        return change

    return rule


def rate_at(time: float, peak_per_s: float, bursts: Sequence[float]) -> float:
    """Requests a second: a fifth of the peak at night, the peak in the afternoon, half as many again in a burst."""
    afternoon = (1 - math.cos(2 * math.pi * (time / DAY_S - 0.125))) / 2
    is_burst = any(begins <= time < begins + 600 for begins in bursts)
    return peak_per_s * (0.2 + 0.8 * afternoon**2) * (1.5 if is_burst else 1.0)


def day(peak_per_s: float, seed: int = 0, length_s: float = DAY_S, num_bursts: int = 6) -> list[Request]:
    """Requests that arrive at random through a day, or through a part of one."""
    rng = random.Random(seed)
    bursts = [rng.random() * length_s for _ in range(num_bursts)]
    highest = 1.5 * peak_per_s
    found, now = [], 0.0
    while (now := now + rng.expovariate(highest)) < length_s:
        if rng.random() * highest < rate_at(now, peak_per_s, bursts):
            found.append(_request(now, rng))
    return found


def _request(now: float, rng: random.Random) -> Request:
    """A request that shares no prefix. Lengths are exponential around their means, and at most four times them."""
    prompt, output = (min(1 + int(rng.expovariate(1 / mean)), 4 * mean) for mean in (PROMPT_LEN, OUTPUT_LEN))
    return Request(now, [], prompt, output)


def steady(per_s: float, length_s: float, seed: int = 0) -> list[Request]:
    """Requests that arrive at random at one rate."""
    rng = random.Random(seed)
    found, now = [], 0.0
    while (now := now + rng.expovariate(per_s)) < length_s:
        found.append(_request(now, rng))
    return found


def capacity(num_engines: int, target_s: float = 2.0, machine: Machine = MACHINE) -> float:
    """The highest steady rate, in requests a second, at which so many engines keep the target; to a fiftieth each."""
    low, high = 0.0, 2.0 * num_engines
    while high - low > 0.02 * num_engines:
        rate = (low + high) / 2
        served = simulate(steady(rate, 1800.0), lambda *_: 0, least=num_engines, target_s=target_s, machine=machine)
        low, high = (rate, high) if served.late <= LATE else (low, rate)
    return low


def oracle_hours(requests: Sequence[Request], length_s: float, capacity: Callable[[int], float]) -> float:
    """Engine hours of the oracle.

    capacity  the highest rate, in requests a second, of so many engines
    """
    counts = [0] * math.ceil(length_s / WINDOW_S)
    for request in requests:
        counts[int(request.arrived // WINDOW_S)] += 1
    needed = [next(each for each in itertools.count(1) if capacity(each) >= count / WINDOW_S) for count in counts]
    return sum(needed) * WINDOW_S / 3600


def main(
    peak: Annotated[float, typer.Option(help="Requests a second in the afternoon, without bursts.")] = 6.0,
    seeds: Annotated[int, typer.Option(help="Days.")] = 3,
    start: Annotated[float, typer.Option(help="Seconds until a new engine serves.")] = 60.0,
    target: Annotated[float, typer.Option(help="Target for the time to the first token, in seconds.")] = 2.0,
) -> None:
    known = cache(partial(capacity, target_s=target))
    for seed in range(seeds):
        requests = day(peak, seed)
        found = simulate(requests, by_load(Targets(ttft_s=target)), start_s=start, target_s=target)
        oracle = oracle_hours(requests, DAY_S, known)
        typer.echo(
            f"day {seed}: {found.num_requests} requests, {found.late:.2%} late, {found.engine_hours:.1f} engine hours, "
            f"{found.engine_hours / oracle:.2f} of the oracle's {oracle:.1f}; {len(found.changes) - 1} changes, "
            f"up to {max(count for _, count in found.changes)} engines"
        )


if __name__ == "__main__":
    typer.run(main)
