"""A step trace as spans of time, and those spans as Chrome trace JSON.

Times are seconds from the first step on. What a sequence does in consecutive steps is one span.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from pagoda.v1 import trace_pb2
from pagoda_server.router.telemetry.trace_reader import hold_name

# -- spans -------------------------------------------------------------------------------------------------------------


MoveKind = trace_pb2.MoveKind


# Moves of a sequence that has run, if it has computed tokens.
_LEAVES_RUNNING = (
    MoveKind.MOVE_KIND_PREEMPTED,
    MoveKind.MOVE_KIND_FINISHED,
    MoveKind.MOVE_KIND_ABORTED,
    MoveKind.MOVE_KIND_EXPIRED,
    MoveKind.MOVE_KIND_FAILED,
)


class Doing(StrEnum):
    """What a sequence does during a span. The last three happen in steps."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    HELD = "held"  # it runs, but takes no part in a step
    PREFILL = "prefill"
    DECODE = "decode"
    PADDING = "padding"  # computed and dropped, because the sequence had ended


@dataclass(slots=True)
class Span:
    """tokens: computed in the span; why: the reason for not computing."""

    doing: Doing
    start_s: float
    end_s: float
    tokens: int = 0
    steps: int = 0
    why: str = ""


@dataclass(slots=True)
class Track:
    """One sequence.

    tokens     of its prompt and output, as of its last move
    last_move  the kind of that move: "waits", "started", or one of `moves`
    moves      when it was preempted or ended, and the kind of each move
    decoded    the end of each step that decoded it, which gave it a token
    """

    sequence: int
    request_id: str = ""
    tenant: str = ""
    arrived_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    last_move: str = ""
    spans: list[Span] = field(default_factory=list)
    moves: list[tuple[float, str]] = field(default_factory=list)
    decoded: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    start_s: float
    end_s: float
    decode_tokens: int
    prefill_tokens: int
    sequences: int
    running: int
    waiting: int
    next_in_line: int | None
    hold: str
    blocks_free: int
    blocks_evictable: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One engine's trace. Tracks are in the order of their sequences' first spans.

    taken_s  when the trace was taken; the first step is at 0
    still    live sequences without a span: no step has ended since they came
    """

    engine: int
    name: str
    taken_s: float
    token_budget: int
    blocks_total: int
    steps: list[Step]
    tracks: list[Track]
    still: list[Track]

    @property
    def end_s(self) -> float:
        return self.steps[-1].end_s if self.steps else 0.0


def timelines(parts: Iterable[trace_pb2.StepTracePart]) -> list[Timeline]:
    """One timeline for each engine."""
    by_engine: dict[int, list[trace_pb2.StepTracePart]] = {}
    for part in parts:
        by_engine.setdefault(part.engine, []).append(part)
    return [_Reader(parts).timeline() for _, parts in sorted(by_engine.items())]


class _Reader:
    def __init__(self, parts: Sequence[trace_pb2.StepTracePart]) -> None:
        self._first = parts[0]
        self._steps = [step for part in parts for step in part.steps]
        self._moves = [move for part in parts for move in part.moves]
        starts = [step.start_s for step in self._steps[:1]] or [self._first.taken_at_s]
        self._origin = starts[0]
        self._tracks: dict[int, Track] = {}
        self._ends: dict[int, float] = {}  # when sequences ended
        self._running: dict[int, tuple[int, Span]] = {}  # the last step in which a sequence ran, and its span

    def timeline(self) -> Timeline:
        self._read_moves()
        steps = [self._read_step(index, step, ids) for index, (step, ids) in enumerate(self._with_ids())]
        tracks = [track for track in self._tracks.values() if track.spans or track.moves]
        for track in tracks:
            track.spans = _in_order(track.spans)
        tracks.sort(key=lambda track: (track.spans[0].start_s if track.spans else track.moves[0][0], track.sequence))
        return Timeline(
            engine=self._first.engine,
            name=self._first.name,
            taken_s=self._first.taken_at_s - self._origin,
            token_budget=self._first.token_budget,
            blocks_total=self._first.blocks_total,
            steps=steps,
            tracks=tracks,
            still=[track for track in self._tracks.values() if not track.spans and not track.moves],
        )

    def _track(self, id: int) -> Track:
        return self._tracks.setdefault(id, Track(id))

    # -- waiting sequences ------------------------------------------------------------------------------------------

    def _read_moves(self) -> None:
        holds = _Holds(self._steps, self._origin)
        end_s = (self._steps[-1].end_s if self._steps else self._first.taken_at_s) - self._origin
        waiting: dict[int, tuple[Doing, float]] = {}
        for move in self._moves:
            at = max(0.0, move.at_s - self._origin)
            if move.sequence not in self._tracks and not (move.computed_tokens and move.kind in _LEAVES_RUNNING):
                waiting[move.sequence] = (Doing.WAITING, max(0.0, move.arrived_s - self._origin))
            track = self._track(move.sequence)
            track.request_id, track.tenant = move.request_id, move.tenant
            track.arrived_s = move.arrived_s - self._origin
            track.prompt_tokens, track.tokens = move.prompt_tokens, move.tokens
            track.last_move = MoveKind.Name(move.kind).removeprefix("MOVE_KIND_").lower()
            if move.kind == MoveKind.MOVE_KIND_WAITS:
                continue
            if since := waiting.pop(move.sequence, None):
                track.spans += holds.spans(*since, at)
            if move.kind == MoveKind.MOVE_KIND_STARTED:
                continue
            if move.kind == MoveKind.MOVE_KIND_PREEMPTED:
                waiting[move.sequence] = (Doing.PREEMPTED, at)
            else:
                self._ends[move.sequence] = at
            track.moves.append((at, track.last_move))
        for id, since in waiting.items():
            self._tracks[id].spans += holds.spans(*since, end_s)

    # -- running sequences-------------------------------------------------------------------------------------------

    def _with_ids(self) -> Iterator[tuple[trace_pb2.TracedStep, Sequence[int]]]:
        ids: Sequence[int] = ()
        for step in self._steps:
            ids = step.sequences if self._first.is_partial else step.sequences or ids
            yield step, ids

    def _read_step(self, at: int, step: trace_pb2.TracedStep, ids: Sequence[int]) -> Step:
        start, end = step.start_s - self._origin, step.end_s - self._origin
        num_decodes = len(ids) - len(step.chunk_lengths)
        for id in ids[:num_decodes]:
            self._extend(id, at, Doing.DECODE, start, end, 1)
        prefill_tokens, num_prefills = 0, 0
        for id, first, length in zip(ids[num_decodes:], step.chunk_starts, step.chunk_lengths, strict=True):
            if 0 < self._track(id).prompt_tokens <= first:  # drafts are verified, or tokens that no step chose computed
                self._extend(id, at, Doing.DECODE, start, end, 1)
                continue
            self._extend(id, at, Doing.PREFILL, start, end, length)
            prefill_tokens += length
            num_prefills += 1
        for id, reason in zip(step.idle, step.idle_reasons, strict=True):
            self._extend(id, at, Doing.HELD, start, end, 0, hold_name(reason))
        return Step(
            start_s=start,
            end_s=end,
            decode_tokens=len(ids) - num_prefills,
            prefill_tokens=prefill_tokens,
            sequences=len(ids),
            running=step.running,
            waiting=step.waiting,
            next_in_line=step.next_in_line if step.HasField("next_in_line") else None,
            hold=hold_name(step.hold),
            blocks_free=step.blocks_free,
            blocks_evictable=step.blocks_evictable,
        )

    def _extend(self, id: int, at: int, doing: Doing, start: float, end: float, tokens: int, why: str = "") -> None:
        if start >= self._ends.get(id, end):
            doing = Doing.PADDING
        last, span = self._running.get(id, (-1, None))
        if span is None or last != at - 1 or (span.doing, span.why) != (doing, why):
            span = Span(doing, start, end, why=why)
            self._track(id).spans.append(span)
        span.end_s = end
        span.tokens += tokens
        span.steps += 1
        if doing is Doing.DECODE:
            self._track(id).decoded.append(end)
        self._running[id] = (at, span)


def _in_order(spans: list[Span]) -> list[Span]:
    """Sort spans without overlaps: a sequence that is preempted during its last step waits from that step's end."""
    ordered: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        if ordered:
            span.start_s = min(max(span.start_s, ordered[-1].end_s), span.end_s)
        if span.end_s > span.start_s or span.steps:
            ordered.append(span)
    return ordered


