"""Which sequence is next under each policy, and the bounds that docs/scheduling.md states, in simulated time."""

from __future__ import annotations

import math
import random
import time
from itertools import islice

import pytest

from pagoda_server.engine.core.sequence import EndReason, Request, SamplingParams, Sequence, State
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.deadline import LATE_EVERY, LeastSlack
from pagoda_server.engine.scheduling.expiry import LEAVING
from pagoda_server.engine.scheduling.fair import MAX_IDLE_TENANTS, OUTPUT_WEIGHT, Fair
from pagoda_server.engine.scheduling.policy import PolicySettings
from pagoda_server.settings.engine import PolicyName
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt


def order_of_starts(engine: SteppedEngine, seqs: list[Sequence]) -> list[int]:
    engine.run()
    return [seq.id for seq in sorted(seqs, key=lambda seq: seq.account.first_scheduled or 0.0)]


def test_fcfs_knows_no_priority() -> None:
    engine = SteppedEngine(max_num_seqs=1, policy="fcfs")
    seqs = [engine.add(prompt(3, at), max_tokens=2, priority=at) for at in range(4)]
    assert order_of_starts(engine, seqs) == [0, 1, 2, 3]


def test_a_priority_is_worth_so_many_seconds_of_waiting_and_no_more() -> None:
    engine = SteppedEngine(max_num_seqs=1, ageing_s=10.0)
    engine.add(prompt(3), max_tokens=60, priority=1000)  # has the place for 60 s
    low = engine.add(prompt(3, 1), max_tokens=1)
    highs = []
    for _ in range(50):
        engine.step()
        highs.append(engine.add(prompt(3, 2), max_tokens=1, priority=3))
    engine.run()
    passed_by = [high for high in highs if (high.account.first_scheduled or 0.0) < (low.account.first_scheduled or 0.0)]
    assert len(passed_by) == 29, "those that came less than 3 * 10 s after it"
    assert all(high.request.arrived < low.request.arrived + 30 for high in passed_by)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_only_under_priority_does_a_higher_one_displace_the_lowest_at_the_sequence_limit(policy: PolicyName) -> None:
    engine = SteppedEngine(max_num_seqs=2, policy=policy)
    low, lower = (engine.add(prompt(6, at), max_tokens=20, priority=-at) for at in range(2))
    engine.step()
    high = engine.add(prompt(6, 5), max_tokens=3, priority=7)
    engine.step()
    displaces = policy == "priority"
    assert (high.state is State.RUNNING) == displaces
    assert (low.account.preemptions, lower.account.preemptions) == (0, int(displaces))
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (low, lower, high))


def test_a_sequence_that_started_by_its_age_keeps_its_place() -> None:
    engine = SteppedEngine(max_num_seqs=1, ageing_s=5.0)
    engine.add(prompt(3), max_tokens=20, priority=1000)
    old = engine.add(prompt(3, 1), max_tokens=20)
    while old.state is not State.RUNNING:
        engine.step()
    engine.add(prompt(3, 2), max_tokens=2, priority=2)  # higher, but 2 * 5 s are less than `old` has waited
    engine.run()
    assert old.account.preemptions == 0


def test_a_high_priority_prompt_does_not_wait_for_a_long_low_one_to_be_computed() -> None:
    engine = SteppedEngine(num_blocks=200, token_budget=16, max_model_len=500)
    engine.add(prompt(300), max_tokens=2)
    engine.step()
    high = engine.add(prompt(30, 1), max_tokens=2, priority=1)
    engine.step()
    engine.step()
    assert high.account.first_token is not None


def test_a_higher_one_displaces_for_blocks_only_if_it_can_then_start() -> None:
    engine = SteppedEngine(num_blocks=20, block_size=4, token_budget=64, max_model_len=80, prefix_caching=False)
    equal = engine.add(prompt(40), max_tokens=8, priority=5)
    low = engine.add(prompt(12, 1), max_tokens=8)
    engine.step()
    high = engine.add(prompt(50, 2), max_tokens=2, priority=5)
    engine.step()
    assert (low.account.preemptions, equal.account.preemptions, high.state) == (0, 0, State.WAITING)
    engine.run()
    assert engine.outputs[high.id] == engine.expected(high)


# -- fair shares -------------------------------------------------------------------------------------------------------


