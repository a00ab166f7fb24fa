"""`python -m bench.roles`: goodput of engines with roles ÷ that of engines for everything, in simulated time.

Each engine is the server's own scheduler, with its pacing, its cost model, its prefix cache and its arrivals from other
engines. Given are the time of a step, as that of an 8B model on a large GPU or of a small one on two cores of a CPU,
and the bandwidth of a link in front of each decode engine, which brings the blocks; a lender's copies cost nothing.
Goodput is the highest rate of arrivals at which 90 % of the requests meet both targets: their time to the first token,
and their mean time a token after it. They arrive at engines that have served others and know what a step takes. The
engines for everything hold the second target with `--target-itl-ms`; those with roles have the best of the splits that
are near balance.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from bench.fleet import Machine
from bench.plots import DPI, STYLE
from pagoda_server.engine.core.sequence import Lender, Request, SamplingParams
from pagoda_server.engine.core.sequence import Sequence as Tokens
from pagoda_server.engine.core.step import Sampled, StepPlan
from pagoda_server.engine.kv.block_store import Done
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 64, 5000, 4000
WARMING = 2  # requests for each engine before those that count
MET = 0.9  # the part of the requests that meets its targets at the goodput
STEPS = 5  # of the search for it: each halves the interval
WORKLOADS = ((1024, 256), (2048, 128), (4096, 64), (8192, 32))  # prompt and output
TARGETS_MS = (15, 20, 30, 60)
WINS, LOSES = 1.1, 0.9


@dataclass(frozen=True, slots=True)
class Hardware:
    """
    kv_bytes  of a token's keys and values
    load_s    for a block from host memory to the device
    """

    machine: Machine
    kv_bytes: int
    load_s: float


HARDWARE = {
    "gpu": Hardware(Machine(), kv_bytes=131_072, load_s=0.0002),
    # The default model in int4 on two cores with AVX-512 VNNI, from "A step" of docs/performance.md.
    "cpu": Hardware(Machine(0, 64, 512, base_s=0.0024, decode_s=0.00053, token_s=0.00037), 23_040, load_s=0.0004),
}


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and when it got its first token and its last one."""

    number: int
    arrived: float
    prompt_len: int
    output_len: int
    made: int = 0
    first: float = math.inf
    last: float = math.inf

    def got(self, now: float) -> None:
        self.made += 1
        self.first = min(self.first, now)
        self.last = now

    def has_missed(self, ttft_s: float, itl_s: float) -> bool:
        """Say, once for each request, that it misses a target: after its first token, or after its last one."""
        is_late = self.first - self.arrived > ttft_s
        return (
            is_late
            if self.made == 1
            else self.made == self.output_len and not is_late and not self.meets(ttft_s, itl_s)
        )

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        tpot_s = (self.last - self.first) / max(1, self.output_len - 1)
        return self.first - self.arrived <= ttft_s and tpot_s <= itl_s


@dataclass(frozen=True, slots=True)
class Setup:
    """
    prefill, decode  engines with these roles; without any, all are for everything
    itl_s            target for the mean time a token takes after the first
    ttft_s           target for the time to the first token
    bytes_per_s      of the link to each decode engine
    hardware         of each engine, in HARDWARE
    """

    engines: int
    prefill: int
    prompt_len: int
    output_len: int
    itl_s: float
    ttft_s: float
    bytes_per_s: float
    hardware: str = "gpu"


class Link:
    """The blocks that an engine has asked others for, one after another over a link; see Peers of engine/kv."""

    rows: Any = None  # no bytes are moved

    def __init__(self, block_s: float, clock: Callable[[], float], wakes: Callable[[float], None]) -> None:
        self._block_s = block_s
        self._clock, self._wakes = clock, wakes
        self._free_at = 0.0
        self._coming: list[tuple[float, Done]] = []

    def read(self, peer: str, wanted: Sequence[tuple[bytes, int]]) -> None:
        began = max(self._clock(), self._free_at)
        self._free_at = began + len(wanted) * self._block_s
        asked_s = (self._free_at - self._clock()) / len(wanted)
        self._coming += [(self._free_at, Done(host, True, asked_s)) for _, host in wanted]
        self._wakes(self._free_at)

    def take_done(self) -> list[Done]:
        now = self._clock()
        done = [each for at, each in self._coming if at <= now]
        self._coming = [(at, each) for at, each in self._coming if at > now]
        return done


