"""Which tokens are drafted, and how many of them pay."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.drafting import PromptLookup, Speculation, prompt_lookup, speculation
from pagoda_server.engine.drafting.prompt_lookup import INDEXED_AT_ONCE, _keys
from pagoda_server.engine.runners.sampling import AllowedTokens
from pagoda_server.engine.runners.synthetic import StepTime, expected_tokens
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.next_to_last import NextToLast

pytestmark = pytest.mark.thorough

MOST = 8


def sequence(id: int, tokens: list[int], **params: int) -> Sequence:
    seq = Sequence(id, tokens, Request(len(tokens)), SamplingParams(max_tokens=1000, **params))
    seq.max_len = len(tokens) + 1000
    return seq


class Costs:
    """A step's time as a CostModel predicts it."""

    def __init__(self, base_s: float, row_s: float, wait_s: float | None = None) -> None:
        self._base_s, self._row_s = base_s, row_s
        self.overlap, self.wait_s = wait_s is not None, wait_s

    def decodes_s(self, count: int, num_keys: int) -> float:
        return self._base_s + self._row_s * count


class Counting:
    """A drafter that always has something to propose."""

    token_s = 0.0

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return list(range(most))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""


class Rule:
    """A Speculation of `count` running sequences, and what it decides."""

    def __init__(self, count: int, costs: Costs, **params: int) -> None:
        self.seqs = [sequence(id, [1, 2, 3], **params) for id in range(count)]
        self.speculation = Speculation(Counting(), MOST, VOCAB_SIZE)
        self._costs = costs

    def decide(self, room: int = 1000, num_running: int | None = None) -> dict[int, int]:
        """How many tokens the next step drafts, by sequence."""
        chunks = [Chunk(seq, 2, 1, True) for seq in self.seqs]
        num_running = len(chunks) if num_running is None else num_running
        drafted = self.speculation.drafts(chunks, room, self._costs, num_running)
        return {chunk.seq.id: len(drafts) for chunk, drafts in drafted}

    def hold(self, num_running: int | None = None) -> set[int]:
        """Which sequences the next step leaves out, if the last token of each is pending."""
        chunks = [Chunk(seq, seq.num_tokens, 1, True) for seq in self.seqs]
        num_running = len(chunks) if num_running is None else num_running
        return {chunk.seq.id for chunk in self.speculation.holds(chunks, self._costs, num_running)}

    def learn(self, id: int, num_drafted: int, num_accepted: int, times: int = 30) -> None:
        for _ in range(times):
            self.speculation.verified(self.seqs[id], num_drafted, num_accepted)


IDLE, FULL = Costs(5.0, 0.3), Costs(5.0, 0.6)


def test_a_lone_stream_drafts_as_many_as_are_likely() -> None:
    rule = Rule(1, IDLE)
    assert 1 <= rule.decide()[0] < MOST
    rule.learn(0, 8, 8)
    assert rule.decide() == {0: MOST}


def test_a_full_batch_drafts_nothing_however_likely() -> None:
    rule = Rule(64, FULL)
    for id in range(64):
        rule.learn(id, 8, 8)
    assert not rule.decide()


def test_no_draft_costs_tokens_per_second() -> None:
    """Whatever the chances, the expected rate is at least that without drafts, and one more draft gains little."""
    draw = random.Random(1)
    for _ in range(60):
        count, base_s, row_s = draw.randint(1, 40), draw.uniform(1, 20), draw.uniform(0.1, 1)
        rule = Rule(count, Costs(base_s, row_s))
        chances = []
        for id in range(count):
            accepted = draw.randint(0, 8)
            rule.learn(id, 8, accepted, times=draw.randint(0, 20))
            chances.append(rule.speculation._record(rule.seqs[id]).chance)
        drafted = rule.decide()
        tokens = count + sum(chances[id] ** at for id, most in drafted.items() for at in range(1, most + 1))
        seconds = base_s + row_s * (count + sum(drafted.values()))
        assert tokens / seconds >= count / (base_s + row_s * count)
        for id in range(count):
            if 0 < (most := drafted.get(id, 0)) < MOST and chances[id] ** (most + 1) >= speculation.LEAST_CHANCE:
                gained = chances[id] ** (most + 1) / row_s
                assert gained <= speculation.MARGIN * tokens / seconds * 1.3


