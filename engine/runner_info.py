"""What a runner says of itself: its model, its device and how much its KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The size of a paged KV cache. One token takes 2 · layers · kv_heads · (head_dim · element_bytes + scale_bytes).

    scale_bytes  of the scale that each head's key, and each value, of a token has; 0: there is none
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """
    vocab_size     rows of the embedding: valid token ids are below it
    max_model_len  longest prompt + output
    """

    model: str
    architecture: str
    device: str
    dtype: str
    kernel_backend: str
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    kv_cache: KVCacheSpec
    num_blocks: int

    @property
    def token_capacity(self) -> int:
        return self.num_blocks * self.kv_cache.block_size
