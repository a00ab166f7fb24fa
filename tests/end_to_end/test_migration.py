"""Streams move with their blocks from an engine that is asked to end: real processes, some of which fail meanwhile."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, request
from tests.end_to_end.test_failover import metrics
from tests.end_to_end.test_failover_formats import read_all
from tests.end_to_end.test_required_calls import TEMPLATE
from tests.end_to_end.test_resume import Case, Stub, cases, check_same, model, resumable, slowed
from tests.end_to_end.test_resume_formats import CASES, check_format
from tests.servers import Server, running_engine, running_server

pytestmark = pytest.mark.thorough

__all__ = ["cases", "model"]  # fixtures

ENGINE = ("--host-kv-gb", "0.01", "--grace-s", "60")
SYNTHETIC = ("--model", "synthetic", "--step-ms", "10", *ENGINE)
LOAD = control_pb2.GetLoadRequest()
VOCAB = 258


@dataclass
class Pair:
    """An engine with all streams, one that joins later, and their server."""

    first: psutil.Process
    second: psutil.Process
    server: Server
    members: Path
    addresses: list[str]

    @property
    def loads(self) -> list[control_pb2.EngineLoad]:
        with grpc.insecure_channel(self.server.address) as channel:
            return list(control_pb2_grpc.ControlStub(channel).GetLoad(LOAD).engines)

    def add_second(self) -> None:
        list_engines(self.members, self.addresses)
        until(lambda: len(self.loads) == 2)

    def outcomes(self) -> dict[str, float]:
        """Migrations and failovers, by what became of them."""
        lines = [each for each in metrics(self.server) if each.startswith(("pagoda_migra", "pagoda_failovers"))]
        return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def until(happens: object, timeout_s: float = 60.0) -> None:
    assert callable(happens)
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_engines(path: Path, addresses: list[str]) -> None:
    entries = [{"name": Path(each).stem, "address": each} for each in addresses]
    path.with_suffix(".new").write_text(json.dumps({"engines": entries}))
    path.with_suffix(".new").rename(path)


@contextlib.contextmanager
def pair(folder: Path, *engine: str, router: tuple[str, ...] = ()) -> Iterator[Pair]:
    addresses = [f"unix:{folder / name}.sock" for name in ("first", "second")]
    members = folder / "engines"
    list_engines(members, addresses[:1])
    with (
        running_engine(addresses[0], *engine) as first,
        running_engine(addresses[1], *engine) as second,
        running_server(*engine[:2], "--engine", f"file:{members}", "--http", "127.0.0.1:0", *router) as server,
    ):
        until(lambda: Path(addresses[1].removeprefix("unix:")).exists())
        yield Pair(psutil.Process(first.pid), psutil.Process(second.pid), server, members, addresses)


@pytest.fixture(scope="module")
def calling_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that writes tool calls."""
    folder = tmp_path_factory.mktemp("models") / "calling"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ tools | tojson }}", ""))
    return folder


@pytest.fixture(scope="module")
def server(calling_model: Path) -> Iterator[Server]:
    """What nothing disturbs."""
    with running_server("--model", str(calling_model), "--dtype", "float32", "--quantization", "none") as server:
        yield server


def test_every_stream_of_an_engine_that_is_asked_to_end_moves_as_if_nothing_had_happened(
    server: Server, calling_model: Path, cases: dict[str, Case], tmp_path: Path
) -> None:
    asked = {name: case.request for name, case in cases.items()} | {f"format {name}": CASES[name] for name in CASES}
    asked["kept"] = resumable(cases["seeded"].request, "kept")
    engine = ("--model", str(calling_model), "--dtype", "float32", "--quantization", "none", "--threads", "1", *ENGINE)
    with (
        pair(tmp_path, *engine, "--block-size", "8") as found,
        grpc.insecure_channel(server.address) as calm,
        grpc.insecure_channel(found.server.address) as channel,
        ThreadPoolExecutor(32) as pool,
    ):
        undisturbed = dict(zip(asked, pool.map(lambda each: ask(Stub(calm), each), asked.values()), strict=True))
        reached = threading.Barrier(len(asked) + 1)
        with slowed(found.first):
            reads = {
                name: pool.submit(read_all, Stub(channel), each, 20 + 2 * at, reached)
                for at, (name, each) in enumerate(asked.items())
            }
            reached.wait(120)
            found.add_second()
            found.first.send_signal(signal.SIGTERM)
            answers = {name: Answer(read.result()) for name, read in reads.items()}
        for name, answer in answers.items():
            check_same(answer, undisturbed[name], asked[name].sampling.n or 1)
            if name.startswith("format "):
                check_format(answer.responses, asked[name])
        assert found.first.wait(60) == 0
        outcomes = found.outcomes()
        assert outcomes["moved"] >= len(asked) // 4, "not all of them ended before, or were too late on a busy machine"
        assert outcomes["continued"] == outcomes["unavailable"] == 0
        (load,) = found.loads
        assert load.fetched_tokens > 0


