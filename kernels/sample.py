"""The choice of the next token: the contract, and the reference that every backend is compared with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from .adjust_logits import unpack_masks
from .gumbel import gumbel, noise_keys


@dataclass(frozen=True)
class Draws:
    """The rows whose token is drawn at random; all others take their most likely token.

    Fields beside rows and positions are parameters of sampling, by their names.

    rows         [draws] int64, ascending
    temperature  [draws] float32, positive
    top_k        [draws] int64 or int32, keep the k most likely tokens; 0: all
    top_p        [draws] float32, then keep the fewest tokens whose probability among the kept reaches p; 1: all
    min_p        [draws] float32, then keep tokens at least min_p times as likely as the most likely; 0: all
    top_n_sigma  [draws] float32, then keep logits at most so many standard deviations below the best (top-nσ; Tang et
                 al., 2024), of the row's logits that are not -inf; 0: all
    seed         [draws] int64, of the noise; unsigned ones as the same 64 bits
    positions    [draws] int64, of the token to choose; what changes from step to step
    """

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    top_n_sigma: Tensor
    seed: Tensor
    positions: Tensor

    def select(self, draws: Tensor) -> Draws:
        """Some of them, by their positions here."""
        return Draws(*(getattr(self, each.name)[draws] for each in fields(self)))

    @property
    def noise_keys(self) -> Tensor:
        """[draws] int64"""
        return noise_keys(self.seed, self.positions)

    @cached_property
    def without_rules(self) -> Draws:
        """Draws among all tokens."""
        none = torch.zeros_like(self.temperature)
        every = {"top_k": torch.zeros_like(self.top_k), "top_p": none + 1, "min_p": none, "top_n_sigma": none}
        return replace(self, **every)

    @cached_property
    def lowest(self) -> Tensor:
        """[draws] float32, the least scaled logit that min-p keeps."""
        return self.min_p.log()

    @cached_property
    def has_top_n_sigma(self) -> bool:
        return bool((self.top_n_sigma > 0).any())

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where compiled code finds the draws, in the order of its arguments; top_k must be int64."""
        fields = (self.rows, self.temperature, self.seed, self.positions, self.top_k, self.top_p, self.lowest)
        return tuple(each.data_ptr() for each in fields)

    @property
    def is_limited(self) -> Tensor:
        """[draws] bool, whether a rule may drop tokens."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0) | (self.top_n_sigma > 0)


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """Chooses one token a row: the best of (logit / temperature + Gumbel noise) among the tokens that are kept.

    logits  [rows, vocab] floating point; -inf cannot be chosen
    return  [rows] int64; -1 where the row holds NaN or +inf, or nothing that can be chosen

    Each rule keeps what is at or above some logit, so equally likely tokens are kept or dropped together, and what is
    kept depends on the values alone. The maximum of scores with Gumbel noise is a draw from their softmax
    (Gumbel-max; Maddison et al., 2014).
    """
    best, tokens = logits.max(dim=-1)
    if len(draws.rows):
        scaled = scale(logits, best, draws)
        cutoff, _ = find_cutoff(scaled.sort(dim=-1, descending=True).values, scaled, draws)
        noise = gumbel(draws.noise_keys[:, None], torch.arange(logits.shape[-1], device=logits.device))
        tokens[draws.rows] = torch.where(scaled >= cutoff[:, None], scaled + noise, float("-inf")).argmax(dim=-1)
    return tokens.masked_fill(~best.isfinite(), -1)


def likeliest_if_drawn(logits: Tensor, draws: Draws) -> Tensor:
    """Chooses the most likely token of each row, unless a row's draw among all tokens is another one.

    return  [rows] int64; -1 where another token is drawn, and where `sample` returns -1

    The draw does without the rules. So `sample` returns this token under any rules, which always keep the most likely
    one, and whatever other tokens cannot be chosen.
    """
    free = draws.without_rules
    drawn = sample(logits, free)[free.rows]
    tokens = sample(logits, draws.select(free.rows[:0]))
    tokens[free.rows] = torch.where(drawn == tokens[free.rows], drawn, -1)
    return tokens


def most_likely_allowed(logits: Tensor, rows: Tensor, token_masks: Tensor) -> Tensor:
    """Chooses the most likely of the tokens that a row's mask allows, the lowest id of several.

    logits       [num_rows, vocab] floating point; -inf cannot be chosen
    rows         [masked] int64
    token_masks  [masked, ceil(vocab / 32)] int32; token 32 * w + i can be chosen if bit i of word w is set
    return       [masked] int64; -1 where what is allowed holds NaN or +inf, or nothing that can be chosen
    """
    is_banned = ~unpack_masks(token_masks, logits.shape[1])
    best, tokens = logits[rows].masked_fill_(is_banned, float("-inf")).max(dim=-1)
    return tokens.masked_fill_(~best.isfinite(), -1)


def scale(logits: Tensor, best: Tensor, draws: Draws) -> Tensor:
    """[draws, vocab] float32: logits below the row's best, over the temperature. However low that is, the best is 0."""
    chosen = logits[draws.rows].float() - best[draws.rows, None].float()
    return chosen / draws.temperature[:, None]


