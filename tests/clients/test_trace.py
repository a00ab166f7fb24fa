"""A step trace as JSON and as a picture: from an engine in simulated time, and from a real server."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from pagoda.v1 import control_pb2_grpc, inference_pb2_grpc, trace_pb2
from pagoda_server.cli.app import app
from pagoda_server.cli.trace_timeline import Doing, Timeline, timelines, trace_document
from pagoda_server.engine.serving.codec import trace_messages
from pagoda_server.router.tenants.caller import Caller, set_caller
from pagoda_server.router.tenants.own_view import seen_trace
from tests.end_to_end.asking import ask, request
from tests.engine.harness import SteppedEngine
from tests.servers import Server, running_server


class TimedEngine(SteppedEngine):
    """Steps of one second each."""

    def step(self, duration_s: float = 1.0):  # type: ignore[no-untyped-def]
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.steps.launch(plan)
        self.now += duration_s
        if self.steps:
            self.steps.commit_oldest()
        self._take_output()
        return plan

    def timeline(self) -> Timeline:
        [timeline] = timelines(trace.part for trace in trace_messages(0, self.steps.trace.take()))
        return timeline


def spans(timeline: Timeline, at: int) -> list[tuple[str, float, float, int, str]]:
    return [(str(s.doing), s.start_s, s.end_s, s.tokens, s.why) for s in timeline.tracks[at].spans]


def check_format(events: list[dict[str, Any]]) -> None:
    """Check the Trace Event Format's rules for the phases in use, and what viewers require of slices."""
    slices = defaultdict(list)
    names = set()
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "X":
                assert isinstance(event["ts"], int)
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                assert event["args"]
                assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
            case "i":
                assert event["s"] in ("t", "p", "g")
                assert event["ts"] >= 0
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                if event["name"] == "thread_name":
                    names.add((event["pid"], event["tid"]))
            case other:
                raise AssertionError(f"phase {other}")
    assert slices.keys() <= names
    for of_thread in slices.values():
        for (_, end), (start, _) in itertools.pairwise(of_thread):
            assert end <= start, "slices of a thread overlap"


def test_what_a_sequence_did_follows_from_its_steps() -> None:
    engine = TimedEngine(token_budget=10, max_num_seqs=2)
    for head, length in ((1, 14), (2, 3), (3, 3)):
        engine.add([head] * length, max_tokens=3)
    for _ in range(8):
        engine.step()
    timeline = engine.timeline()
    assert spans(timeline, 0) == [("prefill", 0, 2, 14, ""), ("decode", 2, 4, 2, "")]
    assert spans(timeline, 2)[0][0] == "waiting"
    assert spans(timeline, 2)[-2][:2] == ("prefill", spans(timeline, 2)[-3][2])
    assert sum(tokens for what, _, _, tokens, _ in spans(timeline, 1) if what == "prefill") == 3
    assert [(move[1]) for track in timeline.tracks for move in track.moves] == ["finished"] * 3


def test_a_chunk_behind_the_prompt_is_a_decode() -> None:
    moves = [trace_pb2.TracedMove(sequence=1, kind=trace_pb2.MOVE_KIND_STARTED, prompt_tokens=6, tokens=6)]
    steps = [
        trace_pb2.TracedStep(start_s=at, end_s=at + 1, sequences=[1], chunk_starts=[start], chunk_lengths=[length])
        for at, (start, length) in enumerate([(0, 6), (6, 5), (8, 3)])  # two steps that verify drafts
    ]
    [timeline] = timelines([trace_pb2.StepTracePart(steps=steps, moves=moves)])
    assert spans(timeline, 0) == [("prefill", 0, 1, 6, ""), ("decode", 1, 3, 2, "")]
    assert [(step.decode_tokens, step.prefill_tokens) for step in timeline.steps] == [(0, 6), (1, 0), (1, 0)]


def test_a_wait_says_what_it_was_for_as_that_changes() -> None:
    engine = TimedEngine(max_num_seqs=1, num_blocks=8, block_size=4)
    engine.add([1] * 4, max_tokens=3)
    engine.add([2] * 4, max_tokens=2)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
    assert spans(engine.timeline(), 1)[0] == ("waiting", 0, 3, 0, "no place")


def test_a_preempted_sequence_waits_between_two_runs() -> None:
    engine = TimedEngine(num_blocks=8, block_size=4)
    for head in (1, 2):
        engine.add([head] * 10, max_tokens=16)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
    timeline = engine.timeline()
    for track, ended in zip(timeline.tracks, engine.ended.values(), strict=True):
        doing = [span.doing for span in track.spans]
        if ended.seq.account.preemptions:
            waited = sum(span.end_s - span.start_s for span in track.spans if span.doing is Doing.PREEMPTED)
            assert waited == ended.seq.account.preempted_s
        assert doing[-1] is Doing.DECODE
    assert any(span.doing is Doing.PREEMPTED for track in timeline.tracks for span in track.spans)


