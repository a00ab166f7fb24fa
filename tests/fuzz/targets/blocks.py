"""A file of KV blocks under patches: each names a place, a length and bytes. Entries' own checksums are made to fit.

Thus what an entry says is trusted as far as its block's checksum goes.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from pathlib import Path

from pagoda_server.engine.kv.block_file import ENTRY_BYTES, TABLE_AT, BlockFile
from tests.engine.test_block_file import SIZE, opened, read, write
from tests.fuzz.common import folder_of

NUM_SLOTS = 4
NAMES = [10, 11, 20]
CHECKED = ENTRY_BYTES - 8  # bytes of an entry before its checksum


def _whole() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks"
        write(opened(path, NUM_SLOTS), NAMES)
        return path.read_bytes()


WHOLE = _whole()


def check(data: bytes) -> bool:
    content = bytearray(WHOLE)
    while len(data) > 3:
        at, length = struct.unpack_from("<HB", data)
        patch, data = data[3 : 3 + length], data[3 + length :]
        at = TABLE_AT + at % (len(WHOLE) - TABLE_AT)
        patch = patch[: len(WHOLE) - at]
        content[at : at + len(patch)] = patch
    for at in range(TABLE_AT, TABLE_AT + NUM_SLOTS * ENTRY_BYTES, ENTRY_BYTES):
        struct.pack_into("<I", content, at + CHECKED, zlib.crc32(content[at : at + CHECKED]))
    with folder_of(blocks=bytes(content)) as folder:
        file = opened(folder / "blocks", NUM_SLOTS)
        try:
            return _check(file)
        finally:
            file.close()


def _check(file: BlockFile) -> bool:
    latest = file.latest(NUM_SLOTS)
    assert len(latest) == len(set(latest)) <= NUM_SLOTS
    for address in latest:
        file.read(address, memoryview(bytearray(SIZE)))
    found = read(file, NAMES)
    write(file, [30, 31, 32])
    assert read(file, [32]) == [32]
    return found == NAMES