def test_likely_drafts_come_first_when_the_step_has_little_room() -> None:
    rule = Rule(3, IDLE)
    rule.learn(1, 8, 8)
    assert rule.decide(room=3) == {1: 3}


@pytest.mark.parametrize(("row_s", "rarer"), [(0.3, 1), (4.0, 4)])
def test_refused_drafts_stop_and_are_tried_again_ever_more_rarely(row_s: float, rarer: int) -> None:
    rule = Rule(1, Costs(8.0 - row_s, row_s))
    rule.learn(0, 1, 0)
    tried = []
    for number in range(400 * rarer):
        if drafted := rule.decide():
            assert drafted == {0: 1}
            tried.append(number)
            rule.speculation.verified(rule.seqs[0], 1, 0)
    gaps = [after - before for before, after in pairwise(tried)]
    assert tried[0] == rarer * speculation.PATIENCE - 1
    assert gaps == [2 * rarer * speculation.PATIENCE, 4 * rarer * speculation.PATIENCE]


def test_a_try_that_succeeds_brings_drafts_back() -> None:
    rule = Rule(1, IDLE)
    rule.learn(0, 1, 0)
    while not rule.decide():
        pass
    rule.speculation.verified(rule.seqs[0], 1, 1)
    assert rule.decide()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_limits_its_drafts(most: int) -> None:
    rule = Rule(1, IDLE, max_draft_tokens=most)
    rule.learn(0, 8, 8)
    assert rule.decide().get(0, 0) == most


def test_no_draft_reaches_beyond_the_longest_sequence() -> None:
    rule = Rule(1, IDLE)
    rule.learn(0, 8, 8)
    rule.seqs[0].max_len = rule.seqs[0].num_tokens + 3
    assert rule.decide() == {0: 2}  # the third token is chosen behind the last draft
    rule.seqs[0].max_len = rule.seqs[0].num_tokens + 1
    assert not rule.decide()


def test_guesses_end_before_a_token_that_the_mask_forbids() -> None:
    rule = Rule(1, IDLE)
    rule.learn(0, 8, 8)
    rule.seqs[0].token_mask = AllowedTokens([0, 1, 2, 4, 5])
    assert rule.decide() == {0: 3}


def test_lookup_proposes_what_followed_the_last_tokens_when_they_occurred_last() -> None:
    lookup = PromptLookup()
    seq = sequence(0, [5, 6, 7, 1, 2, 3, 5, 6, 7, 8, 9, 5, 6])
    assert lookup.propose(seq, 3) == [7, 8, 9]
    seq.tokens += [7, 1]
    assert lookup.propose(seq, 4) == [2, 3, 5, 6]
    seq.tokens += [40, 41]
    assert lookup.propose(seq, 4) == []


def test_lookup_continues_a_period() -> None:
    assert PromptLookup().propose(sequence(0, [9, 1, 2, 3, 1, 2, 3]), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_lookup_that_follows_a_sequence_proposes_what_a_new_one_does() -> None:
    draw = random.Random(2)
    followed, seq = PromptLookup(), sequence(0, [])
    for _ in range(300):
        seq.tokens.append(draw.randrange(4))
        if draw.random() < 0.5:
            assert followed.propose(seq, 5) == PromptLookup().propose(seq, 5)


def test_a_sequence_with_another_ones_number_starts_anew() -> None:
    lookup = PromptLookup()
    assert lookup.propose(sequence(0, [1, 2, 3, 1, 2]), 1) == [3]
    assert lookup.propose(sequence(0, [1, 2]), 1) == []


def test_drafts_shrink_rather_than_preempt_a_sequence() -> None:
    oracle = Oracle(lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE), 1.0, VOCAB_SIZE)
    engine = SteppedEngine(num_blocks=6, block_size=4, speculation=AlwaysDrafts(oracle, 8, VOCAB_SIZE))
    seqs = [engine.add([number, 1, 2], max_tokens=8) for number in range(2)]
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert engine.scheduler.counters.preemptions == 0
    assert 0 < engine.scheduler.counters.accepted_tokens == engine.scheduler.counters.drafted_tokens


