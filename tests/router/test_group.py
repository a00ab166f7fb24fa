"""Which engines serve together: votes at the start, refusals, and the change to other weights."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from pagoda.v1 import control_pb2
from pagoda_server.router.engines.group import GONE_S, SETTLES_S, EngineGroup, Identity, may_continue
from pagoda_server.router.engines.refusals import WrongEngine


def info(weights: str = "a", dtype: str = "bfloat16", block_size: int = 16, **fields: str) -> control_pb2.EngineInfo:
    return control_pb2.EngineInfo(
        weights_fingerprint=weights,
        precision=control_pb2.Precision(weights="unquantized", dtype=dtype, kv_cache=dtype) if dtype else None,
        kv_cache=control_pb2.KvCacheInfo(block_size=block_size),
        **fields,  # type: ignore[arg-type]
    )


@dataclass(eq=False)
class Engine:
    """What a group reads of a channel."""

    label: str = "here"
    identity: Identity | None = None
    identified_at: float = 0.0
    is_leaving: bool = False
    is_ready: bool = False
    away_s: float = 0.0

    async def greet(self, group: EngineGroup, said: control_pb2.EngineInfo | None = None) -> str:
        """Ask to be admitted; return why not."""
        self.identity, self.identified_at = Identity.of(said or info()), time.monotonic()
        try:
            await group.admit(self)
        except WrongEngine as error:
            return error.reason
        self.is_ready = True
        return ""


def group_of(*engines: Engine, mixes: bool = False) -> EngineGroup:
    return EngineGroup(lambda: engines, mixes=mixes)


pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_one_engine_serves_at_once_and_so_does_what_replaces_it() -> None:
    group = group_of(engine := Engine())
    began = time.monotonic()
    for weights in ("a", "a", "b"):
        assert await engine.greet(group, info(weights)) == ""
        engine.is_ready = False
    assert time.monotonic() == began


async def test_the_largest_group_that_is_ready_soon_serves_whoever_was_first() -> None:
    engines = [Engine() for _ in range(4)]
    group = group_of(*engines)
    began = time.monotonic()
    asked = [asyncio.create_task(engines[at].greet(group, info(weights))) for at, weights in ((0, "b"), (2, "a"))]
    await asyncio.sleep(SETTLES_S / 2)
    asked.append(asyncio.create_task(engines[3].greet(group)))
    assert await asyncio.gather(*asked) == ["weights", "", ""]
    assert time.monotonic() - began == pytest.approx(SETTLES_S)


async def test_a_majority_of_all_members_does_not_wait() -> None:
    engines = [Engine() for _ in range(3)]
    group = group_of(*engines)
    began = time.monotonic()
    assert await asyncio.gather(*(engine.greet(group) for engine in engines[:2])) == ["", ""]
    assert time.monotonic() == began
    assert await engines[2].greet(group, info("b")) == "weights"


async def test_among_equal_groups_the_first_in_the_list_serves() -> None:
    engines = [Engine(), Engine()]
    group = group_of(*engines)
    later = asyncio.create_task(engines[1].greet(group, info("b")))
    await asyncio.sleep(0.1)
    assert await engines[0].greet(group, info("a")) == ""
    assert await later == "weights"


@pytest.mark.parametrize(
    ("other", "reason"),
    [(info("b"), "weights"), (info(dtype="float32"), "precision"), (info(block_size=32), "block_size")],
)
async def test_what_may_change_answers_is_refused_unless_it_is_mixed_and_weights_always(
    other: control_pb2.EngineInfo, reason: str
) -> None:
    for mixes in (False, True):
        engines = [Engine(), Engine(), Engine()]
        group = group_of(*engines, mixes=mixes)
        await asyncio.gather(*(engine.greet(group) for engine in engines[:2]))
        assert await engines[2].greet(group, other) == ("" if mixes and reason != "weights" else reason)


async def test_other_weights_serve_once_no_engine_is_left_that_served() -> None:
    first, second, third = engines = [Engine(), Engine(), Engine()]
    group = group_of(*engines)
    await asyncio.gather(*(engine.greet(group) for engine in engines))
    first.is_ready = False
    assert await first.greet(group, info("b")) == "weights", "two others serve"
    second.is_ready, second.away_s = False, 1.0
    third.is_leaving = True
    assert await first.greet(group, info("b")) == "weights", "one may come back"
    assert await second.greet(group, info("b")) == ""
    assert await first.greet(group, info("b")) == ""


async def test_an_engine_that_has_long_been_away_is_gone() -> None:
    first, second = engines = [Engine(), Engine()]
    group = group_of(*engines)
    await asyncio.gather(*(engine.greet(group) for engine in engines))
    first.is_ready = second.is_ready = False
    first.away_s = GONE_S - 1
    assert await second.greet(group, info("b")) == "weights"
    first.away_s = GONE_S
    first.identified_at -= GONE_S
    assert await second.greet(group, info("b")) == ""


async def test_engines_of_earlier_versions_mix_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    engines = [Engine() for _ in range(4)]
    group = group_of(*engines)
    said = [info("", dtype=""), info("a"), info("", dtype=""), info("b")]
    asked = [asyncio.create_task(engine.greet(group, each)) for engine, each in zip(engines, said, strict=True)]
    assert await asyncio.gather(*asked) == ["", "", "", "weights"]
    assert len([each for each in caplog.messages if "does not say which weights" in each]) == 1


def test_a_stream_goes_on_where_weights_and_precision_are_the_same() -> None:
    assert may_continue(info(), info(block_size=32, model="moved"))
    assert not may_continue(info(), info("b"))
    assert not may_continue(info(), info(dtype="float32"))
    assert not may_continue(info(""), info("b"))
    assert may_continue(info(), info(dtype="float32"), mixes=True)
    assert not may_continue(info(), info("b"), mixes=True)
    assert not may_continue(info(""), info("b"), mixes=True)
    old = control_pb2.EngineInfo(model="m", dtype="bfloat16", weight_bytes=5)
    assert may_continue(old, old)
    assert not may_continue(old, control_pb2.EngineInfo(model="m", dtype="bfloat16", weight_bytes=6))
