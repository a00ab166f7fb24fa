"""Judges a chaos run after the fact, from what the clients saw and what the server holds. It knows no server.

Each check returns violations: sentences, none if the promise was kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pagoda.v1 import control_pb2

SPARE_THREADS = 8  # gRPC's pools start and end threads when they like
HALF_A_CHARACTER = "\ufffd"  # the text of a sequence that was cut inside a character ends with it
CANARY_TOKENS = 6  # shorter runs of tokens occur in several outputs by chance
LONGEST_REPORT = 20

OK, CANCELLED, UNAVAILABLE = "OK", "CANCELLED", "UNAVAILABLE"
INVALID, EXHAUSTED, DEADLINE = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"
NOT_FOUND = "NOT_FOUND"


@dataclass
class Output:
    """One sequence as a client received it; `reasons` and `matched` of its `finished` events, one if all is well."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasons: list[str] = field(default_factory=list)
    matched: str = ""
    num_after_end: int = 0  # events after the first `finished`
    end: str = ""  # the part of the text that came after the last token


@dataclass
class Outcome:
    """How a call ended, as its client saw it.

    item          the catalogue's item that it asked for; None: one that must be refused
    scopes        what faults can be about: "cable"
    allowed       statuses that the call itself explains, such as DEADLINE_EXCEEDED
    was_cancelled its client cancelled it while it was live; `was_aborted`: through Admin.Abort
    usage         completion tokens of the last message; None: it did not come
    """

    call: int
    item: int | None
    began_s: float
    ended_s: float = 0.0
    status: str = ""
    details: str = ""
    error_reason: str = ""
    retry_s: float | None = None
    pushback: str = ""
    scopes: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()
    was_cancelled: bool = False
    was_aborted: bool = False
    outputs: dict[int, Output] = field(default_factory=dict)
    usage: int | None = None
    completed_s: float = 0.0  # when the last message came
    num_after_last: int = 0  # messages after the one with `usage`

    def __str__(self) -> str:
        return f"call {self.call} (item {self.item}, {self.status} {self.details!r})"


@dataclass(frozen=True)
class Window:
    """A time in which a fault explains statuses of the calls that ran then.

    explains  status → the scope of calls that may end so; empty: all calls
    """

    fault: str
    since_s: float
    until_s: float
    explains: Mapping[str, str]

    def covers(self, outcome: Outcome) -> bool:
        scope = self.explains.get(outcome.status)
        if scope is None or (scope and scope not in outcome.scopes):
            return False
        return self.since_s <= outcome.ended_s and outcome.began_s <= self.until_s


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    children: int
    tasks: int
    memory_bytes: int


# -- calls ------------------------------------------------------------------------------------------------------------


def check_outcomes(calls: Iterable[int], outcomes: Sequence[Outcome]) -> list[str]:
    """Every call has exactly one outcome, and every outcome has a status."""
    ends = Counter(outcome.call for outcome in outcomes)
    violations = [f"call {call} has {ends.pop(call, 0)} outcomes" for call in calls if ends.get(call, 0) != 1]
    violations += [f"{outcome} never ended" for outcome in outcomes if not outcome.status]
    known = set(calls)
    return violations + [f"an outcome of call {call}, which was never made" for call in ends if call not in known]


def check_status(outcome: Outcome, windows: Sequence[Window]) -> list[str]:
    """A status that is not OK has a reason: the client, the call itself, a full server, or a fault at that time."""
    status = outcome.status
    if status in (OK, "") or status in outcome.allowed or (status == CANCELLED and outcome.was_cancelled):
        return []
    if status == EXHAUSTED:
        if not (outcome.error_reason and outcome.retry_s and outcome.pushback):
            return [f"{outcome} is a refusal without a reason or a retry delay"]
        return []
    return [] if any(window.covers(outcome) for window in windows) else [f"{outcome} has no cause"]


def check_stream(outcome: Outcome, solo: Mapping[int, Sequence[Output]]) -> list[str]:
    """What a stream delivered is what its solo run gives, as far as it got; one that completed has all of it."""
    if outcome.item is None:
        delivered = any(output.ids or output.text for output in outcome.outputs.values())
        return [f"{outcome} delivered tokens"] if delivered or outcome.status == OK else []
    expected = solo[outcome.item]
    violations = []
    if outcome.num_after_last:
        violations.append(f"{outcome}: {outcome.num_after_last} messages after the last one")
    # A connection that breaks, or a deadline that passes, may take the status of a stream that is complete.
    if outcome.usage is not None and outcome.status not in (OK, UNAVAILABLE, DEADLINE) and not outcome.was_cancelled:
        violations.append(f"{outcome} completed and failed")
    if outcome.status == OK and outcome.usage is None:
        violations.append(f"{outcome} has no last message")
    if outcome.usage is not None:
        received = sum(len(output.ids) for output in outcome.outputs.values())
        if received != outcome.usage:
            violations.append(f"{outcome} delivered {received} tokens and reports {outcome.usage}")
    for index in set(range(len(expected))) | outcome.outputs.keys():
        output = outcome.outputs.get(index, Output())
        violations += [f"{outcome}, sequence {index}: {fault}" for fault in _faults_of(outcome, output, index, solo)]
    return violations