class FairLoad:
    """Tenants that always have a waiting sequence, on a small cache. `served` holds weighted tokens after each step."""

    def __init__(self, policy: PolicyName, weights: dict[str, float], seed: int) -> None:
        self.engine = SteppedEngine(
            num_blocks=40, block_size=4, max_num_seqs=6, token_budget=20, policy=policy, tenant_weights=weights
        )
        self.random = random.Random(seed)
        self.seqs: list[Sequence] = []
        self.longest_prompt = 60

    def add(self, tenant: str) -> None:
        length = self.random.choice([2, 5, 20, self.longest_prompt])
        start, max_tokens = self.random.randrange(250), self.random.randrange(1, 30)
        self.seqs.append(self.engine.add(prompt(length, start), max_tokens, tenant=tenant, bypass=True))

    def served(self, tenant: str) -> float:
        started = [seq for seq in self.seqs if seq.request.tenant == tenant and seq.account.first_scheduled is not None]
        return sum(seq.request.prompt_len + OUTPUT_WEIGHT * seq.output_len for seq in started)

    def run(self, steps: int, tenants: dict[str, int]) -> list[dict[str, float]]:
        """Step; `tenants` says how many sequences of each wait at least."""
        history = []
        for _ in range(steps):
            for tenant, depth in tenants.items():
                for _ in range(depth - sum(seq.request.tenant == tenant for seq in self.engine.scheduler.waiting)):
                    self.add(tenant)
            self.engine.step()
            history.append({tenant: self.served(tenant) for tenant in tenants})
        return history


def unfairness(history: list[dict[str, float]], weights: dict[str, float]) -> float:
    """Return the largest difference of any two tenants' weighted service in any interval."""
    worst = 0.0
    for one in weights:
        for other in weights:
            lead = [served[one] / weights[one] - served[other] / weights[other] for served in history]
            lowest = 0.0
            for value in lead:
                lowest = min(lowest, value)
                worst = max(worst, value - lowest)
    return worst


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 3.0, "b": 1.0}])
@pytest.mark.parametrize("seed", [0, 1])
def test_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(weights: dict[str, float], seed: int) -> None:
    load = FairLoad("fair", weights, seed)
    # More than start in one step, so that each waits all the time; asking for more earns no more.
    depths = {tenant: 30 if tenant == "a" else 8 for tenant in weights}
    history = load.run(1500, depths)
    capacity = load.engine.pool.num_blocks * load.engine.pool.block_size
    bound = 2 * max(load.longest_prompt, OUTPUT_WEIGHT * capacity) / min(weights.values())
    assert unfairness(history, weights) <= bound
    assert min(history[-1].values()) > 5 * bound, "long enough to tell"


def test_first_come_first_served_breaks_the_bound_that_fair_keeps() -> None:
    weights = {"a": 1.0, "b": 1.0}
    load = FairLoad("fcfs", weights, 0)
    history = load.run(1500, {"a": 10, "b": 1})
    assert unfairness(history, weights) > 2 * OUTPUT_WEIGHT * 160


def test_idling_earns_no_credit_and_no_sequence_is_held_back_while_there_is_room() -> None:
    load = FairLoad("fair", {}, 0)
    alone = load.run(400, {"a": 4})
    both = load.run(800, {"a": 4, "b": 4})
    gained = {tenant: both[-1][tenant] - both[0][tenant] for tenant in ("a", "b")}
    assert alone[-1]["a"] > 1000, "it had the engine to itself"
    assert abs(gained["a"] - gained["b"]) <= 2 * OUTPUT_WEIGHT * 160, "b does not catch up on what it never asked for"


def test_names_made_up_by_clients_are_not_remembered_for_ever() -> None:
    fair = Fair(PolicySettings(clock=lambda: 0.0))
    for id in range(5 * MAX_IDLE_TENANTS):
        seq = Sequence(id, [1], Request(1, tenant=f"tenant {id}"), SamplingParams())
        fair.add(seq)
        fair.remove(seq)
        fair.started(seq)
    assert len(fair.counters) <= 2 * MAX_IDLE_TENANTS + 1


# -- targets -----------------------------------------------------------------------------------------------------------


def test_least_slack_is_first_and_late_sequences_are_last() -> None:
    engine = SteppedEngine(max_num_seqs=1, policy="deadline")
    engine.add(prompt(3), max_tokens=5, ttft_s=0.5)
    late, loose, tight = (engine.add(prompt(3, at), max_tokens=2, ttft_s=s) for at, s in enumerate((2.0, 40.0, 20.0)))
    assert order_of_starts(engine, [late, loose, tight]) == [tight.id, loose.id, late.id]


def test_late_ones_have_one_start_of_eight_while_others_wait() -> None:
    engine = SteppedEngine(max_num_seqs=1, policy="deadline")
    engine.add(prompt(3), max_tokens=3)
    late = engine.add(prompt(3, 1), max_tokens=1, ttft_s=0.5)
    others = [engine.add(prompt(3, 2), max_tokens=1, ttft_s=1000.0) for _ in range(3 * LATE_EVERY)]
    engine.run()
    before = [seq for seq in others if (seq.account.first_scheduled or 0.0) < (late.account.first_scheduled or 0.0)]
    assert len(before) <= LATE_EVERY