@dataclass(slots=True, eq=False)
class Engine:
    """The server's scheduler in simulated time."""

    hardware: Hardware
    itl_s: float | None
    bytes_per_s: float
    wakes: Callable[[float, Engine], None]
    now: float = 0.0
    is_idle: bool = True
    uncomputed: int = 0  # prompt tokens of requests whose first token is not there
    held: dict[int, Asked] = field(default_factory=dict)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        def clock() -> float:
            return self.now

        block_s = BLOCK_SIZE * self.hardware.kv_bytes / self.bytes_per_s
        self.scheduler = Scheduler(
            BlockPool(NUM_BLOCKS, BLOCK_SIZE),
            max_num_seqs=self.machine.max_num_seqs,
            token_budget=self.machine.token_budget,
            max_model_len=32_768,
            clock=clock,
            target_itl_s=self.itl_s,
            num_host_blocks=NUM_HOST_BLOCKS,
            peers=Link(block_s, clock, lambda at: self.wakes(at, self)),
        )

    @property
    def machine(self) -> Machine:
        return self.hardware.machine

    @property
    def cost_s(self) -> float:
        """What a router expects a new request to wait, as in router/engines/choosing.py."""
        return self.uncomputed * self.machine.token_s + len(self.held) / self.machine.max_num_seqs

    def add(self, asked: Asked, now: float, max_tokens: int, *, has_begun: bool) -> None:
        self.now = now
        self.held[asked.number] = asked
        prompt = [asked.number, *[0] * (asked.prompt_len - 1)]  # no two share a block
        lender = Lender("a prefill engine", asked.prompt_len) if has_begun else None
        request = Request(asked.prompt_len, arrived=now, lender=lender)
        self.uncomputed += 0 if has_begun else asked.prompt_len
        tokens = [*prompt, 1] if has_begun else prompt
        self.scheduler.add(Tokens(asked.number, tokens, request, SamplingParams(max_tokens=max_tokens)))

    def plan(self, now: float) -> tuple[StepPlan, float] | None:
        """Return the next step and when it ends; None: there is nothing to compute."""
        self.now = now
        plan = self.scheduler.schedule()
        self.is_idle = plan.is_empty
        if plan.is_empty:
            if (until := self.scheduler.next_deadline) < math.inf:
                self.wakes(max(until, now + 1e-6), self)
            return None
        num_decodes = sum(chunk.length == 1 for chunk in plan.chunks)
        machine = self.machine
        seconds = machine.base_s + machine.decode_s * num_decodes + machine.token_s * (plan.num_tokens - num_decodes)
        return plan, now + seconds + self.hardware.load_s * len(plan.loads)

    def end(self, plan: StepPlan, now: float) -> Iterator[tuple[Asked, bool]]:
        """Commit a step; yield the requests that have got a token, with whether they have ended here."""
        self.now = now
        tokens = [2 if chunk.samples else -1 for chunk in plan.chunks]
        copied_s = self.hardware.load_s * len(plan.loads)
        self.scheduler.commit(plan, Sampled(tokens, [None] * len(tokens), copied_s=copied_s))
        output = self.scheduler.take_output()
        ended = {each.seq.id for each in output.ended}
        for number in output.sequences:
            asked = self.held[number]
            if asked.made == 0:
                self.uncomputed -= asked.prompt_len
            asked.got(now)
            if number in ended:
                del self.held[number]
            yield asked, number in ended


