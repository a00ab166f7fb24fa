from __future__ import annotations

import pytest

from pagoda_server.channel.strides import chain_root
from pagoda_server.engine.kv.blocks import BlockPool, chain_hash


def chain(*blocks: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    for tokens in blocks:
        hashes.append(chain_hash(hashes[-1] if hashes else chain_root(salt), tokens))
    return hashes


def published(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Return blocks with these contents that are released: cached and evictable."""
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks)
    return blocks


def test_every_block_is_free_evictable_or_referenced() -> None:
    pool = BlockPool(8, 4)
    published(pool, chain([1] * 4, [2] * 4))
    held = pool.allocate(3)
    assert (pool.num_free, pool.num_evictable, pool.num_referenced) == (3, 2, 3)
    pool.check_integrity([held])


def test_unpublished_blocks_become_free_and_published_ones_evictable() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    pool.publish(first, chain([1] * 4)[0])
    pool.release([first, second])
    assert (pool.num_free, pool.num_evictable) == (3, 1)


def test_match_finds_the_longest_cached_run_only() -> None:
    pool = BlockPool(8, 2)
    hashes = chain([1, 2], [3, 4], [5, 6])
    blocks = published(pool, hashes)
    assert pool.match(hashes) == blocks
    assert pool.match(chain([1, 2], [9, 9], [5, 6])) == blocks[:1]
    assert pool.match(chain([9, 9], [3, 4])) == []


def test_an_address_depends_on_everything_before_it_and_on_the_salt() -> None:
    assert chain([1, 2], [3, 4])[1] != chain([9, 9], [3, 4])[1]
    assert chain([1, 2])[0] != chain([1, 2], salt="other")[0]


def test_a_shared_block_is_kept_until_its_last_user_leaves() -> None:
    pool = BlockPool(4, 2)
    hashes = chain([1, 2])
    blocks = published(pool, hashes)
    pool.share(blocks)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_referenced == 1
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.num_referenced == 0


def test_the_least_recently_used_content_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 2)
    old, new = chain([1, 1], [2, 2]), chain([3, 3], [4, 4])
    published(pool, old)
    published(pool, new)
    pool.allocate(1)
    assert len(pool.match(old)) == 1, "the tail of the older chain goes first"
    pool.allocate(1)
    assert pool.match(old) == []
    assert len(pool.match(new)) == 2


def test_flush_forgets_content_but_leaves_blocks_with_their_users() -> None:
    pool = BlockPool(6, 2)
    hashes = chain([1, 1], [2, 2], [3, 3])
    published(pool, hashes)
    in_use = pool.match(hashes)[:1]
    pool.share(in_use)
    assert pool.flush() == 2
    assert pool.match(hashes) == []
    pool.check_integrity([in_use])
    pool.release(in_use)
    assert pool.num_free == 6


def test_content_that_is_cached_already_stays_where_it_is() -> None:
    pool = BlockPool(4, 2)
    hashes = chain([1, 1])
    (cached,) = published(pool, hashes)
    (twin,) = pool.allocate(1)
    pool.publish(twin, hashes[0])
    assert pool.match(hashes) == [cached]
    pool.release([twin])
    assert pool.num_free == 3


def test_check_integrity_notices_a_leak_and_a_double_use() -> None:
    pool = BlockPool(4, 2)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="!= 4 blocks"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([held, held])
