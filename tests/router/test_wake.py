from __future__ import annotations

import asyncio

import pytest

from pagoda_server.router.engines.stream import (
    GIVES_WAY_S,
    REFUSALS_FOLLOW_S,
    WOKEN_AT_ONCE,
    EngineStream,
    Wake,
    Wakeups,
)

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_what_is_set_before_the_wait_is_not_lost_and_counts_once() -> None:
    wake = Wake()
    wake.set()
    wake.set()
    await asyncio.wait_for(wake.wait(), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wake.wait(), 0.01)


async def test_a_waiter_is_woken_and_one_that_was_cancelled_leaves_no_trace() -> None:
    wake = Wake()
    cancelled = asyncio.create_task(wake.wait())
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    waiter = asyncio.create_task(wake.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    wake.set()
    await asyncio.wait_for(waiter, 1)
    assert waiter.done()


def stream_of(wakeups: Wakeups, *, has_begun: bool) -> EngineStream:
    """A stream whose reader is to be woken."""
    stream = EngineStream(1, 1, abort=lambda _: None, forget=lambda _: None, on_start=lambda: None)
    stream.has_begun = has_begun
    wakeups.add(stream)
    wakeups.start()
    return stream


async def test_first_tokens_alone_are_written_while_calls_are_refused() -> None:
    now = 100.0
    wakeups = Wakeups(clock=lambda: now)
    wakeups.give_way()
    begun = asyncio.create_task(stream_of(wakeups, has_begun=True).wait())
    await asyncio.wait_for(stream_of(wakeups, has_begun=False).wait(), 30)
    await asyncio.sleep(5 * REFUSALS_FOLLOW_S)
    assert not begun.done()
    now += REFUSALS_FOLLOW_S
    await asyncio.wait_for(begun, 30)


async def test_late_tokens_go_before_most_first_tokens() -> None:
    now = 100.0
    wakeups = Wakeups(clock=lambda: now)
    wakeups.give_way()
    others = [stream_of(wakeups, has_begun=True) for _ in range(3 * WOKEN_AT_ONCE)]
    assert all(stream.is_due for stream in others)
    assert not wakeups.are_late
    now += GIVES_WAY_S
    assert wakeups.are_late
    first = [EngineStream(1, 1, abort=lambda _: None, forget=lambda _: None, on_start=lambda: None) for _ in others]
    for stream in first:
        wakeups.add(stream)
    wakeups.start()
    assert [stream.is_due for stream in others].count(False) == 2 * WOKEN_AT_ONCE * 3 // 4
    assert [stream.is_due for stream in first].count(False) == 2 * WOKEN_AT_ONCE // 4
    await asyncio.sleep(1)
    assert not any(stream.is_due for stream in (*others, *first))
    assert not wakeups.are_late


async def test_tokens_do_not_give_way_for_ever() -> None:
    now = 100.0
    wakeups = Wakeups(clock=lambda: now)
    wakeups.give_way()
    begun = asyncio.create_task(stream_of(wakeups, has_begun=True).wait())
    while now < 100.0 + 0.9 * GIVES_WAY_S:
        now += REFUSALS_FOLLOW_S / 2
        wakeups.give_way()
        await asyncio.sleep(2 * REFUSALS_FOLLOW_S)
    assert not begun.done()
    now = 100.0 + GIVES_WAY_S
    wakeups.give_way()
    await asyncio.wait_for(begun, 30)