class Simulation:
    """Requests that arrive at a rate, and the engines of a setup."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._events: list[tuple[float, int, Engine | None, StepPlan | None, Asked | None]] = []
        self._numbers = itertools.count()
        itl_s = None if setup.prefill else setup.itl_s
        hardware = HARDWARE[setup.hardware]
        self.engines = [
            Engine(hardware, itl_s, setup.bytes_per_s, lambda at, engine: self._push(at, engine))
            for _ in range(setup.engines)
        ]

    def _push(self, at: float, engine: Engine | None, plan: StepPlan | None = None, asked: Asked | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), engine, plan, asked))

    def run(self, rate: float, seconds: float, seed: int = 0) -> float:
        """Return the part of the requests that meet their targets; 0 as soon as too many have missed them."""
        setup, rng = self._setup, random.Random(seed)

        def asked(number: int, at: float) -> Asked:
            return Asked(number, at, setup.prompt_len, setup.output_len)

        warming = [asked(number, 0.0) for number in range(WARMING * setup.engines)]
        self._serve(warming, may_miss=len(warming))
        now = begun = max(engine.now for engine in self.engines)
        counted: list[Asked] = []
        while (now := now + rng.expovariate(rate)) < begun + seconds or len(counted) < 20:
            counted.append(asked(len(warming) + len(counted), now))
        if not self._serve(counted, may_miss=int((1 - MET) * len(counted))):
            return 0.0
        return sum(each.meets(setup.ttft_s, setup.itl_s) for each in counted) / len(counted)

    def _serve(self, asked: Sequence[Asked], may_miss: int) -> bool:
        """Serve these requests; return False as soon as more than `may_miss` have missed a target."""
        setup = self._setup
        for each in asked:
            self._push(each.arrived, None, asked=each)
        for_prompts = self.engines[: setup.prefill] or self.engines
        for_answers = self.engines[setup.prefill :]
        while self._events:
            now, _, engine, plan, new = heapq.heappop(self._events)
            if new is not None:
                chosen = min(for_prompts, key=lambda each: each.cost_s)
                self._give(chosen, new, now, 1 if setup.prefill else new.output_len, has_begun=False)
                continue
            assert engine is not None, "only arrivals have none"
            if plan is not None:
                for each, has_ended in engine.end(plan, now):
                    may_miss -= each.has_missed(setup.ttft_s, setup.itl_s)
                    if has_ended and each.made < each.output_len:
                        decoder = min(for_answers, key=lambda other: other.cost_s)
                        self._give(decoder, each, now, each.output_len, has_begun=True)
            if may_miss < 0:
                return False
            if plan is not None or engine.is_idle:
                self._step(engine, now)
        return True

    def _give(self, engine: Engine, asked: Asked, now: float, max_tokens: int, *, has_begun: bool) -> None:
        engine.add(asked, now, max_tokens, has_begun=has_begun)
        if engine.is_idle:
            self._step(engine, now)

    def _step(self, engine: Engine, now: float) -> None:
        if (planned := engine.plan(now)) is not None:
            self._push(planned[1], engine, planned[0])


def goodput(setup: Setup, seconds: float) -> float:
    """Search for the highest rate at which enough requests meet their targets.

    seconds  in which requests arrive; as long as two requests may take, if that is more
    """
    machine = HARDWARE[setup.hardware].machine
    seconds = max(seconds, 2 * setup.output_len * setup.itl_s)
    busy_s = setup.prompt_len * machine.token_s
    busy_s += setup.output_len * (machine.decode_s + machine.base_s / machine.max_num_seqs)
    low, high = 0.0, setup.engines / busy_s
    for _ in range(STEPS):
        rate = (low + high) / 2
        if Simulation(setup).run(rate, seconds) >= MET:
            low = rate
        else:
            high = rate
    return low


@dataclass(frozen=True, slots=True)
class Cell:
    """Goodputs of a setup, in requests a second: of engines for everything, and with the best number for prompts."""

    setup: Setup
    everything: float
    roles: float
    prefill: int

    @property
    def workload(self) -> tuple[int, int]:
        return self.setup.prompt_len, self.setup.output_len

    @property
    def ratio(self) -> float:
        return self.roles / self.everything if self.everything else math.inf


def splits(setup: Setup) -> list[int]:
    """How many engines may be for prompts: as their work asks for, one fewer, and one more."""
    machine = HARDWARE[setup.hardware].machine
    batch = min(machine.max_num_seqs, max(1.0, (setup.itl_s - machine.base_s) / machine.decode_s))
    prefill_s = setup.prompt_len * machine.token_s
    decode_s = setup.output_len * (machine.decode_s + machine.base_s / batch)
    balanced = round(setup.engines * prefill_s / (prefill_s + decode_s))
    return sorted({min(max(1, balanced + more), setup.engines - 1) for more in (-1, 0, 1)})


def compare(setup: Setup, seconds: float) -> Cell:
    found = {prefill: goodput(replace(setup, prefill=prefill), seconds) for prefill in splits(setup)}
    best = max(found, key=lambda prefill: found[prefill])
    everything = goodput(replace(setup, prefill=0), seconds)
    return Cell(setup, everything, found[best], best)


def draw(cells: Sequence[Cell], title: str, path: Path) -> None:
    """Draw the ratios as a map for each number of engines: workloads across, targets up."""
    sizes = sorted({each.setup.engines for each in cells})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4 * len(sizes) + 1, 5.0))
        axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axis, size in zip(axes, sizes, strict=True):
            image = _draw_map(axis, [each for each in cells if each.setup.engines == size])
            axis.set(xlabel="tokens of prompt : answer", title=f"{size} engines")
        axes[0].set_ylabel("target for the mean time a token takes, ms")
        bar = figure.colorbar(image, ax=axes, label="goodput with roles ÷ without")
        bar.set_ticks([-1, 0, 1], labels=["½", "1", "2"])
        figure.suptitle(title, x=0.01, ha="left")
        figure.savefig(path, dpi=DPI)


def _draw_map(axis: Axes, cells: Sequence[Cell]) -> AxesImage:
    workloads = sorted({each.workload for each in cells}, key=lambda each: each[0] / each[1])
    targets = sorted({each.setup.itl_s for each in cells})
    values = np.zeros((len(targets), len(workloads)))
    for each in cells:
        place = targets.index(each.setup.itl_s), workloads.index(each.workload)
        values[place] = math.log2(min(max(each.ratio, 0.1), 10.0)) if each.roles or each.everything else 0.0
        text = f"{each.ratio:.2f}" if each.everything else "roles alone" if each.roles else "neither"
        split = f"{each.prefill} + {each.setup.engines - each.prefill}"
        axis.annotate(
            f"{text}\n{each.roles:.1f} ÷ {each.everything:.1f} /s\n{split}",
            (place[1], place[0]), ha="center", va="center", fontsize=8,
            color="white" if abs(values[place]) > 1 else "black",
        )  # fmt: skip
    axis.grid(visible=False)
    axis.set_xticks(range(len(workloads)), [f"{prompt}:{output}" for prompt, output in workloads])
    axis.set_yticks(range(len(targets)), [f"{1e3 * target:g}" for target in targets])
    return axis.imshow(values, cmap="PuOr", vmin=-1.5, vmax=1.5, aspect="auto", origin="lower")


def main(
    output: Annotated[Path, typer.Argument(help="Folder for roles.json and roles.png.")],
    hardware: Annotated[str, typer.Option(help=f"Of an engine: {' or '.join(HARDWARE)}.")] = "gpu",
    targets_ms: Annotated[list[float] | None, typer.Option(help="For the mean time that a token takes.")] = None,
    engines: Annotated[list[int] | None, typer.Option(help="Engines in all, 2 and 8 by default.")] = None,
    ttft_s: Annotated[float, typer.Option(help="Target for the time to the first token, in seconds.")] = 1.0,
    gb_per_s: Annotated[float, typer.Option(help="Bandwidth of the link to each decode engine.")] = 25.0,
    seconds: Annotated[float, typer.Option(help="Least simulated time in which requests arrive.")] = 5.0,
    workers: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
) -> None:
    if hardware not in HARDWARE:
        raise typer.BadParameter(f"{hardware} is none of {', '.join(HARDWARE)}", param_hint="--hardware")
    output.mkdir(parents=True, exist_ok=True)
    setups = [
        Setup(count, 0, prompt_len, output_len, itl_ms / 1e3, ttft_s, gb_per_s * 1e9, hardware)
        for count in engines or (2, 8)
        for prompt_len, output_len in WORKLOADS
        for itl_ms in targets_ms or TARGETS_MS
    ]
    found = []
    with ProcessPoolExecutor(workers) as pool:
        for each in pool.map(partial(compare, seconds=seconds), setups):
            found.append(each)
            verdict = "win" if each.ratio >= WINS else "lose" if each.ratio <= LOSES else "are equal"
            setup = each.setup
            print(
                f"{setup.engines} engines, {setup.prompt_len}:{setup.output_len}, {1e3 * setup.itl_s:g} ms: "
                f"{each.roles:.2f} ÷ {each.everything:.2f} requests/s = {each.ratio:.2f} "
                f"with {each.prefill} for prompts: roles {verdict}",
                flush=True,
            )
    (output / "roles.json").write_text(json.dumps([asdict(each) for each in found], indent=1))
    title = f"{hardware.upper()}: first token within {ttft_s:g} s, links of {gb_per_s:g} GB/s"
    draw(found, title, output / "roles.png")


if __name__ == "__main__":
    typer.run(main)
