"""The ring against a queue of bytes: any sizes and order, wrap-around, a full ring, and a peer that miscounts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_server.channel.ring import Ring, RingReader, RingWriter


@contextmanager
def ring_of(size: int) -> Iterator[Ring]:
    filled, freed = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    try:
        yield Ring(memoryview(bytearray(size)), filled, freed)
    finally:
        os.close(filled)
        os.close(freed)


OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.binary(max_size=40)),
    st.tuples(st.just("read"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["notice", "release"]), st.none()),
)


@given(st.integers(1, 16), st.lists(OPERATIONS, max_size=60))
def test_a_ring_is_a_queue_of_bytes_that_never_holds_more_than_its_size(size: int, operations: list) -> None:
    with ring_of(size) as ring:
        writer, reader = RingWriter(ring), RingReader(ring)
        queue = b""  # written, not read
        unreleased = 0
        for operation, argument in operations:
            if operation == "write":
                written = writer.write(memoryview(argument))
                assert written == min(len(argument), size - len(queue) - unreleased)
                queue += argument[:written]
            elif operation == "read":
                count = min(argument, reader.available)
                assert reader.read(count) == queue[:count]
                queue = queue[count:]
                unreleased += count
            elif operation == "release":
                reader.release()
                unreleased = 0
            else:
                reader.notice()
                assert reader.available == len(queue)


def test_nothing_is_read_before_it_was_noticed() -> None:
    with ring_of(8) as ring:
        RingWriter(ring).write(memoryview(b"abc"))
        reader = RingReader(ring)
        assert reader.available == 0
        reader.notice()
        assert reader.read(reader.available) == b"abc"


def test_a_writer_that_counts_more_than_the_ring_holds_is_found_out() -> None:
    with ring_of(8) as ring:
        reader = RingReader(ring)
        RingWriter(ring).write(memoryview(b"12345678"))
        reader.notice()
        os.eventfd_write(ring.filled, 1)
        with pytest.raises(ConnectionError, match="9 bytes in a ring of 8"):
            reader.notice()


def test_a_reader_that_frees_more_than_the_ring_holds_is_found_out() -> None:
    with ring_of(8) as ring:
        writer = RingWriter(ring)
        writer.write(memoryview(b"123"))
        os.eventfd_write(ring.freed, 4)
        with pytest.raises(ConnectionError, match="9 bytes in a ring of 8"):
            writer.write(memoryview(b"12345678"))
