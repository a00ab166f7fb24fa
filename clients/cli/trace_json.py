"""A step trace in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

An engine is a process, its steps one thread and each sequence another; batch, tokens, queue and blocks are counters.
Timestamps are microseconds from the first step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from pagoda_server.cli.trace_timeline import Doing, Step, Timeline, Track

Event: TypeAlias = dict[str, Any]

_STEPS_THREAD = 1
_FIRST_TRACK = 2


def trace_document(engines: Iterable[Timeline]) -> dict[str, Any]:
    """The whole file, for json.dump."""
    events = [event for timeline in engines for event in _engine(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _engine(timeline: Timeline) -> Iterator[Event]:
    pid = timeline.engine + 1
    yield _name(pid, 0, "process_name", f"engine {timeline.engine}")
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
    # The end is rounded, not the length: neighbours never overlap.
    start = _us(start_s)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": _us(end_s) - start, "name": name, "args": args}


def _name(pid: int, tid: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
