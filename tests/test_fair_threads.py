"""Work for many tenants on a few threads: in turn, bounded, and gone from the queue when nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from pagoda_server.grammars.fair_threads import FairThreads, QueueFull, allocated_bytes


class Panic(BaseException):
    """What a panic of a library in Rust becomes."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def held(threads: FairThreads, gate: threading.Event) -> None:
    """Keep the only thread at work until the gate opens."""
    begun = threading.Event()
    threads.submit("first", lambda: (begun.set(), gate.wait()))
    assert begun.wait(10.0)


def test_tenants_take_turns(gate: threading.Event) -> None:
    threads, done = FairThreads(1, "test"), list[str]()

    def note(name: str) -> Callable[[], None]:
        return lambda: done.append(name)

    held(threads, gate)
    futures = [threads.submit(name[0], note(name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    gate.set()
    for future in futures:
        future.result(10.0)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_waits_is_bounded_for_each_tenant_and_in_all(gate: threading.Event) -> None:
    threads = FairThreads(1, "test", most=5, most_own=3)
    held(threads, gate)
    for tenant in "aaabb":
        threads.submit(tenant, int)
    with pytest.raises(QueueFull, match="3 of your"):
        threads.submit("a", int)
    with pytest.raises(QueueFull, match="5 of all"):
        threads.submit("c", int)
    assert threads.num_waiting == 5


def test_a_cancelled_job_leaves_the_queue_and_makes_room(gate: threading.Event) -> None:
    threads, done = FairThreads(1, "test", most_own=2), list[int]()
    held(threads, gate)
    first, second = (threads.submit("a", lambda at=at: done.append(at)) for at in range(2))  # type: ignore[misc]
    assert first.cancel()
    assert threads.num_waiting == 1
    third = threads.submit("a", lambda: done.append(2))
    gate.set()
    second.result(10.0)
    third.result(10.0)
    assert done == [1, 2]


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_a_job_that_raises_ends_no_thread(error: type[BaseException]) -> None:
    threads = FairThreads(1, "test")

    def fail() -> None:
        raise error

    with pytest.raises(error):
        threads.submit("a", fail).result(10.0)
    assert threads.submit("a", lambda: 7).result(10.0) == 7


def test_memory_is_counted_where_the_c_library_counts_it() -> None:
    before = allocated_bytes()
    if not before:
        pytest.skip("this C library does not count")
    kept = bytearray(50 << 20)
    assert allocated_bytes() - before > 40 << 20
    del kept
