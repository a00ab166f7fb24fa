"""The choice of the next token where a batch's sampling parameters, tokens and counts stay on the device.

A running sequence has a row. What its sampling needs is written to the row once, when it starts; a step then names rows
and positions only, so that it can be launched before the tokens of the step before it are known to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda_server.kernels.adjust_logits import LogitAdjustments, adjust_logits
from pagoda_server.kernels.gumbel import noise_keys
from pagoda_server.kernels.sample import Draws, sample

MAX_TOP_LOGPROBS = 20
IN_PROMPT = 1 << 30  # of a count: the prompt holds the token
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # below it, a division would give no number


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the sequence of each row chooses its tokens. All [max_rows, …], on the device, at fixed addresses.

    temperature               [max_rows] float32; below SMALLEST_TEMPERATURE: the most likely token
    top_k                     [max_rows] int32; 0: all; 1: the most likely token, of equals the one with the lowest id
    top_p, min_p              [max_rows] float32; 1 and 0: all
    seed_low, seed_high       [max_rows] int32, halves of the 64-bit seed
    repetition, presence, frequency  [max_rows] float32; 1, 0 and 0: none
    min_position              [max_rows] int32; before it (tokens of the sequence, prompt included) no stop id is chosen
    num_logprobs              [max_rows] int32; -1: none, 0: of the chosen token, N: also of the N most likely
    stop_ids                  [max_rows, max_stops] int32; -1: no entry
    bias_ids, bias            [max_rows, max_biases] int32 and float32; id -1: no entry; no id twice
    counts                    [max_rows, vocab] int32: times that the output holds the token, plus IN_PROMPT
    last_token                [max_rows] int32, the token that was chosen last
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_low: Tensor
    seed_high: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_position: Tensor
    num_logprobs: Tensor
    stop_ids: Tensor
    bias_ids: Tensor
    bias: Tensor
    counts: Tensor
    last_token: Tensor


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


def allocate_rows(max_rows: int, vocab: int, max_stops: int, max_biases: int, device: torch.device) -> SamplingRows:
    """Rows that take their most likely token, and nothing else."""

    def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((max_rows, *shape), value, dtype=dtype, device=device)

    return SamplingRows(
        temperature=filled(0, torch.float32),
        top_k=filled(0, torch.int32),
        top_p=filled(1, torch.float32),
        min_p=filled(0, torch.float32),
        seed_low=filled(0, torch.int32),
        seed_high=filled(0, torch.int32),
        repetition=filled(1, torch.float32),
        presence=filled(0, torch.float32),
        frequency=filled(0, torch.float32),
        min_position=filled(0, torch.int32),
        num_logprobs=filled(-1, torch.int32),
        stop_ids=filled(-1, torch.int32, max_stops),
        bias_ids=filled(-1, torch.int32, max_biases),
        bias=filled(0, torch.float32, max_biases),
        counts=filled(0, torch.int32, vocab),
        last_token=filled(0, torch.int32),
    )


def allocate_sampled(batch: int, device: torch.device) -> SampledRows:
    """Room for a step's choices; holds nothing of use yet."""
    return SampledRows(
        tokens=torch.empty(batch, dtype=torch.int32, device=device),
        chosen=torch.empty(batch, dtype=torch.float32, device=device),
        top_ids=torch.empty(batch, MAX_TOP_LOGPROBS, dtype=torch.int32, device=device),
        top=torch.empty(batch, MAX_TOP_LOGPROBS, dtype=torch.float32, device=device),
    )


def sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, sampling: SamplingRows, out: SampledRows) -> None:
    """Chooses one token for each row of logits by the rules of its row, and notes it there.

    logits     [batch, vocab] floating point, of the model; may be overwritten
    rows       [batch] int32, no row twice; -1: padding, for which nothing is chosen or noted
    positions  [batch] int32, tokens before the one to choose: with the seed they determine the noise

    Log-probabilities are those of the model, in float32, before anything changes the logits; equally likely tokens
    come in ascending order. Then penalties, biases and bans (`adjust_logits`), then the choice (`sample`, with the
    noise of `noise_key(seed, position)`): the same token as those choose. It becomes the row's `last_token`, and its
    count grows by one if the row has penalties. A broken row (-1) changes neither.
    """
    live = (rows >= 0).nonzero()[:, 0]
    row, position, raw = rows[live].long(), positions[live].long(), logits[live].float()
    adjusted = raw.clone()
    adjust_logits(adjusted, _adjustments(row, position, sampling))
    tokens = sample(adjusted, _draws(row, position, sampling))

    out.tokens[live] = tokens.int()
    is_good = tokens >= 0
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
    changes = (sampling.repetition != 1) | (sampling.presence != 0) | (sampling.frequency != 0)
    return changes[row]


def _adjustments(row: Tensor, position: Tensor, sampling: SamplingRows) -> LogitAdjustments:
    counts = sampling.counts[row] * _has_penalties(row, sampling)[:, None]
    seen_rows, seen_ids = counts.nonzero(as_tuple=True)
    of_seen = row[seen_rows]
    bias_ids = sampling.bias_ids[row]
    bias_rows, biases = (bias_ids >= 0).nonzero(as_tuple=True)
    holds_back = (position < sampling.min_position[row])[:, None]
    stop_ids = sampling.stop_ids[row]
    banned_rows, stops = (holds_back & (stop_ids >= 0) & (stop_ids < counts.shape[1])).nonzero(as_tuple=True)
    return LogitAdjustments(
        seen_rows=seen_rows,
        seen_ids=seen_ids,
        seen_counts=(counts[seen_rows, seen_ids] & (IN_PROMPT - 1)).float(),
        repetition=sampling.repetition[of_seen],
        presence=sampling.presence[of_seen],
        frequency=sampling.frequency[of_seen],
        bias_rows=bias_rows,
        bias_ids=bias_ids[bias_rows, biases].long(),
        bias=sampling.bias[row[bias_rows], biases],
        banned_rows=banned_rows,
        banned_ids=stop_ids[banned_rows, stops].long(),
    )


def _draws(row: Tensor, position: Tensor, sampling: SamplingRows) -> Draws:
    drawing = ((sampling.temperature[row] >= SMALLEST_TEMPERATURE) & (sampling.top_k[row] != 1)).nonzero()[:, 0]
    of_draw = row[drawing]
    seeds = (sampling.seed_high[of_draw].long() << 32) | (sampling.seed_low[of_draw].long() & 0xFFFF_FFFF)
    return Draws(
        rows=drawing,
        temperature=sampling.temperature[of_draw],
        top_k=sampling.top_k[of_draw].long(),
        top_p=sampling.top_p[of_draw],
        min_p=sampling.min_p[of_draw],
        keys=noise_keys(seeds, position[drawing]),
    )
