"""A fleet's number of engines in a simulated part of a day, against its target and an oracle."""

from __future__ import annotations

import itertools
import math

import pytest

from bench.scaling import LATE, MACHINE, by_load, day, oracle_hours, simulate, steady
from pagoda_server.fleet.policy import Targets

MOST_PER_ENGINE = 0.95  # requests a second: more than `bench.scaling.capacity` finds, so the oracle here is stricter


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rising_day_with_bursts_keeps_its_target_at_little_more_than_an_oracles_cost(seed: int) -> None:
    length_s, targets = 8 * 3600.0, Targets()
    requests = day(6.0, seed, length_s, num_bursts=3)
    found = simulate(requests, by_load(targets))
    assert found.late <= LATE
    assert found.engine_hours <= 1.25 * oracle_hours(requests, length_s, lambda count: MOST_PER_ENGINE * count)
    turns = [(now, after - before) for (_, before), (now, after) in itertools.pairwise(found.changes)]
    downs = [now for now, change in turns if change < 0]
    assert all(later - now >= targets.down_after_s for now, later in itertools.pairwise(downs))
    assert all(abs(change) == 1 for _, change in turns)


def test_a_steady_load_is_served_by_as_many_engines_as_it_fills() -> None:
    requests = steady(2.0, 2400.0)
    found = simulate(requests, by_load(Targets()), start_s=60.0)
    needed = math.ceil(2.0 / MOST_PER_ENGINE)
    assert found.changes[-1][1] in (needed, needed + 1)
    assert len(found.changes) <= 1 + needed + 1, "it grows to what it needs, and stays there"


def test_one_engine_alone_is_late_where_two_would_not_be() -> None:
    requests, again = steady(1.5, 600.0), steady(1.5, 600.0)
    assert simulate(requests, lambda *_: 0, machine=MACHINE).late > 0.5
    assert simulate(again, lambda *_: 0, least=2, machine=MACHINE).late <= LATE
