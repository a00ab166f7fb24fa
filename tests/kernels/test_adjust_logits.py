from __future__ import annotations

import pytest
import torch

from pagoda_server.kernels import LogitAdjustments
from pagoda_server.kernels.adjust_logits import adjust_logits
from pagoda_server.kernels.backend import Backend
from tests.kernels.backends import BACKENDS


def adjustments(
    seen: list[tuple[int, int, float, float, float, float]],
    bias: list[tuple[int, int, float]],
    banned: list[tuple[int, int]],
    allowed: dict[int, list[int]] | None = None,
) -> LogitAdjustments:
    """Adjustments of rows of up to 96 tokens.

    seen     (row, token, count, repetition, presence, frequency)
    bias     (row, token, bias)
    banned   (row, token)
    allowed  row → the only tokens that can be chosen
    """
    masks = allowed or {}

    def column(table: list[tuple], at: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([entry[at] for entry in table], dtype=dtype)

    return LogitAdjustments(
        *(column(seen, at, torch.int64) for at in (0, 1)),
        *(column(seen, at, torch.float32) for at in (2, 3, 4, 5)),
        *(column(bias, at, torch.int64) for at in (0, 1)),
        column(bias, 2, torch.float32),
        *(column(banned, at, torch.int64) for at in (0, 1)),
        torch.tensor(list(masks), dtype=torch.int64),
        torch.tensor(
            [[sum(1 << (id % 32) for id in ids if id // 32 == word) for word in range(3)] for ids in masks.values()],
            dtype=torch.int64,
        ).to(torch.int32),
    )


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[3.0, -3.0, 3.0], [3.0, -3.0, 3.0]])
    adjust_logits(logits, adjustments([(0, 0, 0, 2, 0, 0), (0, 1, 0, 2, 0, 0)], [], []))
    assert logits.tolist() == [[1.5, -6.0, 3.0], [3.0, -3.0, 3.0]]


def test_presence_counts_once_and_frequency_each_time_in_the_output_only() -> None:
    logits = torch.zeros(1, 3)
    adjust_logits(logits, adjustments([(0, 0, 0, 1, 0.5, 0.25), (0, 1, 3, 1, 0.5, 0.25)], [], []))
    assert logits.tolist() == [[0.0, -1.25, 0.0]]


def test_penalties_come_before_biases_and_bans_last() -> None:
    logits = torch.full((1, 3), 4.0)
    adjust_logits(logits, adjustments([(0, 0, 1, 2, 0, 0)], [(0, 0, 10.0), (0, 2, 50.0)], [(0, 2)]))
    assert logits.tolist() == [[12.0, 4.0, -torch.inf]]


def test_rows_without_adjustments_stay() -> None:
    logits = torch.randn(3, 5)
    before = logits.clone()
    adjust_logits(logits, adjustments([(1, 4, 1, 1.5, 0, 0)], [(1, 0, 1.0)], [(1, 2)]))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits[1], before[1])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_mask_leaves_its_tokens_and_no_others_whatever_their_logits(backend: Backend) -> None:
    logits = torch.randn(4, 75)
    logits[1, 40] = torch.nan
    before = logits.clone()
    allowed = {3: [0, 31, 32, 63, 64, 74], 1: [5]}
    backend.adjust_logits(logits, adjustments([], [(1, 5, 2.0), (1, 6, 50.0)], [(3, 63)], allowed))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[3].isfinite().nonzero()[:, 0].tolist() == [0, 31, 32, 64, 74]
    assert torch.equal(logits[3, [0, 31, 32, 64, 74]], before[3, [0, 31, 32, 64, 74]])
    assert (logits[1, 5], logits[1].isfinite().sum()) == (before[1, 5] + 2, 1)
