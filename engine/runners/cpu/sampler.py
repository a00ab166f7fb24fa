"""From logits to tokens on a CPU: all sequences in one batch, each by its own parameters."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels import Backend, Draws, LogitAdjustments
from ....settings.sampling import PARAMETERS, Parameter
from ...core.sequence import SamplingParams, Sequence, TokenMask
from ...core.step import NOT_FINITE, TokenLogprobs
from ..late_masks import read_masks
from ..sampling import draws_at_random, fill_mask, find_fault, num_mask_words, signed_seeds

_NAMES_OF_DRAWS = {each.name for each in fields(Draws)}
_DRAW_PARAMETERS = [each for each in PARAMETERS if each.name in _NAMES_OF_DRAWS]
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(slots=True)
class Choice:
    """One sequence's next token; where there is none, `token` is -1 and `fault` says why, or its mask is late."""

    token: int
    logprobs: TokenLogprobs | None = None
    fault: str | None = None
    is_late: bool = False


class Sampler:
    """Keeps only what it can make again from the sequences of the last call."""

    def __init__(self, ops: Backend, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}
        self._draws, self._masked_draws, self._changed_draws = _KeptDraws(), _KeptDraws(), _KeptDraws()
        nothing = _integers([])
        self._no_adjustments = LogitAdjustments(**{each.name: nothing for each in fields(LogitAdjustments)})

    def sample(
        self,
        seqs: Rows[Sequence],
        logits: Tensor,
        drafts: Mapping[int, tuple[int, ...]] | None = None,
        *,
        has_others: bool = False,
    ) -> list[Choice]:
        """Chooses the next token of each sequence, and that after each of its drafts.

        seqs        each has a row; one with drafts has a row for each of them, too, right behind it
        logits      [rows, vocab], of the model; may be overwritten
        drafts      by the place of a sequence in `seqs`
        has_others  the step computes more sequences, which no mask may hold up either
        return      one a row; the token after a draft is chosen as if all drafts before it were tokens of the sequence

        Log-probabilities are those of the model, in float32, before anything changes the logits.
        """
        if not seqs:
            return []
        rows = [self._row(seq) for seq in seqs]
        self._rows = {row.seq.id: row for row in rows}
        if drafts:
            rows = [
                row.after(drafts[index][:count]) if count else row
                for index, row in enumerate(rows)
                for count in range(1 + len(drafts.get(index, ())))
            ]
        if all(row.is_plain for row in rows):  # the usual case
            draws = self._draws.of([(index, row) for index, row in enumerate(rows) if row.draws])
            tokens = _list(self._ops.sample(logits, draws))
            return [self._choice(row, token) for row, token in zip(rows, tokens, strict=True)]
        asking = [index for index, row in enumerate(rows) if row.seq.params.logprobs is not None]
        logprobs = logits[asking].float().log_softmax(dim=-1) if asking else None
        changing = {index for index, row in enumerate(rows) if row.changes_logits}
        tokens = self._chosen_without_masks(rows, logits, changing)
        reading = self._read_masks(rows, tokens, has_others)
        again = sorted(
            index for index in changing.union(index for index in reading if rows[index].draws) if rows[index].takes_part
        )
        if len(again) == len(rows):
            tokens = self._sample_changed(rows, logits.float())
        elif again:  # apart, because a copy of all rows in float32 would slow the others down
            changed = self._sample_changed([rows[index] for index in again], logits[again].float())
            for index, token in zip(again, changed, strict=True):
                tokens[index] = token
        if masked := [
            index for index in reading if rows[index].takes_part and not rows[index].draws and index not in changing
        ]:
            for index, token in zip(masked, self._most_likely_allowed(logits, masked, rows), strict=True):
                tokens[index] = token
        choices = [self._choice(row, token) for row, token in zip(rows, tokens, strict=True)]
        if logprobs is not None:
            self._attach(choices, asking, rows, logprobs)
        return choices

    def _chosen_without_masks(self, rows: list[_Row], logits: Tensor, changing: Collection[int]) -> list[int]:
        """Choose a token of each row that would be chosen with any mask, too, if that allows it.

        Where a row draws another token than its most likely one, this depends on the mask: then it is -1. So are the
        tokens of changing rows.
        """
        if len(changing) == len(rows):
            return [-1] * len(rows)
        drawing = [index for index, row in enumerate(rows) if row.draws and row.fault is None and index not in changing]
        masked = [index for index in drawing if rows[index].takes_mask]
        if masked and len(masked) == len(drawing):
            draws = self._masked_draws.of([(index, rows[index]) for index in masked])
            return _list(self._ops.likeliest_if_drawn(logits, draws))
        tokens = _list(
            self._ops.sample(logits, self._draws.of([(index, rows[index]) for index in drawing if index not in masked]))
        )
        if masked:
            draws = self._masked_draws.of([(place, rows[index]) for place, index in enumerate(masked)])
            for index, token in zip(masked, _list(self._ops.likeliest_if_drawn(logits[masked], draws)), strict=True):
                tokens[index] = token
        return tokens

    def _sample_changed(self, rows: list[_Row], logits: Tensor) -> list[int]:
        """Chooses tokens after everything that changes the logits of these rows. The logits are overwritten."""
        self._ops.adjust_logits(logits, self._adjustments(rows))
        draws = self._changed_draws.of([(index, row) for index, row in enumerate(rows) if row.draws])
        return _list(self._ops.sample(logits, draws))

    def _read_masks(self, rows: list[_Row], tokens: list[int], has_others: bool) -> list[int]:
        """Give each row the mask that it needs, as far as the step need not wait for it. Return which rows need one.

        tokens  of rows that only a mask changes: without it. Most of these are allowed, which takes no mask to find out
        """
        runs: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.takes_mask:
                row.forget_mask()
                run = runs.setdefault(row.seq.id, [])
                run.append(index)
        rest = [run[_num_allowed(rows, tokens, run) :] for run in runs.values()]
        readers = [(rows[run[0]].mask, partial(_read_run, [rows[index] for index in run])) for run in rest if run]
        if readers:
            read_masks(readers, has_others=has_others or len(readers) < len({row.seq.id for row in rows}))
        return list(itertools.chain.from_iterable(rest))

    def _row(self, seq: Sequence) -> _Row:
        row = self._rows.get(seq.id)
        return row if row is not None and row.seq is seq else _Row(seq, self._vocab_size)

    def _most_likely_allowed(self, logits: Tensor, masked: list[int], rows: list[_Row]) -> list[int]:
        masks = self._masks([rows[index] for index in masked])
        return _list(self._ops.most_likely_allowed(logits, _integers(masked), masks))

    def _choice(self, row: _Row, token: int) -> Choice:
        if row.fault is not None:
            return Choice(-1, fault=row.fault)
        if row.is_late:
            return Choice(-1, is_late=True)
        if token < 0:
            return Choice(-1, fault=NOT_FINITE)
        return Choice(token)

    def _adjustments(self, rows: list[_Row]) -> LogitAdjustments:
        """Everything that changes the logits of these rows."""
        changes: dict[str, Tensor] = {}
        if penalised := [(index, row) for index, row in enumerate(rows) if row.seen is not None]:
            seen = [row.seen.follow(row.drafts) for _, row in penalised if row.seen is not None]
            seen_per_row = [len(ids) for ids, _ in seen]
            changes |= {
                "seen_rows": _integers(np.repeat([index for index, _ in penalised], seen_per_row)),
                "seen_ids": _integers(np.concatenate([ids for ids, _ in seen])),
                "seen_counts": _numbers(np.concatenate([counts for _, counts in seen])),
            }
            for name in _PENALTIES:
                of_rows = [getattr(row.seq.params, name) for _, row in penalised]
                changes[name] = _numbers(np.repeat(of_rows, seen_per_row))
        if biased := [(index, row) for index, row in enumerate(rows) if len(row.bias)]:
            changes |= {
                "bias_rows": _integers(np.repeat([index for index, _ in biased], [len(row.bias) for _, row in biased])),
                "bias_ids": _integers(np.concatenate([row.bias_ids for _, row in biased])),
                "bias": _numbers(np.concatenate([row.bias for _, row in biased])),
            }
        if banned := [(index, row.stop_ids) for index, row in enumerate(rows) if row.bans_stops]:
            changes |= {
                "banned_rows": _integers(np.repeat([index for index, _ in banned], [len(ids) for _, ids in banned])),
                "banned_ids": _integers(np.concatenate([ids for _, ids in banned])),
            }
        if masked := [index for index, row in enumerate(rows) if row.seq.token_mask is not None]:
            changes |= {"masked_rows": _integers(masked), "token_masks": self._masks([rows[index] for index in masked])}
        return replace(self._no_adjustments, **changes)

    def _masks(self, rows: list[_Row]) -> Tensor:
        return torch.from_numpy(np.stack([row.mask_words() for row in rows]))

    def _attach(self, choices: list[Choice], asking: list[int], rows: list[_Row], logprobs: Tensor) -> None:
        """Puts their log-probabilities into the choices of the rows that ask for them."""
        most = min(max(rows[index].seq.params.logprobs or 0 for index in asking), self._vocab_size)
        best, best_ids = logprobs.topk(most, dim=-1)
        chosen_ids = _integers([max(choices[index].token, 0) for index in asking])
        chosen = logprobs.gather(1, chosen_ids[:, None])[:, 0].tolist()
        for index, one, ids, top in zip(asking, chosen, best_ids.tolist(), best.tolist(), strict=True):
            if choices[index].token >= 0:
                count = rows[index].seq.params.logprobs
                choices[index] = Choice(choices[index].token, TokenLogprobs(one, ids[:count], top[:count]))


