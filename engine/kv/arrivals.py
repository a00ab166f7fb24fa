"""Sequences that wait for blocks of their prompt to arrive in host memory, from a file or from another engine.

A sequence that comes may find blocks elsewhere behind those in memory. It then waits while threads read them into host
blocks, and starts like any other: what has arrived is cached in host memory (host_cache.py). It waits no longer than
it would take to compute them beside other sequences, roughly. Blocks that are damaged, gone or late are computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

from ..core.sequence import Sequence
from ..timing.cost_model import CostModel
from .block_store import BlockStore, Done, HostRows
from .blocks import BlockPool
from .host_cache import HostCache
from .prefix_cache import Prefix
from .stored_blocks import StoredBlocks

_READING_PART = 2  # at most this part of host memory holds blocks that are being read
_LEAST_WAIT_S, _MOST_WAIT_S = 0.5, 2.0
_READ_FADING = 0.98  # of what is known, with each block that is read: about 50 blocks count
_READ_AGEING = 0.98  # applied each time that speaks against a read, so that one slow read does not count for ever
_FILE = ""  # the source that is not an engine's address


class Peers(Protocol):
    """Other engines, from which threads read blocks into host memory. All methods are for the loop's thread."""

    rows: HostRows

    def read(self, peer: str, wanted: Several[tuple[bytes, int]]) -> None:
        """Read blocks of these addresses, which follow each other in a prompt, into host blocks."""

    def take_done(self) -> list[Done]:
        """Return the outcomes since the last call: one for each host block."""


@dataclass(slots=True)
class _Waiting:
    """A sequence for which these addresses are being read. It starts without them at `until`."""

    seq: Sequence
    addresses: set[bytes]
    until: float


@dataclass(slots=True)
class _Source:
    """Where blocks come from, and what became of them.

    num_read  blocks that were read or failed, the last ones with the greatest weight
    seconds   that those took together: the first block of a read takes longest, and counts no more than others
    """

    tokens: int = 0
    num_failed: int = 0
    num_read: float = 0.0
    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        self.num_read = _READ_FADING * self.num_read + 1
        self.seconds = _READ_FADING * self.seconds + seconds

    def pays(self, count: int, computed_s: float) -> bool:
        """Say whether so many blocks come sooner than they are computed, as far as is known."""
        if not self.num_read or not computed_s or count * self.seconds / self.num_read <= computed_s:
            return True
        self.seconds *= _READ_AGEING
        return False


@dataclass(slots=True)
class _Reads:
    """What a new sequence would wait for.

    missing    addresses to read, by source
    expected   addresses that are being read for others
    num_loads  blocks that it would load from host memory
    """

    missing: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    expected: set[bytes] = field(default_factory=set)
    num_loads: int = 0

    @property
    def num_missing(self) -> int:
        return sum(map(len, self.missing.values()))


