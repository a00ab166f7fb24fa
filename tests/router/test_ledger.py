"""Quotas that several routers of a host share: real processes, one of which may be killed or stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from pagoda_server.router.errors import ConfigError, QuotaExceeded
from pagoda_server.router.tenants import ledger
from pagoda_server.router.tenants.ledger import SharedLedger
from pagoda_server.router.tenants.quotas import Quota, Quotas, Spending

MOST = 5


class Router:
    """A process that shares the quotas: it does what it is told, and says what came of it."""

    def __init__(self, path: Path, quota: str) -> None:
        code = (
            f"from tests.router.test_ledger import obey; from pathlib import Path; obey(Path({str(path)!r}), {quota})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from pagoda_server.router.tenants.quotas import Quota; {code}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.answer()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, order: str) -> str:
        self.tell(order)
        return self.answer()


def obey(path: Path, quota: Quota) -> None:
    """What a Router does."""
    shared = SharedLedger(path)
    quotas, live = Quotas(shared), list[Spending]()
    quotas.replace({"a": quota})
    print("ready", flush=True)
    for line in sys.stdin:
        order, _, number = line.strip().partition(" ")
        try:
            if order == "enter":
                live.append(quotas.enter("a"))
            elif order == "reserve":
                live.append(quotas.enter("a"))
                live[-1].reserve(int(number))
            elif order == "leave":
                live.pop().__exit__(None, None, None)
            elif order == "stop":
                with shared.locked():
                    print("stops", flush=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
            elif order == "work":
                print(",".join(_worked(quotas, int(number))), flush=True)
                continue
            print("done", flush=True)
        except QuotaExceeded as error:
            print(error.message, flush=True)


def _worked(quotas: Quotas, count: int) -> Iterator[str]:
    """Requests that run for a moment: when each began and ended, and 0 for one that was refused."""
    for _ in range(count):
        try:
            with quotas.enter("a"):
                began = time.monotonic_ns()
                time.sleep(random.uniform(0, 0.002))
                ended = time.monotonic_ns()
            yield f"{began}-{ended}"
        except QuotaExceeded:
            yield "0"
            time.sleep(random.uniform(0, 0.001))


@contextlib.contextmanager
def routers(path: Path, count: int, quota: str) -> Iterator[list[Router]]:
    started: list[Router] = []
    try:
        started.extend(Router(path, quota) for _ in range(count))
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


def test_routers_together_never_run_more_than_the_quota(tmp_path: Path) -> None:
    with routers(tmp_path / "quotas", 8, f"Quota(max_requests={MOST})") as workers:
        for each in workers:
            each.tell("work 300")
        spans = [span for each in workers for span in each.answer().split(",")]
    changes = [
        (int(at), step) for span in spans if span != "0" for at, step in zip(span.split("-"), (1, -1), strict=True)
    ]
    assert max(accumulate(step for _, step in sorted(changes))) == MOST
    assert "0" in spans


def test_what_a_killed_router_ran_is_no_longer_counted(tmp_path: Path) -> None:
    with routers(tmp_path / "quotas", 2, "Quota(max_requests=2)") as (first, second):
        assert [first.ask("enter") for _ in range(2)] == ["done", "done"]
        assert "quota max_requests is 2: 2 requests run" in second.ask("enter")
        first.process.kill()
        first.process.wait()
        assert [second.ask("enter") for _ in range(2)] == ["done", "done"]
        with routers(tmp_path / "quotas", 1, "Quota(max_requests=2)") as (third,):
            assert "2 requests run" in third.ask("enter"), "it has the place of the first"
            assert second.ask("leave") == "done"
            assert third.ask("enter") == "done"


def test_a_router_that_is_stopped_with_the_lock_stops_no_other(tmp_path: Path) -> None:
    with routers(tmp_path / "quotas", 2, "Quota(max_requests=2)") as (first, second):
        assert first.ask("stop") == "stops"
        began = time.monotonic()
        for _ in range(20):
            assert second.ask("enter") == "done"
            assert second.ask("leave") == "done"
        assert time.monotonic() - began < 1
        first.process.send_signal(signal.SIGCONT)


def test_routers_take_from_one_bucket(tmp_path: Path) -> None:
    with routers(tmp_path / "quotas", 2, "Quota(tokens_per_minute=1000)") as (first, second):
        assert first.ask("reserve 900") == "done"
        assert "tokens_per_minute is 1000: the request may use 200 tokens" in second.ask("reserve 200")
        assert first.ask("leave") == "done", "it has used nothing"
        assert second.ask("reserve 200") == "done"


def test_a_file_that_is_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"^--quotas-file: .*quotas is something else$"):
        SharedLedger(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"^--quotas-file: cannot use .*: Is a directory$"):
        SharedLedger(tmp_path)


def test_a_router_without_a_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with routers(tmp_path / "quotas", 1, "Quota()"):
        monkeypatch.setattr(ledger, "PLACES", 1)
        monkeypatch.setattr(ledger, "_SIZE", (tmp_path / "quotas").stat().st_size)
        with pytest.raises(ConfigError, match=r"1 routers use .* already"):
            SharedLedger(tmp_path / "quotas")


def test_tenants_beyond_the_rows_are_counted_by_each_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger, "ROWS", 3)
    shared = SharedLedger(tmp_path / "quotas")
    quotas = Quotas(shared)
    quotas.replace({str(at): Quota(max_requests=1) for at in range(4)})
    for at in range(4):
        quotas.enter(str(at))
        assert quotas.refusal(str(at)) is not None
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the quotas file is full"]
