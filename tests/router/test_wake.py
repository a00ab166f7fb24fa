from __future__ import annotations

import asyncio

import pytest

from pagoda_server.router.engines.stream import Wake

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
