"""The count of tokens that a request's batch changes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import batches
from bench.gpu.rehearsal import simulated_card
from bench.gpu.rows import Bench, Ceilings, Row
from pagoda_server.engine.core.step import Sampled
from pagoda_server.engine.runners.cuda.outcomes import DeviceStep


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    unknown = Ceilings(math.nan, math.nan)
    return Bench(torch.device("cuda"), lambda calls: 0.0, unknown, is_small=True, evidence=tmp_path)


@pytest.mark.gpu
def test_on_a_gpu_batches_change_no_token_in_float32_or_with_deterministic_and_few_in_bfloat16(bench: Bench) -> None:
    found = list(batches.rows(replace(bench, is_small=False)))
    assert [f"{row.case}: {row.rate:.1f} %" for row in found if not row.met] == []


def rows(bench: Bench) -> list[Row]:
    with simulated_card():
        return list(batches.rows(bench))


def test_on_a_simulated_card_no_batch_changes_a_token(bench: Bench) -> None:
    found = rows(bench)
    assert [row.case for row in found] == [
        f"{setting}, {size} at once against 1"
        for setting in ("float32", "bfloat16", "bfloat16, deterministic")
        for size in (2, 3)
    ]
    assert all(row.met and row.figures["compared"] == 12 for row in found if "float32" in row.case)


def test_a_step_of_several_sequences_that_chooses_other_tokens_misses_the_bar(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = DeviceStep.result

    def faulty(step: DeviceStep) -> Sampled:
        sampled = result(step)
        return Sampled([token + (len(sampled.tokens) > 1) for token in sampled.tokens], sampled.logprobs)

    monkeypatch.setattr(DeviceStep, "result", faulty)
    assert [row.met for row in rows(bench)] == [False] * 6


def test_what_follows_a_difference_is_not_compared() -> None:
    assert batches.count_differing([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == (0, 5)
    assert batches.count_differing([[1, 2, 3], [4, 5, 6]], [[1, 7, 8], [4, 5, 0]]) == (2, 5)
