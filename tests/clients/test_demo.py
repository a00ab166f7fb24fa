"""The demo on the synthetic model: what it shows, and that it leaves no process behind however it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagoda_server.cli.demo import CHATS, PAGE, TEXTS
from tests.servers import ROOT

pytestmark = pytest.mark.thorough

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def mark() -> str:
    """A value of --hang-timeout-s that no other test uses, to identify this test's processes."""
    return f"{600 + uuid.uuid4().int % 10**9 / 10**9:.9f}"


@pytest.fixture
def start(mark: str) -> Start:
    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pagoda_server.cli.demo", "synthetic", "--hang-timeout-s", mark, *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def routers(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if mark in command and "serve" in command:
            found.append(process)
    return found


def server_processes(mark: str) -> list[psutil.Process]:
    """The demo's router, its engine and its other children; router and engine must be running."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for router in routers(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                children = router.children()
                if any("pagoda_server.engine" in child.cmdline() for child in children):
                    return [router, *children]
        time.sleep(0.02)
    raise AssertionError("the demo has started no server")


def read_until_streaming(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None
    assert any(re.match(r"\d│\S", line) and " › " not in line for line in demo.stdout)


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def test_demo_streams_eight_prompts_interleaved_and_reports_figures(start: Start, mark: str) -> None:
    demo = start("--step-ms", "5")
    stdout, stderr = demo.communicate(timeout=300)
    assert demo.returncode == 0, stderr
    for prompt in [*CHATS, *TEXTS]:
        assert stdout.count(f"› {prompt.strip()}") == 2
    assert len(re.findall(r"^\d+ tokens · TTFT \d+ ms · [\d.]+ tokens/s$", stdout, re.MULTILINE)) == 8
    assert re.search(r"^8 streams at once: \d+ tokens in [\d.]+ s, [\d.]+ tokens/s$", stdout, re.MULTILINE)
    assert f"then open {PAGE}\n" in stdout
    assert f"--http {PAGE.removeprefix('http://')} " in (ROOT / "Makefile").read_text()
    log = stdout[: stdout.rindex("8 streams")].split("\n\n")[2]
    order = re.findall(r"(\d)│", log)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 40, "one after the other there would be 7"
    assert routers(mark) == []


def test_demo_on_the_default_model_knows_the_capital_of_sweden(default_model_folder: Path) -> None:
    demo = subprocess.run([sys.executable, "-m", "pagoda_server.cli.demo"], capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stderr
    answer = demo.stdout[demo.stdout.rindex(f"chat › {CHATS[0]}") :].splitlines()[1]
    assert "Stockholm" in answer


def test_a_server_that_cannot_start_ends_the_demo_with_its_last_log_lines(start: Start, mark: str) -> None:
    demo = start("--token-budget", "1")
    _, stderr = demo.communicate(timeout=300)
    assert demo.returncode == 1
    assert stderr.startswith("error: the server ended with exit code 2 before it was ready")
    assert "--token-budget" in stderr
    assert routers(mark) == []


def test_a_server_that_dies_while_streaming_ends_the_demo_with_an_error(start: Start, mark: str) -> None:
    demo = start("--step-ms", "100")
    processes = server_processes(mark)
    read_until_streaming(demo)
    processes[0].kill()
    _, stderr = demo.communicate(timeout=300)
    assert demo.returncode == 1
    assert stderr.startswith("error: ")
    assert all_gone(processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_demo_leaves_no_process_behind(number: signal.Signals, start: Start, mark: str) -> None:
    demo = start("--step-ms", "100")
    processes = server_processes(mark)
    read_until_streaming(demo)
    os.kill(demo.pid, number)
    _, stderr = demo.communicate(timeout=300)
    assert demo.returncode == 130
    assert "Traceback" not in stderr
    assert all_gone(processes)
