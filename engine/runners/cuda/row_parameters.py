"""How new rows are sampled, sent to the device once, when their sequences start."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import torch

from pagoda_server.engine.core.sequence import SamplingParams, Sequence
from pagoda_server.engine.runners.cpu.sampling_row import draws_at_random, find_fault
from pagoda_server.engine.runners.cuda.staging import Staging
from pagoda_server.kernels import MAX_TOP_LOGPROBS, SamplingRows
from pagoda_server.kernels.row_sampling import IN_PROMPT

_ROWS_SENT = 32  # at once
_COUNTS_SENT = 4096
_SENDS_AT_ONCE = 16  # of biases and of counts: one for each row that starts
_SINGLE = (
    "temperature", "top_k", "top_p", "min_p", "seed_low", "seed_high", "repetition", "presence", "frequency",
    "min_position", "num_logprobs",
)  # fmt: skip


class RowParameters:
    """Writes the rows of `SamplingRows`."""

    def __init__(self, sampling: SamplingRows, vocab_size: int, device: torch.device) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._max_stops, self._max_biases = sampling.stop_ids.shape[1], sampling.bias_ids.shape[1]
        self._biased: set[int] = set()  # rows
        dtypes = {field.name: getattr(sampling, field.name).dtype for field in fields(SamplingRows)}
        self._rows = Staging(
            {
                "row": (torch.int64, _ROWS_SENT),
                **{name: (dtypes[name], _ROWS_SENT) for name in _SINGLE},
                "stop_ids": (torch.int32, _ROWS_SENT * self._max_stops),
            },
            device,
        )
        self._bias = Staging(
            {"ids": (torch.int32, self._max_biases), "bias": (torch.float32, self._max_biases)}, device, _SENDS_AT_ONCE
        )
        self._counts = Staging(
            {"ids": (torch.int64, _COUNTS_SENT), "counts": (torch.int32, _COUNTS_SENT)}, device, _SENDS_AT_ONCE
        )

    def fault(self, seq: Sequence) -> str | None:
        """Why a sequence cannot be sampled: one row's mistake must not spoil the batch."""
        params = seq.params
        if len(params.stop_token_ids) > self._max_stops:
            return f"{len(params.stop_token_ids)} stop token ids, the limit is {self._max_stops}"
        if len(params.logit_bias) > self._max_biases:
            return f"logit_bias names {len(params.logit_bias)} tokens, the limit is {self._max_biases}"
        if (params.logprobs or 0) > MAX_TOP_LOGPROBS:
            return f"logprobs is {params.logprobs}, the limit is {MAX_TOP_LOGPROBS}"
        return find_fault(params, self._vocab_size)

    def write(self, new: list[tuple[int, Sequence]]) -> None:
        """Rows and the sequences that take them. One at fault is sampled greedily; its token is not to be used."""
        for start in range(0, len(new), _ROWS_SENT):
            self._write_single(new[start : start + _ROWS_SENT])
        for row, seq in new:
            is_sound = self.fault(seq) is None
            if is_sound and seq.params.logit_bias:
                self._write_biases(row, seq.params)
            elif row in self._biased:
                self._sampling.bias_ids[row].fill_(-1)
                self._biased.discard(row)
            if is_sound and seq.params.has_penalties:
                self._write_counts(row, seq)

    def _write_single(self, new: list[tuple[int, Sequence]]) -> None:
        arrays, count = self._rows.fill(), len(new)
        arrays["row"][:count] = [row for row, _ in new]
        stops = arrays["stop_ids"].reshape(_ROWS_SENT, self._max_stops)
        stops[:count] = -1
        for at, (_, seq) in enumerate(new):
            params = seq.params if self.fault(seq) is None else SamplingParams()
            for name, value in zip(_SINGLE, _single(params, seq, self._vocab_size), strict=True):
                arrays[name][at] = value
            if params.min_tokens:
                stops[at, : len(params.stop_token_ids)] = sorted(params.stop_token_ids)
        self._rows.send()
        sent = self._rows.device
        for name in _SINGLE:
            getattr(self._sampling, name).index_copy_(0, sent["row"][:count], sent[name][:count])
        stop_ids = sent["stop_ids"].view(_ROWS_SENT, self._max_stops)
        self._sampling.stop_ids.index_copy_(0, sent["row"][:count], stop_ids[:count])

    def _write_biases(self, row: int, params: SamplingParams) -> None:
        arrays, count = self._bias.fill(), len(params.logit_bias)
        arrays["ids"][:] = -1
        arrays["ids"][:count] = [token for token, _ in params.logit_bias]
        arrays["bias"][:count] = [bias for _, bias in params.logit_bias]
        self._bias.send()
        self._sampling.bias_ids[row].copy_(self._bias.device["ids"])
        self._sampling.bias[row].copy_(self._bias.device["bias"])
        self._biased.add(row)

    def _write_counts(self, row: int, seq: Sequence) -> None:
        counts = Counter(seq.tokens[seq.prompt_len :])
        for token in set(seq.tokens[: seq.prompt_len]):
            counts[token] += IN_PROMPT
        ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        values = np.fromiter(counts.values(), dtype=np.int32, count=len(counts))
        target = self._sampling.counts[row].zero_()
        for start in range(0, len(ids), _COUNTS_SENT):
            part = slice(start, start + _COUNTS_SENT)
            arrays, count = self._counts.fill(), len(ids[part])
            arrays["ids"][:count], arrays["counts"][:count] = ids[part], values[part]
            self._counts.send()
            target.index_copy_(0, self._counts.device["ids"][:count], self._counts.device["counts"][:count])


def _single(params: SamplingParams, seq: Sequence, vocab_size: int) -> tuple[float, ...]:
    """In the order of _SINGLE."""
    low, high = np.array([params.seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64).view(np.int32)
    return (
        params.temperature if draws_at_random(params) else 0.0,
        min(params.top_k, vocab_size),
        params.top_p,
        params.min_p,
        low,
        high,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        seq.prompt_len + params.min_tokens,
        -1 if params.logprobs is None else params.logprobs,
    )
