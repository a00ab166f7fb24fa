"""What `pagoda top` knows of a server: its load, and what short step traces have shown of the last minutes."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagoda.v1 import control_pb2, trace_pb2
from pagoda_server.router.telemetry.trace_reader import INTERVAL_S, Column, Rates, Row, TraceReader, hold_name

CELL_S = 0.25  # of a sequence's history
CELLS_KEPT = 800
SECONDS_KEPT = 300
MINUTE_S = 60.0
ENDED_SHOWN_S = 2.0
SAME_ARRIVAL_S = 1e-3  # ids begin again with an engine, so the arrival is a part of a sequence's identity
CLOCK_JUMP_S = 2.0  # an engine's clock that differs by more is that of another machine

_RANK = "xpdhw"  # what a cell shows if a sequence did several things in it: the first of them
_SUMMED = (
    "waiting", "running", "blocks_total", "blocks_free", "blocks_evictable", "blocks_referenced", "kv_slots",
    "kv_slots_unused", "steps", "prompt_tokens", "cached_tokens", "preemptions", "recomputed_tokens",
    "drafted_tokens", "accepted_tokens", "forced_tokens",
)  # fmt: skip


@dataclass(slots=True)
class Followed:
    """A live sequence, or one that has just ended. Times are on this process's clock.

    row    its numbers and state, on the engine's clock
    why    what holds it up, such as "no blocks"
    cells  what it did, by time in units of CELL_S: a letter of `Column`
    """

    engine: int
    id: int
    row: Row
    arrived_s: float
    ended_s: float = math.inf
    why: str = ""
    cells: dict[int, str] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return self.row.tokens - self.row.prompt_tokens

    def paint(self, doing: str, start_s: float, end_s: float) -> None:
        for cell in range(math.floor(start_s / CELL_S), math.ceil(end_s / CELL_S)):
            shown = self.cells.get(cell)
            if shown is None or _RANK.index(doing) < _RANK.index(shown):
                self.cells[cell] = doing
        if len(self.cells) > 2 * CELLS_KEPT:
            self.cells = {cell: self.cells[cell] for cell in sorted(self.cells)[-CELLS_KEPT:]}


@dataclass(slots=True)
class Second:
    """What the engines did in a second. Latencies are in milliseconds, and counted."""

    output_tokens: int = 0
    prefill_tokens: int = 0
    ttft: Counter[float] = field(default_factory=Counter)
    itl: Counter[float] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Median and 95th percentile in seconds, of ITL and of TTFT from arrival at the engine; None if there is none."""

    covered_s: float
    ttft: tuple[float, float] | None
    itl: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Change:
    """What changed in the loads of the last minute. hit_rate: None without a prompt."""

    hit_rate: float | None
    preemptions: int