async def test_a_tenants_own_trace_tells_of_its_sequences_what_the_whole_trace_tells() -> None:
    engine = TimedEngine(num_blocks=16, token_budget=20, max_num_seqs=5)
    for head in range(12):
        engine.add([head] * (1 + 3 * head), max_tokens=1 + head, tenant="ab"[head % 3 == 0])
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step(0.0625)
    parts = [trace.part for trace in trace_messages(0, engine.steps.trace.take())]
    set_caller(Caller("b", frozenset(), is_proven=True))
    own = [part async for part in seen_trace(parts)]
    [whole], [seen] = timelines(parts), timelines(own)
    theirs = {move.sequence for part in parts for move in part.moves if move.tenant == "b"}
    tracks = {track.sequence: track for track in whole.tracks}
    assert {track.sequence for track in seen.tracks} == theirs == {0, 3, 6, 9}
    for track in seen.tracks:
        assert (track.spans, track.moves) == (tracks[track.sequence].spans, tracks[track.sequence].moves)
    assert [(step.running, step.waiting, step.hold) for step in seen.steps] == [
        (step.running, step.waiting, step.hold) for step in whole.steps
    ]
    assert any(step.sequences < whole.steps[at].sequences for at, step in enumerate(seen.steps))
    check_format(trace_document([seen])["traceEvents"])


def test_a_trace_follows_the_format() -> None:
    engine = TimedEngine(num_blocks=16, token_budget=20)
    for head in range(12):
        engine.add([head] * (1 + 3 * head), max_tokens=1 + head, priority=head % 2)
    engine.step()
    engine.abort(3, 7)
    for _ in range(400):
        engine.step(0.0123)
    timeline = engine.timeline()
    assert len(timeline.tracks) == 12
    events = trace_document([timeline])["traceEvents"]
    check_format(events)
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(steps) == len(timeline.steps)


def test_an_engine_that_has_not_worked_gives_an_empty_trace() -> None:
    timeline = TimedEngine().timeline()
    assert (timeline.steps, timeline.tracks) == ([], [])
    check_format(trace_document([timeline])["traceEvents"])


def test_the_command_writes_json_and_a_picture_of_a_running_server(tmp_path: Path) -> None:
    arguments = ("--model", "synthetic", "--step-ms", "2", "--max-num-seqs", "2")
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        message = request("where did the time go", max_tokens=20)
        message.request_id, message.sampling.n = "traced", 4
        timing = ask(inference, message).responses[-1].timing
        output, picture = tmp_path / "trace.json", tmp_path / "trace.png"
        result = CliRunner().invoke(
            app, ["trace", "--address", server.address, "-o", str(output), "--picture", str(picture)]
        )
        assert result.exit_code == 0, result.output
        assert "4 sequences" in result.stdout
        events = json.loads(output.read_text())["traceEvents"]
        check_format(events)
        slices = [event for event in events if event["ph"] == "X" and event["tid"] > 1]
        assert {event["args"]["request"] for event in slices} == {"traced"}
        waited = [event["dur"] for event in slices if event["name"] == "waiting: no place"]
        assert len(waited) == 2
        assert max(waited) == pytest.approx(1e6 * timing.queue_s, rel=0.2)
        assert sum(event["args"]["tokens"] for event in slices if event["name"] == "decode") == 4 * 19 + 3, (
            "three start from the prompt that the first computed: from its last token"
        )
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_where_no_step_ran(tmp_path: Path) -> None:
    output, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    with running_server("--model", "synthetic") as server:
        command = ["trace", "--address", server.address, "-o", str(output), "--picture", str(picture)]
        result = CliRunner().invoke(app, command)
    assert (result.exit_code, picture.exists()) == (1, False)
    assert "no steps in the last 10 s" in result.stderr


def test_tokens_keep_coming_while_a_trace_is_taken(
    control: control_pb2_grpc.ControlStub, inference: inference_pb2_grpc.InferenceStub
) -> None:
    call = inference.Generate(request("go on", max_tokens=30_000))
    next(call)
    for _ in range(20):
        parts = list(control.GetStepTrace(trace_pb2.GetStepTraceRequest(last_s=20.0)))
        steps = [step for part in parts for step in part.steps]  # the last parts may hold moves alone
        assert steps[-1].end_s > parts[-1].taken_at_s - 20.0
        next(call)
    call.cancel()


def test_a_time_that_is_none_is_refused(control: control_pb2_grpc.ControlStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(control.GetStepTrace(trace_pb2.GetStepTraceRequest(last_s=-1.0)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_picture_without_matplotlib_is_refused_before_the_server_is_asked(
    monkeypatch: pytest.MonkeyPatch, synthetic_server: Server, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "trace.json"
    picture = ["--picture", str(tmp_path / "trace.png")]
    result = CliRunner().invoke(app, ["trace", "--address", synthetic_server.address, "-o", str(output), *picture])
    assert (result.exit_code, output.exists()) == (1, False)
    assert "pagoda-server[bench]" in result.stderr
