"""What the benchmark starts ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SPAWNS = """
import pathlib, sys
from bench.processes import spawned
command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
with spawned(command, pathlib.Path(sys.argv[1])) as one:
    one.stdout.readline()
    print(one.pid, flush=True)
    one.wait()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_asked_to_end_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", SPAWNS, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as benchmark:
        assert benchmark.stdout is not None
        started = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.send_signal(how)
        assert benchmark.wait(60) != 0
    started.wait(1)  # raises where it still runs
