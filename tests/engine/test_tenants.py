from __future__ import annotations

import pytest

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence, State
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.tenants import (
    MAX_IDLE,
    MAX_LISTED,
    NUM_SLICES,
    REFRESH_S,
    SLICE_S,
    TenantLoad,
    Tenants,
    TenantTable,
)
from tests.engine.harness import SteppedEngine


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start * 17 + at) % 256 for at in range(length)]


def table(engine: SteppedEngine) -> TenantTable:
    return engine.scheduler.tenants.table(engine.scheduler.running)


def run(engine: SteppedEngine) -> None:
    """Run to the end and take a table after every step, as the engine's loop does."""
    while engine.scheduler.running or engine.scheduler.num_waiting:
        engine.step()
        table(engine)


def of(engine: SteppedEngine, name: str) -> TenantLoad:
    (found,) = [tenant for tenant in table(engine).listed if tenant.name == name]
    return found


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_policy_counts_computed_prompt_tokens_once_and_outputs_twice(policy: str, lookahead: int) -> None:
    engine = SteppedEngine(policy=policy, lookahead=lookahead)
    engine.add(prompt(10), max_tokens=4, tenant="a", bypass=True)
    engine.add(prompt(20, 1), max_tokens=6, tenant="b", bypass=True)
    engine.run()
    assert (of(engine, "a").service, of(engine, "b").service) == (10 + 2 * 4, 20 + 2 * 6)
    assert table(engine).recent_service == 18 + 32


def test_what_the_cache_or_a_sibling_has_costs_nothing() -> None:
    engine = SteppedEngine(num_blocks=200, block_size=8)
    engine.add(prompt(40), max_tokens=1, tenant="first")
    engine.run()
    engine.add(prompt(40), max_tokens=1, tenant="second")
    engine.add_siblings(3, prompt(40, 5), max_tokens=2, tenant="three", bypass=True)
    engine.run()
    assert of(engine, "second").service == 1 + 2, "the last token is computed again"
    assert of(engine, "three").service == 40 + 2 * 1 + 3 * 2 * 2


def test_what_costs_nothing_leaves_the_window_as_it_came() -> None:
    engine = SteppedEngine()
    tenants = engine.scheduler.tenants
    for number in range(3):  # in slices of their own
        seq = Sequence(number, [1, 2], Request(1, tenant="a"), SamplingParams(max_tokens=2))
        tenants.arrived(seq)
        seq.num_computed = 1
        tenants.moves(seq, State.RUNNING)
        seq.state = State.RUNNING
        tenants.ends(seq)
        engine.now += SLICE_S
    engine.add(prompt(8), max_tokens=1, tenant="b")
    engine.run()
    engine.now += 2 * NUM_SLICES * SLICE_S
    assert table(engine).recent_service == 0


def test_preemption_costs_no_tenant_and_its_tokens_count_once() -> None:
    engine = SteppedEngine(num_blocks=20, block_size=4, prefix_caching=False, step_time=StepTime(0.05))
    seqs = [engine.add(prompt(10, at), max_tokens=30, tenant=f"{at % 2}", bypass=True) for at in range(4)]
    run(engine)
    assert sum(seq.account.preemptions for seq in seqs) > 0
    assert of(engine, "0").service == of(engine, "1").service == 2 * (10 + 2 * 30)


def test_waiting_and_running_sequences_are_counted_for_each_tenant() -> None:
    engine = SteppedEngine(max_num_seqs=2)
    for name in ("a", "b", "b", ""):
        engine.add(prompt(5), max_tokens=20, tenant=name)
    engine.step()
    found = {tenant.name: (tenant.running, tenant.waiting) for tenant in table(engine).listed}
    assert found == {"a": (1, 0), "b": (1, 1), "": (0, 1)}
    engine.run()
    assert {(tenant.running, tenant.waiting) for tenant in table(engine).listed} == {(0, 0)}


def test_recent_service_is_that_of_ten_seconds_and_then_the_tenant_is_not_listed() -> None:
    engine = SteppedEngine()  # a second a step
    engine.add(prompt(8), max_tokens=1, tenant="early")
    engine.run()
    engine.add(prompt(8, 1), max_tokens=40, tenant="late")
    while engine.now < NUM_SLICES * SLICE_S - 2:
        engine.step()
        table(engine)
    assert of(engine, "early").recent_service == 8 + 2
    run(engine)
    (late,) = table(engine).listed
    assert (late.name, late.service) == ("late", 8 + 2 * 40)
    assert 2 * (NUM_SLICES - 1) <= late.recent_service <= 2 * (NUM_SLICES + 1)


def test_service_after_a_long_silence_is_recent() -> None:
    engine = SteppedEngine()
    for count in (1, 2):
        engine.add(prompt(8), max_tokens=1, tenant="a", bypass=True)
        engine.run()
        assert of(engine, "a").recent_service == 10
        assert of(engine, "a").service == 10 * count
        engine.now += 1000.0


def test_a_table_is_made_anew_only_now_and_then_while_sequences_live() -> None:
    engine = SteppedEngine()
    engine.add(prompt(8), max_tokens=50)
    engine.step()
    first = table(engine)
    engine.scheduler.clock = None  # type: ignore[assignment]
    engine.now += REFRESH_S / 2
    assert table(engine) is first
    engine.now += REFRESH_S
    assert table(engine) is not first


def test_names_made_up_by_clients_take_bounded_room() -> None:
    now = 0.0
    tenants = Tenants(lambda: now)
    for id in range(5 * MAX_IDLE):
        seq = Sequence(id, [1], Request(1, arrived=now, tenant=f"tenant {id}"), SamplingParams())
        tenants.arrived(seq)
        if id < 5 * MAX_IDLE - 200:
            tenants.moves(seq, State.RUNNING)
            seq.state = State.RUNNING
            tenants.ends(seq)
    listed = tenants.table([])
    assert (len(listed.listed), listed.count) == (MAX_LISTED, 5 * MAX_IDLE)
    now += 20.0
    later = tenants.table([])
    assert (len(later.listed), later.count) == (MAX_LISTED, 200), "those that wait"
    assert len(tenants._idle) == MAX_IDLE
    assert not tenants._recent
