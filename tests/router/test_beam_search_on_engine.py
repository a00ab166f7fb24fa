"""Beam searches on an engine find what the reference finds, whatever happens to their sequences between steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.engine.core.sequence import State
from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.loop.steps_in_flight import Computed, Runner, StepsInFlight
from pagoda_server.engine.scheduling.policies import PolicyName
from pagoda_server.router.request.beam_search import BeamSearchStream
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.test_scheduler import prompt
from tests.router.beam_reference import Expected, beam_params, expected_beams
from tests.router.stepped_channel import SteppedChannel

STOPS = frozenset(range(0, VOCAB_SIZE, 9))


def submit_of(
    params: inference_pb2.BeamSearch,
    prompt: list[int],
    max_tokens: int,
    stops: Iterable[int] = (),
    min_tokens: int = 0,
    **fields: object,
) -> engine_pb2.Submit:
    """All hypotheses of a search."""
    return engine_pb2.Submit(
        prompt=prompt,
        sampling=inference_pb2.Sampling(n=params.width, beam_search=params),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stops,
        **fields,  # type: ignore[arg-type]
    )


def search(channel: SteppedChannel, submit: engine_pb2.Submit) -> BeamSearchStream:
    return BeamSearchStream(channel, submit, clock=channel.engine.scheduler.clock)  # type: ignore[arg-type]


def found(stream: BeamSearchStream) -> list[Expected]:
    hypotheses = []
    for inbox in stream.inboxes:
        end = inbox.ended
        assert end is not None
        matched = end.matched if end.HasField("matched") else None
        regular = engine_pb2.END_REASON_LENGTH if matched is None else engine_pb2.END_REASON_STOP
        assert end.reason == regular
        assert inbox.score is not None
        hypotheses.append(Expected(inbox.tokens, inbox.score, matched))
    return hypotheses


def reasons(stream: BeamSearchStream) -> set[int]:
    assert not any(inbox.tokens or inbox.score is not None for inbox in stream.inboxes), "no hypothesis is told"
    return {inbox.ended.reason for inbox in stream.inboxes if inbox.ended}


def expected(submit: engine_pb2.Submit) -> list[Expected]:
    return expected_beams(
        list(submit.prompt),
        submit.max_tokens,
        submit.sampling.beam_search,
        VOCAB_SIZE,
        frozenset(submit.stop_token_ids),
        submit.min_tokens,
    )


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 18])
@pytest.mark.parametrize("rules", [{}, {"cache": {"bypass": True}}, {"stops": STOPS, "min_tokens": 3}])
async def test_searches_beside_each_other_find_what_the_reference_does(
    lookahead: int, block_size: int, length: int, rules: dict[str, object]
) -> None:
    engine = SteppedEngine(num_blocks=256 // block_size, block_size=block_size, lookahead=lookahead, token_budget=11)
    channel = SteppedChannel(engine)
    submits = [
        submit_of(beam_params(width, penalty), prompt(length), 14, **rules)  # type: ignore[arg-type]
        for width, penalty in ((3, 1.0), (4, 0.0), (2, -1.0))
    ]
    other = engine.add(prompt(20, 3), max_tokens=9)
    streams = [search(channel, submit) for submit in submits]
    await asyncio.gather(*(stream.wait() for stream in streams))
    engine.run()
    for stream, submit in zip(streams, submits, strict=True):
        assert found(stream) == expected(submit)
    assert engine.outputs[other.id] == engine.expected(other)
    assert engine.pool.num_referenced == 0


async def test_without_a_prefix_cache_it_finds_the_same() -> None:
    engine = SteppedEngine(prefix_caching=False)
    submit = submit_of(beam_params(4), prompt(21), 14, STOPS)
    stream = search(SteppedChannel(engine), submit)
    await stream.wait()
    assert found(stream) == expected(submit)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
async def test_nothing_changes_what_is_found_in_a_crowd_that_preempts(policy: PolicyName) -> None:
    """Fewer places than beams, and fewer blocks than sequences want."""
    engine = SteppedEngine(num_blocks=12, max_num_seqs=3, token_budget=11, policy=policy, lookahead=1)
    channel = SteppedChannel(engine)
    submit = submit_of(beam_params(4), prompt(21), 16, STOPS, 9, tenant="a")
    stream = search(channel, submit)
    others = [engine.add(prompt(9 + at, 5), max_tokens=20, tenant="b") for at in range(8)]
    await stream.wait()
    engine.run()
    assert found(stream) == expected(submit)
    assert all(engine.outputs[other.id] == engine.expected(other) for other in others)
    assert engine.scheduler.counters.preemptions > 0, "the case shows nothing"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
async def test_between_its_steps_it_keeps_its_place_in_line(policy: PolicyName) -> None:
    """All places are taken and others wait: each step takes the next places that become free."""
    engine = SteppedEngine(num_blocks=200, max_num_seqs=2, token_budget=64, policy=policy)
    stream = search(SteppedChannel(engine), submit_of(beam_params(2), prompt(9), 10, tenant="a"))
    searching = asyncio.ensure_future(stream.wait())
    others = itertools.count()
    await asyncio.sleep(0)
    while not searching.done():
        while engine.scheduler.num_waiting < 6:
            engine.add(prompt(5, next(others)), max_tokens=4, tenant="b")
        await asyncio.sleep(0)
    await searching
    assert engine.now <= 10 * (4 + 2), "a step waits for those that run, and for no newcomer"


@pytest.mark.parametrize("block_size", [4, 16])
async def test_it_computes_its_prompt_once_and_then_a_token_for_each_beam(block_size: int) -> None:
    engine = SteppedEngine(num_blocks=600, block_size=block_size, token_budget=1024, max_num_seqs=8, max_model_len=2000)
    channel = SteppedChannel(engine)
    stream = search(channel, submit_of(beam_params(4), prompt(1000), 40))
    tokens = []
    step = engine.step
    engine.step = lambda: tokens.append(step().num_tokens)  # type: ignore[assignment, func-returns-value, return-value]
    await stream.wait()
    computed = [count for count in tokens if count]
    assert computed == [1000] + [4] * 39, "a step of the engine for each step of the search"
    assert engine.scheduler.counters.prompt_tokens == 1000


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_it_may_be_preempted_at_any_step(lookahead: int) -> None:
    for at in range(1, 22):
        engine = SteppedEngine(token_budget=11, lookahead=lookahead)
        channel = SteppedChannel(engine)
        submit = submit_of(beam_params(4), prompt(21), 16, STOPS, 9)
        stream = search(channel, submit)
        searching = asyncio.ensure_future(stream.wait())
        for _ in range(at):
            await asyncio.sleep(0)
        for seq in list(engine.scheduler.running):
            engine.scheduler._preempt(seq)
        engine.scheduler.flush_cache()
        await searching
        assert found(stream) == expected(submit)


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_whenever_it_is_aborted_all_of_it_ends_and_its_blocks_come_back(lookahead: int) -> None:
    for at in range(18):
        engine = SteppedEngine(num_blocks=24, token_budget=11, lookahead=lookahead)
        stream = search(SteppedChannel(engine), submit_of(beam_params(3), prompt(21), 14))
        searching = asyncio.ensure_future(stream.wait())
        for _ in range(at):
            await asyncio.sleep(0)
        is_over = searching.done()
        stream.abort()
        await searching
        engine.run()
        assert engine.pool.num_referenced == 0
        if not is_over:
            assert reasons(stream) == {engine_pb2.END_REASON_ABORTED}


async def test_a_reader_that_goes_away_leaves_nothing_behind() -> None:
    engine = SteppedEngine(token_budget=11)
    stream = search(SteppedChannel(engine), submit_of(beam_params(3), prompt(21), 14))
    searching = asyncio.ensure_future(stream.wait())
    for _ in range(7):
        await asyncio.sleep(0)
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    stream.close()
    engine.run()
    assert engine.pool.num_referenced == 0
    assert not engine.scheduler.running


async def test_its_deadline_is_that_of_every_step() -> None:
    engine = SteppedEngine()
    channel = SteppedChannel(engine)
    stream = search(channel, submit_of(beam_params(3), prompt(5), 100, timeout_s=20.0))
    await stream.wait()
    assert engine.now == pytest.approx(20.0, abs=2.0)
    assert [submit.timeout_s + submit.age_s for submit in channel.submits] == [20.0] * len(channel.submits)
    assert reasons(stream) == {engine_pb2.END_REASON_DEADLINE}
    assert engine.pool.num_referenced == 0


class FaultyRunner:
    """Fails the second sequence of every step that samples more than one."""

    def __init__(self, runner: Runner) -> None:
        self.lookahead = runner.lookahead
        self._runner = runner

    def recover(self) -> None:
        self._runner.recover()

    def launch(self, plan: StepPlan) -> Computed:
        sampled = self._runner.launch(plan).result()
        beams = [at for at, chunk in enumerate(plan.chunks) if chunk.samples and chunk.seq.id >= 1_000_000]
        if len(beams) > 1:
            sampled.faults[beams[1]] = "not a number"
        return Computed(sampled)


async def test_a_fault_of_one_beam_fails_its_search_and_no_other_request() -> None:
    engine = SteppedEngine(token_budget=32)
    engine.steps = StepsInFlight(engine.scheduler, FaultyRunner(engine.runner))
    stream = search(SteppedChannel(engine), submit_of(beam_params(3), prompt(9), 12))
    other = engine.add(prompt(9, 5), max_tokens=12)
    await stream.wait()
    stream.close()
    engine.run()
    assert reasons(stream) == {engine_pb2.END_REASON_FAILED}
    assert {inbox.ended.detail for inbox in stream.inboxes if inbox.ended} == {"not a number"}
    assert engine.outputs[other.id] == engine.expected(other)
    assert engine.pool.num_referenced == 0


async def test_with_bypass_it_shares_blocks_with_no_other_request() -> None:
    engine = SteppedEngine(token_budget=64)
    channel = SteppedChannel(engine)
    stream = search(channel, submit_of(beam_params(3), prompt(20), 5, cache=inference_pb2.Cache(bypass=True)))
    await stream.wait()
    assert engine.scheduler.counters.cached_tokens == 0
    salts = {submit.cache.salt for submit in channel.submits}
    assert len(salts) == 1
    assert len(salts.pop()) == 64
    seq = engine.add(prompt(20), max_tokens=3)
    engine.run()
    assert seq.account.cached_tokens == 0
    again = search(channel, submit_of(beam_params(3), prompt(20), 5, cache=inference_pb2.Cache(bypass=True)))
    await again.wait()
    assert again.inboxes[0].ended is not None
    assert again.inboxes[0].ended.cached_tokens == 0
    assert found(again) == found(stream)


async def test_a_salt_is_that_of_every_step() -> None:
    channel = SteppedChannel(SteppedEngine())
    await search(channel, submit_of(beam_params(3), prompt(20), 5, cache=inference_pb2.Cache(salt="mine"))).wait()
    assert {(submit.cache.salt, submit.cache.bypass) for submit in channel.submits} == {("mine", False)}


async def test_a_tenant_is_charged_for_the_prompt_once_and_for_every_beams_tokens() -> None:
    engine = SteppedEngine(token_budget=64)
    await search(SteppedChannel(engine), submit_of(beam_params(4), prompt(32), 10, tenant="a")).wait()
    (load,) = engine.scheduler.tenants.table([]).listed
    assert load.service == 32 + 2 * (1 + 4 * 9)
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.output_tokens) == (32, 1 + 4 * 9)


async def test_a_higher_priority_displaces_those_that_run() -> None:
    engine = SteppedEngine(max_num_seqs=4, token_budget=64)
    low = [engine.add(prompt(9, at), max_tokens=30) for at in range(4)]
    for _ in range(4):
        engine.step()
    channel = SteppedChannel(engine)
    submit = submit_of(beam_params(3), prompt(6), 5, priority=1)
    stream = search(channel, submit)
    began = engine.now
    await stream.wait()
    assert engine.now - began == 5, "no step waits"
    assert all(seq.state is not State.FINISHED for seq in low)
    engine.run()
    assert found(stream) == expected(submit)
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in low)
