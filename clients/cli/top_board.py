"""What `pagoda top` knows of a server: its load, and what short step traces have shown of the last minutes."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pagoda.v1 import control_pb2, trace_pb2
from pagoda_server.cli.trace_timeline import Doing, Timeline, Track, timelines

CELL_S = 0.25  # of a sequence's history
CELLS_KEPT = 800
SECONDS_KEPT = 300
MINUTE_S = 60.0
LATENCY_UNIT_S = 1e-4  # latencies are counted by this
ENDED_SHOWN_S = 2.0
SAME_ARRIVAL_S = 1e-3  # ids begin again with an engine, so the arrival is a part of a sequence's identity
ROUNDING_S = 1e-6  # a step that stands in two traces has in both almost the same end
CLOCK_JUMP_S = 2.0  # an engine's clock that differs by more is that of another machine

# What a cell shows if a sequence did several things in it: the first of them.
_RANK = {
    doing: rank
    for rank, doing in enumerate(
        (Doing.PREEMPTED, Doing.PREFILL, Doing.DECODE, Doing.PADDING, Doing.HELD, Doing.WAITING)
    )
}
_ENDINGS = ("finished", "aborted", "expired", "rejected", "failed")
_DOING_AFTER = {"waits": Doing.WAITING, "preempted": Doing.PREEMPTED, "started": Doing.PREFILL}
_SUMMED = (
    "waiting", "running", "blocks_total", "blocks_free", "blocks_evictable", "blocks_referenced", "kv_slots",
    "kv_slots_unused", "steps", "prompt_tokens", "cached_tokens", "preemptions", "recomputed_tokens",
    "drafted_tokens", "accepted_tokens", "forced_tokens",
)  # fmt: skip


@dataclass(slots=True)
class Followed:
    """A live sequence, or one that has just ended. Times are on this process's clock.

    cells            what it did, by time in units of CELL_S
    ending           how it ended; empty while it is live
    is_whole         whether it was known before its first token
    prefilled_s      the end of the last chunk, whose token has not been counted
    tokens_reported  its output as of its last move; tokens_seen: those of the traces; tokens_missed: those before them
    """

    engine: int
    id: int
    request_id: str
    tenant: str
    arrived_s: float
    prompt_tokens: int
    is_whole: bool
    tokens_reported: int = 0
    tokens_seen: int = 0
    tokens_missed: int = 0
    doing: Doing = Doing.WAITING
    why: str = ""
    cells: dict[int, Doing] = field(default_factory=dict)
    ending: str = ""
    ended_s: float = math.inf
    last_token_s: float | None = None
    prefilled_s: float | None = None

    @property
    def output_tokens(self) -> int:
        return max(self.tokens_reported, self.tokens_missed + self.tokens_seen)

    def paint(self, doing: Doing, start_s: float, end_s: float) -> None:
        for cell in range(math.floor(start_s / CELL_S), math.ceil(end_s / CELL_S)):
            shown = self.cells.get(cell)
            if shown is None or _RANK[doing] < _RANK[shown]:
                self.cells[cell] = doing
        if len(self.cells) > 2 * CELLS_KEPT:
            self.cells = {cell: self.cells[cell] for cell in sorted(self.cells)[-CELLS_KEPT:]}


@dataclass(slots=True)
class Second:
    """What the engines did in a second. Latencies are counted by multiples of LATENCY_UNIT_S."""

    output_tokens: int = 0
    prefill_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)


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
        engines = {}
        for timeline in timelines(parts):
            engine = engines[timeline.engine] = self._engines.get(timeline.engine) or _Engine(timeline.engine)
            self.now = engine.read(timeline, self._clock(), window_s, self._seconds)
        self._engines = engines
        self._seconds = {at: each for at, each in self._seconds.items() if at > self.now - SECONDS_KEPT}

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
        return [self._seconds.get(at) for at in range(newest - count + 1, newest + 1)]

    def latencies(self) -> Latencies:
        """Those of the last minute, or of the part of it that traces cover."""
        ttft: Counter[int] = Counter()
        itl: Counter[int] = Counter()
        last = [second for at, second in self._seconds.items() if at > self.now - MINUTE_S - 1]
        for second in last:
            ttft.update(second.ttft)
            itl.update(second.itl)
        return Latencies(min(MINUTE_S, len(last)), _percentiles(ttft), _percentiles(itl))


def _percentiles(counts: Counter[int]) -> tuple[float, float] | None:
    """The median and the 95th percentile: the smallest values that so many do not exceed."""
    if not counts:
        return None
    values = sorted(counts)
    up_to = list(itertools.accumulate(counts[value] for value in values))
    median, p95 = (values[bisect.bisect_left(up_to, share * up_to[-1])] for share in (0.5, 0.95))
    return median * LATENCY_UNIT_S, p95 * LATENCY_UNIT_S


class _Engine:
    """One engine's sequences, as its traces show them."""

    def __init__(self, number: int) -> None:
        self.sequences: dict[int, Followed] = {}
        self.hold = ""
        self._number = number
        self._offset: float | None = None  # from the engine's clock to this process's
        self._seen = -math.inf  # the end of the last step that has been counted

    def read(self, timeline: Timeline, now: float, window_s: float, seconds: dict[int, Second]) -> float:
        """Take in a trace. Return when it was taken, on this process's clock."""
        taken_at = timeline.origin_s + timeline.taken_s
        if self._offset is None or abs(now - taken_at - self._offset) > CLOCK_JUMP_S:
            self._offset, self._seen = now - taken_at, -math.inf
        origin, taken_at = timeline.origin_s + self._offset, taken_at + self._offset
        since = taken_at - window_s
        seen = max(self._seen, since)
        for at in range(math.ceil(seen), math.floor(taken_at) + 1):
            seconds.setdefault(at, Second())
        for step in timeline.steps:
            if origin + step.end_s > seen:
                _second(seconds, origin + step.end_s).prefill_tokens += step.prefill_tokens
        if timeline.steps:
            self.hold = timeline.steps[-1].hold
            self._seen = max(seen, origin + timeline.end_s + ROUNDING_S)
        named = set()
        for track in (*timeline.tracks, *timeline.still):
            is_new, sequence = self._followed(track, origin, since)
            named.add(sequence.id)
            _move(sequence, track, origin, seen)
            for token_s, gap_s, is_first in _new_tokens(sequence, track, origin, seen):
                second = _second(seconds, token_s)
                second.output_tokens += 1
                if gap_s is not None:
                    (second.ttft if is_first else second.itl)[round(gap_s / LATENCY_UNIT_S)] += 1
            sequence.tokens_reported = track.tokens - track.prompt_tokens
            if is_new and not sequence.is_whole:
                uncounted = sequence.prefilled_s is not None
                sequence.tokens_missed = max(0, sequence.tokens_reported - sequence.tokens_seen - uncounted)
        self.sequences = {
            id: each
            for id, each in self.sequences.items()
            if (taken_at - each.ended_s < ENDED_SHOWN_S if each.ending else id in named)
        }
        return taken_at

    def _followed(self, track: Track, origin: float, since: float) -> tuple[bool, Followed]:
        """The track's sequence, and whether it is new."""
        arrived_s = origin + track.arrived_s
        sequence = self.sequences.get(track.sequence)
        is_new = sequence is None or abs(sequence.arrived_s - arrived_s) > SAME_ARRIVAL_S
        if sequence is None or is_new:
            sequence = self.sequences[track.sequence] = Followed(
                engine=self._number,
                id=track.sequence,
                request_id=track.request_id,
                tenant=track.tenant,
                arrived_s=arrived_s,
                prompt_tokens=track.prompt_tokens,
                is_whole=arrived_s >= since or track.last_move == "waits",
            )
        return is_new, sequence


