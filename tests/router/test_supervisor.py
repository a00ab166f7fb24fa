"""Children that die, and what their exit code says: real processes, each a line of Python."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda_server.router.process import supervisor as supervisor_module
from pagoda_server.router.process.supervisor import ChildFailedError, Supervisor
from pagoda_server.settings import EXIT_CONFIG

CHILD = """
import sys, time, pathlib
runs = pathlib.Path(sys.argv[1])
runs.write_text(runs.read_text() + ".")
what = sys.argv[2].split(",")[min(len(runs.read_text()), sys.argv[2].count(",") + 1) - 1]
if what != "fails":
    print("ready", flush=True)
if what == "serves":
    sys.stdin.read()
sys.exit(2 if what == "fails" else 1)
"""


async def run(folder: Path, *lives: str) -> tuple[Supervisor, int]:
    """Run a child that lives so, one life after the other, until it serves; return how often it was started."""
    runs = folder / "runs"
    runs.write_text("")
    served = asyncio.Event()

    def on_line(line: str) -> None:
        supervisor.mark_ready()
        if lives[min(len(runs.read_text()), len(lives)) - 1] == "serves":
            served.set()

    supervisor = Supervisor("child", [sys.executable, "-c", CHILD, str(runs), ",".join(lives)], on_line=on_line)
    running = asyncio.create_task(supervisor.run())
    waiting = asyncio.create_task(served.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    waiting.cancel()
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert served.is_set()
    return supervisor, len(runs.read_text())


async def test_a_child_that_cannot_work_with_its_settings_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match="child cannot serve this model with these settings") as failed:
        await run(tmp_path, "fails", "serves")
    assert failed.value.exit_code == EXIT_CONFIG
    assert (tmp_path / "runs").read_text() == "."


async def test_a_child_that_has_served_with_its_settings_is_started_again_whatever_it_says(tmp_path: Path) -> None:
    supervisor, starts = await run(tmp_path, "dies", "fails", "serves")
    assert (starts, supervisor.restarts) == (3, 2)


ASKED = """
import os, signal, sys
for turn, line in enumerate(sys.stdin):
    print("asked", line.strip(), flush=True)
    if sys.argv[1] != "silent":
        print("alive", flush=True)
    if sys.argv[1] == "ends" and turn == 3:
        print("ends", flush=True)
    if sys.argv[1] in ("hangs", "ends") and turn == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
"""


async def lines_of_one_asked(kind: str, until: Callable[[list[str], Supervisor], bool]) -> list[str]:
    """The lines of a child that is asked, once something is so."""
    lines: list[str] = []
    supervisor = Supervisor(
        "child",
        [sys.executable, "-c", ASKED, kind],
        on_line=lines.append,
        stop_timeout_s=2.0,
        ask=lambda: "well?",
        hang_timeout_s=0.1,
    )
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(30):
            while not until(lines, supervisor):
                supervisor.mark_ready()
                await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return lines


async def test_a_child_that_stands_still_is_killed_and_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(supervisor_module, "SHORTEST_HANG_S", 0.5)
    await lines_of_one_asked("hangs", lambda lines, supervisor: supervisor.restarts > 0)
    assert "child hangs: it has not answered for" in caplog.text
    assert "child exited with signal SIGKILL" in caplog.text


async def test_a_child_that_ends_has_time_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(supervisor_module, "SHORTEST_HANG_S", 0.5)
    await lines_of_one_asked("ends", lambda lines, supervisor: supervisor.restarts > 0)
    assert "child hangs: it has not ended for 2 s" in caplog.text


@pytest.mark.parametrize("kind", ["answers", "silent"])
async def test_a_child_that_answers_and_one_that_never_has_are_left_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(supervisor_module, "SHORTEST_HANG_S", 1.5)
    end = time.monotonic() + 3
    lines = await lines_of_one_asked(kind, lambda lines, supervisor: supervisor.restarts > 0 or time.monotonic() > end)
    assert time.monotonic() > end, "it was killed"
    assert set(lines) == {"asked well?"}
    assert (len(lines) == 1) == (kind == "silent"), "one that does not answer is asked once"