def test_thousands_that_become_late_at_once_are_not_touched() -> None:
    now = [0.0]
    settings = PolicySettings(clock=lambda: now[0])
    policy = LeastSlack(settings)
    seqs = [Sequence(id, [1], Request(1, ttft_s=1.0 + id / 1e6), SamplingParams()) for id in range(10_000)]
    started = time.thread_time()
    for seq in seqs:
        policy.add(seq)
    added_s = time.thread_time() - started
    timely = Sequence(10_000, [1], Request(1, ttft_s=50.0), SamplingParams())
    policy.add(timely)
    assert next(policy.in_line()) is seqs[0]
    now[0] = 2.0
    started = time.thread_time()
    assert next(policy.in_line()) is timely
    assert time.thread_time() - started < added_s / 10
    assert list(islice(policy, 3)) == seqs[:3], "no sequence has moved"


def test_those_that_became_late_first_are_the_first_of_the_late() -> None:
    engine = SteppedEngine(max_num_seqs=1, policy="deadline")
    engine.add(prompt(3), max_tokens=20)
    engine.step()
    later, earlier = (engine.add(prompt(3, at), max_tokens=1, ttft_s=s) for at, s in enumerate((9.0, 4.0)))
    assert order_of_starts(engine, [later, earlier]) == [earlier.id, later.id]


def test_slack_is_taken_from_the_time_that_a_prompt_will_likely_take() -> None:
    step_time = StepTime(1.0)
    engine = SteppedEngine(
        num_blocks=400, max_num_seqs=1, token_budget=16, max_model_len=500, policy="deadline", step_time=step_time
    )
    engine.add(prompt(160), max_tokens=1)
    engine.run()  # ten steps of a second: what prompts take is known
    engine.add(prompt(3, 5), max_tokens=8)
    engine.step()
    short = engine.add(prompt(3, 7), max_tokens=1, ttft_s=18.0)
    long = engine.add(prompt(160, 9), max_tokens=1, ttft_s=24.0)  # has to start before 14 s have passed
    assert order_of_starts(engine, [short, long]) == [long.id, short.id]
    assert (long.account.first_token or math.inf) - long.request.arrived <= 24.0


def test_a_sequence_that_can_meet_its_target_but_not_its_deadline_is_late() -> None:
    engine = SteppedEngine(max_num_seqs=1, policy="deadline")
    engine.add(prompt(3), max_tokens=6)
    engine.step()
    lost = engine.add(prompt(3, 1), max_tokens=1, timeout_s=4.0)
    timely = engine.add(prompt(3, 2), max_tokens=1, ttft_s=9.0)
    engine.run()
    assert engine.ended[lost.id].reason is EndReason.DEADLINE
    assert engine.ended[timely.id].reason is EndReason.LENGTH


def goodput(policy: PolicyName, seed: int) -> int:
    """Count first tokens within 4 s among 400 requests that arrive three times as fast as they can be served."""
    engine = SteppedEngine(
        num_blocks=400, max_num_seqs=4, token_budget=32, policy=policy, step_time=StepTime(0.1, 0.01, 0.002)
    )
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0.0, 60.0) for _ in range(400))
    seqs: list[Sequence] = []
    while arrivals or engine.scheduler.running or engine.scheduler.waiting:
        while arrivals and arrivals[0] <= engine.now:
            arrivals.pop(0)
            seqs.append(engine.add(prompt(rng.randrange(4, 60), len(seqs)), rng.randrange(2, 16), ttft_s=4.0))
        if engine.step().is_empty and arrivals:
            engine.now = arrivals[0]
    return sum(
        seq.account.first_token is not None and seq.account.first_token - seq.request.arrived <= 4.0 for seq in seqs
    )


def test_under_overload_twice_as_many_meet_their_target_as_first_come_first_served() -> None:
    assert goodput("deadline", 0) >= 2 * goodput("fcfs", 0) > 0


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_sequence_that_cannot_meet_its_deadline_leaves_before_it_passes_and_costs_no_step() -> None:
    engine = SteppedEngine(max_num_seqs=1, token_budget=16, num_blocks=200, max_model_len=500, step_time=StepTime(1.0))
    engine.add(prompt(20), max_tokens=60)
    engine.step()
    long = engine.add(prompt(320, 1), max_tokens=4, timeout_s=12.0)  # 20 steps of 1 s, of which half is taken as sure
    short = engine.add(prompt(4, 2), max_tokens=4, timeout_s=12.0)
    computed = set()
    while long.id not in engine.ended:
        computed |= {chunk.seq.id for chunk in engine.step().chunks}
    assert engine.ended[long.id].reason is EndReason.DEADLINE
    assert engine.ended[long.id].at <= 3.0 + 1.0
    assert long.id not in computed
    assert short.id not in engine.ended


