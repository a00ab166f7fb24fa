"""Running sequences' rows on the device: block tables, sampling parameters, and the token that each chose last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels import MAX_TOP_LOGPROBS, SamplingRows, allocate_rows
from ....kernels.row_sampling import IN_PROMPT, INTEGERS, MAX_BIASES, MAX_STOPS, NUMBERS
from ....settings.sampling import PARAMETERS
from ...core.sequence import BlockTable, SamplingParams, Sequence, State, TokenMask
from ...core.step import Chunk
from ..late_masks import read_masks
from ..sampling import draws_at_random, fill_mask, find_fault, signed_seeds
from .staging import Staging

# How many of each are sent in one copy.
_BLOCKS_SENT = 4096
_ROWS_SENT = 32
_COUNTS_SENT = 4096
_MASKS_SENT = 16
_SENDS_AT_ONCE = 16  # copies of biases or counts under way: each row that starts needs one
_SENT_BY_ROW = ("numbers", "integers", "stop_ids")
_MOST = (1 << 31) - 1  # the largest integer of a row


@dataclass(slots=True)
class _Row:
    """
    blocks       the sequence's block table, which only grows; a sequence that gives up its blocks gets another one
    num_sent     of each group's table
    fault        why the sequence cannot be sampled; its parameters never change, so it is found once
    needs_mask   its token mask must be sent before it is sampled
    num_counted  of a sequence with penalties: the tokens that the device has counted, or will have when the steps
                 launched so far are done; None: it has no penalties
    """

    number: int
    seq: Sequence
    blocks: BlockTable
    num_sent: list[int]
    fault: str | None
    needs_mask: bool
    num_counted: int | None
    last_step: int = 0

    @property
    def is_abandoned(self) -> bool:
        return self.seq.state is State.FINISHED or self.seq.blocks is not self.blocks


class DeviceRows:
    """Gives a sequence a row when it first computes, and takes the row back when another sequence needs it.

    max_drafts   entries of a step that may be drafts: all before this one
    block_tables [groups, max_rows, max_blocks] int32, on the device
    num_choices  of the step that was placed last, by the position of each chunk that lacks masks: how many of its
                 choices, the one behind its last token first, have theirs; with 0, it chooses no token
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        max_drafts: int = 0,
        num_groups: int = 1,
    ) -> None:
        self.block_tables = torch.zeros(num_groups, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling: SamplingRows = allocate_rows(max_rows, vocab_size, MAX_STOPS, MAX_BIASES, device, max_drafts)
        self._parameters = _RowParameters(self.sampling, vocab_size, device)
        self._blocks = Staging({"at": (torch.int64, _BLOCKS_SENT), "block": (torch.int32, _BLOCKS_SENT)}, device)
        self._rows: dict[int, _Row] = {}  # by the identity of the block table, which is kept alive here
        self.num_choices: dict[int, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))
        self._step = 0

    def place(self, chunks: list[Chunk], entries: list[int]) -> list[int]:
        """Return the row of each chunk's sequence. Send the device what it lacks: new rows, blocks, masks and counts.

        entries  the place of each chunk's sequence among the step's
        """
        self._step += 1
        new: list[_Row] = []
        masked: dict[int, _ChunkMasks] = {}  # by chunk position
        uncounted: list[tuple[int, list[int]]] = []
        grown: list[tuple[int, int]] = []
        _, max_rows, width = self.block_tables.shape
        numbers = []
        for index, (chunk, entry) in enumerate(zip(chunks, entries, strict=True)):
            blocks = chunk.seq.blocks
            row = self._rows.get(id(blocks))
            if row is None:
                row = self._take(chunk.seq)
                new.append(row)
            row.last_step = self._step
            for group, table in enumerate((blocks, *blocks.windows)):
                if (sent := row.num_sent[group]) < len(table):
                    first = (group * max_rows + row.number) * width
                    grown += [(first + place, table[place]) for place in range(sent, len(table))]
                    row.num_sent[group] = len(table)
            mask = row.seq.token_mask
            if mask is not None and chunk.samples and (row.needs_mask or chunk.drafts):
                known = chunk.end - len(chunk.drafts) == len(row.seq.tokens)
                assert known or not mask.depends_on_tokens, "the last token is not known"
                row.needs_mask = mask.depends_on_tokens
                places = [row.number]
                if chunk.drafts:
                    first = len(self.sampling.numbers) + entry + 1
                    places += range(first, first + len(chunk.drafts))
                masked[index] = _ChunkMasks(mask, row.seq.tokens, chunk.drafts, places)
            if row.num_counted is not None:
                if row.num_counted < len(row.seq.tokens):
                    uncounted.append((row.number, row.seq.tokens[row.num_counted :]))
                # A step counts the token that it chooses, unless it verifies drafts.
                row.num_counted = chunk.end + 1 if chunk.samples and not chunk.drafts else len(row.seq.tokens)
            numbers.append(row.number)
        self._send_blocks(grown)
        self._parameters.write([(row.number, row.seq) for row in new])
        self._parameters.count(uncounted)
        self.num_choices = self._read_masks(masked, has_others=len(chunks) > len(masked))
        for index, count in self.num_choices.items():
            if not count and (row := self._rows[id(chunks[index].seq.blocks)]).num_counted is not None:
                row.num_counted = len(row.seq.tokens)
        return numbers

    def faults(self, places: Mapping[int, tuple[Chunk, int]]) -> dict[int, str]:
        """Return which of these chunks' sequences cannot be sampled, and why. All must have rows."""
        rows = ((index, self._rows[id(chunk.seq.blocks)]) for index, (chunk, _) in places.items())
        return {index: row.fault for index, row in rows if row.fault is not None}

    def _read_masks(self, masked: dict[int, _ChunkMasks], has_others: bool) -> dict[int, int]:
        """Send the masks that are there in time; return `num_choices`."""
        if not masked:
            return {}
        num_words = self.sampling.token_masks.shape[1]
        chunks = list(masked.values())
        read_masks([(each.mask, partial(each.read, num_words)) for each in chunks], has_others=has_others)
        self._parameters.write_masks([pair for each in chunks for pair in zip(each.rows, each.words, strict=False)])
        return {index: len(each.words) for index, each in masked.items() if len(each.words) < len(each.rows)}

    def forget(self) -> None:
        """Take back every row. Sequences then get new rows, made from the tokens that the host knows."""
        self._free += [row.number for row in self._rows.values()]
        self._rows.clear()

    def _take(self, seq: Sequence) -> _Row:
        if not self._free:
            abandoned = [key for key, row in self._rows.items() if row.is_abandoned and row.last_step != self._step]
            self._free += [self._rows.pop(key).number for key in abandoned]
        fault = self._parameters.fault(seq)
        num_counted = len(seq.tokens) if seq.params.has_penalties and fault is None else None
        num_sent = [0] * len(self.block_tables)
        row = _Row(self._free.pop(), seq, seq.blocks, num_sent, fault, seq.token_mask is not None, num_counted)
        self._rows[id(seq.blocks)] = row
        return row

    def _send_blocks(self, grown: list[tuple[int, int]]) -> None:
        table = self.block_tables.view(-1)
        for start in range(0, len(grown), _BLOCKS_SENT):
            part = grown[start : start + _BLOCKS_SENT]
            arrays = self._blocks.fill()
            arrays["at"][: len(part)] = [index for index, _ in part]
            arrays["block"][: len(part)] = [block for _, block in part]
            self._blocks.send()
            sent: dict[str, Tensor] = {name: field[: len(part)] for name, field in self._blocks.device.items()}
            table.index_copy_(0, sent["at"], sent["block"])


