"""From logits to tokens: each sequence by its own parameters, all of them in one batch."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda_server.engine.core.sequence import Sequence, TokenLogprobs
from pagoda_server.engine.runners.cpu.sampling_row import SamplingRow
from pagoda_server.kernels import Backend, Draws, LogitAdjustments


@dataclass(slots=True)
class Choice:
    """One sequence's next token, or why there is none: then `token` is -1."""

    token: int
    logprobs: TokenLogprobs | None = None
    fault: str | None = None


class Sampler:
    """Holds nothing but what can be made again from the sequences of the last call."""

    def __init__(self, ops: Backend, vocab_size: int, device: torch.device) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, SamplingRow] = {}
        self._no_draws = self._draws([])

    def sample(self, seqs: Rows[Sequence], logits: Tensor) -> list[Choice]:
        """
        seqs    one a row; their next tokens are chosen
        logits  [rows, vocab], of the model; may be overwritten

        Log-probabilities are those of the model, in float32, before anything changes the logits.
        """
        if not seqs:
            return []
        rows = [self._row(seq) for seq in seqs]
        self._rows = {row.seq.id: row for row in rows}
        if all(row.is_plain for row in rows):  # the usual case, without building empty arrays
            return [self._choice(row, token) for row, token in zip(rows, self._most_likely(logits), strict=True)]
        asking = [at for at, row in enumerate(rows) if row.seq.params.logprobs is not None]
        logprobs = logits[asking].float().log_softmax(dim=-1) if asking else None
        adjustments = self._adjustments(rows)
        if adjustments is not None:
            logits = logits.float()
            self._ops.adjust_logits(logits, adjustments)
        tokens = self._ops.sample(logits, self._draws(rows)).tolist()
        choices = [self._choice(row, token) for row, token in zip(rows, tokens, strict=True)]
        if logprobs is not None:
            self._attach(choices, asking, rows, logprobs)
        return choices

    def _row(self, seq: Sequence) -> SamplingRow:
        row = self._rows.get(seq.id)
        return row if row is not None and row.seq is seq else SamplingRow(seq, self._vocab_size)

    def _most_likely(self, logits: Tensor) -> list[int]:
        tokens: list[int] = self._ops.sample(logits, self._no_draws).tolist()
        return tokens

    def _choice(self, row: SamplingRow, token: int) -> Choice:
        if row.fault is not None:
            return Choice(-1, fault=row.fault)
        if token < 0:
            return Choice(-1, fault="the model's logits hold NaN or infinity, or leave no token to choose")
        return Choice(token)

    def _draws(self, rows: list[SamplingRow]) -> Draws:
        drawing = [at for at, row in enumerate(rows) if row.draws and row.fault is None]
        params = [rows[at].seq.params for at in drawing]
        return Draws(
            rows=self._integers(drawing),
            temperature=self._floats([p.temperature for p in params]),
            top_k=self._integers([min(p.top_k, self._vocab_size) for p in params]),
            top_p=self._floats([p.top_p for p in params]),
            min_p=self._floats([p.min_p for p in params]),
            keys=self._integers([rows[at].noise_key for at in drawing]),
        )

    def _adjustments(self, rows: list[SamplingRow]) -> LogitAdjustments | None:
        changed = [(at, row) for at, row in enumerate(rows) if row.fault is None and row.changes_logits]
        if not changed:
            return None
        penalised = [(at, row.seq.params, *row.seen.follow()) for at, row in changed if row.seen is not None]
        biased = [(at, row) for at, row in changed if len(row.bias)]
        banned = [(at, row.stop_ids) for at, row in changed if row.bans_stops]
        seen_per_row = [len(ids) for _, _, ids, _ in penalised]
        return LogitAdjustments(
            seen_rows=self._integers(np.repeat([at for at, *_ in penalised], seen_per_row)),
            seen_ids=self._integers(_join([ids for _, _, ids, _ in penalised])),
            seen_counts=self._floats(_join([counts for *_, counts in penalised])),
            repetition=self._floats(np.repeat([p.repetition_penalty for _, p, *_ in penalised], seen_per_row)),
            presence=self._floats(np.repeat([p.presence_penalty for _, p, *_ in penalised], seen_per_row)),
            frequency=self._floats(np.repeat([p.frequency_penalty for _, p, *_ in penalised], seen_per_row)),
            bias_rows=self._integers(np.repeat([at for at, _ in biased], [len(row.bias) for _, row in biased])),
            bias_ids=self._integers(_join([row.bias_ids for _, row in biased])),
            bias=self._floats(_join([row.bias for _, row in biased])),
            banned_rows=self._integers(np.repeat([at for at, _ in banned], [len(ids) for _, ids in banned])),
            banned_ids=self._integers(_join([ids for _, ids in banned])),
        )

    def _attach(self, choices: list[Choice], asking: list[int], rows: list[SamplingRow], logprobs: Tensor) -> None:
        """Puts their log-probabilities into the choices of the rows that ask for them."""
        most = min(max(rows[at].seq.params.logprobs or 0 for at in asking), self._vocab_size)
        best, best_ids = logprobs.topk(most, dim=-1)
        chosen_ids = self._integers([max(choices[at].token, 0) for at in asking])
        chosen = logprobs.gather(1, chosen_ids[:, None])[:, 0].tolist()
        for at, one, ids, top in zip(asking, chosen, best_ids.tolist(), best.tolist(), strict=True):
            if choices[at].fault is None:
                count = rows[at].seq.params.logprobs
                choices[at] = Choice(choices[at].token, TokenLogprobs(one, ids[:count], top[:count]))

    def _integers(self, values: list[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)

    def _floats(self, values: list[float] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(self._device)


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0)