def test_accepted_drafts_shorten_an_answer_and_the_step_time_decides() -> None:
    """With the engine's own rule, drafts save most steps; where rows cost all the time, none is drafted."""
    steps = {}
    for name, step_time in {"idle": StepTime(1.0, 0.01, 0.01), "full": StepTime(0.0, 0.0, 1.0)}.items():
        oracle = Oracle(lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE), 1.0, VOCAB_SIZE)
        engine = SteppedEngine(
            num_blocks=200, max_model_len=400, speculation=Speculation(oracle, 8, VOCAB_SIZE), step_time=step_time
        )
        seqs = [engine.add([number] * 3, max_tokens=120) for number in range(2)]
        steps[name] = engine.run()
        assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    assert steps["idle"] < 40
    assert steps["full"] > 100


def test_a_sequence_with_drafts_in_flight_waits_for_its_tokens() -> None:
    oracle = Oracle(lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE), 0.5, VOCAB_SIZE)
    engine = SteppedEngine(lookahead=1, speculation=AlwaysDrafts(oracle, 4, VOCAB_SIZE))
    first = engine.add([1, 2, 3, 4, 5], max_tokens=2)
    engine.run()
    seq = engine.add(first.tokens[:5], max_tokens=12)  # all but its last token is cached: a decode at once
    assert engine.step().chunks[0].drafts
    assert engine.step().is_empty
    engine.run()
    assert engine.outputs[seq.id] == engine.expected(seq)


OVERLAPPED = Costs(5.0, 0.05, wait_s=1.0)


def test_where_steps_overlap_drafts_must_bring_what_waiting_for_them_loses() -> None:
    rule = Rule(1, OVERLAPPED)
    assert rule.decide(), "a fifth of a step is lost, and a new sequence's drafts bring more"
    assert not rule.decide(num_running=2), "the other one computes meanwhile, so a whole step is lost"
    rule.learn(0, 8, 8)
    assert rule.decide(num_running=2) == {0: MOST}
    rule.learn(0, 8, 1)
    assert rule.decide()
    assert not rule.decide(num_running=2)


def test_a_guided_sequence_waits_for_its_tokens_in_any_case() -> None:
    rule = Rule(1, OVERLAPPED)
    rule.seqs[0].token_mask = NextToLast(VOCAB_SIZE)
    rule.seqs[0].tokens[-1] = 1
    assert rule.decide(num_running=2)


def test_the_first_step_that_waits_drafts_nothing_as_it_tells_what_waiting_loses() -> None:
    rule = Rule(1, OVERLAPPED)
    rule._costs.wait_s = None
    assert rule.hold() == {0}
    assert not rule.decide()


def test_guesses_are_compared_with_tokens_though_nothing_is_drafted() -> None:
    """Beside others a new sequence does not wait. It does once its guesses were right, and until they are not."""
    rule, (right, wrong) = Rule(2, OVERLAPPED), (0, 7)
    held = []
    for token in [right] * 20 + [wrong] * 20:
        held.append(rule.hold(num_running=3))
        for seq in rule.seqs:
            seq.tokens.append(token)
    assert held[0] == set()
    assert held[19] == {0, 1}
    assert held[39] == set()


def test_guesses_may_be_wrong_for_ever() -> None:
    rule = Rule(1, OVERLAPPED)
    rule.seqs[0].max_len = 10_000
    for _ in range(4000):
        assert not rule.hold(num_running=2)
        rule.seqs[0].tokens.append(7)


