"""Streams go on when their engine is lost: real processes, some of which are killed or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import Server, running_engine, running_server

pytestmark = pytest.mark.thorough

MODEL = ("--model", "synthetic")
ENGINE = (*MODEL, "--step-ms", "10", "--max-num-seqs", "64")
VOCAB = 258
LOAD = control_pb2.GetLoadRequest()
STREAMS, TOKENS = 64, 300


@dataclass
class Fleet:
    engines: list[subprocess.Popen[str]]
    server: Server

    @property
    def loads(self) -> list[control_pb2.EngineLoad]:
        with grpc.insecure_channel(self.server.address) as channel:
            return list(control_pb2_grpc.ControlStub(channel).GetLoad(LOAD).engines)

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.loads) != count:
            assert time.monotonic() < deadline, f"{len(self.loads)} engines are ready, not {count}"
            time.sleep(0.02)


@contextlib.contextmanager
def fleet(
    folder: Path, *arguments: str, count: int = 3, engine: tuple[str, ...] = ENGINE, inside: Sequence[str] = ()
) -> Iterator[Fleet]:
    addresses = [f"{'shm' if at % 2 else 'unix'}:{folder / str(at)}.sock" for at in range(count)]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(running_engine(address, *engine)) for address in addresses]
        server = stack.enter_context(
            running_server(
                *engine[:2], "--engine", ",".join(addresses), "--http", "127.0.0.1:0", *arguments, inside=inside
            )
        )
        found = Fleet(engines, server)
        found.wait_for(count)
        yield found


@dataclass
class Stream:
    """What a client sees of a stream."""

    responses: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    longest_gap_s: float = 0.0
    error: grpc.RpcError | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens.tokens) for each in self.responses)

    async def read(self, calls: AsyncIterator[inference_pb2.GenerateResponse]) -> None:
        before = None
        try:
            async for response in calls:
                now = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now - (before or now))
                before = now
                self.responses.append(response)
        except grpc.RpcError as error:
            self.error = error


async def streams_through(
    server: Server, requests: list[inference_pb2.GenerateRequest], disturb: Any, after_tokens: int = 50
) -> list[Stream]:
    """The streams of these requests, all at once; `disturb` is called once each has so many tokens."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        streams = [Stream() for _ in requests]
        tasks = [
            asyncio.create_task(stream.read(inference.Generate(each, timeout=120)))
            for stream, each in zip(streams, requests, strict=True)
        ]
        while min(stream.num_tokens for stream in streams) < after_tokens:
            await asyncio.sleep(0.01)
            assert not any(stream.error for stream in streams)
        disturb()
        await asyncio.gather(*tasks)
        return streams


def metrics(server: Server) -> list[str]:
    with urllib.request.urlopen(f"{server.http}/metrics", timeout=30) as page:
        return list(page.read().decode().splitlines())


async def test_streams_of_a_killed_engine_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    requests = [request(f"stream {at}", TOKENS) for at in range(STREAMS)]
    with fleet(tmp_path) as found:
        held: list[int] = []

        def kill() -> None:
            found.engines[0].send_signal(signal.SIGSTOP)
            time.sleep(0.3)  # until the router has read what the engine had sent
            held.append(found.loads[0].running)
            found.engines[0].kill()

        streams = await streams_through(found.server, requests, kill)
        assert [stream.error for stream in streams] == [None] * STREAMS
        for at, stream in enumerate(streams):
            answer = Answer(stream.responses)
            assert answer.ids() == expected_tokens(f"stream {at}".encode(), TOKENS, VOCAB)
            assert stream.responses[-1].usage.completion_tokens == TOKENS
        gaps = sorted(stream.longest_gap_s for stream in streams)
        print(f"longest gaps: median {gaps[STREAMS // 2]:.3f} s, greatest {gaps[-1]:.3f} s")
        assert gaps[-1] < 5
        (line,) = [each for each in await asyncio.to_thread(metrics, found.server) if 'outcome="continued"' in each]
        assert float(line.split()[-1]) == held[0] > 0