def find_cutoff(leading: Tensor, scaled: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """The least scaled logit that top-k, top-p, min-p and top-nσ keep.

    leading  [draws, n], the n greatest of each row of `scaled`, in descending order
    return   [draws] float32, and [draws] bool: whether every token that is kept is sure to be among the leading ones
    """
    vocab = scaled.shape[-1]
    is_complete = leading.shape[-1] == vocab
    last = leading[:, -1]
    unlimited = torch.full_like(last, float("-inf"))

    is_topped = (draws.top_k > 0) & (draws.top_k < vocab)
    kth = (draws.top_k.long() - 1).clamp(0, leading.shape[-1] - 1)
    top_k_cutoff = torch.where(is_topped, leading.gather(1, kth[:, None])[:, 0], unlimited)
    # Tokens as likely as the k-th are kept too, so the leading ones must go on to a less likely one.
    is_sure = ~is_topped | (last < top_k_cutoff)

    weights = leading.double().exp() * (leading >= top_k_cutoff[:, None])
    mass = weights.cumsum(dim=-1)
    total = torch.where(is_topped, mass[:, -1], row_sums(scaled.exp(), torch.float64))
    num_kept = (mass - weights < (draws.top_p.double() * total)[:, None]).sum(dim=-1).clamp(min=1)
    top_p_cutoff = torch.where(draws.top_p < 1, leading.gather(1, num_kept[:, None] - 1)[:, 0], unlimited)

    cutoff = torch.maximum(torch.maximum(top_k_cutoff, top_p_cutoff), draws.lowest)
    near = (draws.top_n_sigma > 0).nonzero()[:, 0]
    if len(near):
        reach = draws.top_n_sigma[near].double() * _deviation(scaled[near])
        cutoff[near] = torch.maximum(cutoff[near], -reach.float())
    return cutoff, is_sure & (last < cutoff) | is_complete


def _deviation(rows: Tensor) -> Tensor:
    """[rows] float64: the standard deviation of each row's values that are not -inf."""
    is_finite = rows != float("-inf")
    count = is_finite.sum(dim=-1, keepdim=True)
    mean = row_sums(rows.double().masked_fill_(~is_finite, 0))[:, None] / count
    return row_sums((rows.double() - mean).masked_fill_(~is_finite, 0).square_()).div_(count[:, 0]).sqrt_()


def row_sums(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[rows], the same to the last bit in any batch. Torch splits the sum of a single row among its threads."""
    both = rows.expand(2, -1) if len(rows) == 1 else rows
    return both.sum(dim=-1, dtype=dtype)[: len(rows)]
