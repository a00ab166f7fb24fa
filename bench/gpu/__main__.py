"""`python -m bench.gpu`: kernels, decode step, tests and server, compared with what the card can do."""

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

import psutil
import typer
from rich.console import Console

from bench.gpu import evidence, report
from bench.gpu.rows import CEILINGS, Row, ceilings_of, failed
from bench.gpu.worker import CARD_IS_LOST, Part, Settings
from bench.processes import kill_tree, spawned

LIMIT_S = 520.0  # for all parts together; with what follows, the last part's end and the report, below ten minutes
LEAST_S = 20.0  # a part with less time than this is not started
GRACE_S = 5.0  # from SIGTERM to SIGKILL

# Numbers come before tests of detail: if time runs out, or the machine goes, they are there.
PARTS = (
    Part(CEILINGS, 30, "bench.gpu.rows", "ceiling_rows"),
    Part("decode attention", 50, "bench.gpu.attention", "decode_rows"),
    Part("decode step 8B", 90, "bench.gpu.step", shape="LLAMA_8B"),
    Part("projections", 60, "bench.gpu.layers", "projection_rows"),
    Part("layers", 25, "bench.gpu.layers"),
    Part("sampling", 30, "bench.gpu.sampling"),
    Part("decode step 8B int4", 30, "bench.gpu.step", "int4_rows", shape="LLAMA_8B"),
    Part("decode step 1B", 45, "bench.gpu.step", shape="LLAMA_1B"),
    Part("prefill attention", 40, "bench.gpu.attention", "prefill_rows"),
    Part("tests of kernels", 55, "bench.gpu.checks", "kernel_rows"),
    Part("tests of the runner", 30, "bench.gpu.checks", "runner_rows"),
    Part("deterministic", 45, "bench.gpu.step", "deterministic_rows", shape="LLAMA_8B"),
    Part("tests of the server", 25, "bench.gpu.checks", "server_rows"),
    Part("serving", 60, "bench.gpu.serving"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Output folder for the report and the logs.")] = Path("bench-results"),
    rehearse: Annotated[bool, typer.Option(help="Run every part with tiny shapes on a simulated card.")] = False,
    parts: Annotated[
        str, typer.Option(help=f"Any of, comma-separated: {', '.join(part.name for part in PARTS)}.")
    ] = "",
    limit_s: Annotated[
        float, typer.Option(help="Time limit for all parts, counted from the start of this process.")
    ] = LIMIT_S,
    wheels: Annotated[
        Path | None, typer.Option(help="Folder of wheels that this machine lacks; they are installed for this run.")
    ] = None,
) -> None:
    """Run the parts, each in a process of its own, so that a failure in one does not affect the others."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks run
    try:
        wanted = _named(parts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--parts") from None
    started = time.monotonic() - (time.time() - psutil.Process().create_time())
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(160, Console().width))
    with TemporaryDirectory() as folder, TemporaryDirectory() as site:
        result = report.Report(out, Path(folder), started)
        os.environ.update(evidence.environment(Path(site)))
        # Whether kernels are interpreted is chosen when they are defined.
        os.environ["TRITON_INTERPRET"] = str(int(rehearse))
        try:
            if wheels is not None:
                evidence.install(wheels, Path(site), Path(folder) / "wheels.log")
            evidence.describe_machine(Path(folder) / "machine.txt")
        except Exception as failure:  # most parts need none of them
            result.add(failed("installation", "", failure))
        try:
            for index, part in enumerate(wanted):
                given_s = seconds_for(wanted[index:], limit_s - result.elapsed_s)
                for row in run(part, rehearse, given_s, result):
                    result.add(row)
                    console.print(f"[{result.elapsed_s:4.0f} s] {row.part}: {row.case} {row.error}", markup=False)
                result.write_logs()
        finally:
            result.write_logs()
        for table in result.tables():
            console.print(report.shown(table), "")
    console.print(f"{report.summary(result.rows)}. Report and logs: {out}")
    if rehearse and any(row.time_us is None and row.rate is None for row in result.rows):
        raise typer.Exit(1)


def _named(names: str) -> list[Part]:
    """Return the parts of these names in the order of PARTS, after the ceilings, which all others refer to."""
    wanted = {name.strip() for name in names.split(",")} if names else {part.name for part in PARTS}
    if unknown := wanted - {part.name for part in PARTS}:
        raise ValueError(f"there is no part {min(unknown)!r}")
    return [part for part in PARTS if part.name in wanted | {CEILINGS}]


def seconds_for(parts: Sequence[Part], left_s: float) -> float:
    """Seconds for the first of these parts: its share of what is left, so that the last ones get what others leave."""
    share = parts[0].share_s / sum(part.share_s for part in parts)
    return min(left_s, max(LEAST_S, share * left_s))


def run(part: Part, rehearse: bool, limit_s: float, result: report.Report) -> Iterator[Row]:
    """Yield the rows of a part as they arrive; add the card and the logs to `result`.

    After a fault a card answers nothing more in that process: a new one goes on with the cases that are left.
    """
    if limit_s < LEAST_S:
        yield Row(part.name, "", error="no time left")
        return
    ends = time.monotonic() + limit_s
    ceilings = ceilings_of([row for row in result.rows if row.part == CEILINGS])
    folder = result.evidence / part.name.replace(" ", "-")
    folder.mkdir()
    done: list[tuple[str, str]] = []
    code, attempt, may_go_on = CARD_IS_LOST, 0, True
    while code == CARD_IS_LOST and may_go_on and (left_s := ends - time.monotonic()) > 0:
        attempt, num_before = attempt + 1, len(done)
        settings = Settings(part, rehearse, str(folder), left_s, ceilings.bytes_per_s, ceilings.flops_per_s, done)
        log = folder / f"worker-{attempt}.log"
        command = [sys.executable, "-m", "bench.gpu.worker", settings.line()]
        with spawned(command, log, subprocess.PIPE) as process:
            assert process.stdout is not None
            with _killed_after(process.pid, left_s):
                for line in process.stdout:
                    if (message := json.loads(line)).keys() == {"card"}:
                        result.card.update(message["card"])
                    else:
                        row = Row(**message)
                        done.append((row.part, row.case))
                        yield row
                code = process.wait()
        may_go_on = len(done) > num_before and done[-1] != (part.name, "")  # that row is of the part as a whole
    if code not in (0, CARD_IS_LOST):
        is_late = time.monotonic() >= ends
        why = f"was ended after {limit_s:.0f} s" if is_late else f"died with {code}: {_last_line(log)}"
        yield Row(part.name, "", error=f"the process {why}")
    elif not done:
        yield Row(part.name, "", error="it measured nothing")


@contextlib.contextmanager
def _killed_after(pid: int, limit_s: float) -> Iterator[None]:
    """Send the process SIGTERM after `limit_s`, and SIGKILL to it and all that it started after GRACE_S more."""
    ends = [
        threading.Timer(limit_s, os.kill, (pid, signal.SIGTERM)),
        threading.Timer(limit_s + GRACE_S, kill_tree, (pid,)),
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
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


if __name__ == "__main__":
    app()
