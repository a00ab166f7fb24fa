"""Children that die, and what their exit code says: real processes, each a line of Python."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

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
