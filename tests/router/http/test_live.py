"""The feed of the page: what it makes of an engine's traces, and what it asks an engine for."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, trace_pb2
from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.engine.serving.codec import trace_messages
from pagoda_server.router.engines.held_adapters import HeldAdapters
from pagoda_server.router.errors import ResourceExhausted, Unavailable
from pagoda_server.router.http import live
from pagoda_server.router.http.live import LiveFeed
from pagoda_server.router.telemetry.load_feed import MAX_WATCHERS
from pagoda_server.router.telemetry.trace_reader import Rates, TraceReader
from pagoda_server.router.tenants.caller import ANYONE, Caller
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.router.fleets import fleet_of

pytestmark = pytest.mark.usefixtures("virtual_time")


class Seconds:
    """Each step takes a second."""

    def of(self, plan: StepPlan) -> float:
        return 1.0


def parts_of(engine: SteppedEngine, last_s: float = 60.0) -> list[trace_pb2.StepTracePart]:
    return [message.part for message in trace_messages(0, engine.steps.trace.take(last_s))]


def read(reader: TraceReader, engine: SteppedEngine, rates: Rates, last_s: float = 60.0) -> dict[str, Any]:
    return live.page_rows(reader.read(parts_of(engine, last_s), rates))


def rows_of(engine: SteppedEngine) -> dict[int, list[Any]]:
    """Each sequence's state, numbers and cells, from one trace of everything."""
    return {id: row for id, *row in read(TraceReader(), engine, {})["rows"]}


def test_a_row_tells_what_its_sequence_did_in_each_step() -> None:
    engine = SteppedEngine(step_time=Seconds(), max_num_seqs=1)
    engine.add([1] * 20, max_tokens=3, tenant="acme")  # its prompt takes two steps of 16 tokens
    engine.add([2] * 4, max_tokens=2)
    engine.run()
    rows = rows_of(engine)
    assert rows[0] == ["finished", 20, 23, 22, "acme", "", "ppdd.."]
    assert rows[1][-1] == "wwwwpd"


def test_a_preempted_sequence_shows_when_it_lost_its_blocks_and_when_it_came_back() -> None:
    engine = SteppedEngine(step_time=Seconds(), num_blocks=8, block_size=4)
    seqs = [engine.add([head] * 10, max_tokens=16) for head in (1, 2)]
    engine.run()
    [preempted] = [seq for seq in seqs if seq.account.preemptions]
    cells = rows_of(engine)[preempted.id][-1]
    assert cells.strip(".").strip("pd").count("x") == len(cells.strip(".").strip("pd")) > 0


def test_traces_that_overlap_tell_each_step_once() -> None:
    engine = SteppedEngine(step_time=Seconds())
    reader, rates, cells = TraceReader(), Rates(), {0: "", 1: ""}
    engine.add([1] * 6, max_tokens=30)
    for at in range(40):
        if at == 7:
            engine.add([2] * 30, max_tokens=9)
        engine.step()
        if at % 3 == 0 or at > 35:
            for id, *_, some in read(reader, engine, rates, last_s=8.0)["rows"]:
                cells[id] += some
    assert {id: some.strip(".") for id, some in cells.items()} == {0: "p" + 29 * "d", 1: "pp" + 8 * "d"}
    assert sum(rate.tokens for rate in rates.values()) == 30 + 9
    assert sum(rate.prompt_tokens for rate in rates.values()) == 6 + 30


def test_numbers_are_those_after_the_last_step_however_often_a_start_is_told() -> None:
    engine = SteppedEngine(step_time=Seconds())
    seq, reader = engine.add([1] * 20, max_tokens=30), TraceReader()
    for _ in range(25):
        engine.step()
        [[_, state, prompt, tokens, computed, *_]] = read(reader, engine, {}, last_s=4.0)["rows"]
        assert (prompt, tokens, computed) == (20, len(seq.tokens), seq.num_computed)
    assert state == "d"


def test_an_end_is_told_once() -> None:
    engine = SteppedEngine(step_time=Seconds())
    engine.add([1], max_tokens=2)
    engine.run()
    reader = TraceReader()
    assert [row[1] for row in read(reader, engine, {})["rows"]] == ["finished"]
    assert read(reader, engine, {})["rows"] == []


def test_times_are_those_of_first_tokens_and_of_gaps_between_tokens() -> None:
    engine = SteppedEngine(step_time=Seconds(), max_num_seqs=1)
    engine.add([1] * 20, max_tokens=4)
    engine.add([2] * 4, max_tokens=3)
    engine.run()
    rates = Rates()
    TraceReader().read(parts_of(engine), rates)
    assert [ms for _, rate in sorted(rates.items(), reverse=True) for ms in rate.ttft] == [2000.0, 6000.0]
    gaps = [pair for rate in rates.values() for pair in rate.itl.items()]
    assert {ms for ms, _ in gaps} == {1000.0}
    assert sum(times for _, times in gaps) == 3 + 2