def test_no_sequence_is_dropped_that_could_have_had_its_first_token_alone() -> None:
    step_time = StepTime(0.05, 0.01, 0.001)
    engine = SteppedEngine(num_blocks=400, token_budget=32, max_num_seqs=4, max_model_len=300, step_time=step_time)
    rng = random.Random(3)
    seqs = []
    for at in range(600):
        if rng.random() < 0.3:
            timeout_s = rng.choice([0.02, 0.1, 0.3, 1.0, 3.0])
            seqs.append(engine.add(prompt(rng.randrange(1, 250), at), rng.randrange(1, 30), timeout_s=timeout_s))
        engine.step()
    dropped = [
        engine.ended[seq.id]
        for seq in seqs
        if seq.id in engine.ended
        and engine.ended[seq.id].reason is EndReason.DEADLINE
        and engine.ended[seq.id].at < seq.request.deadline
    ]
    assert len(dropped) > 10
    for ended in dropped:
        full = (ended.seq.request.prompt_len - 1) // 32
        alone = full * (0.05 + 0.01 + 32 * 0.001) + 0.05 + 0.01 + 0.001
        assert ended.at + alone > ended.seq.request.deadline
        assert ended.seq.account.first_scheduled is None


def crowd_that_is_lost(
    policy: PolicyName, count: int, timeout_s: float = math.inf
) -> tuple[SteppedEngine, list[Sequence]]:
    """Add sequences that become hopeless in the same step, while another one with `timeout_s` runs."""
    engine = SteppedEngine(
        num_blocks=400, max_num_seqs=1, token_budget=16, max_model_len=1000, policy=policy, step_time=StepTime(1.0)
    )
    engine.add(prompt(4), max_tokens=30, timeout_s=timeout_s)
    for _ in range(3):
        engine.step()
    return engine, [engine.add(prompt(4, at), max_tokens=2, timeout_s=8.0) for at in range(count)]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_a_bounded_number_of_hopeless_sequences_leaves_in_a_step_while_another_runs(policy: PolicyName) -> None:
    engine, lost = crowd_that_is_lost(policy, 10 * LEAVING)
    gone = []
    while engine.scheduler.num_waiting:
        before = len(engine.ended)
        engine.step()
        gone.append(len(engine.ended) - before)
    assert max(gone) == LEAVING
    assert all(engine.ended[seq.id].reason is EndReason.DEADLINE for seq in lost)
    assert all(seq.account.first_scheduled is None for seq in lost), "and cost nothing"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_hopeless_sequences_hold_up_no_other_when_none_runs(policy: PolicyName) -> None:
    engine, _ = crowd_that_is_lost(policy, 5 * LEAVING)
    engine.now += 100.0
    engine.abort(0)  # the running one
    alive = engine.add(prompt(4, 99), max_tokens=2, timeout_s=50.0)
    assert [chunk.seq for chunk in engine.step().chunks] == [alive]
    engine.run()
    assert engine.ended[alive.id].reason is EndReason.LENGTH


def test_a_running_sequence_leaves_at_its_deadline_however_many_others_are_hopeless() -> None:
    engine, _ = crowd_that_is_lost("fcfs", 10 * LEAVING, timeout_s=15.0)
    running = engine.scheduler.running[0]
    while running.id not in engine.ended:
        engine.step()
    assert engine.ended[running.id].at <= running.request.deadline + 1.0


def test_a_cached_prompt_is_not_taken_for_one_that_must_be_computed() -> None:
    engine = SteppedEngine(num_blocks=200, token_budget=16, max_model_len=500, step_time=StepTime(1.0))
    engine.add(prompt(320), max_tokens=1)
    engine.run()
    again = engine.add(prompt(320), max_tokens=1, timeout_s=3.0)
    engine.run()
    assert engine.ended[again.id].reason is EndReason.LENGTH


def test_a_prompt_that_several_sequences_share_is_charged_once() -> None:
    engine = SteppedEngine(num_blocks=60, max_num_seqs=8, token_budget=64, policy="fair")
    engine.add_siblings(4, prompt(41), max_tokens=3, tenant="a", bypass=True)
    engine.add(prompt(41, 9), max_tokens=3, tenant="b", bypass=True)
    engine.run()
    served = engine.scheduler.waiting.counters
    assert served["b"] == 41 + 3 * OUTPUT_WEIGHT
    assert served["a"] == 41 + 3 * 1 + 4 * 3 * OUTPUT_WEIGHT, "each sibling computes the prompt's last token"
