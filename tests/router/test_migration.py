"""When a stream leaves its engine, and when it stays."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda_server.router.engines.choosing import Asked
from pagoda_server.router.engines.stream import SequenceInbox
from pagoda_server.router.errors import EngineLost
from pagoda_server.router.request import migration
from pagoda_server.router.request.migration import Migration, Migrations
from tests.router import test_failover
from tests.router.fleets import fleet_of

SUBMIT = engine_pb2.Submit(prompt=[1, 2, 3], max_tokens=9, min_tokens=5, logprobs=2, sampling={"n": 2, "seed": 7})


class Stream:
    """A rehearsal, which ends at once, with the loss of its engine, or never."""

    def __init__(self, reason: int | None, *, is_lost: bool) -> None:
        ended = None if reason is None else engine_pb2.Ended(reason=reason)  # type: ignore[arg-type]
        self.inboxes = [SequenceInbox(ended=ended)]
        self.is_closed = False
        self._is_lost = is_lost

    async def wait(self) -> None:
        if self._is_lost:
            raise EngineLost(None)
        await asyncio.sleep(3600)

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class Engine(test_failover.Engine):
    address: str = ""
    block_layout: bytes = b"layout"
    ends: int | None = engine_pb2.END_REASON_LENGTH
    fails: tuple[int, ...] = ()  # rehearsals that are late, counted from 0
    is_lost: bool = False
    asked: list[tuple[engine_pb2.Submit, Asked, Stream]] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None  # called while a rehearsal is computed

    @property
    def is_draining(self) -> bool:
        return not self.takes_requests

    def submit(self, submit: engine_pb2.Submit, asked: Asked) -> Stream:
        ends = engine_pb2.END_REASON_DEADLINE if len(self.asked) in self.fails else self.ends
        stream = Stream(ends, is_lost=self.is_lost)
        self.asked.append((submit, asked, stream))
        self.meanwhile()
        return stream


async def due(
    source: Engine, *others: Engine, progress: Any = None, is_on: bool = True, lenders: list[Any] | None = None
) -> tuple[Any, Migrations]:
    """The engine to which a stream is due to go, if it is; all that runs on its behalf has ended.

    lenders  gets where that engine can fetch what it lacks
    """
    migrations, known = Migrations(is_on=is_on), progress if progress is not None else [array("I", [4, 5]), None]
    any_source: Any = source
    moving = Migration(migrations, fleet_of(source, *others), any_source, SUBMIT, lambda: known, lambda: 30.0)
    assert not moving.is_due(), "first the other engine gets the blocks"
    for _ in range(10):
        await asyncio.sleep(0.01)
    is_due = moving.is_due()
    if lenders is not None:
        lenders.append(moving.lender)
    moving.close()
    await asyncio.sleep(0)
    return moving.target if is_due else None, migrations


async def test_another_engine_computes_each_unfinished_sequence_as_it_is_before_the_stream_goes_there() -> None:
    source, target = Engine(says_goodbye=True), Engine()
    found, migrations = await due(source, target)
    assert found is target
    ((submit, asked, stream),) = target.asked
    assert [list(each.ids) for each in submit.outputs] == [[4, 5]]
    assert (submit.max_tokens, submit.min_tokens, submit.sampling.n, submit.sampling.seed) == (3, 0, 1, 7)
    assert not submit.HasField("logprobs")
    assert submit.priority == -1, "streams that are there already go first"
    assert asked.lender == (source.address, 5)
    assert stream.is_closed
    assert migrations.outcomes == {"moved": 1, "stayed": 0}


@pytest.mark.parametrize(("grows", "num_rounds"), [([40, 17, 16, 5], 3), ([30, 30, 30, 30, 30], migration.MOST_ROUNDS)])
async def test_a_stream_is_copied_again_until_it_is_a_few_tokens_ahead(grows: list[int], num_rounds: int) -> None:
    ids, rest = array("I", [4]), iter(grows)
    target = Engine(meanwhile=lambda: ids.extend([6] * next(rest)))
    source, lenders = Engine(says_goodbye=True), list[Any]()
    found, _ = await due(source, target, progress=[ids, None], lenders=lenders)
    assert found is target
    is_far_ahead = grows[num_rounds - 1] > migration.FEW * SUBMIT.sampling.n
    assert lenders == [(source.address, len(SUBMIT.prompt) + len(ids)) if is_far_ahead else None]
    lengths = [len(submit.outputs[0].ids) for submit, _, _ in target.asked]
    assert lengths == [1 + sum(grows[:at]) for at in range(num_rounds)], "each round has what has come since"


@pytest.mark.parametrize(
    ("grows", "fails", "moves"),
    [
        ([30, 8, 8], (1,), True),
        ([30], (0,), False),
        ([30, 30, 30], (1, 2), False),
        ([30] * migration.MOST_ROUNDS, (migration.MOST_ROUNDS - 1,), False),
    ],
    ids=["a later one", "the first one", "two", "the last one"],
)
async def test_one_copy_may_fail_unless_it_is_the_first_or_the_last(
    grows: list[int], fails: tuple[int, ...], moves: bool
) -> None:
    ids, rest = array("I", [4]), iter(grows)
    target = Engine(fails=fails, meanwhile=lambda: ids.extend([6] * next(rest)))
    found, _ = await due(Engine(says_goodbye=True), target, progress=[ids, None])
    assert (found is target) == moves
    assert len(target.asked) == len(grows)


async def test_a_sequence_keeps_its_own_seed() -> None:
    target = Engine()
    await due(Engine(says_goodbye=True), target, progress=[None, array("I", [4])])
    assert target.asked[0][0].sampling.seed == 8


@pytest.mark.parametrize(
    ("source", "target", "is_on"),
    [
        (Engine(), Engine(), True),
        (Engine(says_goodbye=True, block_layout=b""), Engine(block_layout=b""), True),
        (Engine(says_goodbye=True), Engine(), False),
    ],
    ids=["the engine serves on", "it lends no blocks", "streams may not go on elsewhere"],
)
async def test_nothing_is_asked_of_another_engine(source: Engine, target: Engine, is_on: bool) -> None:
    found, migrations = await due(source, target, is_on=is_on)
    assert found is None
    assert not target.asked
    assert not migrations.outcomes.total()


@pytest.mark.parametrize(
    "target",
    [
        Engine(block_layout=b"other"),
        Engine(is_ready=False),
        Engine(info=test_failover.FLOAT),
        Engine(ends=engine_pb2.END_REASON_REJECTED),
        Engine(ends=engine_pb2.END_REASON_DEADLINE),
        Engine(ends=None, is_lost=True),
    ],
    ids=["other blocks", "absent", "another precision", "rejects it", "is late", "is lost"],
)
async def test_a_stream_stays_where_no_other_engine_can_take_it(target: Engine) -> None:
    source = Engine(says_goodbye=True)
    found, migrations = await due(source, target)
    assert found is None
    assert migrations.outcomes == {"moved": 0, "stayed": 1}
    assert all(stream.is_closed for _, _, stream in target.asked)


async def test_an_engine_that_takes_too_long_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MOST_S", 0.02)
    target = Engine(ends=None)
    found, migrations = await due(Engine(says_goodbye=True), target)
    assert found is None
    assert migrations.outcomes["stayed"] == 1
    assert target.asked[0][2].is_closed


async def test_a_stream_that_ends_meanwhile_ends_its_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Engine(ends=None)
    found, migrations = await due(Engine(says_goodbye=True), target)
    assert found is None
    assert target.asked[0][2].is_closed
    assert not migrations.outcomes.total()
    assert not migrations.places.locked()
