"""What the prefix caches of engines hold, as the events that smg's `cache_aware` policy reads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from ..engines.block_events import Change
from .protocols import smg_common_pb2 as smg

BATCH_BLOCKS = 1024  # a message of 64-token blocks then has at most about 200 kB


def batches(change: Change, next_number: int) -> Iterator[smg.KvEventBatch]:
    """Yield a change in parts, which are numbered from `next_number` on."""
    for start in range(0, max(len(change.stored), len(change.removed)), BATCH_BLOCKS):
        events = list(_stored(change, start))
        if removed := change.removed[start : start + BATCH_BLOCKS]:
            hashes = map(_signed, removed)
            events.append(smg.KvCacheEvent(removed=smg.KvBlocksRemoved(block_hashes=hashes)))
        yield _batch(next_number, events)
        next_number += 1


def cleared(number: int) -> smg.KvEventBatch:
    return _batch(number, [smg.KvCacheEvent(cleared=smg.KvCacheCleared())])


def _stored(change: Change, start: int) -> Iterator[smg.KvCacheEvent]:
    """Yield an event for each run of blocks that follow each other."""
    last, event = None, smg.KvCacheEvent()
    for block in change.stored[start : start + BATCH_BLOCKS]:
        if last is None or not block.HasField("parent") or block.parent != last:
            if last is not None:
                yield event
            event = smg.KvCacheEvent(stored=smg.KvBlocksStored())
            if block.HasField("parent"):
                event.stored.parent_block_hash = _signed(block.parent)
        size = len(block.tokens)
        event.stored.blocks.add(block_hash=_signed(block.hash), token_ids=block.tokens, block_size=size)
        last = block.hash
    if last is not None:
        yield event


def _batch(number: int, events: Iterable[smg.KvCacheEvent]) -> smg.KvEventBatch:
    batch = smg.KvEventBatch(sequence_number=number, timestamp=time.time(), events=events)
    for event in batch.events:
        event.event_id = number
    return batch


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key