class _KeptDraws:
    """The draws of a batch, which mostly stays the same from step to step: then only the positions change."""

    def __init__(self) -> None:
        self._drawing: list[tuple[int, _Row]] | None = None
        self.of([])

    def of(self, drawing: list[tuple[int, _Row]]) -> Draws:
        """Return the draws of these rows, each with its place in the logits. They are valid until the next call."""
        if drawing != self._drawing:
            params = [row.seq.params for _, row in drawing]
            self._drawing = drawing
            self._draws = Draws(
                rows=_integers([index for index, _ in drawing]),
                seed=_integers(signed_seeds(params)),
                positions=_integers([0] * len(drawing)),
                **{each.name: _column(each, params) for each in _DRAW_PARAMETERS},
            )
            self._positions = self._draws.positions.numpy()
        self._positions[:] = [row.position for _, row in drawing]
        return self._draws


def _column(parameter: Parameter, params: list[SamplingParams]) -> Tensor:
    values = [getattr(each, parameter.name) for each in params]
    return _integers(values) if parameter.is_integer else _numbers(values)


def _integers(values: list[int] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def _numbers(values: list[float] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def _list(tokens: Tensor) -> list[int]:
    found: list[int] = tokens.tolist()
    return found


class _Row:
    """One sequence as the sampler sees it: its parameters as arrays, and what must change in its logits.

    fault           why the sequence cannot be sampled; None: it can
    draws           its token is drawn at random; otherwise it is the most likely one
    seen            the tokens that penalties apply to; None: it has no penalties
    bias_ids, bias  int64 and float32
    stop_ids        int64; banned while fewer than min_tokens tokens exist
    takes_mask      it has a token mask, and no fault
    is_plain        nothing changes its logits, and it asks for no more than a token
    drafts          tokens that the sequence is taken to have behind its own
    is_late         its mask is not there in time
    """

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        params = seq.params
        self.seq = seq
        self.drafts: tuple[int, ...] = ()
        self.is_late = False
        self.fault = find_fault(params, vocab_size)
        self.draws = draws_at_random(params)
        self.seen = _SeenTokens(seq) if params.has_penalties else None
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.stop_ids = np.array([token for token in params.stop_token_ids if 0 <= token < vocab_size], dtype=np.int64)
        self._words: np.ndarray | None = None
        self._num_words = num_mask_words(vocab_size)

        self._always_changes = params.has_penalties or len(self.bias) > 0
        holds_stops_back = params.min_tokens > 0 and len(self.stop_ids) > 0
        changes = self._always_changes or holds_stops_back or seq.token_mask is not None
        self.takes_mask = seq.token_mask is not None and self.fault is None
        self.is_plain = not (self.fault or changes or params.logprobs is not None)

    def after(self, drafts: tuple[int, ...]) -> _Row:
        """The row of the token that follows these drafts."""
        row = copy(self)
        row.drafts = drafts
        return row

    @property
    def bans_stops(self) -> bool:
        return self.seq.output_len + len(self.drafts) < self.seq.params.min_tokens and len(self.stop_ids) > 0

    @property
    def changes_logits(self) -> bool:
        """Whether anything but a mask does."""
        return self._always_changes or self.bans_stops

    @property
    def takes_part(self) -> bool:
        """Whether a token is chosen for it."""
        return self.fault is None and not self.is_late

    @property
    def tokens(self) -> list[int]:
        """Those before the one to choose."""
        return [*self.seq.tokens, *self.drafts] if self.drafts else self.seq.tokens

    @property
    def position(self) -> int:
        """The place of the token to choose, which is the number of tokens before it."""
        return self.seq.num_tokens + len(self.drafts)

    @property
    def mask(self) -> TokenMask:
        """The sequence's. It must have one."""
        mask = self.seq.token_mask
        assert mask is not None
        return mask

    def read_mask(self, timeout_s: float) -> bool:
        """Read the mask of the next token, waiting for at most so long. Returns whether it is there."""
        if self._words is None:
            self.is_late = not self.mask.is_ready(self.tokens, timeout_s)
            if self.is_late:
                return False
            self._words = np.empty(self._num_words, dtype=np.int32)
            fill_mask(self.mask, self.tokens, self._words)
        return True

    def forget_mask(self) -> None:
        """Before the masks of a step are read: forget what the step before read, if that may have changed."""
        self.is_late = False
        if self.seq.token_mask is not None and self.seq.token_mask.depends_on_tokens:
            self._words = None

    def mask_words(self) -> np.ndarray:
        """[words] int32, the mask that was read last."""
        assert self._words is not None
        return self._words


def _num_allowed(rows: list[_Row], tokens: list[int], run: list[int]) -> int:
    """How many of a sequence's rows, from the first one on, need no mask: their tokens are known to be allowed.

    Once a token differs from the draft in its place, no later row is read.
    """
    for count, index in enumerate(run):
        row = rows[index]
        if row.changes_logits or tokens[index] < 0 or not row.mask.surely_allows(row.tokens, tokens[index]):
            return count
        if count + 1 < len(run) and tokens[index] != rows[run[count + 1]].drafts[-1]:
            break
    return len(run)


def _read_run(rows: list[_Row], timeout_s: float) -> bool:
    """Read the masks of a sequence, which follow each other, up to the first that is late."""
    for index, row in enumerate(rows):
        if not row.read_mask(timeout_s):
            for later in rows[index:]:
                later.is_late = True
            return False
    return True


class _SeenTokens:
    """The distinct tokens of one sequence, and how often its output holds each. A new token costs constant time."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self._index: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        self._num_followed = 0

    def follow(self, drafts: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [distinct] int64 and counts in the output [distinct] float32, up to the sequence's last token.

        drafts  count as tokens of the output behind it

        The arrays are views that are valid until the next token.
        """
        for position in range(self._num_followed, self.seq.num_tokens):
            index = self._place(self.seq.tokens[position])
            if position >= self.seq.request.prompt_len:
                self._counts[index] += 1
        self._num_followed = self.seq.num_tokens
        num_distinct = len(self._index)
        ids, counts = self._ids[:num_distinct], self._counts[:num_distinct]
        if not drafts:
            return ids, counts
        counts = np.append(counts, np.zeros(len(drafts), dtype=np.float32))
        new: dict[int, int] = {}
        for draft in drafts:
            known = self._index.get(draft)
            counts[new.setdefault(draft, num_distinct + len(new)) if known is None else known] += 1
        return np.append(ids, np.fromiter(new, dtype=np.int64)), counts[: num_distinct + len(new)]

    def _place(self, token: int) -> int:
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = len(self._index)
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[index], self._counts[index] = token, 0
        return index
