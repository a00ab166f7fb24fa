"""A program that goes on with the children of the one that ran in its process before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from pagoda_server.router.process import succession
from pagoda_server.router.process.succession import ChildState, Handover, Inherited
from pagoda_server.router.process.supervisor import Supervisor
from pagoda_server.settings import ServeConfig

ECHO = "import sys\nfor line in sys.stdin: print('heard', line, end='', flush=True)"
HANDOVER = Handover(
    ServeConfig(listen="127.0.0.1:1", workers=2), {"a": "/a"}, "/private", 3, 4, [ChildState(10, 11, 12, 0)],
    "shm:@engine", ChildState(20, 21, None, 5), 30,
)  # fmt: skip


def test_a_handover_comes_back_from_its_json() -> None:
    assert Handover.from_json(HANDOVER.to_json()) == HANDOVER
    assert HANDOVER.descriptors() == [30, 11, 12, 21]


def test_the_installed_code_says_whether_it_understands_a_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    assert succession.objection(HANDOVER) == ""
    of_another_version = HANDOVER.to_json().replace('"max_requests"', '"most_calls"')
    monkeypatch.setattr(Handover, "to_json", lambda _: of_another_version)
    assert "most_calls" in succession.objection(HANDOVER)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "/nowhere/python" in succession.objection(HANDOVER)


async def test_a_child_that_was_adopted_is_heard_started_again_and_stopped() -> None:
    command = [sys.executable, "-c", ECHO]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert child.stdin
    assert child.stdout
    lines = asyncio.Queue[str]()
    supervisor = Supervisor("child", command, first_line=lambda: "first", on_line=lines.put_nowait)
    supervisor.adopt(ChildState(child.pid, os.dup(child.stdin.fileno()), os.dup(child.stdout.fileno()), restarts=7))
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        supervisor.send("one")
        assert await lines.get() == "heard one", "it has had its first line from the program before"
        state = supervisor.state()
        assert state
        assert (state.pid, state.restarts) == (child.pid, 7)
        os.kill(child.pid, signal.SIGKILL)
        assert await lines.get() == "heard first"
        assert supervisor.restarts == 8
        state = supervisor.state()
        assert state
        assert state.pid != child.pid
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert supervisor.state() is None
    child.wait()  # another has reaped it


def test_an_inherited_child_s_exit_code_is_that_of_popen() -> None:
    for ending, expected in (("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)):
        child = subprocess.Popen([sys.executable, "-c", f"import os, sys\nsys.stdin.read()\n{ending}"], stdin=-1)
        assert child.stdin
        inherited = Inherited(ChildState(child.pid, os.dup(child.stdin.fileno()), None, 0))
        child.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            inherited.wait(0.1)
        assert inherited.poll() is None
        inherited.stdin.close()
        assert inherited.wait(60) == inherited.poll() == expected
        inherited.terminate()  # a process that has ended gets no signal
        child.wait()
