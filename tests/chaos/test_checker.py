"""The judge of chaos runs sees what is planted: each test breaks one promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pagoda.v1 import control_pb2, inference_pb2
from tests.chaos.checker import (
    CANCELLED,
    EXHAUSTED,
    OK,
    UNAVAILABLE,
    Held,
    Outcome,
    Output,
    Window,
    check_calls,
    check_canaries,
    check_cancels,
    check_held,
    check_idle,
    check_log,
    report,
)
from tests.chaos.load import take


def ended(ids: list[int], reason: str = "LENGTH") -> Output:
    return Output(ids, "".join(chr(97 + id % 26) for id in ids), [reason], "0")


SOLO = {0: [ended(list(range(10)))], 1: [ended(list(range(40, 50))), ended(list(range(60, 70)))]}
LOST = Window("kill", 10.0, 20.0, {UNAVAILABLE: ""})


def good() -> Outcome:
    return Outcome(7, 1, 1.0, 2.0, OK, outputs=dict(enumerate([replace(each) for each in SOLO[1]])), usage=20)


def failed(status: str, **fields: object) -> Outcome:
    outputs = {0: Output(list(range(40, 43)), SOLO[1][0].text[:3])}
    return Outcome(7, 1, 15.0, 16.0, status, outputs=outputs, **fields)  # type: ignore[arg-type]


def check(outcome: Outcome) -> list[str]:
    return check_calls([7], [outcome], [LOST], SOLO)


def test_what_is_as_promised_is_no_violation() -> None:
    refusal = {"error_reason": "QUEUE_FULL", "retry_s": 0.1, "pushback": "100"}
    cut = Output(list(range(40, 44)), SOLO[1][0].text[:3] + "\ufffd", [CANCELLED], "0")
    for outcome in (
        good(),
        failed(UNAVAILABLE),
        failed(EXHAUSTED, **refusal),
        failed(EXHAUSTED, allowed=frozenset({EXHAUSTED})),
        failed(CANCELLED, was_cancelled=True),
        replace(good(), was_aborted=True, outputs={0: cut, 1: SOLO[1][1]}, usage=14),
        Outcome(7, None, 1.0, 2.0, "INVALID_ARGUMENT", allowed=frozenset({"INVALID_ARGUMENT"})),
    ):
        assert check(outcome) == []
    assert check_canaries(SOLO) == []


def with_output(index: int, **fields: object) -> Callable[[Outcome], None]:
    def change(outcome: Outcome) -> None:
        outcome.outputs[index] = replace(outcome.outputs[index], **fields)  # type: ignore[arg-type]

    return change


BROKEN: dict[str, tuple[Callable[[Outcome], None], str]] = {
    "a wrong token": (with_output(0, ids=[40, 41, 42, 99, *range(44, 50)]), "instead of"),
    "another's tokens": (with_output(0, ids=list(range(10))), "it has tokens of item 0"),
    "the other sequence's tokens": (with_output(0, ids=list(range(60, 70))), "instead of"),
    "a lost token": (with_output(0, ids=[40, 41, *range(43, 50)]), "instead of"),
    "too few tokens": (with_output(1, ids=list(range(60, 69))), "after 9 of 10 tokens"),
    "half a character": (with_output(1, text=SOLO[1][1].text[:3] + "\ufffd"), "instead of"),
    "wrong text": (with_output(1, text="x"), "text 'x' instead of"),
    "lost text": (with_output(1, text=SOLO[1][1].text[:-1]), "of 'ijklmnopqr'"),
    "another reason": (with_output(0, reasons=["STOP"]), "ended by ['STOP']"),
    "another stop": (with_output(0, matched="7"), "ended by"),
    "two ends": (with_output(0, reasons=["LENGTH", "LENGTH"]), "ended 2 times"),
    "tokens after the end": (with_output(0, num_after_end=1), "1 events after its end"),
    "no end": (with_output(0, reasons=[]), "did not end"),
    "cut by nobody": (with_output(0, reasons=[CANCELLED]), "nothing aborted it"),
    "a missing sequence": (lambda outcome: outcome.outputs.pop(1), "sequence 1: did not end"),  # type: ignore[arg-type,return-value]
    "a sequence too many": (lambda outcome: outcome.outputs.update({2: Output()}), "was not asked for"),
    "no last message": (lambda outcome: setattr(outcome, "usage", None), "no last message"),
    "wrong usage": (lambda outcome: setattr(outcome, "usage", 21), "delivered 20 tokens and reports 21"),
    "messages after the last": (lambda outcome: setattr(outcome, "num_after_last", 1), "1 messages after the last"),
    "completed and failed": (lambda outcome: setattr(outcome, "status", "INTERNAL"), "completed and failed"),
    "no status": (lambda outcome: setattr(outcome, "status", ""), "never ended"),
    "tokens of a bad request": (lambda outcome: setattr(outcome, "item", None), "delivered tokens"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_stream_that_is_not_its_solo_run_is_found(broken: str) -> None:
    change, complaint = BROKEN[broken]
    outcome = good()
    change(outcome)
    assert any(complaint in violation for violation in check(outcome)), check(outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        failed("INTERNAL"),
        failed("UNKNOWN"),
        failed(CANCELLED),
        failed("DEADLINE_EXCEEDED"),
        failed(EXHAUSTED),
        failed(EXHAUSTED, error_reason="QUEUE_FULL"),
        failed(EXHAUSTED, error_reason="QUEUE_FULL", retry_s=0.1),
        replace(failed(UNAVAILABLE), began_s=21.0, ended_s=22.0),
        replace(failed(UNAVAILABLE), began_s=1.0, ended_s=9.0),
    ],
    ids=lambda outcome: f"{outcome.status} {outcome.error_reason} {outcome.began_s:g}",
)
def test_a_status_without_a_cause_is_found(outcome: Outcome) -> None:
    assert len(check(outcome)) == 1


def test_a_fault_explains_only_calls_of_its_scope() -> None:
    cable = replace(LOST, explains={UNAVAILABLE: "cable"})
    assert check_calls([7], [failed(UNAVAILABLE, scopes=frozenset({"cable"}))], [cable], SOLO) == []
    assert check_calls([7], [failed(UNAVAILABLE, scopes=frozenset({"chat"}))], [cable], SOLO)


def test_lost_and_doubled_outcomes_are_found() -> None:
    assert check_calls([7, 8], [good()], [], SOLO) == ["call 8 has 0 outcomes"]
    assert check_calls([7], [good(), good()], [], SOLO) == ["call 7 has 2 outcomes"]
    assert check_calls([], [good()], [], SOLO) == ["an outcome of call 7, which was never made"]


def test_items_that_cannot_be_told_apart_are_found() -> None:
    assert check_canaries({0: SOLO[0], 5: [ended(list(range(20)))]})


IDLE = {"blocks_total": 10, "blocks_free": 4, "blocks_evictable": 6}


@pytest.mark.parametrize(
    ("load", "engine"),
    [
        ({"requests": 1}, {}),
        ({"reserved_tokens": 5}, {}),
        ({}, {"running": 1}),
        ({}, {"waiting": 1}),
        ({}, {"host_blocks_used": 1}),
        ({}, {"blocks_free": 3, "blocks_referenced": 1}),
        ({}, {"blocks_free": 3}),
        ({}, {"blocks_free": 5}),
    ],
    ids=str,
)
def test_what_an_idle_server_still_holds_is_found(load: dict[str, int], engine: dict[str, int]) -> None:
    assert check_idle(control_pb2.Load(engines=[control_pb2.EngineLoad(**IDLE)])) == []
    engines = [control_pb2.EngineLoad(**IDLE | engine)]
    assert check_idle(control_pb2.Load(engines=engines, **load))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", ["descriptors", "tasks", "threads", "children", "memory_bytes"])
def test_what_a_process_holds_too_much_is_found(more: str) -> None:
    base = Held(descriptors=20, threads=9, children=3, tasks=12, memory_bytes=50_000_000)
    amount = {"threads": 9, "memory_bytes": 10_000_001}.get(more, 1)
    assert check_held("router", base, base, 10_000_000) == []
    (violation,) = check_held("router", base, replace(base, **{more: getattr(base, more) + amount}), 10_000_000)
    assert violation.startswith("router: ")


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "ValueError: no",
        "2026-01-01 00:00:00,000 pagoda.router ERROR internal error",
        "2026-01-01 00:00:00,000 asyncio ERROR Task exception was never retrieved",
        "RuntimeWarning: coroutine 'x' was never awaited",
    ],
)
def test_trouble_in_the_log_is_found_unless_a_fault_explains_it(line: str) -> None:
    log = f"2026-01-01 00:00:00,000 pagoda.router INFO engine ready\n{line}\n"
    assert len(check_log(log, ["signal SIGKILL"])) == 1
    assert check_log(log, ["signal SIGKILL", line.split()[-1].rstrip(":)")]) == []


def test_late_cancels_are_found() -> None:
    assert check_cancels({0: 5, 2: 1}, at_most=2) == []
    assert check_cancels({0: 5, 3: 1}, at_most=2)


def test_a_report_is_short() -> None:
    assert report([str(at) for at in range(100)]).endswith("\n19\n… and 80 more")


def test_an_outcome_holds_what_the_responses_carry() -> None:
    outcome = Outcome(1, 0, 0.0)
    response = inference_pb2.GenerateResponse
    take(response(tokens={"index": 1, "tokens": [{"id": 5}, {"id": 6}], "text": "ab"}), outcome)
    take(response(tokens={"index": 1, "tokens": [{"id": 7}], "text": "c"}), outcome)
    end = {"index": 1, "reason": "FINISH_REASON_STOP", "stop_string": "c"}
    take(response(finished=end, usage={"completion_tokens": 3}), outcome)
    assert outcome.outputs == {1: Output([5, 6, 7], "abc", ["STOP"], "c")}
    assert (outcome.usage, outcome.num_after_last) == (3, 0)
    take(response(tokens={"index": 1}), outcome)
    assert (outcome.outputs[1].num_after_end, outcome.num_after_last) == (1, 1)
