"""A file of KV blocks returns what was written or nothing, whatever happens to it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest

from pagoda_server.engine.kv import block_file
from pagoda_server.engine.kv.block_file import ENTRY_BYTES, TABLE_AT, BlockFile, NotLocked, StoredBlock

SIZE = 96  # bytes of a block
LAYOUT = bytes(range(32))
ROOT = sha256(b"root").digest()


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def opened(path: Path, num_slots: int = 4, clock: Clock | None = None, layout: bytes = LAYOUT) -> BlockFile:
    return BlockFile(path, layout, SIZE, num_slots, clock or Clock())


def address(name: int) -> bytes:
    return sha256(b"%d" % name).digest()


def content(name: int) -> memoryview:
    return memoryview((address(name) * 3)[:SIZE])


def write(file: BlockFile, names: Iterable[int]) -> None:
    """Write blocks that follow each other: block 12 follows block 11, and block 10 is the first."""
    for name in names:
        parent = address(name - 1) if name % 10 else ROOT
        file.write([(StoredBlock(address(name), parent, name % 10), content(name))])


def read(file: BlockFile, names: Iterable[int]) -> list[int]:
    """Return the names of the blocks that the file has. Each must be as it was written."""
    found = []
    for name in names:
        into = bytearray(SIZE)
        if file.read(address(name), memoryview(into)):
            assert into == content(name), f"block {name} is another one"
            found.append(name)
    return found


def test_blocks_are_found_after_the_file_was_opened_again(path: Path) -> None:
    write(opened(path), [10, 11, 20])
    again = opened(path)
    assert len(again) == 3
    assert read(again, [10, 11, 12, 20]) == [10, 11, 20]
    assert not again.holds(address(12))


def test_a_file_of_another_layout_or_size_is_replaced_and_whoever_has_it_open_keeps_it(path: Path) -> None:
    first = opened(path)
    write(first, [10])
    assert read(opened(path, layout=bytes(32)), [10]) == []
    assert read(first, [10]) == [10]
    second = opened(path)
    write(second, [20])
    assert read(opened(path, num_slots=5), [20]) == []


@pytest.mark.parametrize("cut", [0, 5, TABLE_AT, TABLE_AT + 30])
def test_a_file_that_was_cut_short_is_replaced(path: Path, cut: int) -> None:
    write(opened(path), [10])
    os.truncate(path, cut)
    file = opened(path)
    assert read(file, [10]) == []
    write(file, [10])
    assert read(file, [10]) == [10]


def test_what_was_not_used_for_longest_makes_room(path: Path, clock: Clock) -> None:
    file = opened(path, clock=clock)
    for name in (10, 20, 30, 40):
        write(file, [name])
        clock.now += 100
    file.touch([address(10), address(99)])
    write(file, [50, 60])
    assert read(file, [10, 20, 30, 40, 50, 60]) == [10, 40, 50, 60]


def test_a_block_whose_last_use_is_damaged_is_not_kept_for_ever(path: Path, clock: Clock) -> None:
    write(opened(path, clock=clock), [10, 20, 30, 40])
    with path.open("r+b") as file:
        file.seek(TABLE_AT + ENTRY_BYTES - 4)
        file.write(b"\xff\xff\xff\xff")
    again = opened(path, clock=clock)
    write(again, [50])
    assert read(again, [10, 20, 30, 40, 50]) == [20, 30, 40, 50]


def test_the_end_of_a_sequence_makes_room_before_its_beginning(path: Path, clock: Clock) -> None:
    file = opened(path, clock=clock)
    for name in (10, 11, 12, 13):
        write(file, [name])
        clock.now += 100
    write(file, [20])
    assert read(file, [10, 11, 12, 13, 20]) == [10, 11, 12, 20]


def test_the_last_used_sequences_are_listed_from_their_beginnings(path: Path, clock: Clock) -> None:
    file = opened(path, num_slots=8, clock=clock)
    for names in ([10, 11, 12], [20, 21], [31]):
        write(file, names)
        clock.now += 100
    assert file.latest(10) == [address(name) for name in (20, 21, 10, 11, 12)], "31 has no beginning"
    file.touch([address(name) for name in (10, 11, 12)])
    assert file.latest(4) == [address(name) for name in (10, 11, 12, 20)]


def test_processes_find_what_others_write_and_do_not_overwrite_it(path: Path) -> None:
    one, two = opened(path), opened(path)
    write(one, [10])
    assert read(two, [10]) == []
    write(two, [20])
    one.refresh()
    assert read(one, [10, 20]) == read(two, [10, 20]) == [10, 20]


def test_a_block_that_another_process_overwrote_is_not_found(path: Path, clock: Clock) -> None:
    one = opened(path, num_slots=1, clock=clock)
    write(one, [10])
    write(opened(path, num_slots=1, clock=clock), [20])
    assert one.holds(address(10))
    assert read(one, [10]) == []
    assert one.num_damaged == 0
    assert not one.holds(address(10))


def test_a_cleared_file_is_empty_for_all(path: Path) -> None:
    one, two = opened(path), opened(path)
    write(one, [10, 11])
    two.refresh()
    one.clear()
    two.refresh()
    assert (len(one), len(two), len(opened(path))) == (0, 0, 0)
    write(two, [10])
    assert read(two, [10]) == [10]


def test_a_process_that_holds_the_lock_ends_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_file, "_LOCK_TRIES", 2)
    file = opened(path)
    write(file, [10])
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NotLocked):
            write(file, [20])
        assert read(file, [10]) == [10]
    write(file, [20])
    assert read(file, [10, 20]) == [10, 20]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_process_may_die_at_any_byte_of_a_write(path: Path, monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
    write(opened(path, num_slots), [10, 20])
    before = path.read_bytes()
    pwrite = os.pwrite
    for most in range(3 * ENTRY_BYTES + SIZE + 16):
        path.write_bytes(before)
        file, left = opened(path, num_slots), most

        def write_some(fd: int, data: bytes, at: int) -> int:
            nonlocal left
            pwrite(fd, bytes(data)[:left], at)
            left -= len(data)
            if left < 0:
                raise Killed
            return len(data)

        monkeypatch.setattr(os, "pwrite", write_some)
        was_killed = False
        try:
            write(file, [30])
        except Killed:
            was_killed = True
        monkeypatch.undo()
        file.close()
        again = opened(path, num_slots)
        found = read(again, [10, 20, 30])
        assert len(found) >= num_slots - 1
        assert was_killed or 30 in found
        write(again, [40])
        assert 40 in read(again, [10, 20, 30, 40])
        again.close()


def test_a_flipped_bit_anywhere_loses_one_block_at_most(path: Path) -> None:
    write(opened(path, 2), [10, 11])
    whole = path.read_bytes()
    for at in range(TABLE_AT, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        file = opened(path, 2)
        assert len(read(file, [10, 11])) >= 1
        file.close()


def test_an_empty_disk_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(path)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:40], at))
    with pytest.raises(OSError, match="the disk is full"):
        write(file, [10])
    monkeypatch.undo()
    assert read(file, [10]) == []
    write(file, [10, 11, 20, 21])
    assert read(file, [10, 11, 20, 21]) == [10, 11, 20, 21]


WRITER = """
import sys
from pathlib import Path
from tests.engine.test_block_file import opened, write
file = opened(Path(sys.argv[1]), 64)
print("ready", flush=True)
for turn in range(10**6):
    write(file, [10 * (turn * int(sys.argv[2]) % 500)])
"""


@pytest.mark.thorough
def test_writers_that_are_killed_leave_only_whole_blocks(path: Path) -> None:
    for _ in range(12):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(step)], stdout=subprocess.PIPE, text=True)
            for step in (3, 7)
        ]
        for each in writers:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        reader = opened(path, 64)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            reader.refresh()
            read(reader, range(0, 5000, 10))
        for each in writers:
            each.send_signal(signal.SIGKILL)
            each.communicate()
        assert reader.num_damaged < 64
        reader.close()
    again = opened(path, 64)
    found = read(again, range(0, 5000, 10))
    assert len(found) >= 62, "each writer was killed in one write"
    assert again.num_damaged == 0
