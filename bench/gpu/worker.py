"""The parts of the GPU benchmark, and the process that runs some of them: `python -m bench.gpu.worker SETTINGS`.

Each row is written to standard output as a line of JSON. A kernel that reads out of bounds makes the GPU unusable for
the process that launched it, and for no other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import triton

from bench.gpu.rows import CEILINGS, Bench, Ceilings, Row, ceilings_of, explain
from pagoda_server.kernels.triton.timing import cuda_timer, host_timer

GRACE_S = 20.0  # for this process's children to end


@dataclass(frozen=True, slots=True)
class Part:
    """A part, whose rows `function` of `module` yields. `shape` names a model in kernels.triton.inputs, if needed."""

    name: str
    limit_s: float
    module: str
    function: str = "rows"
    shape: str = ""

    def rows(self, bench: Bench) -> Iterator[Row]:
        """Yield the part's rows. Its module is imported here, so that a broken one fails this part alone."""
        function = getattr(import_module(self.module), self.function)
        arguments = [getattr(import_module("pagoda_server.kernels.triton.inputs"), self.shape)] if self.shape else []
        yield from function(bench, *arguments)


# These run before all others, if requested.
CHECKS = (
    Part("tests of kernels", 240, "bench.gpu.checks", "kernel_rows"),
    Part("tests of the runner", 120, "bench.gpu.checks", "runner_rows"),
    Part("tests of the server", 60, "bench.gpu.checks", "server_rows"),
)
PARTS = (
    Part(CEILINGS, 40, "bench.gpu.rows", "ceiling_rows"),
    Part("decode attention", 60, "bench.gpu.attention", "decode_rows"),
    Part("decode step 8B", 110, "bench.gpu.step", shape="LLAMA_8B"),
    Part("decode step 1B", 70, "bench.gpu.step", shape="LLAMA_1B"),
    Part("prefill attention", 50, "bench.gpu.attention", "prefill_rows"),
    Part("layers", 40, "bench.gpu.layers"),
    Part("sampling", 40, "bench.gpu.sampling"),
    Part("projections", 60, "bench.gpu.layers", "projection_rows"),
    Part("serving", 150, "bench.gpu.serving"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """
    evidence                  folder for logs and artefacts
    limit_s                   time limit of this process
    bytes_per_s, flops_per_s  the ceilings, as far as they are known
    """

    parts: list[str]
    is_small: bool
    evidence: str
    limit_s: float = math.inf
    bytes_per_s: float = math.nan
    flops_per_s: float = math.nan

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main(line: str) -> None:
    # Libraries print to standard output too. That goes to the log, and rows go to a copy of standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks run
    threading.Thread(target=end_with_parent, daemon=True).start()
    settings = Settings(**json.loads(line))
    answers.write(json.dumps({"card": card(settings.is_small)}) + "\n")
    for row in rows(settings):
        answers.write(row.line() + "\n")


def end_with_parent() -> None:
    """End this process when its parent, which holds the other end of standard input, has ended."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)  # a call into the driver may never return


def rows(settings: Settings) -> Iterator[Row]:
    if unknown := set(settings.parts) - {part.name for part in (*CHECKS, *PARTS)}:
        raise ValueError(f"there is no part {min(unknown)!r}")
    bench = Bench(
        device=torch.device("cpu" if settings.is_small else "cuda"),
        timer=host_timer if settings.is_small else cuda_timer,
        ceilings=Ceilings(settings.bytes_per_s, settings.flops_per_s),
        is_small=settings.is_small,
        evidence=Path(settings.evidence),
        limit_s=settings.limit_s,
    )
    for part in (*CHECKS, *PARTS):
        if part.name not in settings.parts:
            continue
        found: list[Row] = []
        try:
            for row in part.rows(bench):
                found.append(row)
                yield row
        except Exception as failure:  # fails this part alone
            yield Row(part.name, "", error=explain(failure))
        if part.name == CEILINGS:
            bench = dataclasses.replace(bench, ceilings=ceilings_of(found))


def card(is_small: bool) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if is_small:
        return {"gpu": "none: a rehearsal"} | versions
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} | versions


if __name__ == "__main__":
    main(sys.argv[1])
