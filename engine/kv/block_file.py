"""A file of KV blocks that outlives the engine: each block under its address, with a checksum.

The file has a header, a table with an entry for each slot, and the slots:

    0               magic, version, layout, block size in bytes, number of slots
    GENERATION_AT   a number that grows with each change of the table
    TABLE_AT        entries: address, parent's address, position, two checksums, second of last use
    behind it       slots of block_bytes each

A block is written into an empty slot, then its entry. A process that is killed between the two leaves an empty slot.
Nothing waits for the disk to be done: what a loss of power tears apart, the checksum over address and content finds. A
block that fails it is not there.

Engines of one host share a file. Writers take turns by a lock on the file, which ends with its holder. Readers take no
lock: they find out by the entry and the checksum whether a slot was overwritten while they read it.

The file is read and written, not mapped. Python would hold its lock while a mapped page comes from the disk, and a file
that somebody cuts short would end the process.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<16s32sQQ")
_MAGIC = b"pagoda-blocks-1\n"  # another format has another number
GENERATION_AT = 512
TABLE_AT = 4096
_ENTRY = struct.Struct("<32s32sIIII")
ENTRY_BYTES = _ENTRY.size
_CHECKED_BYTES = 72  # of an entry: all before its own checksum
_COMPARED_ENTRIES = 64  # at once, to find out which entries have changed
_NO_ENTRY = bytes(ENTRY_BYTES)

_TOUCH_EVERY_S = 60  # a use is noted no more often: each is a write
_LOCK_TRIES, _LOCK_PAUSE_S = 250, 0.002
_VICTIMS_PART = 32  # one sort chooses this part of all slots to be overwritten


class NotLocked(OSError):
    """Another process has held the lock for longer than a write takes."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """
    address   of the block (engine/kv/blocks.py)
    parent    the address of the block before it, or the root of its prompt
    position  in its sequence's block table
    """

    address: bytes
    parent: bytes
    position: int


class BlockFile:
    """
    path         of the file; its folder is made, for this user alone
    layout       32 bytes that stand for all that decides what a block's bytes mean
    block_bytes  of one block
    num_slots    blocks that the file holds at most
    now          seconds since 1970

    A file of another layout, block size or number of slots is replaced by an empty one; a process that has it open
    keeps it. Methods are for one thread, except `holds`. They raise OSError where nothing is said about errors.
    """

    def __init__(
        self, path: Path, layout: bytes, block_bytes: int, num_slots: int, now: Callable[[], float] = time.time
    ) -> None:
        self.num_damaged = 0  # blocks that failed their checksum
        self._now = now
        self._block_bytes = block_bytes
        self._num_slots = num_slots
        self._data_at = TABLE_AT + num_slots * ENTRY_BYTES
        self._index: dict[bytes, int] = {}  # address → slot
        self._address_of: dict[int, bytes] = {}  # by slot
        self._fresh = iter(range(num_slots))  # slots that this process has not tried yet
        self._empty: list[int] = []  # slots that have lost their content; others linger among them
        self._victims: deque[tuple[int, int, int]] = deque()  # slots to be overwritten next, with their ranks
        self._table = bytearray(num_slots * ENTRY_BYTES)  # as this process has read or written it
        self._generation = -1
        self._fd = self._open(path, _HEADER.pack(_MAGIC, layout, block_bytes, num_slots))
        self.refresh()

    def _open(self, path: Path, header: bytes) -> int:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        size = self._data_at + self._num_slots * self._block_bytes
        try:
            with _locked(folder):
                if not _begins_with(path, header, size):
                    new = path.with_suffix(".new")
                    with open(new, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                        file.write(header)
                        file.truncate(size)
                    new.rename(path)
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(folder)

    def close(self) -> None:
        os.close(self._fd)

    def __len__(self) -> int:
        return len(self._index)

    def holds(self, address: bytes) -> bool:
        """Say whether a block is in the file, as far as this process knows. Any thread may ask."""
        return address in self._index

    def read(self, address: bytes, into: memoryview) -> bool:
        """Read a block; return False, and leave anything in `into`, if it is not there or damaged.

        into  [block_bytes]
        """
        slot = self._index.get(address)
        if slot is None:
            return False
        entry = os.pread(self._fd, ENTRY_BYTES, TABLE_AT + slot * ENTRY_BYTES)
        if len(entry) == ENTRY_BYTES and entry[:32] == address:
            count = os.preadv(self._fd, [into], self._slot_at(slot))
            _, _, _, checksum, _, _ = _ENTRY.unpack(entry)
            if count == self._block_bytes and _checksum(entry, into) == checksum:
                return True
            self.num_damaged += 1
        self._drop(slot)
        return False

    def write(self, blocks: Iterable[tuple[StoredBlock, memoryview]]) -> int:
        """Write blocks with their content, those that are not there yet. Return how many were written.

        Where the file is full, blocks that were not used for longest are overwritten, the ends of sequences first.
        """
        count = 0
        with _locked(self._fd):
            self.refresh()
            try:
                for block, content in blocks:
                    if block.address not in self._index:
                        self._write(block, content)
                        count += 1
            finally:
                self._changed()
        return count

    def _write(self, block: StoredBlock, content: memoryview) -> None:
        slot = self._choose_slot()
        if slot in self._address_of:
            self._write_entry(slot, _NO_ENTRY)
        self._empty.append(slot)  # until its entry is written
        if os.pwrite(self._fd, content, self._slot_at(slot)) != self._block_bytes:
            raise OSError("a block was written in part: the disk is full")
        # No block is noted as used later than its parent, so that parents are overwritten after their children.
        parent = self._index.get(block.parent)
        used = int(self._now()) if parent is None else self._used(parent)
        entry = bytearray(_ENTRY.pack(block.address, block.parent, block.position, 0, 0, used))
        struct.pack_into("<I", entry, 68, _checksum(entry, content))
        struct.pack_into("<I", entry, _CHECKED_BYTES, zlib.crc32(entry[:_CHECKED_BYTES]))
        self._write_entry(slot, bytes(entry))

    def touch(self, addresses: Iterable[bytes]) -> None:
        """Note that blocks were used now."""
        now = int(self._now())
        for address in addresses:
            slot = self._index.get(address)
            if slot is not None and not 0 <= now - self._used(slot) < _TOUCH_EVERY_S:
                used = struct.pack("<I", now)
                at = slot * ENTRY_BYTES + ENTRY_BYTES - len(used)
                self._table[at : at + len(used)] = used
                os.pwrite(self._fd, used, TABLE_AT + at)

    def clear(self) -> None:
        """Forget all blocks, for all processes."""
        with _locked(self._fd):
            os.pwrite(self._fd, bytes(len(self._table)), TABLE_AT)
            self._read_table()
            self._changed()

    def refresh(self) -> None:
        """Find out what other processes have written."""
        generation = self._read_generation()
        if generation != self._generation:
            self._read_table()
            self._generation = generation

    def latest(self, most: int) -> list[bytes]:
        """Return the addresses of blocks whose beginnings are there: the last used sequences, each from its start.

        most  addresses; one sequence may exceed it, and is cut
        """
        chosen: dict[bytes, None] = {}
        for _, _, slot in sorted(self._ranks(), reverse=True):
            chain: list[bytes] = []
            at: int | None = slot
            while at is not None and (address := self._address_of[at]) not in chosen:
                chain.append(address)
                _, parent, position, _, _, _ = self._entry(at)
                if position == 0:
                    break
                at = self._index.get(parent) if len(chain) <= self._num_slots else None
            else:
                if at is None:
                    continue  # its beginning is gone
            chosen.update(dict.fromkeys(reversed(chain)))
            if len(chosen) >= most:
                break
        return list(chosen)[:most]

    # -- slots and entries --------------------------------------------------------------------------------------------

    def _slot_at(self, slot: int) -> int:
        return self._data_at + slot * self._block_bytes

    def _entry(self, slot: int) -> tuple[bytes, bytes, int, int, int, int]:
        return _ENTRY.unpack_from(self._table, slot * ENTRY_BYTES)

    def _used(self, slot: int) -> int:
        """Return the second of a block's last use; 0 if that has not come yet: no checksum covers it."""
        used = self._entry(slot)[5]
        return used if used <= self._now() else 0

    def _ranks(self) -> Iterator[tuple[int, int, int]]:
        """Yield each block's second of last use, its negated position and its slot: the lowest is given up first."""
        for slot in self._address_of:
            yield self._used(slot), -self._entry(slot)[2], slot

    def _choose_slot(self) -> int:
        while (slot := self._empty.pop() if self._empty else next(self._fresh, None)) is not None:
            if slot not in self._address_of:
                return slot
        while True:
            if not self._victims:
                self._read_table()  # for what other processes have used
                self._victims.extend(sorted(self._ranks())[: 1 + self._num_slots // _VICTIMS_PART])
            rank = self._victims.popleft()
            slot = rank[2]
            if slot in self._address_of and rank == (self._used(slot), -self._entry(slot)[2], slot):
                return slot

    def _write_entry(self, slot: int, entry: bytes) -> None:
        os.pwrite(self._fd, entry, TABLE_AT + slot * ENTRY_BYTES)
        self._note(slot, entry)

    def _note(self, slot: int, entry: bytes) -> None:
        """Take in what a slot's entry says now."""
        self._table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = entry
        self._drop(slot)
        address, _, _, _, checksum, _ = _ENTRY.unpack(entry)
        if entry != _NO_ENTRY and zlib.crc32(entry[:_CHECKED_BYTES]) == checksum and address not in self._index:
            self._index[address] = slot
            self._address_of[slot] = address

    def _drop(self, slot: int) -> None:
        if (address := self._address_of.pop(slot, None)) is not None:
            del self._index[address]
            self._empty.append(slot)

    def _read_table(self) -> None:
        table = os.pread(self._fd, len(self._table), TABLE_AT).ljust(len(self._table), b"\0")
        size = _COMPARED_ENTRIES * ENTRY_BYTES
        for start in range(0, len(table), size):
            if table[start : start + size] != self._table[start : start + size]:
                for at in range(start, min(start + size, len(table)), ENTRY_BYTES):
                    entry = table[at : at + ENTRY_BYTES]
                    if entry != self._table[at : at + ENTRY_BYTES]:
                        self._note(at // ENTRY_BYTES, entry)

    def _read_generation(self) -> int:
        return int.from_bytes(os.pread(self._fd, 8, GENERATION_AT), "little")

    def _changed(self) -> None:
        """Let other processes know that the table has changed. The caller holds the lock."""
        self._generation = (self._read_generation() + 1) % 2**64
        os.pwrite(self._fd, self._generation.to_bytes(8, "little"), GENERATION_AT)


def _checksum(entry: bytes | bytearray, content: memoryview) -> int:
    """Return the checksum of a block's address, parent, position and content."""
    return zlib.crc32(content, zlib.crc32(entry[:68]))


def _begins_with(path: Path, header: bytes, size: int) -> bool:
    """Say whether a file has this size and header."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == size and file.read(len(header)) == header
    except FileNotFoundError:
        return False


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Hold the lock on an open file. Raises NotLocked if others hold it for half a second."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    else:
        raise NotLocked("the block file is locked by another process")
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