class Arrivals:
    """
    store      the file; None: there is none
    stored     decides what goes to it
    peers      other engines; None: nothing is fetched from them
    num_hosts  blocks of host memory
    clock      seconds, monotonic
    """

    def __init__(
        self,
        store: BlockStore | None,
        stored: StoredBlocks | None,
        peers: Peers | None,
        cache: HostCache,
        pool: BlockPool,
        costs: CostModel,
        num_hosts: int,
        clock: Callable[[], float],
    ) -> None:
        self.file, self.peer = _Source(), _Source()
        self._store, self._stored, self._peers, self._cache = store, stored, peers, cache
        self._pool, self._costs, self._clock = pool, costs, clock
        self._most_read = max(1, num_hosts // _READING_PART)
        self._reading: dict[int, bytes | None] = {}  # by host block; None: no longer wanted
        self._readers: dict[bytes, int] = {}  # by address: the host block that it is read into
        self._waiting: dict[int, _Waiting] = {}  # by sequence

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
        hashes = seq.blocks.hashes[: seq.cacheable_len // size]
        reads, end = self._reads(seq, hashes, first)
        if end < len(hashes) and self._store is not None:
            self._store.refresh()  # another engine may have written the rest; the next sequence will find it
        if not (reads.missing or reads.expected) or not self._is_worth(reads, prefix.num_tokens, end * size):
            return False
        for source, missing in reads.missing.items():
            reads.expected.update(self._read(source, missing))
        if not reads.expected:
            return False
        now, computed_s = self._clock(), self._computed_s(prefix.num_tokens, end * size)
        deadline = seq.request.deadline
        if computed_s:
            until = min(now + min(max(computed_s, _LEAST_WAIT_S), _MOST_WAIT_S), deadline - 2 * computed_s)
        else:  # nothing says how long computing takes, so half of the time is left for it
            until = min(now + _MOST_WAIT_S, (now + deadline) / 2)
        if until <= now:
            return False  # if the source hangs, it could not be computed in time any more
        self._waiting[seq.id] = _Waiting(seq, reads.expected, until)
        return True

    def _reads(self, seq: Sequence, hashes: list[bytes], first: int) -> tuple[_Reads, int]:
        """Look for blocks from `first` on. Return what is to be read, and behind which block nothing is known."""
        reads, lender, end = _Reads(), seq.request.lender, first
        num_lent = lender.num_tokens // self._pool.block_size if lender is not None and self._peers is not None else 0
        for address in hashes[first:]:
            if not self._pool.match([address]):
                is_full = len(self._reading) + reads.num_missing >= self._most_read
                if address in self._readers:
                    reads.expected.add(address)
                elif self._cache.holds(address):
                    self._cache.touch(address)
                elif self._store is not None and self._store.holds(address) and not is_full:
                    reads.missing[_FILE].append(address)
                elif lender is not None and end < num_lent and not is_full:
                    reads.missing[lender.address].append(address)
                else:
                    break
                reads.num_loads += 1
            end += 1
        return reads, end

    def _is_worth(self, reads: _Reads, start: int, end: int) -> bool:
        """Say whether to read and load blocks rather than compute tokens `start` to `end`."""
        if end <= start or not self._costs.is_worth_loading(reads.num_loads, start, end):
            return False
        computed_s = self._computed_s(start, end)
        return all(self._source(name).pays(len(each), computed_s) for name, each in reads.missing.items())

    def _computed_s(self, start: int, end: int) -> float:
        """Estimate how many seconds it takes to compute these tokens; 0 if this engine has computed no prompt yet."""
        return max(self._costs.chunk_s(start, end), self._costs.likely_s(end - start))

    def _source(self, name: str) -> _Source:
        return self.file if name == _FILE else self.peer

    def _read(self, source: str, addresses: list[bytes]) -> list[bytes]:
        """Start to read these, or as many as there are host blocks for; return which."""
        wanted: list[tuple[bytes, int]] = []
        for address in addresses:
            if (host := self._cache.take()) is None:
                break
            wanted.append((address, host))
            self._reading[host], self._readers[address] = address, host
        if wanted and source == _FILE:
            assert self._store is not None, "it holds these"
            self._store.read(wanted)
        elif wanted:
            assert self._peers is not None, "one of them is asked"
            self._peers.read(source, wanted)
        return [address for address, _ in wanted]

    def arrived(self) -> list[Sequence]:
        """Take in what the threads have done; return the sequences that need not wait any longer."""
        for done in self._store.take_done() if self._store is not None else ():
            self.file.num_failed += not done.is_ok
            if done.host in self._reading:
                self._has_read(self.file, done)
            else:
                assert self._stored is not None, "there is a file"
                self._stored.has_written(done.host)
        for done in self._peers.take_done() if self._peers is not None else ():
            self.peer.num_failed += not done.is_ok
            self._has_read(self.peer, done)
        if not self._waiting:
            return []
        now = self._clock()
        ready = [each.seq for each in self._waiting.values() if not each.addresses or each.until <= now]
        for seq in ready:
            del self._waiting[seq.id]
        return ready

    def _has_read(self, source: _Source, done: Done) -> None:
        source.note(done.seconds)
        address = self._reading.pop(done.host)
        has_come = address is not None and done.is_ok and self._cache.put(address, done.host)
        if has_come:
            source.tokens += self._pool.block_size
        else:
            self._cache.give_back(done.host)
        if address is not None:
            del self._readers[address]
            for each in self._waiting.values():
                if address in each.addresses:
                    each.addresses.remove(address)
                    each.seq.account.pulls(self._pool.block_size if has_come and source is self.peer else 0)

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
