"""Free blocks are handed out side by side where possible; none is lost or handed out twice."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.engine.kv.blocks import BlockPool, FreeBlocks
from tests.engine.test_blocks import chain, published


def num_runs(blocks: list[int]) -> int:
    return 1 + sum(second != first + 1 for first, second in pairwise(blocks))


def test_sequences_that_grow_in_turns_have_stretches_of_neighbours() -> None:
    pool = BlockPool(64, 4)
    tables: list[list[int]] = [[] for _ in range(8)]
    for _ in range(8):
        for table in tables:
            table += pool.allocate(1, after=table[-1] if table else -1)
    assert [num_runs(table) for table in tables] == [1] * 8, "32 tokens lie together"


def test_any_sequence_may_take_the_rest_of_a_stretch() -> None:
    pool = BlockPool(16, 4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert second[0] // 8 != first[0] // 8
    assert len(pool.allocate(14)) == 14
    assert pool.num_free == 0


def test_a_prompt_gets_one_run_of_an_empty_pool() -> None:
    assert BlockPool(100, 4).allocate(90) == list(range(90))


def test_where_all_is_cached_stretches_are_evicted_for_those_that_grow() -> None:
    pool = BlockPool(1024, 4)
    for number in range(128):
        published(pool, chain(*([number * 10 + at] * 4 for at in range(8))))
    assert pool.num_free == 0
    tables: list[list[int]] = [[] for _ in range(4)]
    for _ in range(8):
        for table in tables:
            table += pool.allocate(1, after=table[-1] if table else -1)
    assert all(num_runs(table) <= 2 for table in tables)
    assert pool.num_free <= 1024 // 32 + 8, "little more is given up than is used"
    pool.check_integrity(tables)


def test_blocks_of_a_whole_stretch_are_taken_in_any_order() -> None:
    free = FreeBlocks(4, 32)
    assert [free.take(-1) for _ in range(4)] == [0, 1, 2, 3]
    free.add([2])
    assert free.take(0) == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8, 16]), st.lists(st.integers(0, 10**6), max_size=120))
def test_free_blocks_are_a_set(num_blocks: int, block_size: int, choices: list[int]) -> None:
    free, taken = FreeBlocks(num_blocks, block_size), set[int]()
    for choice in choices:
        if len(taken) == num_blocks or (taken and choice % 2):
            free.add([block := sorted(taken)[choice % len(taken)]])
            taken.remove(block)
        else:
            block = free.take(choice % (num_blocks + 1) - 1)
            assert block not in taken
            taken.add(block)
        assert sorted(free) == sorted(set(range(num_blocks)) - taken)
        assert free.num_free == num_blocks - len(taken)
        groups = [range(at, min(at + free.stretch, num_blocks)) for at in range(0, num_blocks, free.stretch)]
        assert free.num_whole == sum(len(group) == free.stretch and taken.isdisjoint(group) for group in groups)
