"""The choice of the next token where a batch's sampling parameters, tokens and counts stay on the device.

A running sequence has a row. What its sampling needs is written to the row once, when it starts; a step then names rows
and positions only, so that it can be launched before the tokens of the step before it are known to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .adjust_logits import LogitAdjustments, adjust_logits
from .sample import Draws, sample

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 96  # stop ids of a served row: the most that a router accepts, and a model's own
MAX_BIASES = 1024  # biases of a served row
IN_PROMPT = 1 << 30  # of a count: the prompt holds the token
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # below it, a division would give no number


# What a row holds in `numbers` and in `integers`, a column each, and the value that changes no choice.
NUMBERS: Mapping[str, float] = {
    "temperature": 0,
    "top_p": 1,
    "min_p": 0,
    "top_n_sigma": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
INTEGERS: Mapping[str, int] = {
    "top_k": 0,
    "seed_low": 0,
    "seed_high": 0,
    "min_position": 0,
    "num_logprobs": -1,
    "is_masked": 0,
    "num_stops": 0,
    "num_biases": 0,
}
COLUMNS = {name: column for names in (NUMBERS, INTEGERS) for column, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the sequence of each row chooses its tokens. All on the device, at fixed addresses.

    numbers        [max_rows, len(NUMBERS)] float32
    integers       [max_rows, len(INTEGERS)] int32
    stop_ids       [max_rows, max_stops] int32
    bias_ids, bias [max_rows, max_biases] int32 and float32; no id twice
    token_masks    [max_rows + max_drafts, ceil(vocab / 32)] int32, bit i of word w: token 32 * w + i can be chosen.
                   Those behind max_rows are of rows behind drafts: see Verified
    counts         [max_rows, vocab] int32: times that the output holds the token, plus IN_PROMPT
    last_token     [max_rows] int32, the token that was chosen last

    Each column is an attribute, too, a view [max_rows]. Those of `Draws` and `LogitAdjustments` mean what they mean
    there, except that a row is greedy below SMALLEST_TEMPERATURE or with top_k 1. The others:

    seed_low, seed_high    halves of the 64-bit seed
    min_position           before it (tokens of the sequence, prompt included) no stop id is chosen
    num_logprobs           -1: none, 0: of the chosen token, N: also of the N most likely
    is_masked              1: only tokens of token_masks can be chosen
    num_stops, num_biases  entries that the row has of stop_ids and of bias; the others are never read
    """

    numbers: Tensor
    integers: Tensor
    stop_ids: Tensor
    bias_ids: Tensor
    bias: Tensor
    token_masks: Tensor
    counts: Tensor
    last_token: Tensor

    def __getattr__(self, name: str) -> Tensor:
        if name not in COLUMNS:
            raise AttributeError(name)
        return (self.numbers if name in NUMBERS else self.integers)[:, COLUMNS[name]]


@dataclass(frozen=True, slots=True)
class Verified:
    """Which rows of a step verify drafts: guesses of a sequence's next tokens.

    Each draft has a row, behind the sequence's own. A row behind drafts chooses as if they were tokens of the sequence.
    It takes mask `max_rows + at` of token_masks, where `at` is its place in the batch.

    ranks   [batch] int32; 0: no draft is behind or before it. N: it is the N-th row of its sequence
    tokens  [batch] int64, the token that each row is behind. Read where the rank is above 1: it is a draft there
    """

    ranks: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a step chose, one entry a row of its logits. Entries of padding, and logprobs not asked for, are undefined.

    tokens   [batch] int32; -1 where the logits hold NaN or +inf, or nothing that can be chosen
    chosen   [batch] float32, the log-probability of the token
    top_ids  [batch, MAX_TOP_LOGPROBS] int32, most likely first
    top      [batch, MAX_TOP_LOGPROBS] float32
    """

    tokens: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def allocate_rows(
    max_rows: int, vocab: int, max_stops: int, max_biases: int, device: torch.device, max_drafts: int = 0
) -> SamplingRows:
    """Rows that take their most likely token, and nothing else."""

    def filled(value: float, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return SamplingRows(
        numbers=torch.tensor([*NUMBERS.values()], dtype=torch.float32, device=device).repeat(max_rows, 1),
        integers=torch.tensor([*INTEGERS.values()], dtype=torch.int32, device=device).repeat(max_rows, 1),
        stop_ids=filled(-1, max_rows, max_stops),
        bias_ids=filled(-1, max_rows, max_biases),
        bias=filled(0, max_rows, max_biases, dtype=torch.float32),
        token_masks=filled(0, max_rows + max_drafts, -(-vocab // 32)),
        counts=filled(0, max_rows, vocab),
        last_token=filled(0, max_rows),
    )


def allocate_sampled(batch: int, device: torch.device) -> SampledRows:
    """Room for a step's choices; holds nothing of use yet."""
    return SampledRows(
        tokens=torch.empty(batch, dtype=torch.int32, device=device),
        chosen=torch.empty(batch, dtype=torch.float32, device=device),
        top_ids=torch.empty(batch, MAX_TOP_LOGPROBS, dtype=torch.int32, device=device),
        top=torch.empty(batch, MAX_TOP_LOGPROBS, dtype=torch.float32, device=device),
    )


