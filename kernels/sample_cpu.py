"""The choice of the next token on a CPU: in torch most rows order and perturb their leading tokens only.

Compiled code orders nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .gumbel import gumbel
from .native_module import DTYPES, native, takes
from .sample import Draws, find_cutoff, likeliest_if_drawn, most_likely_allowed, scale

# Tokens to look at, first and at the second attempt; a row that keeps more of them is sorted whole.
LEADING_TOKENS = (256, 4096)


def sample_cpu(logits: Tensor, draws: Draws) -> Tensor:
    """`sample`, exactly, but without a sort of the vocabulary in the usual case."""
    best, tokens = logits.max(dim=-1)
    _draw(logits, best, tokens, draws)
    return tokens.masked_fill_(~best.isfinite(), -1)


def sample_native(logits: Tensor, draws: Draws) -> Tensor:
    """`sample_cpu`, exactly, with few passes over a row's logits.

    Compiled code rounds its logarithms and sums in another way than torch. Where that may decide which token wins, or
    whether top-p keeps it, `sample_cpu` draws; the same goes for a large top-k and for top-nσ.
    """
    if native is None or not takes(logits) or draws.top_k.dtype != torch.int64:
        return sample_cpu(logits, draws)
    tokens, num_unsure = _sample_native(logits, draws, only_likeliest=False)
    if num_unsure or draws.has_top_n_sigma:
        drawn = tokens[draws.rows]
        is_unsure = (drawn == native.UNSURE_DRAW) | (draws.top_n_sigma > 0) & (drawn >= 0)
        unsure = draws.select(is_unsure.nonzero()[:, 0])
        here = replace(unsure, rows=torch.arange(len(unsure.rows)))
        tokens[unsure.rows] = sample_cpu(logits[unsure.rows], here)
    return tokens


def likeliest_if_drawn_native(logits: Tensor, draws: Draws) -> Tensor:
    """`likeliest_if_drawn` in one pass, but for draws that rounding may decide: there it is -1, too."""
    if native is None or not takes(logits) or draws.top_k.dtype != torch.int64:
        return likeliest_if_drawn(logits, draws)
    tokens, _ = _sample_native(logits, draws.without_rules, only_likeliest=True)
    return tokens


def _sample_native(logits: Tensor, draws: Draws, *, only_likeliest: bool) -> tuple[Tensor, int]:
    """Tokens, and how many of them are not sure, which have UNSURE_DRAW in their place."""
    assert native is not None
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    num_unsure = native.sample(
        DTYPES[logits.dtype],
        logits.data_ptr(),
        tokens.data_ptr(),
        rows,
        vocab,
        *draws.addresses,
        len(draws.rows),
        only_likeliest,
    )
    return tokens, num_unsure


def most_likely_allowed_native(logits: Tensor, rows: Tensor, token_masks: Tensor) -> Tensor:
    """`most_likely_allowed` in one pass over what is allowed."""
    if native is None or not takes(logits) or not token_masks.is_contiguous():
        return most_likely_allowed(logits, rows, token_masks)
    tokens = torch.empty_like(rows)
    native.argmax(
        DTYPES[logits.dtype],
        logits.data_ptr(),
        rows.data_ptr(),
        token_masks.data_ptr(),
        tokens.data_ptr(),
        len(rows),
        logits.shape[1],
    )
    return tokens


def _draw(logits: Tensor, best: Tensor, tokens: Tensor, draws: Draws) -> None:
    if len(draws.rows):
        scaled = scale(logits, best, draws)
        is_limited = draws.is_limited
        limited, free = is_limited.nonzero()[:, 0], (~is_limited).nonzero()[:, 0]
        if len(limited):
            tokens[draws.rows[limited]] = _draw_limited(scaled[limited], draws.select(limited))
        if len(free):
            tokens[draws.rows[free]] = _draw_free(scaled[free], draws.select(free))


def _draw_free(scaled: Tensor, draws: Draws) -> Tensor:
    noise = gumbel(draws.noise_keys[:, None], torch.arange(scaled.shape[-1]))
    return noise.add_(scaled).max(dim=-1).indices


def _draw_limited(scaled: Tensor, draws: Draws) -> Tensor:
    vocab = scaled.shape[-1]
    tokens = torch.empty_like(draws.rows)
    pending = torch.arange(len(draws.rows))
    for size in (*LEADING_TOKENS, vocab):
        rows, todo = scaled[pending], draws.select(pending)
        leading, ids = rows.topk(size, dim=-1) if size < vocab else rows.sort(dim=-1, descending=True)
        cutoff, is_sure = find_cutoff(leading, rows, todo)
        scores = leading + gumbel(todo.noise_keys[:, None], ids)
        winners = scores.masked_fill_(leading < cutoff[:, None], float("-inf")).max(dim=-1).indices
        tokens[pending] = ids.gather(1, winners[:, None])[:, 0]
        pending = pending[~is_sure]
        if not len(pending):
            break
    return tokens
