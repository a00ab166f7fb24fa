"""The engine's settings: one frozen value, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.scheduling.policies import PolicyName

Device = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "fp8"]
Overlap = Literal["auto", "on", "off"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "int4", "int8", "fp8"]

CPU_BLOCK_SIZE = 4
GPU_BLOCK_SIZE = 16
MAX_GB = 1_000_000_000  # whatever memory there is; what is counted in bytes fits into 64 bits


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """
    model           folder of the checkpoint
    quantization    of weights and activations in products; int4: weights that the checkpoint holds in 4 bits stay so,
                    others become int8; auto: int4 or int8 for bfloat16 on a CPU that is fast at it, else none
    kv_cache_dtype  auto: that of the weights; fp8: 8 bits, with a scale for each head of a token, on a GPU
    kv_cache_gb     size of the paged KV cache in 10^9 bytes; None: what is free on a GPU, 0.5 on a CPU
    host_kv_gb      10^9 bytes of host memory for what preempted sequences have computed; 0: it is computed again
    block_size      tokens a KV block holds; None: 4 on a CPU, 16 on a GPU
    max_num_seqs    sequences that run at once
    token_budget    tokens that one step computes at most, decodes included
    policy          who is next in line: one of engine/scheduling/policies/
    priority_ageing_s  seconds of waiting that are worth one step of priority
    tenant_weights  tenants' shares under --policy fair, as NAME=WEIGHT,…; 1 where not named
    target_itl_ms   a step that holds decodes is to take so long at most: its share of prefill adapts; 0: no such target
    overlap         launch a step before the tokens of the one before it are read; auto: on a GPU
    max_model_len   prompt + output of one sequence; None: what the model was trained for, as far as the cache holds it
    threads         of the model's arithmetic; None: one a physical core
    """

    model: str
    device: Device = "auto"
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_gb: float | None = None
    host_kv_gb: float = 0.0
    block_size: int | None = None
    max_num_seqs: int = 64
    token_budget: int = 512
    policy: PolicyName = "priority"
    priority_ageing_s: float = 60.0
    tenant_weights: str = ""
    target_itl_ms: float = 100.0
    overlap: Overlap = "auto"
    max_model_len: int | None = None
    prefix_caching: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise ConfigError(f"--block-size must be a power of two, not {self.block_size}")
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        if self.token_budget <= self.max_num_seqs:
            raise ConfigError(
                f"--token-budget ({self.token_budget}) must exceed --max-num-seqs ({self.max_num_seqs}): "
                "otherwise decodes fill every step and a waiting prompt never advances"
            )
        if not 0 < self.priority_ageing_s < math.inf:
            raise ConfigError(f"--priority-ageing-s must be positive, not {self.priority_ageing_s}")
        if not 0 <= self.target_itl_ms < math.inf:
            raise ConfigError(f"--target-itl-ms must be 0 (no target) or more and finite, not {self.target_itl_ms}")
        if self.weight_of_tenant() and self.policy != "fair":
            raise ConfigError(f"--tenant-weights: --policy {self.policy} has no shares; fair has")
        if self.kv_cache_gb is not None and not 0 < self.kv_cache_gb <= MAX_GB:
            raise ConfigError(f"--kv-cache-gb must be positive and at most {MAX_GB}, not {self.kv_cache_gb}")
        if not 0 <= self.host_kv_gb <= MAX_GB:
            raise ConfigError(f"--host-kv-gb must be from 0 to {MAX_GB}, not {self.host_kv_gb}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"--max-model-len must be at least 2, not {self.max_model_len}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads must be at least 1, not {self.threads}")

    @property
    def target_itl_s(self) -> float | None:
        """None: no target."""
        return self.target_itl_ms / 1e3 if self.target_itl_ms else None

    def tokens_a_block(self, device_type: str) -> int:
        """Small ones waste few slots. A GPU's kernels are made for blocks of 16."""
        return self.block_size or (CPU_BLOCK_SIZE if device_type == "cpu" else GPU_BLOCK_SIZE)

    def weight_of_tenant(self) -> dict[str, float]:
        """Raises ConfigError."""
        weights: dict[str, float] = {}
        for part in filter(None, self.tenant_weights.split(",")):
            name, _, weight = part.partition("=")
            try:
                weights[name] = float(weight)
            except ValueError:
                weights[name] = math.nan
            if not name or not 0 < weights[name] < math.inf:
                raise ConfigError(f"--tenant-weights takes NAME=WEIGHT,… with positive weights, not {part!r}")
        return weights
