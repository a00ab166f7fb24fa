"""The choice of the next token where a batch's sampling parameters, tokens and counts stay on the device.

A running sequence has a row. What its sampling needs is written to the row once, when it starts; a step then names rows
and positions only, so that it can be launched before the tokens of the step before it are known to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_TOP_LOGPROBS = 20
IN_PROMPT = 1 << 30  # of a count: the prompt holds the token


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the sequence of each row chooses its tokens. All [max_rows, …], on the device, at fixed addresses.

    temperature               [max_rows] float32; 0: the most likely token
    top_k                     [max_rows] int32; 0: all
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
    raise NotImplementedError
