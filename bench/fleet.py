"""`python -m bench.fleet`: several simulated engines, and the rules by which routers choose one for each prompt.

The rules, their views of the engines and the bookkeeping of the prefix cache are the server's own. Engines are simple:
a step holds all decodes and as many prompt tokens as its budget leaves, and takes a constant time, some for each decode
and some for each prompt token. Routers see loads and caches as they were a while ago, and add what they have sent.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.channel.strides import STRIDE
from pagoda_server.engine.kv.blocks import EvictionOrder
from pagoda_server.router.engines.cached_keys import CachedKeys
from pagoda_server.router.engines.choosing import Asked, Automatic, ByHash, Candidates, Chooser, LeastLoaded
from pagoda_server.router.engines.table import EngineTable


@dataclass(frozen=True, slots=True)
class Machine:
    """What each engine is: as an 8B model on a large GPU, roughly.

    num_strides  room of its KV cache, in strides
    """

    num_strides: int = 5_000
    max_num_seqs: int = 128
    token_budget: int = 8192
    base_s: float = 0.012
    decode_s: float = 0.00012
    token_s: float = 0.00005


@dataclass(slots=True, eq=False)
class Request:
    """keys: of its prompt's strides"""

    arrived: float
    keys: list[int]
    prompt_len: int
    output_len: int
    ttft_s: float = 0.0
    left: int = 0  # prompt tokens to compute
    made: int = 0
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    view: View | None = None


