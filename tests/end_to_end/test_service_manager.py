"""What servers and engines report to a service manager's socket, as systemd has one, and that what hangs does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pagoda_server.runtime.service_manager import READY, REPORTS, SEND_S, STOPPING, WATCHDOG, notify, report_progress
from tests.end_to_end.test_hangs import FAST, MODEL, STUCK, is_lost, until
from tests.servers import running_engine, running_server

WATCHDOG_S = 2.0  # after which the manager would end a service that is silent
LATE_S = 5.0  # for a report, on a machine that does other things


class Report(NamedTuple):
    pid: int
    state: str


class Manager:
    """Receives reports, and learns from the kernel which process has sent each."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._end = end

    def next(self, timeout_s: float = LATE_S, pid: int | None = None) -> Report | None:
        """The next report, of any process or of one; None: there is none in this time."""
        ends = time.monotonic() + timeout_s
        while True:
            self._end.settimeout(max(ends - time.monotonic(), 0.001))
            try:
                state, ancillary, _, _ = self._end.recvmsg(4096, socket.CMSG_SPACE(struct.calcsize("3i")))
            except TimeoutError:
                return None
            ((_, _, sender),) = ancillary
            report = Report(struct.unpack("3i", sender)[0], state.decode())
            if pid in (None, report.pid):
                return report

    def until(self, state: str, timeout_s: float = 60.0, pid: int | None = None) -> list[Report]:
        """The reports up to this one."""
        ends, reports = time.monotonic() + timeout_s, list[Report]()
        while not reports or reports[-1].state != state:
            report = self.next(ends - time.monotonic(), pid)
            assert report is not None, f"no {state} in {timeout_s} s, but {reports}"
            reports.append(report)
        return reports

    def is_silent(self, pid: int | None = None) -> bool:
        """Whether nothing comes for as long as the watchdog has patience, once what was on its way has come."""
        time.sleep(0.2)
        while self.next(0.001):
            pass
        return self.next(WATCHDOG_S, pid) is None


@contextlib.contextmanager
def listening(address: str | bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(address)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield Manager(end)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    path = str(tmp_path / "notify")
    with listening(path, path, monkeypatch) as manager:
        yield manager


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_process_of_a_server_alone_reports_its_start_its_event_loop_and_its_end(
    manager: Manager, workers: int
) -> None:
    with running_server(*FAST, "--workers", str(workers)) as server:
        pid = server.process.pid
        reports = manager.until(READY) + manager.until(WATCHDOG) + manager.until(WATCHDOG)
        psutil.Process(pid).suspend()
        assert manager.is_silent()
        psutil.Process(pid).resume()
        reports += manager.until(WATCHDOG)
        server.process.send_signal(signal.SIGTERM)
        reports += manager.until(STOPPING)
        assert server.process.wait(60) == 0
    assert {report.pid for report in reports} == {pid}, "systemd believes no other process"
    assert [report.state for report in reports if report.state != WATCHDOG] == [READY, STOPPING]


def test_a_router_alone_has_started_once_it_listens(manager: Manager, tmp_path: Path) -> None:
    with running_server(*MODEL, "--engine", f"unix:{tmp_path / 'none.sock'}", ready=False):
        manager.until(READY)


@pytest.mark.thorough
def test_an_engine_reports_as_long_as_its_loop_makes_steps(manager: Manager, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'engine.sock'}"
    with running_engine(listen, *STUCK) as engine, running_server(*MODEL, "--engine", listen) as server:
        manager.until(READY, pid=engine.pid)
        manager.until(WATCHDOG, pid=engine.pid)
        assert is_lost(server, 0.5), "its first step never ends"
        assert manager.is_silent(engine.pid), "its other threads live on, but that does not count"
        engine.send_signal(signal.SIGTERM)
        manager.until(STOPPING, pid=engine.pid)


@pytest.mark.thorough
def test_a_server_reports_on_after_its_first_process_has_taken_new_code(manager: Manager) -> None:
    with running_server(*FAST, "--max-connection-age-s", "1") as server:
        server.process.send_signal(signal.SIGUSR2)
        until(lambda: "goes on in the code that is installed now" in server.log.read_text(), 60)
        assert manager.until(READY)
        time.sleep(WATCHDOG_S / REPORTS)
        while manager.next(0.001):
            pass
        reports = [manager.next(60.0) for _ in range(3)]
        assert reports == 3 * [Report(server.process.pid, WATCHDOG)]


def test_an_abstract_address_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"pagoda-test-{os.getpid()}"
    with listening(f"\0{name}", f"@{name}", monkeypatch) as manager:
        notify(READY)
        assert manager.next() == Report(os.getpid(), READY)


def test_a_watchdog_of_another_process_gets_no_reports(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_PID", str(os.getppid()))
    asyncio.run(asyncio.wait_for(report_progress(), 5.0))
    assert manager.next(0.1) is None


def test_a_manager_that_reads_nothing_holds_up_a_service_for_a_moment(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    while not caplog.records:  # its socket holds some
        began = time.monotonic()
        notify(WATCHDOG)
    assert time.monotonic() - began < SEND_S + LATE_S
    assert "WATCHDOG=1 cannot be sent" in caplog.text
    assert manager.next(), "those before have arrived"
