"""--tensor-parallel through real processes: the same stream, and an engine that ends with any of its ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from pagoda.v1 import inference_pb2_grpc
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from tests.checkpoints.tiny_gguf import tiny_model
from tests.end_to_end.asking import ask, request
from tests.end_to_end.test_hangs import until
from tests.servers import Server, running_server

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

ENDS_S = 5.0  # a rank ends with the others
LATE_S = 10.0  # for the rest, on a machine that does other things
HANG_S = 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    import_gguf(tiny_model("llama").write(folder / "model.gguf"), folder, no_progress)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    how = ("--dtype", "float32", "--tensor-parallel", "2", "--hang-timeout-s", str(HANG_S))
    with running_server("--model", str(folder), *how, "--kv-cache-gb", "0.01") as server:
        yield server


def ranks_of(server: Server) -> list[psutil.Process]:
    engine = server.engine()
    return [engine, *engine.children()]


def stream(server: Server, seed: int = 5, max_tokens: int = 30) -> list[int]:
    with grpc.insecure_channel(server.address) as channel:
        sampling = {"temperature": 0.8, "seed": seed}
        message = request("In a village by the sea", max_tokens, sampling=sampling)
        return ask(inference_pb2_grpc.InferenceStub(channel), message).ids()


def have_ended(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_a_group_streams_the_tokens_of_one_process(server: Server, folder: Path) -> None:
    with running_server("--model", str(folder), "--dtype", "float32", "--kv-cache-gb", "0.01") as alone:
        assert [stream(server, seed) for seed in range(3)] == [stream(alone, seed) for seed in range(3)]


def lose(server: Server, rank: int, number: signal.Signals) -> list[psutil.Process]:
    """Send a signal to a rank while a stream runs; return all ranks once that stream has broken."""
    ranks = ranks_of(server)
    assert len(ranks) == 2
    with grpc.insecure_channel(server.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("Once", 200))
        next(call)
        ranks[rank].send_signal(number)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return ranks


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_group_which_starts_again(server: Server, rank: int, number: signal.Signals) -> None:
    before = stream(server)
    ranks = lose(server, rank, number)
    until(lambda: have_ended(ranks), ENDS_S)
    server.wait_ready()
    assert stream(server) == before
    assert not {each.pid for each in ranks} & {each.pid for each in ranks_of(server)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_ends_the_group_at_the_hang_limit(server: Server, rank: int) -> None:
    ranks = lose(server, rank, signal.SIGSTOP)
    until(lambda: have_ended(ranks), HANG_S + LATE_S)
    server.wait_ready()
    assert stream(server)


def test_sigterm_ends_all_ranks_and_lets_streams_finish(folder: Path) -> None:
    how = ("--dtype", "float32", "--tensor-parallel", "3", "--kv-cache-gb", "0.01")
    with running_server("--model", str(folder), *how) as server:
        ranks = ranks_of(server)
        assert len(ranks) == 3
        with grpc.insecure_channel(server.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request("Once", 100))
            next(call)
            server.process.send_signal(signal.SIGTERM)
            for rank in ranks[1:]:
                rank.terminate()  # as a unit's stop does
            assert list(call)
        assert server.process.wait(60) == 0
        until(lambda: have_ended(ranks), ENDS_S)
