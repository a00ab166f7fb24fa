"""The benchmark's end of a peer's process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.measure import Run
from bench.peers.peer import OnTokens, PeerSettings
from bench.peers.worker import read_run, write_workload
from bench.processes import peak_memory_bytes, spawned
from bench.workloads import Workload


class PeerProcess:
    """A peer that is loaded and warmed up, and sleeps between runs."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        ready = self._read()
        self.versions: dict[str, str] = ready["ready"]
        self._pid: int = ready["pid"]

    def run(self, workload: Workload, on_tokens: OnTokens) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(write_workload(workload) + "\n")
        self._process.stdin.flush()
        while "run" not in (answer := self._read()):
            on_tokens(answer["done"])
        run = read_run(answer["run"])
        return Run(run.times, run.steps, kv=None, peak_memory_bytes=peak_memory_bytes(self._pid))

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the peer's process ended:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def peer_process(name: str, python: str, settings: PeerSettings) -> Iterator[PeerProcess]:
    """Run a peer inside a `with` block. Raise BenchError, then or in a run, if the peer fails."""
    command = [python, "-m", "bench.peers.worker", name, json.dumps(dataclasses.asdict(settings))]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with spawned(command, log, stdin=subprocess.PIPE) as process:
            yield PeerProcess(process, log)
