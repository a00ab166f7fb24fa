"""Running sequences' rows on the device: block tables, sampling parameters, and the token that each chose last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda_server.engine.core.sequence import SamplingParams, Sequence, State, TokenMask
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.runners.cuda.staging import Staging
from pagoda_server.engine.runners.late_masks import read_masks
from pagoda_server.engine.runners.sampling import draws_at_random, fill_mask, find_fault
from pagoda_server.kernels import MAX_TOP_LOGPROBS, SamplingRows, allocate_rows
from pagoda_server.kernels.row_sampling import IN_PROMPT, MAX_BIASES, MAX_STOPS
from pagoda_server.settings.sampling import PARAMETERS

# How many of each are sent in one copy.
_BLOCKS_SENT = 4096
_ROWS_SENT = 32
_COUNTS_SENT = 4096
_MASKS_SENT = 16
_SENDS_AT_ONCE = 16  # copies of biases or counts under way: each row that starts needs one
_MOST = (1 << 31) - 1  # the largest integer of a row


@dataclass(slots=True)
class _Row:
    """
    blocks       the sequence's block table, which only grows; a sequence that gives up its blocks gets another one
    fault        why the sequence cannot be sampled; its parameters never change, so it is found once
    needs_mask   its token mask must be sent before it is sampled
    """

    number: int
    seq: Sequence
    blocks: list[int]
    fault: str | None
    needs_mask: bool
    num_sent: int = 0
    last_step: int = 0

    @property
    def is_abandoned(self) -> bool:
        return self.seq.state is State.FINISHED or self.seq.blocks is not self.blocks


class DeviceRows:
    """Gives a sequence a row when it first computes, and takes the row back when another sequence needs it.

    block_table  [max_rows, max_blocks] int32, on the device
    late         chunks, by position, of the step that was placed last, whose masks were not there in time
    """

    def __init__(self, max_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling: SamplingRows = allocate_rows(max_rows, vocab_size, MAX_STOPS, MAX_BIASES, device)
        self._parameters = _RowParameters(self.sampling, vocab_size, device)
        self._blocks = Staging({"at": (torch.int64, _BLOCKS_SENT), "block": (torch.int32, _BLOCKS_SENT)}, device)
        self._rows: dict[int, _Row] = {}  # by the identity of the block table, which is kept alive here
        self.late: set[int] = set()
        self._free = list(range(max_rows - 1, -1, -1))
        self._step = 0

    def place(self, chunks: list[Chunk]) -> list[int]:
        """Return the row of each chunk's sequence. Send the device what it lacks: new rows, blocks and masks."""
        self._step += 1
        new: list[_Row] = []
        masked: dict[int, tuple[int, Sequence, TokenMask]] = {}  # by chunk position
        grown: list[tuple[int, int]] = []
        width = self.block_table.shape[1]
        numbers = []
        for at, chunk in enumerate(chunks):
            blocks = chunk.seq.blocks
            row = self._rows.get(id(blocks))
            if row is None:
                row = self._take(chunk.seq)
                new.append(row)
            row.last_step = self._step
            if row.num_sent < len(blocks):
                first = row.number * width
                grown += [(first + place, blocks[place]) for place in range(row.num_sent, len(blocks))]
                row.num_sent = len(blocks)
            if row.needs_mask and chunk.samples and (mask := row.seq.token_mask) is not None:
                assert not mask.depends_on_tokens or chunk.end == len(row.seq.tokens), "the last token is not known"
                row.needs_mask = mask.depends_on_tokens
                masked[at] = (row.number, row.seq, mask)
            numbers.append(row.number)
        self._send_blocks(grown)
        self._parameters.write([(row.number, row.seq) for row in new])
        self.late = _late(masked, has_others=len(chunks) > len(masked))
        self._parameters.write_masks([(number, seq) for at, (number, seq, _) in masked.items() if at not in self.late])
        return numbers

    def faults(self, places: Mapping[int, tuple[Sequence, int]]) -> dict[int, str]:
        """Return which of these sequences cannot be sampled, and why. All must have rows."""
        rows = ((at, self._rows[id(seq.blocks)]) for at, (seq, _) in places.items())
        return {at: row.fault for at, row in rows if row.fault is not None}

    def forget(self) -> None:
        """Take back every row. Sequences then get new rows, made from the tokens that the host knows."""
        self._free += [row.number for row in self._rows.values()]
        self._rows.clear()

    def _take(self, seq: Sequence) -> _Row:
        if not self._free:
            abandoned = [key for key, row in self._rows.items() if row.is_abandoned and row.last_step != self._step]
            self._free += [self._rows.pop(key).number for key in abandoned]
        fault = self._parameters.fault(seq)
        row = _Row(self._free.pop(), seq, seq.blocks, fault, needs_mask=seq.token_mask is not None)
        self._rows[id(seq.blocks)] = row
        return row

    def _send_blocks(self, grown: list[tuple[int, int]]) -> None:
        table = self.block_table.view(-1)
        for start in range(0, len(grown), _BLOCKS_SENT):
            part = grown[start : start + _BLOCKS_SENT]
            arrays = self._blocks.fill()
            arrays["at"][: len(part)] = [at for at, _ in part]
            arrays["block"][: len(part)] = [block for _, block in part]
            self._blocks.send()
            sent: dict[str, Tensor] = {name: field[: len(part)] for name, field in self._blocks.device.items()}
            table.index_copy_(0, sent["at"], sent["block"])


