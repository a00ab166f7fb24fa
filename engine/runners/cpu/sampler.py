"""From logits to tokens on a CPU: all sequences in one batch, each by its own parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda_server.engine.core.sequence import SamplingParams, Sequence, TokenMask
from pagoda_server.engine.core.step import TokenLogprobs
from pagoda_server.engine.runners.late_masks import read_masks
from pagoda_server.engine.runners.sampling import draws_at_random, fill_mask, find_fault, num_mask_words
from pagoda_server.kernels import Backend, Draws, LogitAdjustments, drop_untypical, noise_key
from pagoda_server.settings.sampling import PARAMETERS, Parameter

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

    def __init__(self, ops: Backend, vocab_size: int, device: torch.device) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._no_draws = self._draws([])
        nothing = self._integers([])
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
                row.after(drafts[at][:count]) if count else row
                for at, row in enumerate(rows)
                for count in range(1 + len(drafts.get(at, ())))
            ]
        if all(row.is_plain for row in rows):  # the usual case, without building empty arrays
            return [self._choice(row, token) for row, token in zip(rows, self._most_likely(logits), strict=True)]
        self._read_masks(rows, has_others)
        asking = [at for at, row in enumerate(rows) if row.seq.params.logprobs is not None]
        logprobs = logits[asking].float().log_softmax(dim=-1) if asking else None
        changing = [at for at, row in enumerate(rows) if row.takes_part and row.changes_logits]
        masked = [at for at, row in enumerate(rows) if row.is_only_masked]
        if len(masked) == len(rows):
            tokens = self._most_likely_allowed(logits, masked, rows)
        elif len(changing) == len(rows):
            tokens = self._sample_changed(rows, logits.float())
        else:
            draws = self._draws(rows, without=changing) if any(row.draws for row in rows) else self._no_draws
            tokens = self._ops.sample(logits, draws).tolist()
            if changing:  # apart, because a copy of all rows in float32 would slow the others down
                changed = self._sample_changed([rows[at] for at in changing], logits[changing].float())
                for at, token in zip(changing, changed, strict=True):
                    tokens[at] = token
            if masked:
                for at, token in zip(masked, self._most_likely_allowed(logits, masked, rows), strict=True):
                    tokens[at] = token
        choices = [self._choice(row, token) for row, token in zip(rows, tokens, strict=True)]
        if logprobs is not None:
            self._attach(choices, asking, rows, logprobs)
        return choices

    def _sample_changed(self, rows: list[_Row], logits: Tensor) -> list[int]:
        """Chooses tokens after everything that changes the logits of these rows. The logits are overwritten."""
        self._ops.adjust_logits(logits, self._adjustments(rows))
        if typical := [at for at, row in enumerate(rows) if row.takes_typical]:
            self._drop_untypical(logits, typical, rows)
        tokens: list[int] = self._ops.sample(logits, self._draws(rows)).tolist()
        return tokens

    def _read_masks(self, rows: list[_Row], has_others: bool) -> None:
        """Give each row its mask, as far as the step need not wait for it."""
        masked: defaultdict[int, list[_Row]] = defaultdict(list)
        for row in rows:
            row.forget_mask()
            if row.seq.token_mask is not None and row.fault is None:
                run = masked[row.seq.id]
                run.append(row)
        if masked:
            has_others = has_others or any(row.seq.id not in masked for row in rows)
            readers = [(run[0].mask, partial(_read_run, run)) for run in masked.values()]
            read_masks(readers, has_others=has_others)

    def _row(self, seq: Sequence) -> _Row:
        row = self._rows.get(seq.id)
        return row if row is not None and row.seq is seq else _Row(seq, self._vocab_size)

    def _most_likely(self, logits: Tensor) -> list[int]:
        tokens: list[int] = self._ops.sample(logits, self._no_draws).tolist()
        return tokens

    def _most_likely_allowed(self, logits: Tensor, masked: list[int], rows: list[_Row]) -> list[int]:
        masks = self._masks([rows[at] for at in masked])
        tokens: list[int] = self._ops.most_likely_allowed(logits, self._integers(masked), masks).tolist()
        return tokens

    def _choice(self, row: _Row, token: int) -> Choice:
        if row.fault is not None:
            return Choice(-1, fault=row.fault)
        if row.is_late:
            return Choice(-1, is_late=True)
        if token < 0:
            return Choice(-1, fault="the model's logits hold NaN or infinity, or leave no token to choose")
        return Choice(token)

    def _draws(self, rows: list[_Row], without: Collection[int] = ()) -> Draws:
        drawing = [at for at, row in enumerate(rows) if row.draws and row.takes_part and at not in without]
        params = [rows[at].seq.params for at in drawing]
        return Draws(
            rows=self._integers(drawing),
            keys=self._integers([rows[at].noise_key for at in drawing]),
            **{each.name: self._column(each, params) for each in _DRAW_PARAMETERS},
        )

    def _column(self, parameter: Parameter, params: list[SamplingParams]) -> Tensor:
        values = [getattr(each, parameter.name) for each in params]
        return self._integers(values) if parameter.is_integer else self._numbers(values)

    def _adjustments(self, rows: list[_Row]) -> LogitAdjustments:
        """Everything that changes the logits of these rows, but for what typical_p drops."""
        changes: dict[str, Tensor] = {}
        if penalised := [(at, row) for at, row in enumerate(rows) if row.seen is not None]:
            seen = [row.seen.follow(row.drafts) for _, row in penalised if row.seen is not None]
            seen_per_row = [len(ids) for ids, _ in seen]
            changes |= {
                "seen_rows": self._integers(np.repeat([at for at, _ in penalised], seen_per_row)),
                "seen_ids": self._integers(np.concatenate([ids for ids, _ in seen])),
                "seen_counts": self._numbers(np.concatenate([counts for _, counts in seen])),
            }
            for name in _PENALTIES:
                of_rows = [getattr(row.seq.params, name) for _, row in penalised]
                changes[name] = self._numbers(np.repeat(of_rows, seen_per_row))
        if biased := [(at, row) for at, row in enumerate(rows) if len(row.bias)]:
            changes |= {
                "bias_rows": self._integers(np.repeat([at for at, _ in biased], [len(row.bias) for _, row in biased])),
                "bias_ids": self._integers(np.concatenate([row.bias_ids for _, row in biased])),
                "bias": self._numbers(np.concatenate([row.bias for _, row in biased])),
            }
        if banned := [(at, row.stop_ids) for at, row in enumerate(rows) if row.bans_stops]:
            changes |= {
                "banned_rows": self._integers(np.repeat([at for at, _ in banned], [len(ids) for _, ids in banned])),
                "banned_ids": self._integers(np.concatenate([ids for _, ids in banned])),
            }
        if masked := [at for at, row in enumerate(rows) if row.seq.token_mask is not None]:
            changes |= {"masked_rows": self._integers(masked), "token_masks": self._masks([rows[at] for at in masked])}
        return replace(self._no_adjustments, **changes)

    def _drop_untypical(self, logits: Tensor, typical: list[int], rows: list[_Row]) -> None:
        params = [rows[at].seq.params for at in typical]
        temperature = self._numbers([each.temperature for each in params])
        kept = logits[typical]
        drop_untypical(kept, temperature, self._numbers([each.typical_p for each in params]))
        logits[typical] = kept

    def _masks(self, rows: list[_Row]) -> Tensor:
        return torch.from_numpy(np.stack([row.mask_words() for row in rows])).to(self._device)

    def _attach(self, choices: list[Choice], asking: list[int], rows: list[_Row], logprobs: Tensor) -> None:
        """Puts their log-probabilities into the choices of the rows that ask for them."""
        most = min(max(rows[at].seq.params.logprobs or 0 for at in asking), self._vocab_size)
        best, best_ids = logprobs.topk(most, dim=-1)
        chosen_ids = self._integers([max(choices[at].token, 0) for at in asking])
        chosen = logprobs.gather(1, chosen_ids[:, None])[:, 0].tolist()
        for at, one, ids, top in zip(asking, chosen, best_ids.tolist(), best.tolist(), strict=True):
            if choices[at].token >= 0:
                count = rows[at].seq.params.logprobs
                choices[at] = Choice(choices[at].token, TokenLogprobs(one, ids[:count], top[:count]))

    def _integers(self, values: list[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)

    def _numbers(self, values: list[float] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(self._device)


class _Row:
    """One sequence as the sampler sees it: its parameters as arrays, and what must change in its logits.

    fault           why the sequence cannot be sampled; None: it can
    draws           its token is drawn at random; otherwise it is the most likely one
    takes_typical   it is drawn among its typical tokens alone
    seen            the tokens that penalties apply to; None: it has no penalties
    bias_ids, bias  int64 and float32
    stop_ids        int64; banned while fewer than min_tokens tokens exist
    is_plain        it takes its most likely token, and asks for nothing else
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
        self.takes_typical = self.draws and params.typical_p < 1 and self.fault is None
        self.seen = _SeenTokens(seq) if params.has_penalties else None
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.stop_ids = np.array([token for token in params.stop_token_ids if 0 <= token < vocab_size], dtype=np.int64)
        self._words: np.ndarray | None = None
        self._num_words = num_mask_words(vocab_size)

        self._always_changes = (
            params.has_penalties
            or len(self.bias) > 0
            or self.takes_typical
            or (seq.token_mask is not None and self.draws)
        )
        holds_stops_back = params.min_tokens > 0 and len(self.stop_ids) > 0
        changes = self._always_changes or holds_stops_back or seq.token_mask is not None
        self.is_plain = not (self.fault or self.draws or changes or params.logprobs is not None)

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
        return self._always_changes or self.bans_stops or self.takes_typical

    @property
    def takes_part(self) -> bool:
        """Whether a token is chosen for it."""
        return self.fault is None and not self.is_late

    @property
    def is_only_masked(self) -> bool:
        """Whether its token is the most likely one of those that its mask allows."""
        return self.seq.token_mask is not None and not self.changes_logits and self.takes_part

    @property
    def noise_key(self) -> int:
        """The position is the number of tokens before the one to draw."""
        return noise_key(self.seq.params.seed, self.seq.num_tokens + len(self.drafts))

    @property
    def mask(self) -> TokenMask:
        """The sequence's. It must have one."""
        mask = self.seq.token_mask
        assert mask is not None
        return mask

    def read_mask(self, timeout_s: float) -> bool:
        """Read the mask of the next token, waiting for at most so long. Returns whether it is there."""
        if self._words is None:
            tokens = [*self.seq.tokens, *self.drafts] if self.drafts else self.seq.tokens
            self.is_late = not self.mask.is_ready(tokens, timeout_s)
            if self.is_late:
                return False
            self._words = np.empty(self._num_words, dtype=np.int32)
            fill_mask(self.mask, tokens, self._words)
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


def _read_run(rows: list[_Row], timeout_s: float) -> bool:
    """Read the masks of a sequence, which follow each other, up to the first that is late."""
    for at, row in enumerate(rows):
        if not row.read_mask(timeout_s):
            for later in rows[at:]:
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
            at = self._place(self.seq.tokens[position])
            if position >= self.seq.request.prompt_len:
                self._counts[at] += 1
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
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = len(self._index)
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[at], self._counts[at] = token, 0
        return at
