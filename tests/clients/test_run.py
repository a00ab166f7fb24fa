"""`pagoda run`, `list` and `rm` in real processes with a cache of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.checkpoints.tiny_gguf import tiny_model
from tests.servers import running_server

pytestmark = pytest.mark.thorough

NOWHERE = "127.0.0.1:9"  # no server answers there
Pagoda = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def start(cache: Path) -> Pagoda:
    def start(*arguments: str, address: str = NOWHERE) -> subprocess.Popen[str]:
        environment = os.environ | {"PAGODA_CACHE": str(cache), "PAGODA_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "pagoda_server.cli", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    return start


def finished(process: subprocess.Popen[str], typed: str = "") -> tuple[int, str, str]:
    stdout, stderr = process.communicate(typed, timeout=300)
    return process.returncode, stdout, stderr


def servers_of(cache: Path) -> list[psutil.Process]:
    """Processes that serve a model of this cache."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(cache) in argument for argument in command):
            found.append(process)
    return found


def assert_soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_question_is_answered_by_a_server_that_ends_with_the_command(start: Pagoda, cache: Path) -> None:
    code, stdout, stderr = finished(start("run", "synthetic", "hello", "--max-tokens", "20", "--seed", "1"))
    assert (code, len(stdout) > 5) == (0, True), stderr
    assert servers_of(cache) == []
    _, listed, _ = finished(start("list"))
    (row,) = listed.splitlines()[1:]
    assert row.split()[0] == "synthetic"
    assert row.split()[-2] == time.strftime("%Y-%m-%d")


def test_a_server_that_has_the_model_answers(start: Pagoda, cache: Path) -> None:
    with running_server("--model", "synthetic") as server:
        process = start("run", "synthetic", "-", "--max-tokens", "5", address=server.address)
        code, stdout, stderr = finished(process, "hello")
    assert (code, len(stdout) > 1) == (0, True), stderr
    assert not cache.exists(), "nothing is imported, and no second server is started"


def test_a_chat_goes_on_after_a_stopped_answer_and_its_server_ends_with_it(start: Pagoda, cache: Path) -> None:
    chat = start("run", "synthetic")
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("hello\n")
    chat.stdin.flush()
    seen = ""
    while "model ›" not in seen or len(seen.split("model ›")[1]) < 50:
        seen += chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    code, stdout, stderr = finished(chat, "/exit\n")
    assert code == 0, stderr
    assert "(stopped)" in stdout
    assert servers_of(cache) == []


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_no_server_is_left_however_the_command_ends(ending: signal.Signals, start: Pagoda, cache: Path) -> None:
    process = start("run", "synthetic", "hello")
    assert process.stdout is not None
    process.stdout.read(20)
    assert servers_of(cache)
    process.send_signal(ending)
    code, _, _ = finished(process)
    assert code == (130 if ending == signal.SIGINT else 128 + ending)
    assert_soon(lambda: not servers_of(cache))


def test_a_model_that_is_served_is_not_removed(start: Pagoda, cache: Path) -> None:
    assert finished(start("pull", "synthetic"))[0] == 0
    chat = start("run", "synthetic")
    assert chat.stdout is not None
    chat.stdout.read(10)
    code, _, stderr = finished(start("rm", "synthetic"))
    assert (code, stderr) == (1, "error: synthetic is in use: a process serves it\n")
    assert finished(chat, "hi\n/exit\n")[0] == 0
    assert finished(start("rm", "synthetic"))[:2] == (0, "removed synthetic\n")
    assert list((cache / "models").iterdir()) == []


def test_removing_an_import_leaves_the_file_it_came_from(start: Pagoda, cache: Path, tmp_path: Path) -> None:
    path = tiny_model("qwen2").write(tmp_path / "tiny.gguf")
    _, folder, _ = finished(start("pull", str(path)))
    name = Path(folder.strip()).name
    for outside in (str(path), f"../models/{name}", str(cache / "models" / name), "unheard-of"):
        code, _, stderr = finished(start("rm", outside))
        assert (code, stderr.startswith("error: the cache has no model")) == (1, True), stderr
    assert finished(start("rm", name))[0] == 0
    assert path.is_file()
    assert finished(start("list"))[1].splitlines()[1:] == []


def test_a_server_that_cannot_start_says_why(start: Pagoda, tmp_path: Path) -> None:
    path = tiny_model("qwen2").write(tmp_path / "tiny.gguf")
    _, folder, _ = finished(start("pull", str(path)))
    (Path(folder.strip()) / "tokenizer.json").write_text("{}" * 40)
    code, _, stderr = finished(start("run", str(Path(folder.strip())), "hello"))
    assert code == 1
    assert "error: the server ended with exit code" in stderr
    assert "tokenizer.json" in stderr
