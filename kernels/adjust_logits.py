"""Penalties, biases and bans: what changes logits before a token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Changes to single logits, as lists of (row, token id): only what a sequence has seen or names is touched.

    seen_rows, seen_ids    [seen] int64, tokens of prompt or output in rows with penalties, no pair twice
    seen_counts            [seen] float32, times that the output holds the token
    repetition             [seen] float32, divides positive and multiplies negative logits (CTRL; Keskar et al., 2019)
    presence, frequency    [seen] float32, subtracted once if the output holds the token, and for each time it does
    bias_rows, bias_ids    [biases] int64, no pair twice
    bias                   [biases] float32, added
    banned_rows, banned_ids  [banned] int64, tokens that cannot be chosen
    """

    seen_rows: Tensor
    seen_ids: Tensor
    seen_counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias_rows: Tensor
    bias_ids: Tensor
    bias: Tensor
    banned_rows: Tensor
    banned_ids: Tensor


def adjust_logits(logits: Tensor, adjustments: LogitAdjustments) -> None:
    """Applies penalties, then biases, then bans, in place.

    logits  [rows, vocab] float32
    """
    a = adjustments
    if len(a.seen_rows):
        seen = logits[a.seen_rows, a.seen_ids]
        seen = torch.where(seen > 0, seen / a.repetition, seen * a.repetition)
        seen -= a.presence * (a.seen_counts > 0) + a.frequency * a.seen_counts
        logits[a.seen_rows, a.seen_ids] = seen
    if len(a.bias_rows):
        logits[a.bias_rows, a.bias_ids] += a.bias
    if len(a.banned_rows):
        logits[a.banned_rows, a.banned_ids] = float("-inf")