def _late(masked: dict[int, tuple[int, Sequence, TokenMask]], has_others: bool) -> set[int]:
    readers = [(mask, partial(mask.is_ready, seq.tokens)) for _, seq, mask in masked.values()]
    places = list(masked)
    return {places[each] for each in read_masks(readers, has_others=has_others)}


class _RowParameters:
    """Writes sequences' parameters to their rows of `SamplingRows` when they start, and masks whenever they change."""

    def __init__(self, sampling: SamplingRows, vocab_size: int, device: torch.device) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._max_stops, self._max_biases = sampling.stop_ids.shape[1], sampling.bias_ids.shape[1]
        max_rows, self._num_words = sampling.token_masks.shape
        dtypes = {each.name: getattr(sampling, each.name).dtype for each in fields(SamplingRows)}
        self._single = [name for name in dtypes if getattr(sampling, name).dim() == 1 and name != "last_token"]
        self._rows = Staging(
            {
                "row": (torch.int64, _ROWS_SENT),
                **{name: (dtypes[name], _ROWS_SENT) for name in self._single},
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
            sets=1 + -(-max_rows // _MASKS_SENT),  # a step's masks are filled while those of the step before are sent
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
        if params.typical_p != 1:
            return f"typical_p is {params.typical_p}; a CUDA device takes only 1"
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

    def write_masks(self, masked: list[tuple[int, Sequence]]) -> None:
        for start in range(0, len(masked), _MASKS_SENT):
            part = masked[start : start + _MASKS_SENT]
            arrays, count = self._masks.fill(), len(part)
            arrays["row"][:count] = [row for row, _ in part]
            words = arrays["words"].reshape(_MASKS_SENT, self._num_words)
            for at, (_, seq) in enumerate(part):
                assert seq.token_mask is not None
                fill_mask(seq.token_mask, seq.tokens, words[at])
            self._masks.send()
            sent = self._masks.device["words"].view(_MASKS_SENT, self._num_words)[:count]
            self._sampling.token_masks.index_copy_(0, self._masks.device["row"][:count], sent)

    def _write_single(self, new: list[tuple[int, Sequence]]) -> None:
        arrays, count = self._rows.fill(), len(new)
        arrays["row"][:count] = [row for row, _ in new]
        stops = arrays["stop_ids"].reshape(_ROWS_SENT, self._max_stops)
        for at, (_, seq) in enumerate(new):
            params = seq.params if self.fault(seq) is None else SamplingParams()
            values = _single_values(params, seq)
            for name in self._single:
                arrays[name][at] = values[name]
            if params.min_tokens:
                stops[at, : len(params.stop_token_ids)] = sorted(params.stop_token_ids)
        self._rows.send()
        sent = self._rows.device
        for name in self._single:
            getattr(self._sampling, name).index_copy_(0, sent["row"][:count], sent[name][:count])
        stop_ids = sent["stop_ids"].view(_ROWS_SENT, self._max_stops)
        self._sampling.stop_ids.index_copy_(0, sent["row"][:count], stop_ids[:count])

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
        ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        values = np.fromiter(counts.values(), dtype=np.int32, count=len(counts))
        target = self._sampling.counts[row].zero_()
        for start in range(0, len(ids), _COUNTS_SENT):
            part = slice(start, start + _COUNTS_SENT)
            arrays, count = self._counts.fill(), len(ids[part])
            arrays["ids"][:count], arrays["counts"][:count] = ids[part], values[part]
            self._counts.send()
            target.index_copy_(0, self._counts.device["ids"][:count], self._counts.device["counts"][:count])


def _single_values(params: SamplingParams, seq: Sequence) -> dict[str, float]:
    """Return the fields of a row that hold one number."""
    low, high = np.array([params.seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64).view(np.int32)
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
