"""What a choice among engines reads of each of them, in columns."""

from __future__ import annotations

from array import array

from ...channel.strides import STRIDE
from .cached_keys import CachedBits

FULL_S, QUEUE_S = 1.0, 10.0  # what a full batch costs, and a queue as long as the batch
SLACK_PART, SLACK = 0.25, 6  # an engine may have so much of its batch, or so many sequences, more than others
LEAST_RATE = 1e-3  # tokens a second: no engine computes fewer, and all sums of costs are finite


class EngineTable:
    """Numbers of engines that change with every step: a column for each, in which an engine has a row.

    A column lies in one piece of memory. To visit an object of each engine takes several times as long, most of it
    waiting for memory.

    version         changes whenever other engines than before may get requests
    num_sequences   in the engine, those of other routers included
    num_uncomputed  prompt tokens that it still has to compute
    max_num_seqs    that it computes at once
    beyond_slack    its num_sequences, without those that it may have more than other engines
    wait_s          what its uncomputed tokens, unless their rate is unknown, and its sequences cost a prompt
    stride_s        in how long it computes a stride; 0: unknown
    cached          what its prefix cache holds, by its row
    """

    def __init__(self) -> None:
        self.version = 0
        self.num_sequences, self.num_uncomputed, self.max_num_seqs = array("q"), array("q"), array("q")
        self.beyond_slack, self.wait_s, self.stride_s = array("d"), array("d"), array("d")
        self.cached = CachedBits()
        self._taken = 0  # one bit a row

    def __len__(self) -> int:
        return len(self.num_sequences)

    def changed(self) -> None:
        """Note that an engine has become one that may get requests, or has ceased to be."""
        self.version += 1

    def take_row(self) -> int:
        """Return the first row that no engine has."""
        row = (~self._taken & (self._taken + 1)).bit_length() - 1
        self._taken |= 1 << row
        if row == len(self):
            for counts in (self.num_sequences, self.num_uncomputed, self.max_num_seqs):
                counts.append(0)
            for numbers in (self.beyond_slack, self.wait_s, self.stride_s):
                numbers.append(0.0)
        self.max_num_seqs[row] = 0
        self.update(row, 0, 0, 0.0)
        return row

    def give_back(self, row: int) -> None:
        """Let another engine have the row."""
        self._taken ^= 1 << row

    def set_batch(self, row: int, max_num_seqs: int) -> None:
        self.max_num_seqs[row], stride_s = max_num_seqs, self.stride_s[row]
        self.update(row, self.num_sequences[row], self.num_uncomputed[row], STRIDE / stride_s if stride_s else 0.0)

    def update(self, row: int, num_sequences: int, num_uncomputed: int, tokens_per_s: float) -> None:
        """
        tokens_per_s  how many prompt tokens it computes in a second; less than LEAST_RATE: unknown
        """
        most, pace_s = self.max_num_seqs[row], 1.0 / tokens_per_s if tokens_per_s >= LEAST_RATE else 0.0
        fill = num_sequences / (most or 1)
        self.num_sequences[row], self.num_uncomputed[row] = num_sequences, num_uncomputed
        self.beyond_slack[row] = num_sequences - max(SLACK, SLACK_PART * most)
        self.wait_s[row] = num_uncomputed * pace_s + FULL_S * fill + QUEUE_S * max(0.0, fill - 1.0)
        self.stride_s[row] = STRIDE * pace_s