def test_only_so_many_sequences_are_guessed_for_beside_a_step() -> None:
    rule = Rule(speculation.MOST_WATCHED + 1, Costs(500.0, 0.05, wait_s=0.0))
    assert not rule.hold()


class Device(SteppedEngine):
    """An engine in simulated time whose device computes a step while the host, which takes time too, plans the next."""

    HOST_S, STEP_TIME = 2.0, StepTime(5.0, 0.0, 0.05)

    def __init__(self, speculation: Speculation | None) -> None:
        super().__init__(
            num_blocks=4000,
            max_num_seqs=32,
            token_budget=600,
            max_model_len=600,
            lookahead=1,
            speculation=speculation,
        )
        self._ready = deque([0.0])

    def step(self) -> StepPlan:
        self.now += self.HOST_S
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.steps.launch(plan)
            self._ready.append(max(self.now, self._ready[-1]) + self.STEP_TIME.of(plan))
        if len(self.steps) > (0 if plan.is_empty else 1):
            self.now = max(self.now, self._ready[-len(self.steps)])
            self.steps.commit_oldest()
        self._take_output()
        self.scheduler.check_integrity()
        return plan


def speed_up(accuracies: list[float]) -> float:
    """How much sooner streams end with drafts than without, on average; each has guesses of its own accuracy."""

    class Guessing(Oracle):
        def propose(self, seq: Sequence, most: int) -> list[int]:
            self.accuracy = accuracies[seq.id % len(accuracies)]
            return super().propose(seq, most)

    rates = []
    for is_on in (True, False):
        oracle = Guessing(lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE), 0.0, VOCAB_SIZE)
        engine = Device(Speculation(oracle, 8, VOCAB_SIZE, max_choices=32) if is_on else None)
        for number in range(20):  # steps of all sizes, from which their time is learned
            engine.add([number, 7], max_tokens=3 + 2 * number)
        engine.run()
        started = engine.now
        seqs = [engine.add([number] * 3, max_tokens=250) for number in range(len(accuracies))]
        engine.run()
        assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
        rates.append(sum(1 / (engine.ended[seq.id].at - started) for seq in seqs))
        if is_on and accuracies[0]:
            assert engine.scheduler.costs.wait_s == pytest.approx(Device.HOST_S, rel=0.1)
    return rates[0] / rates[1]


@pytest.mark.parametrize(
    ("accuracies", "least"),
    [([1.0], 4.5), ([0.9], 3.0), ([0.9] * 8, 1.6), ([0.9, 0.0, 0.0, 0.0], 1.3), ([0.9, 0.9, 0.9, 0.0], 1.8)],
    ids=str,
)
def test_where_steps_overlap_drafts_that_are_right_shorten_answers(accuracies: list[float], least: float) -> None:
    assert speed_up(accuracies) > least


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.6])
def test_where_steps_overlap_wrong_drafts_cost_little(accuracy: float, count: int) -> None:
    assert speed_up([accuracy] * count) > 0.97


def test_long_prompts_are_indexed_over_several_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = 0

    def counted(tokens: list[int], end: int) -> list[int]:
        nonlocal indexed
        indexed += 1
        return _keys(tokens, end)

    monkeypatch.setattr(prompt_lookup, "_keys", counted)
    lookup, seqs = PromptLookup(), [sequence(id, [7] * 30_000) for id in range(64)]
    for seq in seqs:
        lookup.propose(seq, 8)
    indexed = 0
    assert all(lookup.propose(seq, 8) == [7] * 8 for seq in seqs)
    assert indexed <= INDEXED_AT_ONCE + len(seqs)


def test_a_long_prompt_is_indexed_to_its_end_in_time() -> None:
    lookup, seq = PromptLookup(), sequence(0, [*range(40_000), 1, 2])
    while lookup.propose(seq, 2) != [3, 4]:
        assert seq.num_tokens < 40_100
        seq.tokens += [1, 2]