def sample_rows(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    sampling: SamplingRows,
    out: SampledRows,
    verified: Verified | None = None,
) -> None:
    """Chooses one token for each row of logits by the rules of its row, and notes it there.

    logits     [batch, vocab] floating point, of the model; may be overwritten
    rows       [batch] int32, no row twice, except a sequence's with drafts; -1: padding, for which nothing is chosen or
               noted
    positions  [batch] int32, tokens before the one to choose: with the seed they determine the noise
    verified   None: no sequence has drafts

    Log-probabilities are those of the model, in float32, before anything changes the logits; equally likely tokens
    come in ascending order. Then penalties, biases, bans and masks (`adjust_logits`), then the choice (`sample`, with
    the noise of seed and position): the same token as those choose. It becomes the row's `last_token`, and
    its count grows by one if the row has penalties. A broken row (-1) changes neither. Nor does a sequence with drafts:
    which of its tokens count is known when all are chosen.
    """
    live = (rows >= 0).nonzero()[:, 0]
    row, position, raw = rows[live].long(), positions[live].long(), logits[live].float()
    rank = torch.zeros_like(row) if verified is None else verified.ranks[live].long()
    counts, mask_row = sampling.counts[row], row
    if verified is not None:
        for back in range(int(rank.max()) - 1 if len(live) else 0):
            behind = (rank > back + 1).nonzero()[:, 0]
            counts[behind, verified.tokens[live[behind] - back]] += 1
        mask_row = torch.where(rank > 1, len(sampling.numbers) + live, row)
    adjusted = raw.clone()
    adjust_logits(adjusted, _adjustments(row, position, counts, mask_row, sampling))
    tokens = sample(adjusted, _draws(row, position, sampling))

    out.tokens[live] = tokens.int()
    is_good = (tokens >= 0) & (rank == 0)
    sampling.last_token[row[is_good]] = tokens[is_good].int()
    counted = is_good & _has_penalties(row, sampling)
    sampling.counts[row[counted], tokens[counted]] += 1
    if (sampling.num_logprobs[row] >= 0).any():
        logprobs = raw.log_softmax(dim=-1)
        out.chosen[live] = logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        top, top_ids = logprobs.sort(dim=-1, descending=True, stable=True)
        most = min(MAX_TOP_LOGPROBS, logits.shape[1])
        out.top[live, :most], out.top_ids[live, :most] = top[:, :most], top_ids[:, :most].int()


def _has_penalties(row: Tensor, sampling: SamplingRows) -> Tensor:
    s = sampling
    return ((s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0))[row]


def _adjustments(
    row: Tensor, position: Tensor, counts: Tensor, mask_row: Tensor, sampling: SamplingRows
) -> LogitAdjustments:
    counts = counts * _has_penalties(row, sampling)[:, None]
    seen_rows, seen_ids = counts.nonzero(as_tuple=True)
    of_seen = row[seen_rows]
    bias_ids = sampling.bias_ids[row]
    bias_rows, biases = _is_entry(bias_ids, sampling.num_biases[row]).nonzero(as_tuple=True)
    holds_back = (position < sampling.min_position[row])[:, None]
    stop_ids = sampling.stop_ids[row]
    masked = (sampling.is_masked[row] != 0).nonzero()[:, 0]
    is_stop = _is_entry(stop_ids, sampling.num_stops[row]) & (stop_ids < counts.shape[1])
    banned_rows, stops = (holds_back & is_stop).nonzero(as_tuple=True)
    return LogitAdjustments(
        seen_rows=seen_rows,
        seen_ids=seen_ids,
        seen_counts=(counts[seen_rows, seen_ids] & (IN_PROMPT - 1)).float(),
        repetition_penalty=sampling.repetition_penalty[of_seen],
        presence_penalty=sampling.presence_penalty[of_seen],
        frequency_penalty=sampling.frequency_penalty[of_seen],
        bias_rows=bias_rows,
        bias_ids=bias_ids[bias_rows, biases].long(),
        bias=sampling.bias[row[bias_rows], biases],
        banned_rows=banned_rows,
        banned_ids=stop_ids[banned_rows, stops].long(),
        masked_rows=masked,
        token_masks=sampling.token_masks[mask_row[masked]],
    )


def _is_entry(entries: Tensor, count: Tensor) -> Tensor:
    return torch.arange(entries.shape[1], device=entries.device) < count[:, None]


def _draws(row: Tensor, position: Tensor, sampling: SamplingRows) -> Draws:
    drawing = ((sampling.temperature[row] >= SMALLEST_TEMPERATURE) & (sampling.top_k[row] != 1)).nonzero()[:, 0]
    of_draw = row[drawing]
    seeds = (sampling.seed_high[of_draw].long() << 32) | (sampling.seed_low[of_draw].long() & 0xFFFF_FFFF)
    parameters = {each.name: getattr(sampling, each.name)[of_draw] for each in fields(Draws) if each.name in COLUMNS}
    return Draws(rows=drawing, seed=seeds, positions=position[drawing], **parameters)