def _faults_of(outcome: Outcome, output: Output, index: int, solo: Mapping[int, Sequence[Output]]) -> Iterable[str]:
    assert outcome.item is not None
    if index >= len(solo[outcome.item]):
        yield "was not asked for"
        return
    right = solo[outcome.item][index]
    if len(output.reasons) > 1 or output.num_after_end:
        yield f"ended {len(output.reasons)} times, {output.num_after_end} events after its end"
    is_cut = output.reasons == [CANCELLED]
    if is_cut and not (outcome.was_aborted or outcome.was_cancelled):
        yield "was cut, though nothing aborted it"
    if output.ids != right.ids[: len(output.ids)]:
        yield f"{output.ids} instead of {right.ids}{_owner(output.ids, outcome.item, solo)}"
    elif not right.text.startswith(output.text.rstrip(HALF_A_CHARACTER) if is_cut else output.text):
        yield f"text {output.text!r} instead of {right.text!r}"
    elif output.reasons and not is_cut and (output.ids, output.text) != (right.ids, right.text):
        yield f"ended after {len(output.ids)} of {len(right.ids)} tokens, text {output.text!r} of {right.text!r}"
    elif output.reasons and not is_cut and (output.reasons, output.matched) != (right.reasons, right.matched):
        yield f"ended by {output.reasons} {output.matched!r} instead of {right.reasons} {right.matched!r}"
    if outcome.status == OK and not output.reasons:
        yield "did not end"


def _owner(ids: Sequence[int], item: int, solo: Mapping[int, Sequence[Output]]) -> str:
    """Whose tokens these are, if another item's output holds a run of them that this item's outputs do not."""
    own = {run for output in solo[item] for run in _runs(output.ids)}
    foreign = set(_runs(ids)) - own
    for other, outputs in solo.items():
        if other != item and any(foreign & set(_runs(output.ids)) for output in outputs):
            return f": it has tokens of item {other}"
    return ""


def _runs(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[at : at + CANARY_TOKENS]) for at in range(len(ids) - CANARY_TOKENS + 1)]


def check_canaries(solo: Mapping[int, Sequence[Output]]) -> list[str]:
    """Solo runs tell requests apart: no two items that are long enough have the same first tokens."""
    owners: dict[tuple[int, ...], int] = {}
    violations = []
    for item, outputs in solo.items():
        head = tuple(outputs[0].ids[:CANARY_TOKENS])
        if len(head) == CANARY_TOKENS and owners.setdefault(head, item) != item:
            violations.append(f"items {owners[head]} and {item} both begin with {head}")
    return violations


# -- the server -------------------------------------------------------------------------------------------------------


def check_idle(load: control_pb2.Load) -> list[str]:
    """An idle server holds no request, no reserved token and no referenced block."""
    violations = []
    if load.requests or load.reserved_tokens:
        violations.append(f"idle, with {load.requests} requests and {load.reserved_tokens} reserved tokens")
    for engine in load.engines:
        if engine.running or engine.waiting or engine.blocks_referenced or engine.kv_slots or engine.host_blocks_used:
            violations.append(f"idle, with an engine that holds {str(engine)!r}")
        if engine.blocks_free + engine.blocks_evictable != engine.blocks_total:
            violations.append(
                f"{engine.blocks_free} free and {engine.blocks_evictable} evictable of {engine.blocks_total} blocks"
            )
    return violations


def check_held(role: str, base: Held, now: Held, spare_bytes: int) -> list[str]:
    """A process holds no more than one of its role did before the faults; its memory may grow by `spare_bytes`."""
    violations = [
        f"{role}: {getattr(now, name)} {name}, {getattr(base, name)} before the faults"
        for name, spare in (("descriptors", 0), ("tasks", 0), ("children", 0), ("threads", SPARE_THREADS))
        if getattr(now, name) > getattr(base, name) + spare
    ]
    if now.memory_bytes > base.memory_bytes + spare_bytes:
        grown = now.memory_bytes - base.memory_bytes
        violations.append(f"{role}: {grown / 1e6:.0f} MB more memory, {spare_bytes / 1e6:.0f} MB are allowed")
    return violations


_TROUBLE = re.compile(r"Traceback|Error\b.*\n|ERROR|CRITICAL|Exception|never (retrieved|awaited)|[Aa]ssert|panicked")


def check_log(log: str, explained: Sequence[str]) -> list[str]:
    """The log has no traceback, and no error line but those that match one of the patterns."""
    return [
        f"log: {line}"
        for line in log.splitlines(keepends=True)
        if _TROUBLE.search(line) and not any(re.search(pattern, line) for pattern in explained)
    ]


def check_cancels(by_steps: Mapping[int, int], at_most: int) -> list[str]:
    """Cancelled sequences gave their blocks back within that many steps."""
    late = {steps: count for steps, count in by_steps.items() if steps > at_most and count}
    return [f"cancels that took more than {at_most} steps, by steps: {late}"] if late else []


def check_calls(
    calls: Iterable[int], outcomes: Sequence[Outcome], windows: Sequence[Window], solo: Mapping[int, Sequence[Output]]
) -> list[str]:
    """All that is promised of calls."""
    violations = check_outcomes(calls, outcomes)
    for outcome in outcomes:
        violations += check_status(outcome, windows) + check_stream(outcome, solo)
    return violations


def report(violations: Sequence[str]) -> str:
    """The violations as lines, the first ones if there are many."""
    more = len(violations) - LONGEST_REPORT
    return "\n".join([*violations[:LONGEST_REPORT], *([f"… and {more} more"] if more > 0 else [])])
