"""The prefix cache's second tier: in host memory, what the device had to evict.

Nothing is copied when the pool evicts a cached block. When the block is handed out to be written, the next plan first
saves its content to a host block, under the same address. A sequence that starts later shares what the device still
has, and loads what the host has behind it, if that is expected to be faster than computing. Content stays on the host
when it is loaded: if the device evicts it again, nothing is copied.

Host blocks that preempted sequences need are taken from here, the least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from ..core.sequence import Sequence, State, WindowTable
from ..core.step import StepPlan
from ..timing.cost_model import CostModel
from .blocks import BlockPool
from .host_loads import HostLoads
from .prefix_cache import Prefix
from .windows import HOLE, Windows, window_address


class HostCache:
    """
    pool     of the device; it remembers what it evicts from now on
    free     host blocks that hold nothing, shared with whoever else uses some
    costs    knows whether copying is faster than computing
    loads    takes what sequences load
    windows  of the layers whose blocks are cached beside the others'
    """

    def __init__(self, pool: BlockPool, free: list[int], costs: CostModel, loads: HostLoads, windows: Windows) -> None:
        self.hit_tokens = 0  # of prompts, found here since the engine started
        self._pool = pool
        self._free = free
        self._costs = costs
        self._windows = windows
        self._evicted = pool.remember_evicted()
        self._host_of: OrderedDict[bytes, int] = OrderedDict()  # by address, the least recently used first
        self._saves: dict[int, int] = {}  # host block → block, of the next plan
        self._loads = loads
        self._readers: dict[int, tuple[Sequence, list[int]]] = {}  # sequences that load, until a step is committed
        self._num_readers: Counter[int] = Counter()  # by host block
        self._forgotten: set[int] = set()  # host blocks without an address, which are read
        self._pins: Counter[int] = Counter()  # by host block: who else reads it, of _num_readers

    def __len__(self) -> int:
        return len(self._host_of) + len(self._forgotten)

    def taken(self, blocks: Iterable[int]) -> None:
        """Save evicted content whose blocks were handed out: the next plan writes to them."""
        for block in blocks:
            address = self._evicted.pop(block, None)
            if address is None:
                continue
            if address in self._host_of:
                self._host_of.move_to_end(address)
            elif self._costs.is_worth_saving(1 + len(self._windows), self._pool.block_size):
                host = self.take()
                if host is not None:
                    self._host_of[address] = host
                    self._saves[host] = block

    def holds(self, address: bytes) -> bool:
        return address in self._host_of

    def touch(self, address: bytes) -> None:
        """Note that a block that it holds was used."""
        self._host_of.move_to_end(address)

    def pin(self, address: bytes) -> int | None:
        """Hold the host block with this content until `unpin`; None if there is none."""
        if (host := self._host_of.get(address)) is not None:
            self._pins[host] += 1
            self._num_readers[host] += 1
        return host

    def unpin(self, host: int) -> None:
        self._pins[host] -= 1
        if not self._pins[host]:
            del self._pins[host]
        self._read_once(host)

    def put(self, address: bytes, host: int) -> bool:
        """Take over a host block with this content; return False, and leave it, if there is another one with it."""
        return self._host_of.setdefault(address, host) == host

    def take(self) -> int | None:
        """Take a free host block, or else the least recently used cached one; None if all are in use.

        The caller ends its use by `give_back`, or by `put` if the block is to be cached.
        """
        return self._free.pop() if self._free else self.reclaim()

    def give_back(self, host: int) -> None:
        self._free.append(host)

    def reclaim(self) -> int | None:
        """Give up a host block, the least recently used one; None if all are read now."""
        address = next((address for address, host in self._host_of.items() if not self._num_readers[host]), None)
        if address is None:
            return None
        host = self._host_of.pop(address)
        self._saves.pop(host, None)
        return host

    def extend(self, seq: Sequence, prefix: Prefix) -> Prefix:
        """Extend a waiting sequence's prefix by what is cached behind it, unless computing that is faster."""
        if not self._host_of or prefix.sibling is not None:
            return prefix
        size = self._pool.block_size
        hashes = seq.blocks.hashes[: seq.cacheable_len // size]

        def is_cached(address: bytes) -> bool:
            return address in self._host_of or bool(self._pool.match([address]))

        count = next((at for at, address in enumerate(hashes) if not is_cached(address)), len(hashes))
        count = self._windows.usable(hashes, count, is_cached)
        if count * size <= prefix.num_tokens:
            return prefix
        blocks, loads = list[int](), list[tuple[int, int]]()
        for position, address in enumerate(hashes[:count]):
            if found := self._pool.match([address]):
                blocks += found
            else:
                loads.append((position, self._host_of[address]))
        tables, window_loads = list[WindowTable](), list[tuple[int, int, int]]()
        for group, first in enumerate(self._windows.firsts(count * size)):
            table = WindowTable([0] * first, first)
            for position in range(first, count):
                address = window_address(hashes[position], group)
                if not (found := self._pool.match([address])):
                    window_loads.append((group, position, self._host_of[address]))
                table += found or [HOLE]
            tables.append(table)
        if not self._costs.is_worth_loading(len(loads) + len(window_loads), prefix.num_tokens, count * size):
            return prefix
        return replace(
            prefix,
            num_tokens=count * size,
            blocks=blocks,
            partial=None,
            loads=loads,
            num_found=min(position for *_, position, _ in [*loads, *window_loads]),
            windows=tuple(tables),
            window_loads=window_loads,
        )

    def started(self, seq: Sequence, prefix: Prefix) -> None:
        """Note that a sequence has its blocks, with this prefix; keep what it loads until a step of it is committed."""
        table, loads = seq.blocks, list[tuple[int, int, bytes, int]]()  # position, host block, address, block
        for position, host in prefix.loads:
            loads.append((position, host, table.hashes[position], table[position]))
        for group, position, host in prefix.window_loads:
            address = window_address(table.hashes[position], group)
            loads.append((position, host, address, table.windows[group][position]))
        if not loads:
            return
        hosts = [host for _, host, _, _ in loads]
        self._loads.want(seq, [(host, block) for _, host, _, block in loads])
        self._readers[seq.id] = (seq, hosts)
        self._num_readers.update(hosts)
        for _, _, address, _ in sorted(loads, reverse=True):  # the head of a prefix is given up last
            self._host_of.move_to_end(address)
        if not seq.output_len and not seq.account.preemptions:
            self.hit_tokens += len({position for position, *_ in loads}) * self._pool.block_size

    def released(self, seq: Sequence) -> None:
        """Note that a sequence need not load again: a step of it is committed, or it has given up its blocks."""
        _, hosts = self._readers.pop(seq.id, (seq, []))
        for host in hosts:
            self._read_once(host)

    def _read_once(self, host: int) -> None:
        """Note that a reader of a host block has done with it."""
        self._num_readers[host] -= 1
        if not self._num_readers[host]:
            del self._num_readers[host]
            if host in self._forgotten:
                self._forgotten.remove(host)
                self._free.append(host)

    def flush(self) -> None:
        """Forget all content."""
        self._forget(list(self._host_of))
        self._evicted.clear()

    # -- plans --------------------------------------------------------------------------------------------------------

    def saves(self) -> list[tuple[int, int]]:
        """Return (block, host block) pairs for the next plan, which must not be empty."""
        pairs = [(block, host) for host, block in self._saves.items()]
        self._saves.clear()
        return pairs

    def distrust(self, plan: StepPlan) -> list[Sequence]:
        """Forget what a failed step saved; return the running sequences that started from it."""
        saved = {host for _, host in plan.saves}
        self._forget([address for address, host in self._host_of.items() if host in saved])
        readers = [seq for seq, hosts in self._readers.values() if not saved.isdisjoint(hosts)]
        return [seq for seq in readers if seq.state is State.RUNNING]

    def _forget(self, addresses: Iterable[bytes]) -> None:
        for address in addresses:
            host = self._host_of.pop(address)
            self._saves.pop(host, None)
            if self._num_readers[host]:
                self._forgotten.add(host)
            else:
                self._free.append(host)

    def hosts(self) -> set[int]:
        """Host blocks in use here. Raises AssertionError unless they are accounted for."""
        addressed = set(self._host_of.values())
        assert len(addressed) == len(self._host_of), "two addresses share a host block"
        assert addressed.isdisjoint(self._forgotten), "a forgotten host block has an address"
        assert self._saves.keys() <= addressed, "a save that nobody could find"
        read = Counter(host for _, hosts in self._readers.values() for host in hosts) + self._pins
        assert +self._num_readers == read, "a host block is read by others than it counts"
        assert self._forgotten <= read.keys(), "a forgotten host block that nobody reads"
        assert read.keys() <= addressed | self._forgotten, "a sequence loads what is gone"
        for seq, _ in self._readers.values():
            assert seq.state is State.RUNNING, f"sequence {seq.id} does not run, and loads"
        return addressed | self._forgotten