def text_of(at: int) -> str:
    return f"{at:>4}" * 100


def check_synthetic(answer: Answer, at: int, num_tokens: int) -> None:
    assert answer.ids() == expected_tokens(text_of(at).encode(), num_tokens, VOCAB)


def read_long(pool: ThreadPoolExecutor, channel: grpc.Channel, count: int, num_tokens: int) -> list[object]:
    """Streams that have all begun."""
    reached = threading.Barrier(count + 1)
    reads = [pool.submit(read_all, Stub(channel), request(text_of(at), num_tokens), 3, reached) for at in range(count)]
    reached.wait(60)
    return list(reads)


def test_an_engine_ends_long_before_its_streams_do(tmp_path: Path) -> None:
    """What was cached counts once. The engine that takes them fetches blocks."""
    count, num_tokens = 8, 2000
    with (
        pair(tmp_path, *SYNTHETIC) as found,
        grpc.insecure_channel(found.server.address) as channel,
        ThreadPoolExecutor(count) as pool,
    ):
        reads = read_long(pool, channel, count, num_tokens)
        found.add_second()
        found.first.send_signal(signal.SIGTERM)
        assert found.first.wait(50) == 0
        assert not any(read.done() for read in reads)  # type: ignore[attr-defined]
        for at, read in enumerate(reads):
            answer = Answer(read.result())  # type: ignore[attr-defined]
            check_synthetic(answer, at, num_tokens)
            last = answer.responses[-1]
            assert last.usage.cached_tokens == 0
            assert last.timing.decode_s == pytest.approx(last.timing.total_s, rel=0.5), "of both engines"
        assert found.outcomes()["moved"] == count
        (load,) = found.loads
        assert load.fetched_tokens > 200


def test_streams_stay_without_failover_or_blocks_that_travel(tmp_path: Path) -> None:
    for name, options, router in (
        ("no failover", SYNTHETIC, ("--no-failover",)),
        ("no host memory", ("--model", "synthetic", "--step-ms", "10"), ()),
    ):
        (folder := tmp_path / name).mkdir()
        with (
            pair(folder, *options, router=router) as found,
            grpc.insecure_channel(found.server.address) as channel,
            ThreadPoolExecutor(2) as pool,
        ):
            reads = read_long(pool, channel, 2, 300)
            found.add_second()
            found.first.send_signal(signal.SIGTERM)
            for at, read in enumerate(reads):
                check_synthetic(Answer(read.result()), at, 300)  # type: ignore[attr-defined]
            assert found.first.wait(60) == 0
            assert set(found.outcomes().values()) == {0.0}


@pytest.mark.parametrize("fault", ["the target is killed", "the target hangs", "the source is killed"])
def test_a_fault_while_streams_move_changes_no_token(tmp_path: Path, fault: str) -> None:
    count, num_tokens = 8, 700
    with (
        pair(tmp_path, *SYNTHETIC, router=("--hang-timeout-s", "3")) as found,
        grpc.insecure_channel(found.server.address) as channel,
        ThreadPoolExecutor(count) as pool,
    ):
        reads = read_long(pool, channel, count, num_tokens)
        found.add_second()
        found.first.send_signal(signal.SIGTERM)
        until(lambda: found.outcomes()["moved"] > 0)
        if fault == "the target is killed":
            found.second.kill()
        elif fault == "the target hangs":
            found.second.suspend()
        else:
            found.first.kill()
        errors = []
        for at, read in enumerate(reads):
            try:
                check_synthetic(Answer(read.result()), at, num_tokens)  # type: ignore[attr-defined]
            except grpc.RpcError as error:
                errors.append(error.code())  # type: ignore[attr-defined]
        found.second.resume() if found.second.is_running() else None
        if fault == "the source is killed":
            assert not errors
        else:  # those that had moved have no engine any more
            assert set(errors) <= {grpc.StatusCode.UNAVAILABLE}
            assert len(errors) < count
