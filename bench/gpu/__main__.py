"""`python -m bench.gpu`: kernels, decode step and server, compared with what the card can do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from bench.gpu import report
from bench.gpu.rows import CEILINGS, Ceilings, Row, ceilings_of
from bench.gpu.worker import CHECKS, PARTS, Settings
from bench.processes import spawned

LIMIT_S = 460.0  # for all parts together; the last ones are cut short
LEAST_S = 20.0  # a part with less time than this is not started
GRACE_S = 10.0  # from SIGTERM to SIGKILL

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Output folder for JSON and Markdown.")] = Path("bench-results"),
    smoke: Annotated[bool, typer.Option(help="Rehearse every line with tiny shapes on the CPU.")] = False,
    parts: Annotated[
        str, typer.Option(help=f"Any of, comma-separated: {', '.join(part.name for part in PARTS)}.")
    ] = "",
    check: Annotated[bool, typer.Option(help="Run the tests that need a GPU first, for up to 7 minutes.")] = False,
    limit_s: Annotated[
        float | None, typer.Option(help=f"Time limit for all parts; by default {LIMIT_S:.0f}, more with --check.")
    ] = None,
) -> None:
    """Run the parts, each in a process of its own, so that a failure in one does not affect the others."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks run
    wanted = [name.strip() for name in parts.split(",")] if parts else [part.name for part in PARTS]
    checks = [part.name for part in CHECKS] if check else []
    # The ceilings follow the tests, since all other figures are fractions of them.
    names = list(dict.fromkeys([*checks, CEILINGS, *wanted]))
    if limit_s is None:
        limit_s = LIMIT_S + sum(part.limit_s for part in CHECKS if part.name in checks)
    console = Console(width=max(160, Console().width))
    started = time.monotonic()
    found: list[Row] = []
    card: dict[str, str] = {}
    # A rehearsal runs in one process: it need not survive faults, and imports only once.
    for at, group in enumerate([names] if smoke else [[name] for name in names]):
        left_s = limit_s - (time.monotonic() - started)
        given_s = left_s if smoke else seconds_for(names[at:], left_s)
        if given_s < LEAST_S:
            found.append(Row(", ".join(group), "", error="no time left"))
            continue
        ceilings = ceilings_of([row for row in found if row.part == CEILINGS])
        for row in run(group, smoke, ceilings, given_s, card):
            found.append(row)
            console.print(f"[{time.monotonic() - started:4.0f} s] {row.part}: {row.case} {row.error}", markup=False)
            report.write(
                out, found, card, time.monotonic() - started
            )  # after each row, so that an interrupted run keeps its rows
    report.write(out, found, card, time.monotonic() - started)
    for table in report.tables(found):
        console.print(report.shown(table), "")
    console.print(f"{report.summary(found)}. JSON and Markdown: {out}")


def seconds_for(names: Sequence[str], left_s: float) -> float:
    """Seconds for the first of these parts: up to its limit, if the others keep the same share of theirs."""
    limits = [next(part.limit_s for part in (*CHECKS, *PARTS) if part.name == name) for name in names]
    share = min(1.0, left_s / sum(limits))
    return min(limits[0], left_s, max(LEAST_S, left_s - share * sum(limits[1:])))


def run(parts: list[str], smoke: bool, ceilings: Ceilings, limit_s: float, card: dict[str, str]) -> Iterator[Row]:
    """Yield the rows of these parts as they arrive; fill `card` with the device and versions."""
    os.environ["TRITON_INTERPRET"] = str(int(smoke))
    with TemporaryDirectory() as folder:
        settings = Settings(parts, smoke, folder, limit_s, ceilings.bytes_per_s, ceilings.flops_per_s)
        command = [sys.executable, "-m", "bench.gpu.worker", settings.line()]
        with spawned(command, log := Path(folder) / "log", subprocess.PIPE) as process:
            assert process.stdout is not None
            began = time.monotonic()
            with _killed_after(process.pid, limit_s):
                for line in process.stdout:
                    if (told := json.loads(line)).keys() == {"card"}:
                        card.update(told["card"])
                    else:
                        yield Row(**told)
            if (code := process.wait()) != 0:
                is_late = time.monotonic() - began >= limit_s
                why = f"was ended after {limit_s:.0f} s" if is_late else f"died with {code}: {_last_line(log)}"
                yield Row(parts[-1], "", error=f"the process {why}")


@contextlib.contextmanager
def _killed_after(pid: int, limit_s: float) -> Iterator[None]:
    """Send the process SIGTERM after `limit_s`, and SIGKILL after GRACE_S more."""
    ends = [
        threading.Timer(limit_s, os.kill, (pid, signal.SIGTERM)),
        threading.Timer(limit_s + GRACE_S, os.kill, (pid, signal.SIGKILL)),
    ]
    for end in ends:
        end.daemon = True
        end.start()
    try:
        yield
    finally:
        for end in ends:
            end.cancel()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


if __name__ == "__main__":
    app()
