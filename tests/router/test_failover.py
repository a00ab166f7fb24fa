"""Where a request goes whose engine is lost, and when it goes nowhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagoda.v1 import control_pb2
from pagoda_server.router.engines.group import may_continue
from pagoda_server.router.errors import EngineLost, EnginesLost
from pagoda_server.router.request.failover import Failover
from pagoda_server.settings import ServeConfig, SettingError
from tests.router.fleets import fleet_of

INT8 = control_pb2.EngineInfo(model="m", dtype="bfloat16", kernel_backend="native-int8")
FLOAT = control_pb2.EngineInfo(model="m", dtype="float32", kernel_backend="native")


def of_precision(weights: str, dtype: str) -> control_pb2.EngineInfo:
    precision = control_pb2.Precision(weights=dtype, dtype="bfloat16")
    return control_pb2.EngineInfo(weights_fingerprint=weights, precision=precision)


@dataclass(eq=False)
class Engine:
    """What a Fleet reads of a channel."""

    info: control_pb2.EngineInfo = field(default_factory=lambda: INT8)
    is_ready: bool = True
    is_leaving: bool = False
    says_goodbye: bool = False
    is_suspect: bool = False
    role: str = "both"
    num_sequences: int = 0
    retry_after_s: float | None = None
    name: str = ""

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.is_leaving and not self.says_goodbye

    def may_continue(self, begun: control_pb2.EngineInfo, *, mixes: bool) -> bool:
        return may_continue(self.info, begun, mixes=mixes)


async def moved(
    *engines: Engine,
    has_begun: bool = True,
    continues: bool = True,
    mixes: bool = False,
    wait_s: float = 0.0,
    num_losses: int = 1,
    timeout_s: float | None = None,
) -> Any:
    """The engine to which a request goes that has lost the first one of these."""
    failover = Failover(continues=continues, wait_s=wait_s, mixes=mixes)
    lost: Any = engines[0]
    try:
        return await failover.elsewhere(
            fleet_of(*engines),
            lost,
            EngineLost(lost.info),
            num_losses=num_losses,
            has_begun=has_begun,
            timeout_s=timeout_s,
        )
    finally:
        assert failover.outcomes.total() == 1


def lost_one() -> Engine:
    return Engine(is_ready=False)


async def test_a_stream_that_has_begun_goes_on_only_where_the_same_is_computed() -> None:
    other, same = Engine(FLOAT), Engine(INT8, num_sequences=9)
    assert await moved(lost_one(), other, same) is same
    with pytest.raises(EngineLost):
        await moved(lost_one(), other)
    assert await moved(lost_one(), other, has_begun=False) is other


async def test_a_stream_goes_on_in_another_precision_only_if_asked_to_and_if_no_engine_has_its_own() -> None:
    lost, float32, int8, tuned = (
        Engine(of_precision(weights, dtype), is_ready=at > 0, num_sequences=at)
        for at, (weights, dtype) in enumerate((("w", "int8"), ("w", "float32"), ("w", "int8"), ("tuned", "int8")))
    )
    assert await moved(lost, float32, int8, tuned, mixes=True) is int8, "it has more to do, and the same precision"
    assert await moved(lost, float32, tuned, mixes=True) is float32
    for engines, mixes in (((lost, float32, tuned), False), ((lost, tuned), True)):
        with pytest.raises(EngineLost):
            await moved(*engines, mixes=mixes)
    with pytest.raises(SettingError, match="--mixed-failover needs --mixed-engines"):
        ServeConfig(mixed_failover=True)


async def test_without_failover_only_what_has_not_begun_goes_on() -> None:
    with pytest.raises(EngineLost) as caught:
        await moved(lost_one(), Engine(), continues=False)
    assert caught.value.retry_after_s == 0.1, "as a new request, the client's may go elsewhere at once"
    assert await moved(lost_one(), second := Engine(), continues=False, has_begun=False) is second


async def test_an_engine_that_is_back_gets_its_request_only_if_there_is_no_other() -> None:
    assert await moved(Engine(), second := Engine(num_sequences=9)) is second
    assert await moved(first := Engine(), Engine(is_ready=False)) is first


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_that_has_lost_two_engines_gets_no_third_one(has_begun: bool) -> None:
    with pytest.raises(EnginesLost, match="2 engines were lost"):
        await moved(lost_one(), Engine(), num_losses=2, has_begun=has_begun)


@pytest.mark.usefixtures("virtual_time")
async def test_a_request_waits_for_an_engine_as_long_as_settings_and_deadline_allow() -> None:
    async def waited_s(wait_s: float, timeout_s: float | None) -> float:
        began = time.monotonic()
        with pytest.raises(EngineLost):
            await moved(lost_one(), wait_s=wait_s, timeout_s=timeout_s)
        return time.monotonic() - began

    assert await waited_s(0, None) == 0
    assert await waited_s(3, None) == pytest.approx(3, abs=0.2)
    assert await waited_s(3, 1) == pytest.approx(1, abs=0.2)
    first = lost_one()
    asyncio.get_running_loop().call_later(2, setattr, first, "is_ready", True)
    assert await moved(first, Engine(is_ready=False), wait_s=5) is first
