"""The choice of the next token on a CPU: noise and order only for tokens that can still be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gumbel import GUMBEL_RANGE, gumbel
from kernels.sample import Draws, find_cutoff, scale

# Enough for usual top-k and top-p; a row that needs more is sorted whole.
LEADING_TOKENS = 256


def sample_cpu(logits: Tensor, draws: Draws) -> Tensor:
    """`sample`, exactly, without a sort of the vocabulary in the common case."""
    best, tokens = logits.max(dim=-1)
    has_answer = best.isfinite()
    if len(draws.rows):
        scaled = scale(logits, best, draws)
        # No noise lifts a token over the best one from further below than the noise ranges.
        cutoff = _cutoff(scaled, draws).clamp(min=-GUMBEL_RANGE)
        is_kept = scaled >= cutoff[:, None]
        is_kept[:, 0] |= ~has_answer[draws.rows]  # every row keeps something
        tokens[draws.rows] = _draw(scaled, is_kept, draws.keys)
    return tokens.masked_fill(~has_answer, -1)


def _cutoff(scaled: Tensor, draws: Draws) -> Tensor:
    cutoff = draws.min_p.log()
    ranked = ((draws.top_k > 0) | (draws.top_p < 1)).nonzero()[:, 0]
    if len(ranked):
        rows = scaled[ranked]
        leading = rows.topk(min(LEADING_TOKENS, rows.shape[-1]), dim=-1).values
        cutoff[ranked], is_sure = find_cutoff(leading, rows, draws.select(ranked))
        unsure = ranked[~is_sure]
        if len(unsure):
            rows = scaled[unsure]
            ordered = rows.sort(dim=-1, descending=True).values
            cutoff[unsure], _ = find_cutoff(ordered, rows, draws.select(unsure))
    return cutoff


def _draw(scaled: Tensor, is_kept: Tensor, keys: Tensor) -> Tensor:
    """The best of score plus noise among each row's kept tokens, of which there is at least one."""
    rows, ids = is_kept.nonzero(as_tuple=True)
    scores = scaled[rows, ids] + gumbel(keys[rows], ids)
    counts = is_kept.sum(dim=-1)
    starts = counts.cumsum(dim=0) - counts
    packed = scores.new_full((len(counts), int(counts.max())), float("-inf"))
    packed[rows, torch.arange(len(rows)) - starts[rows]] = scores
    return ids[starts + packed.argmax(dim=-1)]
