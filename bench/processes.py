"""Processes that the benchmark starts or measures: how they end, and how much memory they use."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

STOP_TIMEOUT_S = 15.0


@contextlib.contextmanager
def spawned(
    command: list[str], log: Path, stdin: int = subprocess.DEVNULL, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a process inside a `with` block: standard output on a pipe, standard error in `log`. End its children too.

    It has a session of its own, so a terminal's Ctrl-C reaches only us, and we end it here. SIGTERM to us ends it, too.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks run
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def peak_memory_bytes(pid: int) -> int | None:
    """Sum the peak resident memory of a process and its descendants; None where the kernel does not report it."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(high_water_bytes(process.pid) for process in processes)
    except (psutil.Error, OSError, LookupError):
        return None


def listener(address: str) -> int | None:
    """Return the local process that listens on a TCP address; None if there is none or we may not see it."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        return None
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return None
    for found in connections:
        if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == int(port):
            return found.pid
    return None


def high_water_bytes(pid: int) -> int:
    """Return the peak resident memory of one process."""
    # Not getrusage: its maximum starts from the parent's memory at the fork.
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"process {pid} has no VmHWM")
