"""Sequences that wait for blocks of their prompt to arrive in host memory, from a file or from another engine.

A sequence that comes may find blocks elsewhere behind those in memory. It then waits while threads read them into host
blocks, and starts like any other: what has arrived is cached in host memory (host_cache.py). It waits no longer than
about the time that computing would take. Blocks that are damaged or gone are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.sequence import Sequence
from ..timing.cost_model import CostModel
from .block_store import BlockStore
from .blocks import BlockPool
from .host_cache import HostCache
from .prefix_cache import Prefix
from .stored_blocks import StoredBlocks

_READING_PART = 2  # at most this part of host memory holds blocks that are being read
_LEAST_WAIT_S, _MOST_WAIT_S = 0.5, 2.0
_READ_WEIGHT = 0.2  # of the last read, in the mean time of a block's
_READ_AGEING = 0.98  # applied each time that mean speaks against a read, so that one slow read does not count for ever


@dataclass(slots=True)
class _Waiting:
    """A sequence for which these addresses are being read. It starts without them at `until`."""

    seq: Sequence
    addresses: set[bytes]
    until: float


class Arrivals:
    """
    stored     decides what goes to the file
    num_hosts  blocks of host memory
    clock      seconds, monotonic
    """

    def __init__(
        self,
        store: BlockStore,
        stored: StoredBlocks,
        cache: HostCache,
        pool: BlockPool,
        costs: CostModel,
        num_hosts: int,
        clock: Callable[[], float],
    ) -> None:
        self.read_tokens = 0
        self.num_failed = 0  # blocks that could not be read or written
        self._store, self._stored, self._cache = store, stored, cache
        self._pool, self._costs, self._clock = pool, costs, clock
        self._most_read = max(1, num_hosts // _READING_PART)
        self._reading: dict[int, bytes | None] = {}  # by host block; None: no longer wanted
        self._readers: dict[bytes, int] = {}  # by address: the host block that it is read into
        self._waiting: dict[int, _Waiting] = {}  # by sequence
        self._read_s: float | None = None  # mean, for a block; None before the first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_wait_end(self) -> float:
        """Until then, no sequence has waited too long; math.inf if none waits."""
        return min((each.until for each in self._waiting.values()), default=float("inf"))

    def waiting(self) -> list[Sequence]:
        return [each.seq for each in self._waiting.values()]

    def fetch(self, seq: Sequence, prefix: Prefix) -> bool:
        """Start to read what is elsewhere behind a new sequence's prefix; return whether it should wait for that."""
        if prefix.sibling is not None:
            return False
        size, first = self._pool.block_size, len(prefix.blocks)
        missing, addresses, num_loads, end = list[bytes](), set[bytes](), 0, first
        hashes = seq.blocks.hashes[: seq.cacheable_len // size]
        for address in hashes[first:]:
            if not self._pool.match([address]):
                if address in self._readers:
                    addresses.add(address)
                elif self._cache.holds(address):
                    self._cache.touch(address)
                elif self._store.holds(address) and len(self._reading) + len(missing) < self._most_read:
                    missing.append(address)
                else:
                    break
                num_loads += 1
            end += 1
        if end < len(hashes):
            self._store.refresh()  # another engine may have written the rest; the next sequence will find it
        if not (missing or addresses) or not self._is_worth(len(missing), num_loads, prefix.num_tokens, end * size):
            return False
        addresses.update(self._read(missing))
        if not addresses:
            return False
        now, computed_s = self._clock(), self._costs.chunk_s(prefix.num_tokens, end * size)
        until = min(now + min(max(computed_s, _LEAST_WAIT_S), _MOST_WAIT_S), seq.request.deadline - 2 * computed_s)
        if until <= now:
            return False  # if the disk hangs, it could not be computed in time any more
        self._waiting[seq.id] = _Waiting(seq, addresses, until)
        return True

    def _is_worth(self, num_reads: int, num_loads: int, start: int, end: int) -> bool:
        """Say whether to read and load blocks rather than compute tokens `start` to `end`."""
        if end <= start or not self._costs.is_worth_loading(num_loads, start, end):
            return False
        computed_s = self._costs.chunk_s(start, end)
        if self._read_s is None or not computed_s or num_reads * self._read_s <= computed_s:
            return True
        self._read_s *= _READ_AGEING
        return False

    def _read(self, addresses: list[bytes]) -> list[bytes]:
        """Start to read these, or as many as there are host blocks for; return which."""
        wanted: list[tuple[bytes, int]] = []
        for address in addresses:
            if (host := self._cache.take()) is None:
                break
            wanted.append((address, host))
            self._reading[host], self._readers[address] = address, host
        if wanted:
            self._store.read(wanted)
        return [address for address, _ in wanted]

    def arrived(self) -> list[Sequence]:
        """Take in what the store's thread has done; return the sequences that need not wait any longer."""
        for done in self._store.take_done():
            self.num_failed += not done.is_ok
            if done.host in self._reading:
                self._has_read(done.host, done.is_ok, done.seconds)
            else:
                self._stored.has_written(done.host)
        if not self._waiting:
            return []
        now = self._clock()
        ready = [each.seq for each in self._waiting.values() if not each.addresses or each.until <= now]
        for seq in ready:
            del self._waiting[seq.id]
        return ready

    def _has_read(self, host: int, is_ok: bool, seconds: float) -> None:
        known = seconds if self._read_s is None else self._read_s
        self._read_s = known + _READ_WEIGHT * (seconds - known)
        address = self._reading.pop(host)
        if address is not None:
            del self._readers[address]
            for each in self._waiting.values():
                each.addresses.discard(address)
        if address is not None and is_ok and self._cache.put(address, host):
            self.read_tokens += self._pool.block_size
        else:
            self._cache.give_back(host)

    def ended(self, seq: Sequence) -> None:
        self._waiting.pop(seq.id, None)

    def flush(self) -> None:
        """Forget all blocks that are being read. Sequences that wait for some start without them."""
        self._reading = dict.fromkeys(self._reading)
        self._readers.clear()
        for each in self._waiting.values():
            each.addresses.clear()

    def hosts(self) -> set[int]:
        """Host blocks in use here. Raises AssertionError unless they are accounted for."""
        assert self._readers == {address: host for host, address in self._reading.items() if address is not None}
        for each in self._waiting.values():
            assert each.addresses <= self._readers.keys(), "a sequence waits for what is not being read"
        return {*self._reading}
