"""The process that runs a part of the GPU benchmark: `python -m bench.gpu.worker SETTINGS`.

Each row is written to standard output as a line of JSON; everything else that is printed goes to the part's log. A
kernel that reads out of bounds makes the GPU unusable for the process that launched it, and for no other.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch
import triton

from bench.gpu.rows import Bench, Ceilings, Row, failed
from pagoda_server.kernels.triton.timing import cuda_timer

GRACE_S = 20.0  # for this process's children to end
CARD_IS_LOST = 75  # the exit code that asks for a new process: this one's card answers nothing any more


@dataclass(frozen=True, slots=True)
class Part:
    """A part, whose rows `function` of `module` yields. `shape` names a model in kernels.triton.inputs, if needed.

    share_s   seconds of LIMIT_S that it may take if all parts run
    """

    name: str
    share_s: float
    module: str
    function: str = "rows"
    shape: str = ""

    def rows(self, bench: Bench) -> Iterator[Row]:
        """Yield the part's rows. Its module is imported here, so that a broken one fails this part alone."""
        function = getattr(import_module(self.module), self.function)
        arguments = [getattr(import_module("pagoda_server.kernels.triton.inputs"), self.shape)] if self.shape else []
        yield from function(bench, *arguments)


@dataclass(frozen=True, slots=True)
class Settings:
    """
    is_small                  rehearse on a simulated card
    evidence                  folder for logs and artefacts
    limit_s                   time limit of this process
    bytes_per_s, flops_per_s  the ceilings, as far as they are known
    done                      part and case of the rows that an earlier process of this part has told
    """

    part: Part
    is_small: bool
    evidence: str
    limit_s: float = math.inf
    bytes_per_s: float = math.nan
    flops_per_s: float = math.nan
    done: list[tuple[str, str]] = field(default_factory=list)

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: str) -> Settings:
        values = json.loads(line)
        part, done = Part(**values.pop("part")), [tuple(case) for case in values.pop("done")]
        return cls(part=part, done=done, **values)


def main(line: str) -> None:
    # Libraries print to standard output too. That goes to the log, and rows go to a copy of standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks run
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)  # the log says where it was, even inside a driver that hangs
    threading.Thread(target=end_with_parent, daemon=True).start()
    settings = Settings.parse(line)
    started = time.monotonic()
    with ExitStack() as stack:
        if settings.is_small:
            from tests.rehearsal import simulated_card

            stack.enter_context(simulated_card())
        answers.write(json.dumps({"card": card()}) + "\n")
        code = 0
        for row in rows(settings):
            answers.write(row.line() + "\n")
            print(f"[{time.monotonic() - started:.1f} s] {row.line()}", file=sys.stderr, flush=True)
            if row.error and not card_works():
                code = CARD_IS_LOST
                break
    for stream in (answers, sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # not through destructors: on a card that is lost they abort or hang


def end_with_parent() -> None:
    """End this process when its parent, which holds the other end of standard input, has ended."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)  # a call into the driver may never return


def rows(settings: Settings) -> Iterator[Row]:
    """Yield the part's rows, except those that are done. A failure ends the part with a row."""
    bench = Bench(
        device=torch.device("cuda"),
        timer=cuda_timer,
        ceilings=Ceilings(settings.bytes_per_s, settings.flops_per_s),
        is_small=settings.is_small,
        evidence=Path(settings.evidence),
        limit_s=settings.limit_s,
        done=frozenset(settings.done),
    )
    try:
        for row in settings.part.rows(bench):
            if (row.part, row.case) not in bench.done:
                yield row
    except Exception as failure:
        yield failed(settings.part.name, "", failure)


def card_works() -> bool:
    """Whether the card still answers this process: after a fault no call of the process does."""
    try:
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        return False
    return True


def card() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} | versions


if __name__ == "__main__":
    main(sys.argv[1])
