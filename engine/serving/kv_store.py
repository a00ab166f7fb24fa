"""Opens the file of KV blocks, and fills the prefix cache from it before the engine serves."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ... import installed_version
from ...settings import EngineConfig
from ..core.errors import ConfigError
from ..core.step import StepPlan
from ..kv.block_file import ENTRY_BYTES, BlockFile
from ..kv.block_store import BlockStore
from ..kv.blocks import BlockPool

if TYPE_CHECKING:
    from ..runners.load import InformedRunner
    from ..runners.runner_info import RunnerInfo

MOST_SLOTS = 1_000_000  # each takes about 300 bytes of the engine's memory once it is used
RESTORE_S = 2.0  # an engine starts that much later at most
_RESTORED_PART = 2  # at most this part of the KV cache
_AT_ONCE = 64  # blocks copied to the device together


def open_store(config: EngineConfig, runner: InformedRunner, weights: str) -> BlockStore:
    """
    weights  their fingerprint

    Raises ConfigError if blocks of this model cannot be kept, or the file cannot be opened.
    """
    info, spec = runner.info, runner.info.kv_cache
    if not config.prefix_caching:
        raise ConfigError("--kv-store needs --prefix-caching: it keeps what that has found")
    if len(spec.groups.windows) > 1:
        raise ConfigError("--kv-store: blocks of a model with sliding windows cannot be kept")
    if not weights:
        raise ConfigError("--kv-store: the weights of this model are random, and differ at the next start")
    num_slots = min(int(config.kv_store_gb * 1e9) // (spec.bytes_per_block + ENTRY_BYTES), MOST_SLOTS)
    if num_slots < 1:
        raise ConfigError(f"--kv-store-gb {config.kv_store_gb} holds no block: one takes {spec.bytes_per_block} bytes")
    layout = layout_of(config, info, weights)
    path = Path(config.kv_store).expanduser() / f"{layout.hex()[:16]}.blocks"
    try:
        return BlockStore(BlockFile(path, layout, spec.bytes_per_block, num_slots), runner)
    except OSError as error:
        raise ConfigError(f"--kv-store {config.kv_store}: {error}") from None


def layout_of(config: EngineConfig, info: RunnerInfo, weights: str) -> bytes:
    """Return 32 bytes that stand for all that decides what a block holds, given its address.

    Kernels count, too: others round otherwise, and an engine computes the same tokens whatever its cache held before.
    """
    facts = (
        installed_version(),
        weights,
        config.max_model_len,  # some rotations depend on it
        info.architecture,
        info.kernels,
        info.weights,
        info.dtype,
        info.cache_dtype,
        info.is_deterministic,
        info.kv_cache,
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def restore(store: BlockStore, pool: BlockPool, num_hosts: int) -> int:
    """Fill up to half of an empty KV cache with the blocks that were used last. Return how many those are.

    Call this before the engine serves, on the thread that computes. It takes RESTORE_S at most.

    num_hosts  blocks of host memory, all of them free
    """
    until = time.monotonic() + RESTORE_S
    addresses = store.latest(pool.num_blocks // _RESTORED_PART)
    at_once = min(_AT_ONCE, num_hosts)
    filled: list[int] = []
    for start in range(0, len(addresses), at_once):
        if time.monotonic() > until:
            break
        hosts = enumerate(addresses[start : start + at_once])
        read = [(host, address) for host, address in hosts if store.load(address, host)]
        blocks = pool.allocate(len(read), after=filled[-1] if filled else -1)
        pairs = [(host, block) for (host, _), block in zip(read, blocks, strict=True)]
        store.rows.copy(StepPlan([], loads=pairs))
        for (_, address), block in zip(read, blocks, strict=True):
            pool.publish(block, address)
        filled += blocks
    pool.note_hit(filled)
    pool.release(filled)
    return len(filled)
