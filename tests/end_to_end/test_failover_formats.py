"""All streams of a killed engine go on at another one: seeds, penalties, stop strings, siblings, formats and calls."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2
from tests.end_to_end.asking import Answer, ask
from tests.end_to_end.test_required_calls import TEMPLATE
from tests.end_to_end.test_resume import Case, Stub, cases, check_same, model, resumable, resume, slowed
from tests.end_to_end.test_resume_formats import CASES, check_format
from tests.servers import Server, running_engine, running_server

pytestmark = pytest.mark.thorough

__all__ = ["cases", "model"]  # fixtures

KEPT = ("stopped", "siblings", "logprobs")
FORMATS = [
    ("--dtype", "float32", "--quantization", "none"),
    ("--quantization", "int8", "--deterministic"),
    pytest.param(("--quantization", "none", "--deterministic"), marks=pytest.mark.nightly),
]


@dataclass
class Pair:
    """Two engines behind a server."""

    first: psutil.Process
    second: psutil.Process
    server: Server

    def num_ready(self) -> int:
        with grpc.insecure_channel(self.server.address) as channel:
            return len(control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest()).engines)


@pytest.fixture(scope="module", params=FORMATS, ids=" ".join)
def pair(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The tiny model with a chat template that writes tool calls, on two engines."""
    folder = tmp_path_factory.mktemp("models") / "calling"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ tools | tojson }}", ""))
    addresses = [f"unix:{folder.parent / name}" for name in ("first", "second")]
    engine = ("--model", str(folder), "--threads", "1", *request.param)
    with (
        running_engine(addresses[0], *engine) as first,
        running_engine(addresses[1], *engine) as second,
        running_server("--model", str(folder), "--engine", ",".join(addresses)) as server,
    ):
        found = Pair(psutil.Process(first.pid), psutil.Process(second.pid), server)
        deadline = time.monotonic() + 60
        while found.num_ready() < 2:
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.05)
        yield found


@pytest.fixture(scope="module")
def server(pair: Pair) -> Server:
    return pair.server


@contextlib.contextmanager
def asleep(engine: psutil.Process) -> Iterator[None]:
    """Stop an engine, once it is late with an answer: the other one gets all requests."""
    engine.suspend()
    time.sleep(3)
    try:
        yield
    finally:
        engine.resume()


def read_all(
    inference: Stub, request: inference_pb2.GenerateRequest, count: int, reached: threading.Barrier
) -> list[inference_pb2.GenerateResponse]:
    """All responses of a call, which meets others at the barrier after `count` of them."""
    responses = []
    for response in inference.Generate(request, timeout=120):
        responses.append(response)
        if len(responses) == count:
            reached.wait(60)
    return responses


def test_every_stream_of_a_killed_engine_goes_on_as_if_nothing_had_happened(pair: Pair, cases: dict[str, Case]) -> None:
    """A resumable one can still be resumed afterwards, from any token."""
    with grpc.insecure_channel(pair.server.address) as channel, ThreadPoolExecutor(32) as pool:
        inference = Stub(channel)
        asked = {name: case.request for name, case in cases.items()} | {f"format {name}": CASES[name] for name in CASES}
        undisturbed = dict(zip(asked, pool.map(lambda request: ask(inference, request), asked.values()), strict=True))
        asked |= {f"kept {name}": resumable(cases[name].request, f"kept {name}") for name in KEPT}
        undisturbed |= {f"kept {name}": cases[name].answer for name in KEPT}
        reached = threading.Barrier(len(asked) + 1)
        with asleep(pair.second):
            with slowed(pair.first):
                reads = {
                    name: pool.submit(read_all, inference, request, 4 + at % 8, reached)
                    for at, (name, request) in enumerate(asked.items())
                }
                reached.wait(60)
            pair.first.suspend()  # no stream of it ends any more
        time.sleep(0.5)  # the second engine answers the ping that it owes
        pair.first.kill()
        found = {name: Answer(read.result()) for name, read in reads.items()}
        for name, answer in found.items():
            check_same(answer, undisturbed[name], asked[name].sampling.n or 1)
            if name.startswith("format "):
                check_format(answer.responses, asked[name])
        for name in KEPT:
            received = [len(cases[name].answer.ids(index)) // 2 for index in range(cases[name].n)]
            again = Answer(resume(inference, f"kept {name}", received))
            for index, count in enumerate(received):
                assert again.ids(index) == cases[name].answer.ids(index)[count:]
                assert again.finished(index) == cases[name].answer.finished(index)
    assert pair.server.log.read_text().count("failovers=1") >= 10, "few of them ended before"
