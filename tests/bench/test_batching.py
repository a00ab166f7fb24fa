"""The loops that batch the same requests, and the memory that they would need, in simulated time."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from bench.batching.__main__ import Published, published, spread_out, static_to_continuous
from bench.batching.costs import Measured, card
from bench.batching.loops import LOOPS, Loop, Simulated, continuous, dynamic, static
from bench.batching.memory import RESERVATIONS, Buddies, Use, conversations, paging, reserving
from bench.batching.pictures import draw
from bench.workloads import Request, mixed, poisson

COSTS = card()
SIZE = 4


@pytest.mark.parametrize("loop", [*LOOPS.values(), partial(dynamic, wait_s=0.1)], ids=[*LOOPS, "dynamic"])
@pytest.mark.parametrize("make", [mixed, partial(poisson, rate=20.0)], ids=["at once", "poisson"])
def test_a_request_gets_exactly_its_tokens_after_it_has_come(loop: Loop, make: partial) -> None:
    requests = make(1, count=21).requests
    machine = Simulated(COSTS)
    run = loop(machine, requests, SIZE)
    assert sorted(len(times.arrivals) for times in run.times) == sorted(request.output_len for request in requests)
    assert sorted(times.submitted for times in run.times) == sorted(request.arrival_s for request in requests)
    assert all(times.submitted < times.arrivals[0] for times in run.times)
    assert all(times.arrivals == sorted(times.arrivals) for times in run.times)
    machine.pool.check_integrity([])


def test_static_and_continuous_batches_of_equal_requests_take_the_same_steps_and_time() -> None:
    requests = spread_out(0.0, count=12, mean=20)
    runs = [loop(Simulated(COSTS), requests, SIZE) for loop in (static, continuous)]
    assert runs[0].steps == runs[1].steps == 3 * 20
    assert runs[0].elapsed_s == runs[1].elapsed_s


def test_static_batches_take_longer_the_more_outputs_differ() -> None:
    ratios = [static_to_continuous(COSTS, spread_out(spread, count=24, mean=40), SIZE) for spread in (0.25, 0.5, 1)]
    assert ratios[0] > 1.05
    assert ratios == sorted(ratios)


def test_a_static_batch_has_as_many_steps_as_its_longest_output() -> None:
    requests = [Request([0] * 8, length) for length in (3, 9, 5, 2)]
    assert static(Simulated(COSTS), requests, 2).steps == 9 + 5
    assert LOOPS["static, grouped by output"](Simulated(COSTS), requests, 2).steps == 3 + 9
    assert LOOPS["one by one"](Simulated(COSTS), requests, 2).steps == 3 + 9 + 5 + 2


def test_a_short_prompt_is_padded_to_the_longest_of_its_batch() -> None:
    short, long = Request([0] * 8, 1), Request([0] * 100, 1)
    step_s = static(Simulated(COSTS), [short, long], 2).elapsed_s
    assert step_s == static(Simulated(COSTS), [long, long], 2).elapsed_s
    assert continuous(Simulated(COSTS), [short, long], 2).elapsed_s < step_s


def test_a_dynamic_batch_starts_when_it_is_full_or_its_oldest_has_waited() -> None:
    requests = [Request([0], 1, arrival_s) for arrival_s in (0.0, 0.2, 0.3, 5.0, 5.9, 9.0)]
    run = dynamic(Simulated(COSTS), requests, 3, wait_s=0.5)
    step_s = COSTS.parts[0]
    firsts = [times.arrivals[0] for times in run.times]
    assert firsts == pytest.approx([0.3, 0.3, 0.3, 5.5, 6.4, 9.0], abs=2 * step_s)
    assert run.steps == 4


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_memory_never_overlap_and_none_is_refused_that_would_fit(seed: int) -> None:
    draw_, memory, num_slots = random.Random(seed), Buddies(1000), 1000
    for _ in range(500):
        if memory.taken and draw_.random() < 0.4:
            del memory.taken[draw_.choice([*memory.taken])]
            continue
        length = draw_.randint(1, 200)
        used = {slot for start, size in memory.taken.items() for slot in range(start, start + size)}
        start = memory.take(length)
        if start is None:
            size = 1 << (length - 1).bit_length()
            assert all(used.intersection(range(at, at + size)) for at in range(0, num_slots - size + 1, size))
        else:
            assert memory.taken[start] >= length
            assert start + memory.taken[start] <= num_slots
            assert used.isdisjoint(range(start, start + memory.taken[start]))


def test_every_slot_is_counted_once_and_paging_holds_more_tokens_than_any_reservation() -> None:
    requests = conversations("ShareGPT", 120)
    uses = {kind: Use.mean(reserving(requests, reserve)) for kind, reserve in RESERVATIONS.items()}
    uses["paging"] = Use.mean(paging(requests, COSTS))
    tokens = [use.tokens for use in uses.values()]
    assert all(sum(use[:4]) == pytest.approx(1) and min(use) >= 0 for use in uses.values())
    assert tokens == sorted(tokens)
    assert uses["paging"].tokens > 0.9
    assert uses["reserves the maximum"].at_once == 15_700 // 2048


@pytest.mark.thorough
def test_the_published_comparison_has_its_order() -> None:
    found = published(COSTS, cap=1536, count=200)
    assert [*found] == sorted(found)
    assert found.paging > 10 * found.whole_run


def test_pictures_are_drawn(tmp_path: Path) -> None:
    load = [1.0, 1 / 64, 0.0, 0.0, 0.0, 0.0, 0.0]
    measured = Measured({}, [(load, 0.01)] * 3, [(1, 0.01), (2, 0.012)], 200.0, 1000.0, {})
    run = continuous(Simulated(COSTS), mixed(1, count=3).requests, SIZE)
    waits = {0.1: {"0": run, "continuous": run}}
    uses = {name: {kind: Use(0.25, 0.25, 0.25, 0.25, 3) for kind in (*RESERVATIONS, "paging")} for name in ("A", "B")}
    draw(tmp_path, measured, ([0.0], {"static": [1.0]}), {32: Published(1.0, 2.0, 3.0, 4.0)}, ([0.0], waits), uses)
    assert len([*tmp_path.glob("batching-*.png")]) == 4