class _Holds:
    """What held up the next in line, and so every waiting sequence, over time."""

    def __init__(self, steps: Iterable[trace_pb2.TracedStep], origin: float) -> None:
        self._since: list[float] = []
        self._why: list[str] = []
        for step in steps:
            why = hold_name(step.hold)
            if not self._why or self._why[-1] != why:
                self._since.append(step.start_s - origin)
                self._why.append(why)

    def spans(self, doing: Doing, start: float, end: float) -> Iterator[Span]:
        """Split a wait from `start` to `end` into one span per reason."""
        at = max(0, bisect.bisect_right(self._since, start) - 1)
        while start < end:
            until = min(end, self._since[at + 1]) if at + 1 < len(self._since) else end
            if until > start:
                yield Span(doing, start, until, why=self._why[at] if self._why else "")
            start, at = until, at + 1


# -- Chrome trace JSON -------------------------------------------------------------------------------------------------


Event: TypeAlias = dict[str, Any]

_STEPS_THREAD = 1
_FIRST_TRACK = 2


def trace_document(engines: Iterable[Timeline]) -> dict[str, Any]:
    """A document in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    An engine is a process, its steps one thread and each sequence another; batch, tokens, queue and blocks are
    counters. Timestamps are in microseconds.
    """
    events = [event for timeline in engines for event in _engine(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _engine(timeline: Timeline) -> Iterator[Event]:
    pid = timeline.engine + 1
    yield _name(pid, 0, "process_name", f"engine {timeline.name or timeline.engine}")
    yield _name(pid, _STEPS_THREAD, "thread_name", "steps")
    for step in timeline.steps:
        yield from _step(pid, step, timeline.blocks_total)
    for tid, track in enumerate(timeline.tracks, _FIRST_TRACK):
        yield from _track(pid, tid, track)


def _step(pid: int, step: Step, blocks_total: int) -> Iterator[Event]:
    tokens = {"decode": step.decode_tokens, "prefill": step.prefill_tokens}
    args: Event = {"sequences": step.sequences, **tokens, "waiting": step.waiting}
    if step.next_in_line is not None:
        args |= {"next in line": step.next_in_line, "held by": step.hold}
    title = " + ".join(f"{count} {what}" for what, count in tokens.items() if count)
    yield _slice(pid, _STEPS_THREAD, title, step.start_s, step.end_s, args)
    free, evictable = step.blocks_free, step.blocks_evictable
    blocks = {"referenced": blocks_total - free - evictable, "evictable": evictable, "free": free}
    for counter, values in (
        ("tokens in the step", tokens),
        ("sequences", {"running": step.running, "waiting": step.waiting}),
        ("KV blocks", blocks),
    ):
        yield {"ph": "C", "pid": pid, "tid": 0, "ts": _us(step.start_s), "name": counter, "args": values}


def _track(pid: int, tid: int, track: Track) -> Iterator[Event]:
    title = f"{track.sequence} {track.request_id}".rstrip()
    yield _name(pid, tid, "thread_name", title)
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    for span in track.spans:
        args: Event = {"sequence": track.sequence, "request": track.request_id, "prompt tokens": track.prompt_tokens}
        if span.steps:
            args["steps"] = span.steps
        if span.doing in (Doing.PREFILL, Doing.DECODE, Doing.PADDING):
            args["tokens"] = span.tokens
        title = f"{span.doing}: {span.why}" if span.why else str(span.doing)
        yield _slice(pid, tid, title, span.start_s, span.end_s, args)
    for at, what in track.moves:
        yield {"ph": "i", "pid": pid, "tid": tid, "ts": _us(at), "name": what, "s": "t"}


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float, args: Event) -> Event:
    # Round the end, not the length, so that neighbours never overlap.
    start = _us(start_s)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": _us(end_s) - start, "name": name, "args": args}


def _name(pid: int, tid: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
