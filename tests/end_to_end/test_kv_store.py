"""Servers whose cached prompts survive `kill -9`, in a file that engines share."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2_grpc, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import ask, engine_load, request
from tests.servers import Server, running_server

SYNTHETIC = ("--model", "synthetic", "--host-kv-gb", "1e-4", "--kv-store-gb", "1e-4")
TEXT = "a system prompt that every request begins with. " * 40  # 1,920 tokens of the synthetic model


def cached(server: Server, text: str, most: int = 12) -> tuple[int, list[int]]:
    """Ask once; return how many tokens of the prompt were cached, and the ids of the answer."""
    with grpc.insecure_channel(server.address) as channel:
        answer = ask(inference_pb2_grpc.InferenceStub(channel), request(text, max_tokens=most))
    return answer.responses[-1].usage.cached_tokens, answer.ids()


def wait_for_stored(server: Server, count: int) -> None:
    with grpc.insecure_channel(server.address) as channel:
        control, deadline = control_pb2_grpc.ControlStub(channel), time.monotonic() + 60.0
        while (stored := engine_load(control).stored_blocks) < count:
            assert time.monotonic() < deadline, f"{stored} of {count} blocks are in the file"
            time.sleep(0.05)


def kill(server: Server) -> None:
    """Kill the engine, then the router, both with SIGKILL."""
    engine = server.engine().pid
    server.process.send_signal(signal.SIGSTOP)  # it would start another engine
    os.kill(engine, signal.SIGKILL)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(30)


def test_what_two_requests_had_in_common_is_cached_after_everything_was_killed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running_server(*SYNTHETIC, "--kv-store", str(store)) as server:
        assert cached(server, TEXT)[0] == 0
        assert cached(server, TEXT + "!")[0] == len(TEXT)
        wait_for_stored(server, len(TEXT) // 4)
        kill(server)
    with running_server(*SYNTHETIC, "--kv-store", str(store)) as server:
        num_cached, ids = cached(server, TEXT + "?")
    assert num_cached == len(TEXT)
    assert ids == expected_tokens((TEXT + "?").encode(), 12, 258)
    (file,) = store.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "it holds what users wrote"
    assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_a_flush_empties_the_file(tmp_path: Path) -> None:
    with running_server(*SYNTHETIC, "--kv-store", str(tmp_path)) as server:
        for _ in range(2):
            cached(server, TEXT)
        wait_for_stored(server, 400)
        with grpc.insecure_channel(server.address) as channel:
            admin_pb2_grpc.AdminStub(channel).FlushCache(admin_pb2.FlushCacheRequest())
    with running_server(*SYNTHETIC, "--kv-store", str(tmp_path)) as server:
        assert cached(server, TEXT)[0] == 0


@pytest.mark.thorough
def test_an_engine_that_runs_finds_what_another_one_has_written(tmp_path: Path) -> None:
    arguments = (*SYNTHETIC, "--kv-store", str(tmp_path))
    with running_server(*arguments) as one, running_server(*arguments) as two:
        for question in "!?":
            cached(one, TEXT + question)
        wait_for_stored(one, len(TEXT) // 4)
        cached(two, "something else")
        time.sleep(1.5)  # it looks at the file once a second at most
        cached(two, "something else again")  # and when a prompt is not in the cache
        wait_for_stored(two, len(TEXT) // 4)
        num_cached, ids = cached(two, TEXT + "?")
    assert num_cached == len(TEXT)
    assert ids == expected_tokens((TEXT + "?").encode(), 12, 258)


@pytest.mark.thorough
def test_the_default_model_answers_as_before_after_everything_was_killed(tmp_path: Path) -> None:
    arguments = ("--kv-store", str(tmp_path), "--host-kv-gb", "0.05")
    text = "The history of lighthouses is long. " * 30
    with running_server(*arguments) as server:
        _, computed = cached(server, text)
        num_cached, answer = cached(server, text)
        assert answer == computed
        wait_for_stored(server, num_cached // 4)
        kill(server)
    with running_server(*arguments) as server:
        assert cached(server, text) == (num_cached, answer)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--host-kv-gb", "0"), "--kv-store needs --host-kv-gb above 0"),
        (("--host-kv-gb", "1e-4", "--no-prefix-caching"), "--kv-store needs --prefix-caching"),
        (("--host-kv-gb", "1e-4", "--kv-store-gb", "1e-9"), "--kv-store-gb 1e-09 holds no block"),
        (("--host-kv-gb", "1e-4", "--kv-store", "/dev/null/x"), "--kv-store /dev/null/x: .*Not a directory"),
    ],
)
def test_a_store_that_cannot_be_kept_is_refused_at_the_start(
    tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    command = [sys.executable, "-m", "pagoda_server.engine", "--model", "synthetic", "--listen", f"unix:{tmp_path}/s"]
    ended = subprocess.run(
        [*command, "--kv-store", str(tmp_path), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert re.search(error, ended.stderr.replace("\n", " ")), ended.stderr
