"""The simulation of engines with roles: what it moves, and what it finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.roles import BLOCK_SIZE, Cell, Setup, Simulation, draw, goodput, splits

SETUP = Setup(engines=2, prefill=1, prompt_len=1024, output_len=16, itl_s=0.03, ttft_s=1.0, bytes_per_s=25e9)


def fetched(simulation: Simulation) -> list[int]:
    return [engine.scheduler.host.load().fetched_tokens for engine in simulation.engines]


def test_a_decode_engine_gets_the_blocks_of_prompts_that_another_one_has_computed() -> None:
    simulation = Simulation(SETUP)
    assert simulation.run(rate=2, seconds=4) == 1.0
    prefill, decode = (engine.scheduler.counters for engine in simulation.engines)
    num_prompts = prefill.prompt_tokens // SETUP.prompt_len
    assert num_prompts >= 20
    num_fetched = fetched(simulation)[1] // SETUP.prompt_len
    assert num_fetched == num_prompts
    assert decode.recomputed_tokens <= num_prompts * BLOCK_SIZE
    assert prefill.output_tokens == num_prompts
    assert decode.output_tokens == num_prompts * (SETUP.output_len - 1)


def test_without_roles_nothing_moves() -> None:
    simulation = Simulation(replace(SETUP, prefill=0))
    assert simulation.run(rate=2, seconds=4) == 1.0
    assert fetched(simulation) == [0, 0]


def test_over_a_slow_link_prompts_are_computed_again() -> None:
    simulation = Simulation(replace(SETUP, bytes_per_s=1e7, itl_s=10.0))
    simulation.run(rate=2, seconds=4)
    assert simulation.engines[1].scheduler.counters.recomputed_tokens > 10 * SETUP.prompt_len


def test_too_many_requests_miss_their_targets() -> None:
    assert Simulation(SETUP).run(rate=200, seconds=3) == 0


@pytest.mark.thorough
def test_more_engines_have_more_goodput() -> None:
    one = replace(SETUP, engines=1, prefill=0)
    assert goodput(replace(one, engines=2), 3) > 1.5 * goodput(one, 3) > 0


def test_splits_follow_the_work() -> None:
    assert splits(replace(SETUP, engines=8, prompt_len=4096, output_len=8))[-1] == 7
    assert splits(replace(SETUP, engines=8, prompt_len=8, output_len=4096))[0] == 1
    assert splits(SETUP) == [1]


def test_a_picture_is_drawn_where_neither_meets_the_targets_too(tmp_path: Path) -> None:
    cells = [Cell(SETUP, 0.0, 0.0, 1), Cell(replace(SETUP, itl_s=0.1), 0.0, 2.0, 1)]
    cells += [Cell(replace(each.setup, prompt_len=2048), 1.0, 2.0, 1) for each in cells]
    draw(cells, "title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