class Engine:
    """One engine. Its cache has a block for each stride, evicted in the server's order."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.machine = machine
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.changes: list[tuple[float, int, bool]] = []
        self.num_served = 0
        self._order = EvictionOrder(machine.num_strides)
        self._block_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._used: Counter[int] = Counter()
        self._free = list(range(machine.num_strides))

    @property
    def num_sequences(self) -> int:
        return len(self.running) + len(self.waiting)

    def num_cached(self, request: Request) -> int:
        usable = (request.prompt_len - 1) // STRIDE
        return sum(1 for _ in itertools.takewhile(self._block_of.__contains__, request.keys[:usable]))

    @property
    def num_uncomputed(self) -> int:
        waiting = sum(each.prompt_len - STRIDE * self.num_cached(each) for each in self.waiting)
        return waiting + sum(each.left for each in self.running)

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.machine.max_num_seqs:
            request = self.waiting[0]
            found = [self._block_of[key] for key in request.keys[: self.num_cached(request)]]
            needed = -(-(request.prompt_len + request.output_len) // STRIDE) - len(found)
            if needed > len(self._free) + len(self._order) - sum(not self._used[block] for block in found):
                return
            self.waiting.popleft()
            for block in found:
                self._share(block)
                self._order.note_hit(block)
            while len(self._free) < needed:
                evicted = self._order.pop()
                key = self._key_of.pop(evicted)
                del self._block_of[key]
                self.changes.append((now, key, False))
                self._free.append(evicted)
            new = [self._free.pop() for _ in range(needed)]
            self._used.update(new)
            request.blocks = found + new
            request.num_cached = STRIDE * len(found)
            request.left = request.prompt_len - request.num_cached
            self.running.append(request)

    def _share(self, block: int) -> None:
        if not self._used[block]:
            self._order.remove(block)
        self._used[block] += 1

    def _publish(self, request: Request, now: float) -> None:
        for key, block in zip(request.keys, request.blocks, strict=False):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key], self._key_of[block] = block, key
                self.changes.append((now, key, True))

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        self.num_served += 1
        for block in reversed(request.blocks):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                if block in self._key_of:
                    self._order.add(block)
                else:
                    self._free.append(block)

    def step(self, now: float) -> float:
        """Make a step; return when it ends."""
        self._admit(now)
        decodes = [each for each in self.running if not each.left]
        budget = self.machine.token_budget - len(decodes)
        prompts = []
        for request in self.running:
            if request.left and budget:
                length = min(request.left, budget)
                request.left -= length
                budget -= length
                prompts.append(request)
        num_tokens = self.machine.token_budget - len(decodes) - budget
        ends = now + self.machine.base_s + self.machine.decode_s * len(decodes) + self.machine.token_s * num_tokens
        for request in [*decodes, *prompts]:
            if request.left:
                continue
            assert request.view is not None, "a router has sent it"
            if not request.made:
                request.ttft_s = ends - request.arrived
                self._publish(request, ends)
                request.view.begun(request)
            request.made += 1
            if request.made >= request.output_len:
                self._end(request)
                request.view.num_own -= 1
        return ends


class View:
    """What one router knows of an engine: as of a while ago, and what it has sent itself."""

    def __init__(self, engine: Engine, table: EngineTable, clock: Callable[[], float]) -> None:
        machine = engine.machine
        self.engine = engine
        self.name = self.address = engine.name
        self.block_layout = b""  # engines fetch nothing from each other
        self._table = table
        self.row = table.take_row()
        table.set_batch(self.row, machine.max_num_seqs)
        self._prefill_tokens_per_s = machine.token_budget / (machine.base_s + machine.token_s * machine.token_budget)
        info = control_pb2.EngineInfo(kv_cache={"num_blocks": machine.num_strides, "block_size": STRIDE})
        self.cached = CachedKeys(info, table.cached, self.row, clock)
        self.cached.take_snapshot(engine_pb2.CacheSnapshot(is_first=True, is_last=True))
        self.num_own = self._own_uncomputed = self._num_deltas = self._num_taken = 0
        self._pending: dict[Request, int] = {}
        self._num_others = self._others_uncomputed = 0

    @property
    def num_sequences(self) -> int:
        return self.num_own + self._num_others

    def report(self) -> None:
        """Enter what is known now into the table."""
        num_uncomputed = self._own_uncomputed + self._others_uncomputed
        self._table.update(self.row, self.num_sequences, num_uncomputed, self._prefill_tokens_per_s)

    def send(self, request: Request, asked: Asked) -> None:
        self.num_own += 1
        self._pending[request] = request.prompt_len - asked.num_cached
        self._own_uncomputed += self._pending[request]
        self.cached.expect(request.keys)
        request.view = self
        self.engine.waiting.append(request)

    def begun(self, request: Request) -> None:
        self._own_uncomputed -= self._pending.pop(request)

    def take_load(self) -> None:
        self._num_others = max(0, self.engine.num_sequences - self.num_own)
        self._others_uncomputed = max(0, self.engine.num_uncomputed - self._own_uncomputed)

    def take_changes(self, until: float) -> None:
        changes = self.engine.changes
        latest: dict[int, bool] = {}
        while self._num_taken < len(changes) and changes[self._num_taken][0] <= until:
            _, key, is_cached = changes[self._num_taken]
            latest[key] = is_cached
            self._num_taken += 1
        if latest:
            self._num_deltas += 1
            stored = [key for key, is_cached in latest.items() if is_cached]
            removed = [key for key, is_cached in latest.items() if not is_cached]
            self.cached.take_delta(engine_pb2.CacheDelta(number=self._num_deltas, stored=stored, removed=removed))


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    best_hit_rate: float  # of one cache that forgets nothing
    ttft_p50_s: float
    ttft_p90_s: float
    tokens_per_s: float  # of output
    max_to_min: float  # requests of the engine that served most, and of the one that served least


class AskedKeys(Asked):
    """A request whose keys are there already."""

    def __init__(self, request: Request) -> None:
        super().__init__(range(request.prompt_len), _keys=request.keys)

    def first_keys(self, num_tokens: int) -> list[int]:
        return self.keys()[: num_tokens // STRIDE]


def simulate(
    rule: Callable[[], Chooser],
    requests: Iterable[Request],
    *,
    num_engines: int = 8,
    num_routers: int = 1,
    age_s: float = 0.25,
    machine: Machine | None = None,
) -> Outcome:
    """Serve the requests, in the order of their arrival.

    age_s  how old the loads and caches are that routers know of
    """
    now = 0.0
    engines = [Engine(f"engine-{at}", machine or Machine()) for at in range(num_engines)]
    choosers = [rule() for _ in range(num_routers)]
    routers = [(each, [View(engine, each.table, lambda: now) for engine in engines]) for each in choosers]
    events: list[tuple[float, int, object]] = []
    numbers = itertools.count()
    served = list(requests)
    for request in served:
        heapq.heappush(events, (request.arrived, next(numbers), request))
    for at, engine in enumerate(engines):
        heapq.heappush(events, (at * 1e-4, next(numbers), engine))
    heapq.heappush(events, (0.0, next(numbers), None))
    num_live = len(served)
    turns = itertools.cycle(routers)
    while num_live:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Request):
            chooser, views = next(turns)
            asked = AskedKeys(event)
            for view in views:
                view.report()
            chooser.choose(Candidates(views), asked).send(event, asked)
        elif isinstance(event, Engine):
            before = event.num_served
            idle = not event.waiting and not event.running
            ends = now + 0.002 if idle else event.step(now)
            num_live -= event.num_served - before
            heapq.heappush(events, (ends, next(numbers), event))
        else:
            for _, views in routers:
                for view in views:
                    view.take_load()
                    view.take_changes(now - age_s / 2)
            heapq.heappush(events, (now + age_s, next(numbers), None))
    return _outcome(engines, served, now)


def _outcome(engines: Sequence[Engine], served: Sequence[Request], now: float) -> Outcome:
    seen: set[int] = set()
    best = 0
    for request in served:
        usable = request.keys[: (request.prompt_len - 1) // STRIDE]
        best += STRIDE * sum(1 for _ in itertools.takewhile(seen.__contains__, usable))
        seen.update(request.keys)
    prompt_tokens = sum(each.prompt_len for each in served)
    ttfts = np.array([each.ttft_s for each in served])
    loads = [engine.num_served for engine in engines]
    return Outcome(
        sum(each.num_cached for each in served) / prompt_tokens,
        best / prompt_tokens,
        float(np.percentile(ttfts, 50)),
        float(np.percentile(ttfts, 90)),
        sum(each.output_len for each in served) / now,
        max(loads) / max(1, min(loads)),
    )


def arrivals(
    count: int,
    per_s: float,
    *,
    num_prefixes: int,
    prefix_len: int = 6000,
    prompt_len: int = 7200,
    output_len: int = 1000,
    popular: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Yield requests that arrive at random, each with a prefix that others share.

    num_prefixes  0: none shares any
    popular       the part of the requests that has the first prefix
    """
    rng = random.Random(seed)
    now = 0.0
    prefixes = [_keys(rng, prefix_len // STRIDE) for _ in range(num_prefixes)]
    for _ in range(count):
        now += rng.expovariate(per_s)
        prefix: list[int] = []
        if prefixes:
            prefix = prefixes[0] if rng.random() < popular else rng.choice(prefixes)
        keys = prefix + _keys(rng, prompt_len // STRIDE - len(prefix))
        yield Request(now, keys, prompt_len, output_len)


def _keys(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


RULES: dict[str, Callable[[], Chooser]] = {
    "load": LeastLoaded,
    "hash": ByHash,
    "auto": lambda: Automatic(random.Random(1)),
}


def main(
    requests: Annotated[int, typer.Option(help="Requests of each workload.")] = 3000,
    per_s: Annotated[float, typer.Option(help="Requests a second.")] = 30.0,
    engines: Annotated[int, typer.Option()] = 8,
) -> None:
    table = Table("workload", "rule", "routers", "hits", "hits ÷ best", "TTFT p50", "p90", "tokens/s", "max ÷ min")
    for workload, options in (
        ("150 prefixes", {"num_prefixes": 150}),
        ("none shared", {"num_prefixes": 0}),
        ("one with 80 %", {"num_prefixes": 150, "popular": 0.8}),
    ):
        for rule, routers in (("load", 1), ("hash", 1), ("auto", 1), ("auto", 2)):
            found = simulate(
                RULES[rule],
                arrivals(requests, per_s, **options),
                num_engines=engines,
                num_routers=routers,
            )
            of_best = found.hit_rate / found.best_hit_rate if found.best_hit_rate else 0.0
            table.add_row(
                workload, rule, str(routers), f"{found.hit_rate:.1%}", f"{of_best:.3f}", f"{found.ttft_p50_s:.2f} s",
                f"{found.ttft_p90_s:.2f} s", f"{found.tokens_per_s:,.0f}", f"{found.max_to_min:.2f}",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