@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_drafts_that_become_output_are_counted_as_tokens(accuracy: float) -> None:
    oracle = Oracle(lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE), accuracy, VOCAB_SIZE)
    engine = SteppedEngine(step_time=Seconds(), speculation=AlwaysDrafts(oracle, 4, VOCAB_SIZE))
    engine.add([1] * 6, max_tokens=30)
    reader, rates = TraceReader(), Rates()
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        reader.read(parts_of(engine, last_s=4.0), rates)
    assert sum(rate.tokens for rate in rates.values()) == 30
    assert sum(sum(rate.itl.values()) for rate in rates.values()) == 29


def test_many_sequences_show_the_first_and_count_all() -> None:
    engine = SteppedEngine(step_time=Seconds(), num_blocks=256)
    for head in range(8):
        engine.add([head], max_tokens=4)
    reader = TraceReader(max_rows=3)
    engine.step()
    engine.step()
    assert reader.read(parts_of(engine), Rates()).num_others == 5
    engine.run()
    rates = Rates()
    assert len(TraceReader(max_rows=3).read(parts_of(engine), rates).rows) == 3
    assert sum(rate.tokens for rate in rates.values()) == 32


def test_a_reading_has_at_most_so_many_columns_the_last_ones() -> None:
    engine = SteppedEngine(step_time=Seconds())
    engine.add([1] * 20, max_tokens=30)
    engine.run()
    found = live.page_rows(TraceReader(max_columns=5).read(parts_of(engine), {}))
    assert (found["columns"], found["rows"][0][-1]) == (5, "ddddd")


# -- what is asked for ------------------------------------------------------------------------------------------------


class Channel:
    """The channel to an engine whose state the test sets, and which counts what it is asked for."""

    def __init__(self) -> None:
        self.info = control_pb2.EngineInfo(epoch=1)
        self.held = HeldAdapters()
        self.used = Counter[bytes](), Counter[bytes]()
        self.sequences = SimpleNamespace(
            load=control_pb2.EngineLoad(blocks_total=8, blocks_free=8), adapters=lambda: self.used
        )
        self.questions = self
        self.asked: list[float] = []
        self.is_lost = False

    async def trace(self, last_s: float) -> list[trace_pb2.StepTracePart]:
        if self.is_lost:
            raise Unavailable("the engine was lost")
        self.asked.append(last_s)
        return [trace_pb2.StepTracePart(taken_at_s=1.0)]


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def feed(channel: Channel) -> LiveFeed:
    async def load() -> control_pb2.Load:
        answer = control_pb2.Load(engines=[channel.sequences.load], requests=3)
        answer.tenants.add(name="acme", share=0.75)
        answer.tenants.add(name="brown", share=0.25)
        return answer

    return LiveFeed(fleet_of(channel), load)


