"""What changes logits before a token is chosen: penalties, biases, bans and masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .native_module import native


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Changes to some rows: to single logits as lists of (row, token id), and to whole rows as masks.

    seen_rows, seen_ids    [seen] int64, tokens of prompt or output in rows with penalties, no pair twice
    seen_counts            [seen] float32, times that the output holds the token
    repetition_penalty     [seen] float32, divides positive and multiplies negative logits (CTRL; Keskar et al., 2019)
    presence_penalty       [seen] float32, subtracted once if the output holds the token
    frequency_penalty      [seen] float32, subtracted for each time that the output holds the token
    bias_rows, bias_ids    [biases] int64, no pair twice
    bias                   [biases] float32, added
    banned_rows, banned_ids  [banned] int64, tokens that cannot be chosen
    masked_rows            [masked] int64, no row twice
    token_masks            [masked, ceil(vocab / 32)] int32; token 32 * w + i can be chosen if bit i of word w is set
    """

    seen_rows: Tensor
    seen_ids: Tensor
    seen_counts: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias_rows: Tensor
    bias_ids: Tensor
    bias: Tensor
    banned_rows: Tensor
    banned_ids: Tensor
    masked_rows: Tensor
    token_masks: Tensor


def adjust_logits(logits: Tensor, adjustments: LogitAdjustments) -> None:
    """Applies penalties, then biases, then bans and masks, in place.

    logits  [rows, vocab] float32
    """
    a = adjustments
    _adjust_some(logits, a)
    if len(a.masked_rows):
        is_banned = ~unpack_masks(a.token_masks, logits.shape[1])
        logits[a.masked_rows] = logits[a.masked_rows].masked_fill_(is_banned, float("-inf"))


def adjust_logits_native(logits: Tensor, adjustments: LogitAdjustments) -> None:
    """`adjust_logits` whose masks are applied where the rows are, without copies of them."""
    a = adjustments
    is_readable = logits.dtype == torch.float32 and logits.is_contiguous() and a.token_masks.is_contiguous()
    if native is None or not is_readable or not len(a.masked_rows):
        adjust_logits(logits, a)
        return
    _adjust_some(logits, a)
    rows, masks = a.masked_rows.data_ptr(), a.token_masks.data_ptr()
    native.mask_rows(logits.data_ptr(), rows, masks, len(a.masked_rows), logits.shape[1])


def _adjust_some(logits: Tensor, a: LogitAdjustments) -> None:
    """Applies penalties, biases and bans: what changes single logits."""
    if len(a.seen_rows):
        seen = logits[a.seen_rows, a.seen_ids]
        seen = torch.where(seen > 0, seen / a.repetition_penalty, seen * a.repetition_penalty)
        seen -= a.presence_penalty * (a.seen_counts > 0) + a.frequency_penalty * a.seen_counts
        logits[a.seen_rows, a.seen_ids] = seen
    if len(a.bias_rows):
        logits[a.bias_rows, a.bias_ids] += a.bias
    if len(a.banned_rows):
        logits[a.banned_rows, a.banned_ids] = float("-inf")


def unpack_masks(token_masks: Tensor, vocab: int) -> Tensor:
    """[masked, vocab] bool, whether a token can be chosen."""
    octets = token_masks.view(torch.uint8)[:, :, None]  # four to a word, the lowest first
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=octets.device)).bitwise_and_(1)
    return bits.view(torch.bool).flatten(1)[:, :vocab]
