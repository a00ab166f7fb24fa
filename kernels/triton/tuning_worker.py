"""The processes of the tuner: one times configurations on the GPU, the others compile them ahead, without one.

A worker answers requests, a line of JSON each. A kernel that reads out of bounds makes the GPU unusable for the process
that launched it, and a compiler may abort; either way only the worker ends.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .configs import trying
from .inputs import ModelShape
from .launches import SHARED_LIMITS, compile_kernel, record
from .timing import Timer, cuda_timer, host_timer
from .tuning_spaces import Space, Work, spaces

TOLERANCE = 2e-2  # relative: configurations sum in different orders
TINY = ModelShape("tiny", 2, 4, 2, 16, 64, 64, 300)  # of a rehearsal
REHEARSED_CAPABILITY = 90  # for which a rehearsal compiles

Fields = dict[str, int]
Answer = dict[str, Any]


class WorkerDied(Exception):
    """A worker has ended, or was ended because it did not answer in time."""


class Worker:
    """A worker's process, started when it is first asked and again after it has died.

    log  a file for what it prints
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command, self._log, self._environment = command, log, environment
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, object], timeout_s: float) -> Answer:
        """Raises WorkerDied if there is no answer."""
        if self._process is None or self._process.poll() is not None:
            with self._log.open("ab") as log:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(
                    self._command, stdin=pipe, stdout=pipe, stderr=log, env=self._environment, bufsize=0
                )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerDied(f"the process ended with {process.wait()} before it was asked") from None
        answer, ends = b"", time.monotonic() + timeout_s
        while not answer.endswith(b"\n"):
            readable, _, _ = select.select([process.stdout], [], [], max(ends - time.monotonic(), 0.0))
            if not readable:
                self.close()
                raise WorkerDied(f"no answer within {timeout_s:.0f} s")
            if not (part := process.stdout.read(1 << 16)):
                raise WorkerDied(f"the process ended with {process.wait()}")
            answer += part
        found: Answer = json.loads(answer)
        if "is_fault" in found:
            self.close()  # so that the next request does not meet the process as it ends
        return found

    def close(self) -> None:
        """End the process, which may hang in the driver. May be called from another thread than `ask`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def start_worker(task: str, log: Path, is_rehearsal: bool) -> Worker:
    """task  "time", or "compile", which works without a GPU. In a rehearsal the interpreter does what is timed."""
    command = [sys.executable, "-m", __name__, *(["rehearse"] if is_rehearsal else [])]
    is_interpreted = is_rehearsal and task == "time"
    return Worker(command, log, os.environ | {"TRITON_INTERPRET": "1" if is_interpreted else "0"})


def known_spaces(is_rehearsal: bool) -> list[Space]:
    return spaces((TINY,)) if is_rehearsal else spaces()


@dataclass(slots=True)
class Bench:
    """The space that is timed, whose tensors stay on the device until another one is."""

    device: torch.device
    timer: Timer
    space: Space
    work: Work
    key: str
    default: Fields
    expected: Tensor

    @classmethod
    def open(cls, space: Space, device: torch.device, timer: Timer) -> Bench:
        work = space.work(device)
        with trying(space.op) as configs:
            expected = work.result()
        if len(configs) != 1:
            raise ValueError(f"{space.op} asked for {len(configs)} configurations, not for one")
        ((key, default),) = configs.items()
        return cls(device, timer, space, work, key, default, expected)

    def time(self, fields: Fields) -> Answer:
        """Time the configuration; no fields: the default. Raises whatever the configuration makes the op raise."""
        with trying(self.space.op, **(fields or self.default)):
            if fields and not is_same(self.work.result(), self.expected):
                return {"error": "another result"}
            time_us = sum(self.timer(calls) for calls in self.work.workloads)
        answer: Answer = {"time_us": time_us}
        if not fields:
            answer |= {"key": self.key, "default": self.default, "rivals": list(self.work.rivals)}
        return answer


def is_same(result: Tensor, expected: Tensor) -> bool:
    difference = (result.double() - expected.double()).norm()
    return bool(difference <= TOLERANCE * expected.double().norm())


def compile_space(space: Space, fields: Fields, capability: int) -> Answer:
    """Compile what the space launches into Triton's cache. Without fields, return the default and its rivals."""
    work = space.work(torch.device("meta"))

    def call() -> None:
        for calls in work.workloads:
            calls[0]()

    with trying(space.op, **fields) as configs:
        launches = record(capability, call)
    for launch in launches:
        shared = compile_kernel(launch).metadata.shared
        if shared > SHARED_LIMITS.get(capability, shared):
            return {"error": f"{launch.name} takes {shared} bytes of shared memory"}
    ((_, default),) = configs.items()
    return {"default": default, "rivals": list(work.rivals)} if not fields else {}


class _Server:
    def __init__(self, is_rehearsal: bool) -> None:
        self._is_rehearsal = is_rehearsal
        self._spaces = {space.name: space for space in known_spaces(is_rehearsal)}
        self._bench: Bench | None = None

    def answer(self, request: Mapping[str, Any]) -> Answer:
        match request["task"]:
            case "card":
                return self._card()
            case "compile":
                return compile_space(self._spaces[request["space"]], request["fields"], request["capability"])
            case _:
                return self._time(self._spaces[request["space"]], request["fields"])

    def _card(self) -> Answer:
        if self._is_rehearsal:
            return {"gpu": "rehearsal", "capability": REHEARSED_CAPABILITY}
        major, minor = torch.cuda.get_device_capability()
        return {"gpu": torch.cuda.get_device_name(), "capability": 10 * major + minor}

    def _time(self, space: Space, fields: Fields) -> Answer:
        if self._bench is None or self._bench.space is not space:
            self._bench = None
            gc.collect()
            if not self._is_rehearsal:
                torch.cuda.empty_cache()
            device, timer = ("cpu", host_timer) if self._is_rehearsal else ("cuda", cuda_timer)
            self._bench = Bench.open(space, torch.device(device), timer)
        return self._bench.time(fields)


def is_usable() -> bool:
    """Whether this process can still use the GPU: after a fault, every call of CUDA fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    # Libraries print to standard output too. That goes to the log, and answers go to a copy of standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = _Server("rehearse" in arguments)
    for line in sys.stdin:
        try:
            answer = server.answer(json.loads(line))
        except Exception as failure:  # of any kind: this configuration cannot be used
            answer = {"error": f"{type(failure).__name__}: {failure}"[:500]}
            if not is_usable():
                answer["is_fault"] = True
        answers.write(json.dumps(answer) + "\n")
        if "is_fault" in answer:
            os._exit(1)  # a destructor may hang on the broken device


if __name__ == "__main__":
    main(sys.argv[1:])