class Board:
    """Collects a server's messages. `now` is the time up to which it knows what the engines did."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.info = control_pb2.ServerInfo()
        self.load = control_pb2.Load()
        self.is_partial = False  # the server shows this caller only its own sequences
        self.trace_problem = ""
        self.problem = ""
        self.now = clock()
        self._clock = clock
        self._problem_at = self._info_at = self._heard_at = self.now
        self._loads: deque[tuple[float, control_pb2.EngineLoad]] = deque()
        self._engines: dict[int, _Engine] = {}
        self._seconds: dict[int, Second] = {}

    # -- messages --------------------------------------------------------------------------------------------------

    def saw_info(self, info: control_pb2.ServerInfo) -> None:
        self.info, self._info_at = info, self._clock()

    def saw_load(self, load: control_pb2.Load) -> None:
        engines = [engine.engine for engine in self.load.engines]
        self.problem, self.load, self._heard_at = "", load, self._clock()
        total = self.total
        if self._loads and (
            engines != [engine.engine for engine in load.engines] or total.steps < self._loads[-1][1].steps
        ):
            self._loads.clear()  # an engine has come, gone or started again
        self._loads.append((self._heard_at, total))
        while self._loads[0][0] < self._heard_at - MINUTE_S:
            self._loads.popleft()

    def saw_trace(self, parts: Sequence[trace_pb2.StepTracePart], window_s: float) -> None:
        """Take in a trace of the last `window_s`, which may overlap with the one before."""
        self.trace_problem = ""
        self.is_partial = any(part.is_partial for part in parts)
        by_engine: dict[int, list[trace_pb2.StepTracePart]] = {}
        for part in parts:
            by_engine.setdefault(part.engine, []).append(part)
        self._engines = {number: self._engines.get(number) or _Engine(number) for number in by_engine}
        for number, own in by_engine.items():
            self.now = self._engines[number].read(own, self._clock(), window_s, self._seconds)
        self._seconds = {second: each for second, each in self._seconds.items() if second > self.now - SECONDS_KEPT}

    def waits(self) -> None:
        """Count the silence from now on: the server has just been asked."""
        self._heard_at = self._clock()

    def lost(self, problem: str) -> None:
        """Note that the server cannot be reached, and why."""
        if not self.problem:
            self._problem_at = self._clock()
        self.problem = problem

    # -- figures ---------------------------------------------------------------------------------------------------

    @property
    def uptime_s(self) -> float:
        return self.info.uptime_s + (0.0 if self.problem else self._clock() - self._info_at)

    @property
    def problem_s(self) -> float:
        return self._clock() - self._problem_at

    @property
    def silence_s(self) -> float:
        """Time since the last load, or since the server was asked for it."""
        return self._clock() - self._heard_at

    @property
    def total(self) -> control_pb2.EngineLoad:
        """The loads of all engines together."""
        engines = self.load.engines
        total = control_pb2.EngineLoad(**{name: sum(getattr(each, name) for each in engines) for name in _SUMMED})
        total.kv_waste = total.kv_slots_unused / total.kv_slots if total.kv_slots else 0.0
        total.prefix_hit_rate = total.cached_tokens / total.prompt_tokens if total.prompt_tokens else 0.0
        return total

    @property
    def sequences(self) -> list[Followed]:
        return [sequence for engine in self._engines.values() for sequence in engine.sequences.values()]

    @property
    def hold(self) -> str:
        """Why the next in line does not start, on the first engine where one waits."""
        return next((engine.hold for engine in self._engines.values() if engine.hold), "")

    def change(self) -> Change | None:
        """None before there are two loads."""
        if len(self._loads) < 2:
            return None
        first, last = self._loads[0][1], self._loads[-1][1]
        prompts = last.prompt_tokens - first.prompt_tokens
        hit_rate = (last.cached_tokens - first.cached_tokens) / prompts if prompts else None
        return Change(hit_rate, last.preemptions - first.preemptions)

    def seconds(self, count: int) -> list[Second | None]:
        """The last complete seconds, oldest first; None for one that no trace covers."""
        newest = math.floor(self.now) - 1
        return [self._seconds.get(index) for index in range(newest - count + 1, newest + 1)]

    def latencies(self) -> Latencies:
        """Those of the last minute, or of the part of it that traces cover."""
        ttft: Counter[float] = Counter()
        itl: Counter[float] = Counter()
        last = [second for at, second in self._seconds.items() if at > self.now - MINUTE_S - 1]
        for second in last:
            ttft.update(second.ttft)
            itl.update(second.itl)
        return Latencies(min(MINUTE_S, len(last)), _percentiles(ttft), _percentiles(itl))


def _percentiles(counts: Counter[float]) -> tuple[float, float] | None:
    """The median and the 95th percentile: the smallest values that so many do not exceed."""
    if not counts:
        return None
    values = sorted(counts)
    up_to = list(itertools.accumulate(counts[value] for value in values))
    median, p95 = (values[bisect.bisect_left(up_to, share * up_to[-1])] for share in (0.5, 0.95))
    return median / 1e3, p95 / 1e3


class _Engine:
    """One engine's sequences, as its traces show them."""

    def __init__(self, number: int) -> None:
        self.sequences: dict[int, Followed] = {}
        self.hold = ""
        self._number = number
        self._reader = TraceReader()
        self._offset = math.inf  # from the engine's clock to this process's
        self._read_until = -math.inf

    def read(
        self, parts: Sequence[trace_pb2.StepTracePart], now: float, window_s: float, seconds: dict[int, Second]
    ) -> float:
        """Take in a trace. Return when it was taken, on this process's clock."""
        taken_s = parts[-1].taken_at_s
        if abs(now - taken_s - self._offset) > CLOCK_JUMP_S or self._is_another(parts):
            self._offset, self._reader, self.sequences = now - taken_s, TraceReader(), {}
        now = taken_s + self._offset
        rates = Rates()
        reading = self._reader.read(parts, rates)
        for index in range(math.ceil(max(self._read_until, now - window_s)), math.floor(now) + 1):
            seconds.setdefault(index, Second())
        self._read_until = now
        for age, rate in rates.items():
            second = seconds.setdefault(math.floor(now - (age + 0.5) * INTERVAL_S), Second())
            second.output_tokens += rate.tokens
            second.prefill_tokens += rate.prompt_tokens
            second.ttft.update(rate.ttft)
            second.itl.update(rate.itl)
        steps = [step for part in parts for step in part.steps][-1:]
        held = {id: hold_name(why) for step in steps for id, why in zip(step.idle, step.idle_reasons, strict=True)}
        self.hold = hold_name(steps[0].hold) if steps else self.hold
        for id, row in reading.rows.items():
            each = self.sequences.setdefault(id, Followed(self._number, id, row, row.arrived + self._offset))
            each.why = held.get(id, "") if row.state == "h" else self.hold if row.state in "wx" else ""
            if row.end:
                each.ended_s = row.ended + self._offset
            self._paint(each, reading.columns)
        self.sequences = {
            id: each
            for id, each in self.sequences.items()
            if (now - each.ended_s < ENDED_SHOWN_S if each.row.end else id in reading.rows)
        }
        return now

    def _is_another(self, parts: Sequence[trace_pb2.StepTracePart]) -> bool:
        """Whether the engine was restarted: it has another sequence under a known number."""
        arrivals = ((move.sequence, move.arrived_s + self._offset) for part in parts for move in part.moves)
        return any(
            id in self.sequences and abs(self.sequences[id].arrived_s - arrived_s) > SAME_ARRIVAL_S
            for id, arrived_s in arrivals
        )

    def _paint(self, sequence: Followed, columns: Sequence[Column]) -> None:
        for column in columns:
            if doing := column.cells.get(sequence.id):
                start_s = max(column.start_s + self._offset, sequence.arrived_s)
                sequence.paint(doing, start_s, column.end_s + self._offset)
