"""Running sequences' rows on the device: their block tables, how they are sampled, the token that each chose last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda_server.engine.core.sequence import Chunk, Sequence, State
from pagoda_server.engine.runners.cuda.row_parameters import RowParameters
from pagoda_server.engine.runners.cuda.staging import Staging
from pagoda_server.kernels import SamplingRows, allocate_rows

MAX_STOPS = 96  # what a router lets through, and a model's own
MAX_BIASES = 1024
_BLOCKS_SENT = 4096  # at once


@dataclass(slots=True)
class _Row:
    """
    blocks  the list of the sequence, which only grows until the sequence gives up its blocks
    fault   why the sequence cannot be sampled: found once, as its parameters stay what they are
    """

    number: int
    seq: Sequence
    blocks: list[int]
    fault: str | None
    num_sent: int = 0
    last_step: int = 0

    @property
    def is_abandoned(self) -> bool:
        return self.seq.state is State.FINISHED or self.seq.blocks is not self.blocks


class DeviceRows:
    """A row is given to a sequence when it first computes, and taken back when another needs it.

    block_table  [max_rows, max_blocks] int32, on the device
    """

    def __init__(self, max_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling: SamplingRows = allocate_rows(max_rows, vocab_size, MAX_STOPS, MAX_BIASES, device)
        self._parameters = RowParameters(self.sampling, vocab_size, device)
        self._blocks = Staging({"at": (torch.int64, _BLOCKS_SENT), "block": (torch.int32, _BLOCKS_SENT)}, device)
        self._rows: dict[int, _Row] = {}  # by the identity of the list of blocks, which is kept alive here
        self._free = list(range(max_rows - 1, -1, -1))
        self._step = 0

    def place(self, chunks: list[Chunk]) -> list[int]:
        """The row of each chunk's sequence. Sends the device what it does not know yet: new rows and new blocks."""
        self._step += 1
        new: list[_Row] = []
        grown: list[tuple[int, int]] = []
        width = self.block_table.shape[1]
        numbers = []
        for chunk in chunks:
            blocks = chunk.seq.blocks
            row = self._rows.get(id(blocks))
            if row is None:
                row = self._take(chunk.seq)
                new.append(row)
            row.last_step = self._step
            if row.num_sent < len(blocks):
                first = row.number * width
                grown += [(first + at, blocks[at]) for at in range(row.num_sent, len(blocks))]
                row.num_sent = len(blocks)
            numbers.append(row.number)
        self._send_blocks(grown)
        self._parameters.write([(row.number, row.seq) for row in new])
        return numbers

    def faults(self, places: Mapping[int, tuple[Sequence, int]]) -> dict[int, str]:
        """Which of these sequences, all of which have rows, cannot be sampled, and why."""
        rows = ((at, self._rows[id(seq.blocks)]) for at, (seq, _) in places.items())
        return {at: row.fault for at, row in rows if row.fault is not None}

    def forget(self) -> None:
        """Sequences are given rows anew, from the tokens that the host knows."""
        self._free += [row.number for row in self._rows.values()]
        self._rows.clear()

    def _take(self, seq: Sequence) -> _Row:
        if not self._free:
            abandoned = [key for key, row in self._rows.items() if row.is_abandoned and row.last_step != self._step]
            self._free += [self._rows.pop(key).number for key in abandoned]
        row = _Row(self._free.pop(), seq, seq.blocks, self._parameters.fault(seq))
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
