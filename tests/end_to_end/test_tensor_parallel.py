"""--tensor-parallel through real processes: the same stream, and an engine that ends with any of its ranks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from pagoda.v1 import inference_pb2_grpc
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from tests.checkpoints.tiny_gguf import tiny_model
from tests.end_to_end.asking import Answer, ask, request
from tests.end_to_end.test_failover import fleet
from tests.end_to_end.test_hangs import until
from tests.servers import START_TIMEOUT_S, Server, running_engine, running_server

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

LATE_S = 30.0  # on a machine that does other things; a loss that goes unnoticed ends no group before the hang limit
HANG_S = 4.0
WIDTH = 8192  # of the feed-forward layers: a prompt's step needs more memory in one piece than a process has free


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny = tiny_model("llama", intermediate_size=WIDTH)
    import_gguf(tiny.write(folder / "model.gguf"), folder, no_progress)
    return folder


def pair(folder: Path, hang_timeout_s: float) -> contextlib.AbstractContextManager[Server]:
    """A server whose engine is a group of two ranks that compute a short prompt in one step."""
    how = ("--dtype", "float32", "--tensor-parallel", "2", "--kv-cache-gb", "0.01", "--target-itl-ms", "0")
    return running_server("--model", str(folder), *how, "--hang-timeout-s", str(hang_timeout_s))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with pair(folder, hang_timeout_s=2 * LATE_S) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(folder: Path) -> Iterator[Server]:
    with pair(folder, HANG_S) as server:
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
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("Once", 500))
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
    until(lambda: have_ended(ranks), LATE_S)
    server.wait_ready()
    assert stream(server) == before
    assert not {each.pid for each in ranks} & {each.pid for each in ranks_of(server)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_ends_the_group_at_the_hang_limit(impatient: Server, rank: int) -> None:
    ranks = lose(impatient, rank, signal.SIGSTOP)
    until(lambda: have_ended(ranks), HANG_S + LATE_S)
    impatient.wait_ready()
    assert stream(impatient)


def test_a_rank_without_memory_ends_the_group_which_starts_again(server: Server) -> None:
    """Rank 1 gets no more memory. How rank 0 ends without is in test_tensor_parallel_processes.py."""
    ranks = ranks_of(server)
    for limit in (psutil.RLIMIT_AS, psutil.RLIMIT_DATA):  # the second one holds for address space that malloc has, too
        ranks[1].rlimit(limit, (1, 1))
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        ask(inference_pb2_grpc.InferenceStub(channel), request("word " * 80, 5))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    until(lambda: have_ended(ranks), LATE_S)
    server.wait_ready()
    assert stream(server)


def test_a_slow_rank_slows_its_group_and_changes_nothing(server: Server) -> None:
    before, ranks = stream(server, max_tokens=100), ranks_of(server)
    is_over = threading.Event()

    def slow_down() -> None:
        while not is_over.wait(0.02):
            ranks[1].suspend()
            time.sleep(0.05)
            ranks[1].resume()

    slowing = threading.Thread(target=slow_down)
    slowing.start()
    try:
        assert stream(server, max_tokens=100) == before
    finally:
        is_over.set()
        slowing.join()
    assert ranks_of(server) == ranks


async def test_a_stream_goes_on_at_another_group(folder: Path, tmp_path: Path) -> None:
    how = ("--model", str(folder), "--dtype", "float32", "--tensor-parallel", "2", "--kv-cache-gb", "0.01")
    with fleet(tmp_path, count=2, engine=how) as two:
        expected = stream(two.server, max_tokens=400)
        groups = [psutil.Process(engine.pid) for engine in two.engines]
        async with grpc.aio.insecure_channel(two.server.address) as channel:
            sampling = {"temperature": 0.8, "seed": 5}
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                request("In a village by the sea", 400, sampling=sampling)
            )
            responses = aiter(call)
            found = [await anext(responses)]
            until(lambda: any(load.running for load in two.loads), LATE_S)
            number = next(number for number, load in enumerate(two.loads) if load.running)
            (follower,) = groups[number].children()
            follower.kill()
            found += [each async for each in responses]
        assert Answer(found).ids() == expected
        until(lambda: have_ended([groups[number], follower]), LATE_S)


@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_kills_at_any_time_leave_nothing_behind(folder: Path, tmp_path: Path, num_kills: int) -> None:
    """Either rank, while it loads, while they join, and while they wait for work."""
    draw, temporary, before = random.Random(0), tmp_path / "temporary", shared_memory()
    temporary.mkdir()
    how = ("--model", str(folder), "--dtype", "float32", "--tensor-parallel", "2", "--kv-cache-gb", "0.01")
    times_s = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        for number in range(num_kills):
            with running_engine(f"shm:@pagoda-{os.getpid()}-{number}", *how, log=tmp_path / "log") as engine:
                times_s.append(kill_one(psutil.Process(engine.pid), draw, is_joined=number % 2 == 0))
            assert not any(temporary.iterdir())
            assert shared_memory() <= before
    print(f"the slowest of {num_kills} groups ended after {max(times_s):.2f} s")


def kill_one(leader: psutil.Process, draw: random.Random, *, is_joined: bool) -> float:
    """Kill a rank of a group that starts, or that has joined; return how many seconds the other one lived on."""
    until(lambda: bool(leader.children()), START_TIMEOUT_S)
    ranks = [leader, *leader.children()]
    if is_joined:
        until(lambda: all(ports_of(rank) for rank in ranks), START_TIMEOUT_S)
    else:
        time.sleep(draw.uniform(0, 4))
    ports = set().union(*map(ports_of, ranks))
    draw.choice(ranks).kill()
    took_s = until(lambda: have_ended(ranks), LATE_S)
    until(lambda: not ports & listening(), LATE_S)  # threads of a zombie may still end
    return took_s


def listening() -> set[int]:
    return {each.laddr.port for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN}


def ports_of(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("inet")}


def shared_memory() -> set[str]:
    return {each for each in os.listdir("/dev/shm") if "pagoda" in each}


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
        until(lambda: have_ended(ranks), LATE_S)