async def ticks(watch: AsyncIterator[str], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for message in watch:
        found += json.loads(message)
        if len(found) >= count:
            break
    return found


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_all_watchers_share_one_question_to_the_engine(feed: LiveFeed, channel: Channel) -> None:
    channel.sequences.load.running = 1
    several = [asyncio.create_task(ticks(feed.watch(ANYONE), 3)) for _ in range(5)]
    told = await asyncio.gather(*several)
    assert len(channel.asked) == 3
    assert all(each == told[0] for each in told)
    assert channel.asked[0] > live.FIRST_S > 1 > channel.asked[1]


async def test_an_idle_engine_is_asked_once_and_told_of_once_a_second(feed: LiveFeed, channel: Channel) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await ticks(feed.watch(ANYONE), 2)
    assert loop.time() - started == pytest.approx(live.HEARTBEAT_S)
    assert len(channel.asked) == 1


async def test_an_engine_that_has_worked_since_is_asked_again(feed: LiveFeed, channel: Channel) -> None:
    watch = feed.watch(ANYONE)
    await ticks(watch, 1)
    channel.sequences.load.steps += 1
    task = asyncio.create_task(ticks(feed.watch(ANYONE), 2))
    await until(lambda: len(channel.asked) == 2)
    await task


async def test_nothing_is_asked_for_when_nothing_watches(feed: LiveFeed, channel: Channel) -> None:
    channel.sequences.load.running = 1
    watch = feed.watch(ANYONE)
    await ticks(watch, 1)
    await watch.aclose()  # type: ignore[attr-defined]
    asked = len(channel.asked)
    await asyncio.sleep(3 * live.INTERVAL_S)
    assert len(channel.asked) == asked
    await ticks(feed.watch(ANYONE), 2)
    assert channel.asked[-1] < 2.0  # coming back again and again costs no more than staying


async def test_a_new_watcher_gets_what_was_told_before(feed: LiveFeed, channel: Channel) -> None:
    channel.sequences.load.running = 1
    first = asyncio.create_task(ticks(feed.watch(ANYONE), 4))
    await until(lambda: len(channel.asked) == 3)
    [message] = [json.loads(await anext(feed.watch(ANYONE)))]
    assert len(message) >= 2
    assert message == (await first)[: len(message)]


async def test_an_engine_that_does_not_answer_leaves_the_load(feed: LiveFeed, channel: Channel) -> None:
    channel.is_lost = True
    [tick] = await ticks(feed.watch(ANYONE), 1)
    assert [engine["blocks"] for engine in tick["engines"]] == [[8, 8, 0]]
    assert "rows" not in tick["engines"][0]


async def test_a_caller_that_may_not_observe_sees_its_own_tenant(feed: LiveFeed) -> None:
    [tick] = await ticks(feed.watch(Caller("acme", frozenset(), is_proven=True)), 1)
    assert tick["tenants"] == [["acme", 0, 0, 0.75]]
    assert "blocks" not in tick["engines"][0]


async def test_an_engine_has_its_machine_beside_its_name_for_those_who_may_observe(
    feed: LiveFeed, channel: Channel
) -> None:
    channel.sequences.load.name, channel.info.settings["node"] = "engine-1", "rack-7"
    [tick] = await ticks(feed.watch(ANYONE), 1)
    assert (tick["engines"][0]["name"], tick["engines"][0]["node"]) == ("engine-1", "rack-7")
    [tick] = await ticks(feed.watch(Caller("acme", frozenset(), is_proven=True)), 1)
    assert "node" not in tick["engines"][0]


async def test_adapters_are_shown_to_those_who_may_name_them_and_their_requests_to_observers(
    feed: LiveFeed, channel: Channel
) -> None:
    names = ("pirate", "secret", "idle")
    channel.held.report(
        engine_pb2.Adapters(held=[engine_pb2.Adapter(name=name, identity=name.encode()) for name in names])
    )
    channel.used = Counter([b"secret"] * 3 + [b"pirate"]), Counter([b"pirate"])
    [tick] = await ticks(feed.watch(ANYONE), 1)
    assert tick["engines"][0]["adapters"] == [["secret", 3, 0], ["pirate", 1, 1], ["idle", 0, 0]]
    acme = Caller("acme", frozenset(), is_proven=True, adapters=frozenset({"pirate"}))
    [tick] = await ticks(feed.watch(acme), 1)
    assert tick["engines"][0]["adapters"] == [["pirate", None, None]]


class SlowEngine(Channel):
    """An engine in the loop's time. A long step holds up what it answers, and the load that it reports."""

    def __init__(self, prefill_s: float) -> None:
        super().__init__()
        self._prefill_s = prefill_s
        self.engine = SteppedEngine(num_blocks=256, step_time=self, token_budget=64)
        self.prompts: list[list[int]] = []
        self._asked: asyncio.Queue[tuple[float, asyncio.Future[list[trace_pb2.StepTracePart]]]] = asyncio.Queue()

    def of(self, plan: StepPlan) -> float:
        return self._prefill_s if any(chunk.length > 1 for chunk in plan.chunks) else 0.02

    async def trace(self, last_s: float) -> list[trace_pb2.StepTracePart]:
        answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((last_s, answer))
        return await answer

    async def run(self) -> None:
        while True:
            while not self._asked.empty():
                last_s, answer = self._asked.get_nowait()
                if not answer.done():
                    answer.set_result(parts_of(self.engine, last_s))
            for prompt in self.prompts:
                self.engine.add(prompt, max_tokens=60)
            self.prompts.clear()
            is_step = not self.engine.step().is_empty
            await asyncio.sleep(max(0.01, self.engine.now - time.monotonic()))
            self.engine.now = time.monotonic()
            self.sequences.load.steps += is_step
            self.sequences.load.running = len(self.engine.scheduler.running)


@pytest.mark.parametrize("prefill_s", [0.1, 0.4, 0.9, 1.8])
@pytest.mark.parametrize("is_busy", [False, True])
async def test_each_request_has_its_time_to_first_token_however_long_a_step_takes(
    prefill_s: float, is_busy: bool
) -> None:
    channel = SlowEngine(prefill_s)

    async def load() -> control_pb2.Load:
        return control_pb2.Load(engines=[channel.sequences.load])

    found: list[dict[str, Any]] = []

    async def watch() -> None:
        async for message in LiveFeed(fleet_of(channel), load).watch(ANYONE):
            found.extend(json.loads(message))

    tasks = [asyncio.create_task(channel.run()), asyncio.create_task(watch())]
    await asyncio.sleep(3)
    if is_busy:
        channel.prompts.append([9] * 4)
        await asyncio.sleep(3)
    channel.prompts += [[head] * 20 for head in range(8 - is_busy)]
    await asyncio.sleep(12)
    for task in tasks:
        task.cancel()
    assert sum(len(ttft) for tick in found for *_, ttft in tick["rates"]) == 8
    assert sum(tokens for tick in found for _, tokens, *_ in tick["rates"]) == 8 * 60


async def test_watchers_beyond_the_limit_are_refused(feed: LiveFeed) -> None:
    feed.place.taken = MAX_WATCHERS
    with pytest.raises(ResourceExhausted, match="256 calls of live are running"), feed.place:
        pass
