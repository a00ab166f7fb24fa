"""Engines for prompts and engines for what follows: one stream over both, whichever of them fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.settings import EXIT_CONFIG
from tests.end_to_end.asking import Answer, ask, request
from tests.end_to_end.test_failover_formats import read_all
from tests.end_to_end.test_migration import VOCAB, calling_model, server, text_of, until
from tests.end_to_end.test_resume import Case, Stub, cases, check_same, model, resumable, resume
from tests.end_to_end.test_resume_formats import CASES, check_format
from tests.servers import Server, running_engine, running_server

pytestmark = pytest.mark.thorough

__all__ = ["calling_model", "cases", "model", "server"]  # fixtures

SYNTHETIC = ("--model", "synthetic", "--step-ms", "10", "--host-kv-gb", "0.01")
LOAD, INFO = control_pb2.GetLoadRequest(), control_pb2.GetServerInfoRequest()


@dataclass
class Fleet:
    """Engines by name, which begins with their role."""

    engines: dict[str, psutil.Process]
    server: Server

    @property
    def loads(self) -> dict[str, control_pb2.EngineLoad]:
        with grpc.insecure_channel(self.server.address) as channel:
            loads = control_pb2_grpc.ControlStub(channel).GetLoad(LOAD).engines
        return {list(self.engines)[each.engine]: each for each in loads}

    @contextlib.contextmanager
    def stub(self) -> Iterator[Stub]:
        with grpc.insecure_channel(self.server.address) as channel:
            yield Stub(channel)


@contextlib.contextmanager
def fleet(
    folder: Path, *names: str, engine: tuple[str, ...] = SYNTHETIC, router: tuple[str, ...] = ()
) -> Iterator[Fleet]:
    addresses = [f"unix:{folder / name}.sock" for name in names]
    with contextlib.ExitStack() as stack:
        engines = {
            name: psutil.Process(
                stack.enter_context(running_engine(address, *engine, "--role", name.rstrip("0123456789"))).pid
            )
            for name, address in zip(names, addresses, strict=True)
        }
        served = stack.enter_context(running_server(*engine[:2], "--engine", ",".join(addresses), *router, ready=False))
        found = Fleet(engines, served)
        until(lambda: _num_engines(found) == len(names), 300)
        yield found


def _num_engines(found: Fleet) -> int:
    try:
        return len(found.loads)
    except grpc.RpcError:
        return 0


def check_synthetic(answer: Answer, at: int, num_tokens: int) -> None:
    assert answer.ids() == expected_tokens(text_of(at).encode(), num_tokens, VOCAB)


def test_every_kind_of_request_gets_the_tokens_of_one_engine(
    server: Server, calling_model: Path, cases: dict[str, Case], tmp_path: Path
) -> None:
    """Seeds, penalties, guidance, calls, siblings, logprobs, stop strings; resumable streams can be resumed."""
    asked = {name: case.request for name, case in cases.items()} | {f"format {name}": CASES[name] for name in CASES}
    asked["kept"] = resumable(cases["siblings"].request, "kept")
    asked["one token"] = request("a prompt that is answered where it was computed", 1)
    model = ("--model", str(calling_model), "--dtype", "float32", "--quantization", "none", "--threads", "1")
    with (
        fleet(tmp_path, "prefill", "decode", engine=(*model, "--host-kv-gb", "0.01", "--block-size", "4")) as found,
        grpc.insecure_channel(server.address) as calm,
        found.stub() as inference,
        ThreadPoolExecutor(32) as pool,
    ):
        undisturbed = dict(zip(asked, pool.map(lambda each: ask(Stub(calm), each), asked.values()), strict=True))
        answers = dict(zip(asked, pool.map(lambda each: ask(inference, each), asked.values()), strict=True))
        for name, answer in answers.items():
            check_same(answer, undisturbed[name], asked[name].sampling.n or 1)
            if name.startswith("format "):
                check_format(answer.responses, asked[name])
        case = cases["siblings"]
        received = [len(case.answer.ids(index)) // 2 for index in range(case.n)]
        again = Answer(resume(inference, "kept", received))
        for index, count in enumerate(received):
            assert again.ids(index) == case.answer.ids(index)[count:]
        loads = found.loads
        assert loads["prefill"].output_tokens < loads["decode"].output_tokens // 4


def test_a_prompt_is_computed_once_and_its_answer_elsewhere(tmp_path: Path) -> None:
    with fleet(tmp_path, "prefill", "decode") as found, found.stub() as inference:
        for at in range(3):
            answer = ask(inference, request(text_of(at), 50))
            check_synthetic(answer, at, 50)
            last = answer.responses[-1]
            assert last.usage.cached_tokens == 0
            assert last.timing.pulled_tokens + last.timing.recomputed_tokens >= len(text_of(at))
            assert last.timing.pulled_tokens > 0
            assert 0 < last.timing.prefill_s < last.timing.decode_s
        loads = found.loads
        assert (loads["prefill"].prompt_tokens, loads["decode"].prompt_tokens) == (3 * len(text_of(0)), 0)
        assert loads["decode"].fetched_tokens > 0
        with grpc.insecure_channel(found.server.address) as channel:
            engines = control_pb2_grpc.ControlStub(channel).GetServerInfo(INFO).engines
        assert [each.info.settings["role"] for each in engines] == ["prefill", "decode"]


def reading(pool: ThreadPoolExecutor, inference: Stub, count: int, num_tokens: int) -> list[Future[list[object]]]:
    """Streams that have all begun."""
    reached = threading.Barrier(count + 1)
    reads = [pool.submit(read_all, inference, request(text_of(at), num_tokens), 3, reached) for at in range(count)]
    reached.wait(60)
    return reads  # type: ignore[return-value]


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_streams_survive_the_loss_of_either_engine(tmp_path: Path, lost: str) -> None:
    names = ("prefill", "decode", f"{lost}2")
    with fleet(tmp_path, *names) as found, found.stub() as inference, ThreadPoolExecutor(8) as pool:
        reads = reading(pool, inference, 8, 300)
        found.engines[lost].kill()
        more = [pool.submit(ask, inference, request(text_of(at), 60)) for at in range(8, 16)]
        for at, read in enumerate(reads):
            check_synthetic(Answer(read.result()), at, 300)  # type: ignore[arg-type]
        for at, each in enumerate(more, 8):
            check_synthetic(each.result(), at, 60)


def test_a_prompt_whose_engine_is_killed_goes_to_another_one(tmp_path: Path) -> None:
    engine = (*SYNTHETIC[:2], "--step-ms", "400", *SYNTHETIC[4:], "--token-budget", "128", "--max-num-seqs", "8")
    with fleet(tmp_path, "prefill", "decode", "both", engine=engine) as found, found.stub() as inference:
        call = inference.Generate(request(text_of(0), 5))
        until(lambda: found.loads["prefill"].running > 0)
        found.engines["prefill"].kill()
        check_synthetic(Answer(list(call)), 0, 5)
        assert found.loads["both"].prompt_tokens == len(text_of(0))


def test_a_lender_that_hangs_delays_a_stream_and_changes_no_token(tmp_path: Path) -> None:
    """It is stopped once the first token is there; the decode engine then computes the prompt."""
    with (
        fleet(tmp_path, "prefill", "decode", router=("--hang-timeout-s", "20")) as found,
        found.stub() as inference,
        ThreadPoolExecutor(1) as pool,
    ):
        found.engines["decode"].suspend()
        reached = threading.Barrier(2)
        read = pool.submit(read_all, inference, request(text_of(0), 60), 1, reached)
        reached.wait(60)
        found.engines["prefill"].suspend()
        try:
            found.engines["decode"].resume()
            answer = Answer(read.result(60))
        finally:
            found.engines["prefill"].resume()
        check_synthetic(answer, 0, 60)
        timing = answer.responses[-1].timing
        assert (timing.pulled_tokens, timing.recomputed_tokens) == (0, len(text_of(0)))


def test_an_engine_for_everything_stands_in_and_without_one_the_error_names_the_role(tmp_path: Path) -> None:
    with fleet(tmp_path, "prefill", "decode", "both") as found, found.stub() as inference:
        for lost in ("decode", "prefill"):
            before = found.loads["both"].output_tokens
            found.engines[lost].kill()
            until(lambda lost=lost: lost not in found.loads)
            check_synthetic(ask(inference, request(text_of(7), 30)), 7, 30)
            assert found.loads["both"].output_tokens > before
    for name, missing in (("prefill", "decode"), ("decode", "prefill")):
        (folder := tmp_path / name).mkdir()
        with fleet(folder, name) as found, found.stub() as inference:
            with pytest.raises(grpc.RpcError) as error:
                ask(inference, request("alone", 5))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"--role {missing}" in error.value.details()


def test_scores_and_embeddings_are_computed_by_engines_for_prompts(tmp_path: Path) -> None:
    with fleet(tmp_path, "prefill", "decode") as found, found.stub() as inference:
        score = inference_pb2.ScoreRequest(prompt="a prompt", continuations=[{"text": " that goes on"}])
        assert len(inference.Score(score).scores) == 1
        assert found.loads["decode"].prompt_tokens == 0


@pytest.mark.parametrize("lacking", ["--host-kv-gb 0", "--listen shm:@lacking", "--no-prefix-caching"])
def test_an_engine_that_could_not_hand_anything_over_does_not_start(tmp_path: Path, lacking: str) -> None:
    command = ("--model", "synthetic", "--host-kv-gb", "0.01", "--role", "decode", *lacking.split())
    with running_engine(f"unix:{tmp_path / 'socket'}", *command, log=tmp_path / "log") as engine:
        assert engine.wait(60) == EXIT_CONFIG
    assert "--role decode: this engine fetches and lends no blocks" in (tmp_path / "log").read_text()
