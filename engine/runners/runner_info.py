"""How a runner describes itself: its model, its device and the size of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from ...settings.engine import StepLimits
from ..core.errors import ConfigError
from ..core.layer_groups import LayerGroups
from ..kv.windows import longest_held


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The size of a paged KV cache. One token takes 2 · layers · kv_heads · (head_dim · element_bytes + scale_bytes).

    groups       which layers share block tables
    scale_bytes  of the scale that each head's key, and each head's value, has for a token; 0: there are none
    """

    groups: LayerGroups
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in all layers that hold it."""
        return len(self.groups.places) * self._layer_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.groups.size * self._layer_bytes * self.block_size

    def longest(self, num_blocks: int, token_budget: int) -> int:
        """How many tokens of one sequence so many blocks hold, with steps of this budget."""
        return longest_held(num_blocks, self.groups.windows, token_budget, self.block_size)

    @property
    def _layer_bytes(self) -> int:
        """What a token takes in a layer."""
        return 2 * self.num_kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)


def count_blocks(spec: KVCacheSpec, budget_bytes: int) -> int:
    """How many blocks fit. Raises ConfigError if none does."""
    num_blocks = budget_bytes // spec.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-gb: a KV cache of {budget_bytes} bytes holds no block: "
            f"one of {spec.block_size} tokens takes {spec.bytes_per_block} bytes"
        )
    return num_blocks


def count_host_blocks(spec: KVCacheSpec, host_kv_gb: float) -> int:
    """How many blocks fit into this much host memory, which may be 0. Raises ConfigError if it is less than a block."""
    num_blocks = int(host_kv_gb * 1e9) // spec.bytes_per_block
    if host_kv_gb > 0 and num_blocks < 1:
        raise ConfigError(f"--host-kv-gb {host_kv_gb} holds no block: one takes {spec.bytes_per_block} bytes")
    return num_blocks


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """
    vocab_size       rows of the embedding: valid token ids are below it
    hidden_size      length of a hidden state
    max_model_len    the longest prompt and output together
    limits           of a step
    num_host_blocks  in host memory, for the keys and values of preempted sequences
    instruction_set  what a CPU computes with; empty on other devices
    weights          the format in which weights are multiplied
    cache_dtype      of keys and values
    """

    model: str
    architecture: str
    device: str
    dtype: str
    kernel_backend: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    weight_bytes: int
    kv_cache: KVCacheSpec
    num_blocks: int
    limits: StepLimits
    num_host_blocks: int = 0
    instruction_set: str = ""
    weights: str = "unquantized"
    cache_dtype: str = ""
    is_deterministic: bool = False

    @property
    def kernels(self) -> str:
        """The kernel backend with its instruction set, for people to read."""
        return f"{self.kernel_backend} ({self.instruction_set})" if self.instruction_set else self.kernel_backend

    @property
    def token_capacity(self) -> int:
        """The tokens of the longest sequence that the cache holds."""
        return self.kv_cache.longest(self.num_blocks, self.limits.token_budget)
