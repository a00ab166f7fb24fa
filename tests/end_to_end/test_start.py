"""What a person sees of a start: where the server is, when it serves, what to try, and what is missing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc
from tests.servers import ROOT, free_address

pytestmark = pytest.mark.thorough

SERVE = [sys.executable, "-m", "pagoda_server.cli", "serve", "--model", "synthetic"]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*SERVE, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_lines_to_try_stand_there_once_and_work_at_once(workers: str) -> None:
    with started("--listen", free_address(), "--http", free_address(), "--workers", workers) as process:
        assert process.stdout is not None
        first, *lines = [process.stdout.readline().rstrip("\n") for _ in range(6)]
        assert first.startswith("starting on http://127.")
        assert lines[0].startswith("serving synthetic after ")
        titles = [line.split()[0] for line in lines[1:]]
        assert titles == ["HTTP", "gRPC", "try", "or"]
        url, address, generate, curl = (line.split(None, 1)[1] for line in lines[1:])
        assert first == f"starting on {url} and {address}"
        port = address.rpartition(":")[2]
        command = shlex.split(generate.replace(f"127.0.0.1:{port}", address))[1:]
        answer = subprocess.run(
            [sys.executable, "-m", "pagoda_server.cli", *command, "--max-tokens", "4"],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        answer = subprocess.run(
            [*shlex.split(curl), "--silent", "--fail-with-body", "--max-time", "60"], capture_output=True, text=True
        )
        assert json.loads(answer.stdout)["choices"], answer.stdout


def test_with_json_logs_every_line_is_json() -> None:
    with started("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.terminate()
        rest, errors = process.communicate(timeout=60)
    found = [json.loads(line) for line in [*lines, *rest.splitlines(), *errors.splitlines()]]
    assert all({"time", "level", "logger", "message"} <= set(each) for each in found)
    assert [each["message"].split()[0] for each in found[:2]] == ["starting", "serving"]
    assert found[0]["grpc"].startswith("127.0.0.1:")


def test_without_an_engine_one_line_says_what_to_install() -> None:
    without_torch = "import sys; sys.modules['torch'] = None; from pagoda_server.cli.__main__ import main; main()"
    command = [sys.executable, "-c", without_torch, "serve", "--listen", free_address()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "pip install 'pagoda-server[engine]'" in ended.stderr


def test_settings_come_from_variables_and_a_file_and_a_variable_nearly_called_so_is_not_ignored_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A spawned engine takes none of them for its own: here they name the router's address and another model."""
    file = tmp_path / "pagoda.toml"
    file.write_text(f'model = "nothing-called-so"\nhttp = "{free_address()}"\nmax_num_seqs = 3\n')
    monkeypatch.setenv("PAGODA_CONFIG", str(file))
    monkeypatch.setenv("PAGODA_LISTEN", free_address())
    monkeypatch.setenv("PAGODA_MAX_REQUEST", "5")
    with started() as process:
        assert process.stdout is not None
        assert "starting on http:" in process.stdout.readline()
        lines = [process.stdout.readline() for _ in range(4)]
        assert any(os.environ["PAGODA_LISTEN"] in line for line in lines), lines
        with grpc.insecure_channel(os.environ["PAGODA_LISTEN"]) as channel:
            info = control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=60)
        assert info.engines[0].info.settings["max_num_seqs"] == "3"
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert errors.count("$PAGODA_MAX_REQUEST is not read: a setting's variable is $PAGODA_MAX_REQUESTS") == 1