async def test_several_sequences_stop_strings_and_logprobs_go_on(tmp_path: Path) -> None:
    several = request("several", TOKENS, sampling={"temperature": 1.0, "seed": 7, "n": 3})
    logprobs = request("logprobs", TOKENS)
    logprobs.output.logprobs = 2
    stops = request("stops", TOKENS, stop=["this text never comes"])
    penalties = request("penalties", TOKENS, sampling={"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5})
    requests = [several, logprobs, stops, penalties]
    with fleet(tmp_path, count=2) as found:
        undisturbed = await streams_through(found.server, requests, lambda: None)
        disturbed = await streams_through(found.server, requests, found.engines[0].kill)
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert after.error is None
            for index in range(3 if before is undisturbed[0] else 1):
                one, other = Answer(before.responses), Answer(after.responses)
                assert other.ids(index) == one.ids(index)
                assert other.text(index) == one.text(index)
                assert other.finished(index).reason == one.finished(index).reason
                assert [token.logprob for token in other.tokens(index)] == [
                    token.logprob for token in one.tokens(index)
                ]


async def test_a_real_model_that_is_deterministic_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    engine = ("--model", "smollm2-135m-instruct", "--deterministic", "--kv-cache-gb", "0.2")
    requests = [request(f"Tell me about the number {at}.", 60) for at in range(6)]
    with fleet(tmp_path, count=2, engine=engine) as found:
        undisturbed = await streams_through(found.server, requests, lambda: None, after_tokens=1)
        disturbed = await streams_through(found.server, requests, found.engines[0].kill, after_tokens=10)
        assert [stream.error for stream in disturbed] == [None] * 6
        assert [Answer(each.responses).ids() for each in disturbed] == [
            Answer(each.responses).ids() for each in undisturbed
        ]


async def test_a_request_that_waits_goes_to_another_engine(tmp_path: Path) -> None:
    """Its engine has no place for it, and is killed before it has begun."""
    engine = (*MODEL, "--step-ms", "10", "--max-num-seqs", "2")
    requests = [request(f"waits {at}", 60) for at in range(8)]
    with fleet(tmp_path, "--no-failover", count=2, engine=engine) as found:
        async with grpc.aio.insecure_channel(found.server.address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            streams = [Stream() for _ in requests]
            tasks = [
                asyncio.create_task(stream.read(inference.Generate(each)))
                for stream, each in zip(streams, requests, strict=True)
            ]
            while sum(stream.num_tokens > 3 for stream in streams) < 4:  # noqa: ASYNC110 (the tasks read them)
                await asyncio.sleep(0.01)
            found.engines[0].kill()
            await asyncio.gather(*tasks)
        failed = [stream for stream in streams if stream.error]
        assert 1 <= len(failed) <= 2, "those that had begun, and --no-failover says that they end"
        assert all(stream.error.code() is grpc.StatusCode.UNAVAILABLE for stream in failed if stream.error)
        for at, stream in enumerate(streams):
            if stream.error is None:
                assert Answer(stream.responses).ids() == expected_tokens(f"waits {at}".encode(), 60, VOCAB)


async def test_a_stream_whose_engines_die_twice_is_refused(tmp_path: Path) -> None:
    with fleet(tmp_path) as found:
        holder: list[int] = []

        def kill_its_engine() -> None:
            (at,) = [at for at, load in enumerate(found.loads) if load.running]
            alive = [engine for engine in found.engines if engine.poll() is None]
            holder.append(at)
            alive[at].kill()
            alive[at].wait()

        async with grpc.aio.insecure_channel(found.server.address) as channel:
            stream = Stream()
            inference = inference_pb2_grpc.InferenceStub(channel)
            task = asyncio.create_task(stream.read(inference.Generate(request("poison", 2000))))
            for _ in range(2):
                seen = stream.num_tokens
                while stream.num_tokens < seen + 20:  # noqa: ASYNC110 (the task reads them)
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(kill_its_engine)
                found.wait_for(3 - len(holder))
            await task
        assert stream.error is not None
        assert stream.error.code() is grpc.StatusCode.ABORTED
        assert "2 engines were lost while they computed the request" in (stream.error.details() or "")
        with grpc.insecure_channel(found.server.address) as channel:
            again = ask(inference_pb2_grpc.InferenceStub(channel), request("after", 3))
        assert again.ids() == expected_tokens(b"after", 3, VOCAB)


async def test_streams_of_a_stopped_engine_go_on_after_the_hang_limit(tmp_path: Path) -> None:
    requests = [request(f"stream {at}", TOKENS) for at in range(6)]
    with fleet(tmp_path, "--hang-timeout-s", "2") as found:
        streams = await streams_through(found.server, requests, lambda: found.engines[0].send_signal(signal.SIGSTOP))
        assert [stream.error for stream in streams] == [None] * 6
        for at, stream in enumerate(streams):
            assert Answer(stream.responses).ids() == expected_tokens(f"stream {at}".encode(), TOKENS, VOCAB)
        found.engines[0].send_signal(signal.SIGCONT)


async def test_answers_over_http_go_on(tmp_path: Path) -> None:
    with fleet(tmp_path) as found:

        def complete(text: str, stream: bool) -> list[str]:
            body = {"prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
            asked = urllib.request.Request(f"{found.server.http}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(asked, timeout=120) as answer:
                if not stream:
                    return [json.load(answer)["choices"][0]["text"]]
                lines = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data:")]
            assert lines.pop() == "[DONE]"
            return [choice["text"] for line in lines for choice in json.loads(line)["choices"]]

        expected = {text: "".join(complete(text, False)) for text in ("one", "two", "three")}
        calls = [
            asyncio.create_task(asyncio.to_thread(complete, text, is_streamed))
            for text in expected
            for is_streamed in (True, False)
        ]
        await asyncio.sleep(1)
        found.engines[1].kill()
        answers = ["".join(each) for each in await asyncio.gather(*calls)]
        assert answers == [text for text in expected.values() for _ in range(2)]


async def test_embeddings_and_scores_are_computed_again(tmp_path: Path) -> None:
    engine = (*MODEL, "--step-ms", "300")
    with fleet(tmp_path, count=2, engine=engine) as found:
        async with grpc.aio.insecure_channel(found.server.address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            score = inference_pb2.ScoreRequest(prompt="a prompt", continuations=[{"text": " that goes on" * 20}] * 8)
            expected = await inference.Score(score)
            calls = [asyncio.ensure_future(inference.Score(score)) for _ in range(4)]
            await asyncio.sleep(0.4)
            found.engines[0].kill()
            for answer in await asyncio.gather(*calls):
                assert answer.scores == expected.scores


# -- an engine that ends on purpose ------------------------------------------------------------------------------------


async def test_an_engine_that_is_asked_to_end_gets_nothing_new_and_its_streams_end_there(tmp_path: Path) -> None:
    requests = [request(f"stream {at}", TOKENS) for at in range(STREAMS)]
    with fleet(tmp_path) as found:
        streams = await streams_through(found.server, requests, lambda: found.engines[0].send_signal(signal.SIGTERM))
        assert [stream.error for stream in streams] == [None] * STREAMS
        for at, stream in enumerate(streams):
            assert Answer(stream.responses).ids() == expected_tokens(f"stream {at}".encode(), TOKENS, VOCAB)
        assert found.engines[0].wait(30) == 0
        log = found.server.log.read_text()
        assert log.count("says goodbye") == 1
        counts = [line.split()[-1] for line in metrics(found.server) if line.startswith("pagoda_failovers_total")]
        assert set(counts) == {"0.0"}, "none had to go on elsewhere"


async def test_what_is_left_after_the_grace_period_goes_on_elsewhere(tmp_path: Path) -> None:
    """Twice, and the request is not to blame."""
    engine = (*ENGINE, "--grace-s", "0.3")
    requests = [request(f"stream {at}", 600) for at in range(9)]
    with fleet(tmp_path, engine=engine) as found:

        def leave() -> None:
            for engine in found.engines[:2]:
                engine.send_signal(signal.SIGTERM)
                assert engine.wait(30) == 0

        streams = await streams_through(found.server, requests, leave)
        assert [stream.error for stream in streams] == [None] * 9
        for at, stream in enumerate(streams):
            assert Answer(stream.responses).ids() == expected_tokens(f"stream {at}".encode(), 600, VOCAB)


def test_a_second_signal_ends_an_engine_at_once(tmp_path: Path) -> None:
    with fleet(tmp_path, count=1) as found, grpc.insecure_channel(found.server.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("long", 20_000))
        next(call)
        (engine,) = found.engines
        engine.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert engine.poll() is None
        control = control_pb2_grpc.ControlStub(channel)
        (status,) = control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines
        assert status.state == control_pb2.ENGINE_STATE_DRAINING
        assert found.server.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            ask(inference_pb2_grpc.InferenceStub(channel), request("new", 3))
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(10) == 0
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            list(call)


def test_an_idle_engine_ends_at_once(tmp_path: Path) -> None:
    with fleet(tmp_path, count=2) as found:
        began = time.monotonic()
        found.engines[0].send_signal(signal.SIGTERM)
        assert found.engines[0].wait(10) == 0
        assert time.monotonic() - began < 3
        assert found.server.health() == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
async def test_ten_engines_are_replaced_one_after_the_other_under_200_streams(tmp_path: Path) -> None:
    """One ends by a signal, the next is killed. No stream breaks, and no token changes."""
    engine = (*MODEL, "--step-ms", "10", "--max-num-seqs", "256", "--grace-s", "3")
    with fleet(tmp_path, engine=engine) as found, contextlib.ExitStack() as stack:
        done, is_over = 0, asyncio.Event()

        async def calls(number: int, inference: inference_pb2_grpc.InferenceStub) -> None:
            nonlocal done
            at = 0
            while not is_over.is_set():
                stream, text = Stream(), f"client {number}, call {at}"
                await stream.read(inference.Generate(request(text, 200), timeout=120))
                assert stream.error is None, stream.error
                assert Answer(stream.responses).ids() == expected_tokens(text.encode(), 200, VOCAB)
                at, done = at + 1, done + 1

        async with grpc.aio.insecure_channel(found.server.address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            clients = [asyncio.create_task(calls(number, inference)) for number in range(200)]
            for at in range(10):
                place = at % 3
                await asyncio.sleep(1)
                found.engines[place].send_signal(signal.SIGKILL if at % 2 else signal.SIGTERM)
                await asyncio.to_thread(found.engines[place].wait, 30)
                address = f"{'shm' if place % 2 else 'unix'}:{tmp_path / str(place)}.sock"
                found.engines[place] = stack.enter_context(running_engine(address, *engine))
                await asyncio.to_thread(found.wait_for, 3)
                assert not any(client.done() for client in clients)
            is_over.set()
            await asyncio.gather(*clients)
        assert done > 400


FAULTY = """
import os
import pathlib

from pagoda_server.router.engines.sequences import Sequences

deliver, faults = Sequences.deliver, pathlib.Path(os.environ["FAULTS"])


def deliver_or_fail(self, step):
    if len(self) and faults.exists():
        faults.unlink()
        raise KeyError("nobody foresaw this")
    deliver(self, step)


Sequences.deliver = deliver_or_fail
"""


async def test_an_exception_that_nobody_foresaw_ends_the_connection_of_one_engine_alone(tmp_path: Path) -> None:
    faults, hooks = tmp_path / "faults", tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(FAULTY)  # which Python imports as the router starts
    requests = [request(f"stream {at}", TOKENS) for at in range(16)]
    with fleet(tmp_path, count=2, inside=("env", f"PYTHONPATH={hooks}", f"FAULTS={faults}")) as found:
        streams = await streams_through(found.server, requests, faults.touch)
        assert [stream.error for stream in streams] == [None] * len(requests)
        for at, stream in enumerate(streams):
            assert Answer(stream.responses).ids() == expected_tokens(f"stream {at}".encode(), TOKENS, VOCAB)
        counts = [line.split()[-1] for line in metrics(found.server) if line.startswith("pagoda_failovers_total")]
        assert 0 < sum(map(float, counts)) < len(requests), "the streams of the other engine stay there"
        found.wait_for(2)
        log = found.server.log.read_text()
    assert log.count("the channel to the engine at") == log.count("KeyError: 'nobody foresaw this'") == 1
