"""Sequences written into the device's sampling rows, and sequences of every kind to write."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.runners.sampling import AllowedTokens, fill_mask
from pagoda_server.kernels.row_sampling import (
    IN_PROMPT,
    MAX_TOP_LOGPROBS,
    SampledRows,
    SamplingRows,
    Verified,
    allocate_rows,
    allocate_sampled,
)
from pagoda_server.settings.sampling import PARAMETERS

MAX_STOPS = 5
MAX_BIASES = 11
TOP_K = (0, 1, 2, 7, 40, 10**6)
TOP_P = (1.0, 1e-7, 0.3, 0.9, 0.999)
MIN_P = (0.0, 0.02, 0.3, 1.0)
TOP_N_SIGMA = (0.0, 0.1, 1.0, 2.5, 100.0)
TEMPERATURES = (0.0, 1e-39, 1e-10, 0.6, 1.0, 30.0)


def rows_for(vocab: int, max_rows: int, device: str = "cpu", max_drafts: int = 0) -> SamplingRows:
    return allocate_rows(max_rows, vocab, MAX_STOPS, MAX_BIASES, torch.device(device), max_drafts)


def poisoned(batch: int, device: str = "cpu") -> SampledRows:
    """What no kernel writes, wherever it writes nothing."""
    out = allocate_sampled(batch, torch.device(device))
    for tensor, value in ((out.tokens, -77), (out.top_ids, -77), (out.chosen, math.nan), (out.top, math.nan)):
        tensor.fill_(value)
    return out


def sequence(
    number: int, prompt: list[int], output: list[int], allowed: Collection[int] = (), **params: Any
) -> Sequence:
    """allowed: the only token ids that it may choose; none: all"""
    mask = AllowedTokens(allowed) if allowed else None
    return Sequence(number, prompt + output, Request(len(prompt)), SamplingParams(**params), token_mask=mask)


def any_sequence(number: int, vocab: int, rng: random.Random) -> Sequence:
    """Any combination of parameters; about half of the sequences are without each."""

    def maybe(choices: tuple[Any, ...]) -> Any:
        return choices[0] if rng.random() < 0.5 else rng.choice(choices)

    biases = rng.sample(range(vocab), maybe((0, 1, MAX_BIASES)))
    stops = rng.sample(range(vocab + vocab // 4), maybe((0, 1, MAX_STOPS)))
    return sequence(
        number,
        prompt=[rng.randrange(vocab) for _ in range(rng.randrange(1, 40))],
        output=[rng.randrange(vocab) for _ in range(rng.randrange(30))],
        temperature=rng.choice(TEMPERATURES),
        top_k=maybe(TOP_K),
        top_p=maybe(TOP_P),
        min_p=maybe(MIN_P),
        top_n_sigma=maybe(TOP_N_SIGMA),
        repetition_penalty=maybe((1.0, 1.3, 0.7)),
        presence_penalty=maybe((0.0, 0.5, -1.0)),
        frequency_penalty=maybe((0.0, 0.4, -0.3)),
        logit_bias=tuple((token, rng.uniform(-5, 5)) for token in biases),
        seed=maybe((rng.randrange(1 << 64), 0, (1 << 64) - 1)),
        min_tokens=maybe((0, 15, 100)),
        stop_token_ids=frozenset(stops),
        logprobs=maybe((None, 0, 1, 5, MAX_TOP_LOGPROBS)),
        allowed=rng.sample(range(vocab), maybe((0, 1, 20, vocab - 1))),
    )


def drafts_of(seqs: list[Sequence], vocab: int, rng: random.Random) -> dict[int, tuple[int, ...]]:
    """Drafts for half of the sequences, by their place. Some are tokens that it has, and some come twice."""
    chosen = {}
    for at, seq in enumerate(seqs):
        if rng.random() < 0.5:
            likely = [*seq.tokens[-3:], rng.randrange(vocab), rng.randrange(vocab)]
            chosen[at] = tuple(rng.choice(likely) for _ in range(rng.randint(1, 6)))
    return chosen


def write_drafts(
    sampling: SamplingRows, places: list[int], seqs: list[Sequence], drafts: dict[int, tuple[int, ...]]
) -> tuple[torch.Tensor, torch.Tensor, Verified]:
    """Write the masks behind drafts of sequences whose rows are written.

    places  the row of each sequence
    return  rows and positions of a step of these sequences, and its drafts
    """
    rows, positions, ranks, tokens = [], [], [], []
    for number, seq in enumerate(seqs):
        guesses = drafts.get(number, ())
        for count in range(1 + len(guesses)):
            if count and seq.token_mask is not None:
                words = np.empty(sampling.token_masks.shape[1], dtype=np.int32)
                fill_mask(seq.token_mask, [*seq.tokens, *guesses[:count]], words)
                sampling.token_masks[len(sampling.numbers) + len(rows)] = torch.from_numpy(words)
            rows.append(places[number])
            positions.append(seq.num_tokens + count)
            ranks.append(1 + count if guesses else 0)
            tokens.append([seq.tokens[-1], *guesses][count])
    device = sampling.numbers.device
    numbers = torch.tensor([rows, positions, ranks], dtype=torch.int32, device=device)
    return numbers[0], numbers[1], Verified(numbers[2], torch.tensor(tokens, device=device))


def write_row(sampling: SamplingRows, at: int, seq: Sequence) -> None:
    """All that the row of a sequence holds, as if it had just started."""
    params, vocab = seq.params, sampling.counts.shape[1]
    words = torch.tensor([params.seed & 0xFFFF_FFFF, params.seed >> 32]).to(torch.int32)
    values = {
        **{each.name: getattr(params, each.name) for each in PARAMETERS if hasattr(sampling, each.name)},
        "top_k": min(params.top_k, vocab),
        "seed_low": words[0],
        "seed_high": words[1],
        "min_position": seq.request.prompt_len + params.min_tokens,
        "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        "is_masked": seq.token_mask is not None,
        "last_token": seq.tokens[-1],
        "num_stops": len(params.stop_token_ids),
        "num_biases": len(params.logit_bias),
    }
    for name, value in values.items():
        getattr(sampling, name)[at] = value
    # Entries that the row does not have are never read: these would show in any choice.
    sampling.stop_ids[at] = torch.arange(sampling.stop_ids.shape[1])
    sampling.bias_ids[at] = torch.arange(sampling.bias_ids.shape[1])
    sampling.bias[at] = math.nan
    sampling.counts[at] = 0
    if seq.token_mask is not None:
        words = np.empty(sampling.token_masks.shape[1], dtype=np.int32)
        fill_mask(seq.token_mask, seq.tokens, words)
        sampling.token_masks[at] = torch.from_numpy(words)
    for entry, token in enumerate(sorted(params.stop_token_ids)):
        sampling.stop_ids[at, entry] = token
    for entry, (token, bias) in enumerate(params.logit_bias):
        sampling.bias_ids[at, entry], sampling.bias[at, entry] = token, bias
    for token in seq.tokens[seq.request.prompt_len :]:
        sampling.counts[at, token] += 1
    for token in set(seq.tokens[: seq.request.prompt_len]):
        sampling.counts[at, token] += IN_PROMPT