class _ChunkMasks:
    """The mask of a chunk's next token, and those of the tokens behind its drafts, as far as they were there in time.

    tokens  of the sequence
    rows    of `SamplingRows.token_masks`, one a mask
    """

    def __init__(self, mask: TokenMask, tokens: list[int], drafts: tuple[int, ...], rows: list[int]) -> None:
        self.mask = mask
        self.rows = rows
        self.words: list[np.ndarray] = []
        self._tokens = tokens
        self._drafts = drafts

    def read(self, num_words: int, timeout_s: float) -> bool:
        """A MaskReader. A mask that follows its tokens keeps one state, so each is filled before the next is begun."""
        while (count := len(self.words)) < len(self.rows):
            tokens = [*self._tokens, *self._drafts[:count]] if count else self._tokens
            if not self.mask.is_ready(tokens, timeout_s):
                return False
            self.words.append(np.empty(num_words, dtype=np.int32))
            fill_mask(self.mask, tokens, self.words[-1])
        return True


class _RowParameters:
    """Writes sequences' parameters to their rows of `SamplingRows` when they start, and masks whenever they change."""

    def __init__(self, sampling: SamplingRows, vocab_size: int, device: torch.device) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._max_stops, self._max_biases = sampling.stop_ids.shape[1], sampling.bias_ids.shape[1]
        num_masks, self._num_words = sampling.token_masks.shape
        self._rows = Staging(
            {
                "row": (torch.int64, _ROWS_SENT),
                "numbers": (torch.float32, _ROWS_SENT * len(NUMBERS)),
                "integers": (torch.int32, _ROWS_SENT * len(INTEGERS)),
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
        self._masks = Staging(
            {"row": (torch.int64, _MASKS_SENT), "words": (torch.int32, _MASKS_SENT * self._num_words)},
            device,
            sets=1 + -(-num_masks // _MASKS_SENT),  # a step's masks are filled while those of the step before are sent
        )

    def fault(self, seq: Sequence) -> str | None:
        """Return why a sequence cannot be sampled, or None. One row's mistake must not spoil the batch."""
        params = seq.params
        if len(params.stop_token_ids) > self._max_stops:
            return f"{len(params.stop_token_ids)} stop token ids, the limit is {self._max_stops}"
        if len(params.logit_bias) > self._max_biases:
            return f"logit_bias names {len(params.logit_bias)} tokens, the limit is {self._max_biases}"
        if (params.logprobs or 0) > MAX_TOP_LOGPROBS:
            return f"logprobs is {params.logprobs}, the limit is {MAX_TOP_LOGPROBS}"
        return find_fault(params, self._vocab_size)

    def write(self, new: list[tuple[int, Sequence]]) -> None:
        """Write rows for new sequences. A faulty sequence is sampled greedily, and its token is not used."""
        for start in range(0, len(new), _ROWS_SENT):
            self._write_single(new[start : start + _ROWS_SENT])
        for row, seq in new:
            is_sound = self.fault(seq) is None
            if is_sound and seq.params.logit_bias:
                self._write_biases(row, seq.params)
            if is_sound and seq.params.has_penalties:
                self._write_counts(row, seq)

    def count(self, uncounted: list[tuple[int, list[int]]]) -> None:
        """Count tokens that no step has counted on the device, by row: those of drafts, and forced ones."""
        vocab_size = self._sampling.counts.shape[1]
        times = Counter(row * vocab_size + token for row, tokens in uncounted for token in tokens)
        self._send_counts(times, lambda index, counts: self._sampling.counts.view(-1).index_add_(0, index, counts))

    def write_masks(self, masks: list[tuple[int, np.ndarray]]) -> None:
        """Write masks, [words] int32 each, by their row."""
        for start in range(0, len(masks), _MASKS_SENT):
            part = masks[start : start + _MASKS_SENT]
            arrays, count = self._masks.fill(), len(part)
            arrays["row"][:count] = [row for row, _ in part]
            arrays["words"].reshape(_MASKS_SENT, self._num_words)[:count] = [words for _, words in part]
            self._masks.send()
            sent = self._masks.device["words"].view(_MASKS_SENT, self._num_words)[:count]
            self._sampling.token_masks.index_copy_(0, self._masks.device["row"][:count], sent)

    def _write_single(self, new: list[tuple[int, Sequence]]) -> None:
        arrays, count = self._rows.fill(), len(new)
        arrays["row"][:count] = [row for row, _ in new]
        numbers, integers, stops = (arrays[name].reshape(_ROWS_SENT, -1) for name in _SENT_BY_ROW)
        for index, (_, seq) in enumerate(new):
            params = seq.params if self.fault(seq) is None else SamplingParams()
            values = _single_values(params, seq)
            numbers[index] = [values[name] for name in NUMBERS]
            integers[index] = [values[name] for name in INTEGERS]
            if params.min_tokens:
                stops[index, : len(params.stop_token_ids)] = sorted(params.stop_token_ids)
        self._rows.send()
        sent = self._rows.device
        for name in _SENT_BY_ROW:
            values_of_rows = sent[name].view(_ROWS_SENT, -1)[:count]
            getattr(self._sampling, name).index_copy_(0, sent["row"][:count], values_of_rows)

    def _write_biases(self, row: int, params: SamplingParams) -> None:
        arrays, count = self._bias.fill(), len(params.logit_bias)
        arrays["ids"][:count] = [token for token, _ in params.logit_bias]
        arrays["bias"][:count] = [bias for _, bias in params.logit_bias]
        self._bias.send()
        self._sampling.bias_ids[row].copy_(self._bias.device["ids"])
        self._sampling.bias[row].copy_(self._bias.device["bias"])

    def _write_counts(self, row: int, seq: Sequence) -> None:
        counts = Counter(seq.tokens[seq.request.prompt_len :])
        for token in set(seq.tokens[: seq.request.prompt_len]):
            counts[token] += IN_PROMPT
        target = self._sampling.counts[row].zero_()
        self._send_counts(counts, lambda ids, values: target.index_copy_(0, ids, values))

    def _send_counts(self, counts: Counter[int], write: Callable[[Tensor, Tensor], object]) -> None:
        """Send counts by token id, or by their place among all rows' counts, in parts that `write` takes."""
        ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        values = np.fromiter(counts.values(), dtype=np.int32, count=len(counts))
        for start in range(0, len(ids), _COUNTS_SENT):
            part = slice(start, start + _COUNTS_SENT)
            arrays, count = self._counts.fill(), len(ids[part])
            arrays["ids"][:count], arrays["counts"][:count] = ids[part], values[part]
            self._counts.send()
            write(self._counts.device["ids"][:count], self._counts.device["counts"][:count])


def _single_values(params: SamplingParams, seq: Sequence) -> dict[str, float]:
    """Return what a row holds in `numbers` and `integers`, by name, among other numbers."""
    low, high = signed_seeds([params]).view(np.int32)
    return {
        **{each.name: min(getattr(params, each.name), _MOST) for each in PARAMETERS},
        "temperature": params.temperature if draws_at_random(params) else 0.0,
        "seed_low": low,
        "seed_high": high,
        "min_position": seq.request.prompt_len + params.min_tokens,
        "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        "is_masked": seq.token_mask is not None,
        "num_stops": len(params.stop_token_ids) if params.min_tokens else 0,
        "num_biases": len(params.logit_bias),
    }