def _second(seconds: dict[int, Second], at: float) -> Second:
    return seconds.setdefault(math.floor(at), Second())


def _move(sequence: Followed, track: Track, origin: float, seen: float) -> None:
    """Let a sequence do what its track shows of the time after `seen`."""
    for span in track.spans:
        if origin + span.end_s > seen:
            sequence.paint(span.doing, origin + span.start_s, origin + span.end_s)
            sequence.doing, sequence.why = span.doing, span.why
    if track.last_move in _ENDINGS:
        sequence.ending, sequence.ended_s = track.last_move, origin + track.moves[-1][0]
    elif not track.spans and (sequence.doing is Doing.WAITING or track.last_move != "started"):
        sequence.doing = _DOING_AFTER.get(track.last_move, sequence.doing)


def _new_tokens(
    sequence: Followed, track: Track, origin: float, seen: float
) -> Iterator[tuple[float, float | None, bool]]:
    """Yield each token after `seen`: its time, the gap before it, and whether it is the sequence's first.

    The first token's gap begins with the sequence's arrival. A gap is None if its begin was not seen. The last chunk of
    a prompt computes a token too; that a chunk was the last is known once the sequence decodes or finishes.
    """
    chunks = [(origin + span.end_s, True) for span in track.spans if span.doing is Doing.PREFILL]
    decodes = [(origin + end_s, False) for end_s in track.decoded]
    new = sorted(each for each in chunks + decodes if each[0] > seen)
    if track.last_move == "finished":
        new.append((math.inf, False))
    for at, is_chunk in new:
        if is_chunk:
            sequence.prefilled_s = at
            continue
        for end_s in (sequence.prefilled_s, at):
            if end_s is not None and end_s < math.inf:
                last, sequence.last_token_s = sequence.last_token_s, end_s
                begin = sequence.arrived_s if last is None and sequence.is_whole else last
                sequence.tokens_seen += 1
                yield end_s, None if begin is None else end_s - begin, last is None
        sequence.prefilled_s = None
