"""A model as it is served: its weights on a device, the backend that computes it, and the cache that it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from ...checkpoints.progress import Progress, no_progress
from ...kernels import (
    UNQUANTIZED,
    Backend,
    PagedKV,
    has_native,
    has_native_int8_weight,
    instruction_set,
    load_backend,
)
from ...kernels.paged import GREATEST
from ...settings.engine import EngineConfig, Quantization
from ..core.errors import ConfigError, EngineError, NotEnoughMemory
from ..core.layer_groups import LayerGroups
from ..models import Decoder, attention_share, load_model, read_config
from ..models.adapted import AdapterBanks
from ..models.config import Names
from ..models.share import WHOLE, Share
from ..models.tensors import Checkpoint
from ..models.weights import Weights
from .runner_info import KVCacheSpec, RunnerInfo, count_host_blocks

Kernels: TypeAlias = tuple[str, str]  # the name of a backend, and the format of its weights

DEFAULT_CPU_BYTES = 500_000_000  # of a KV cache

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_OUT_OF_MEMORY = ("cannot allocate memory", "out of memory", "alloc_failed", "can't allocate memory")  # in lower case


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """
    longest      tokens of a sequence, prompt and output: what the model was trained for, or --max-model-len
    spec         the size of its KV cache, of all ranks together
    cache_dtype  of the cache's pages
    share        the part of the model that this is
    """

    name: str
    model: Decoder
    ops: Backend
    device: torch.device
    dtype: torch.dtype
    longest: int
    spec: KVCacheSpec
    cache_dtype: torch.dtype
    share: Share = WHOLE

    def info(self, num_blocks: int, settings: EngineConfig) -> RunnerInfo:
        """Describes the model with a cache of this size. Raises ConfigError if that is too small."""
        wanted_len, limits = settings.max_model_len, settings.step_limits(self.device.type)
        config = self.model.config
        return RunnerInfo(
            model=self.name,
            architecture=config.family,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            kernel_backend=str(self.ops),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_model_len=longest_cached(self.longest, self.spec.longest(num_blocks, limits.token_budget), wanted_len),
            weight_bytes=self.model.weight_bytes,
            kv_cache=self.spec,
            num_blocks=num_blocks,
            limits=limits,
            num_host_blocks=count_host_blocks(self.spec, settings.host_kv_gb),
            instruction_set=instruction_set() if self.device.type == "cpu" else "",
            weights=self.ops.weights,
            cache_dtype=str(self.cache_dtype).removeprefix("torch."),
            is_deterministic=self.ops.is_deterministic,
        )

    def adapter_banks(self, config: EngineConfig) -> AdapterBanks | None:
        """Make the slots for adapters; None: there are none."""
        num_slots = config.number_on(self.device.type, "max_adapters")
        if not num_slots:
            return None
        products = self.model.adapted_products
        with enough_memory("the slots of adapters", "--max-adapters", "--max-lora-rank"):
            return AdapterBanks(products, self.spec.head_dim, num_slots, config.max_lora_rank, self.dtype, self.device)

    def allocate_pages(self, num_blocks: int) -> list[PagedKV]:
        """The pages of a group's layers. They are not cleared, so on a CPU unused memory is not resident."""
        spec, config = self.spec, self.model.config
        _, kv_heads = attention_share(config, self.share).heads(config.num_heads, config.num_kv_heads)
        shape = (spec.groups.size, 2, num_blocks, spec.block_size, kv_heads.size)
        pages = torch.empty(*shape, spec.head_dim, device=self.device, dtype=self.cache_dtype)
        if not spec.scale_bytes:
            return [PagedKV(keys, values) for keys, values in pages]
        scales = torch.empty(shape, device=self.device, dtype=torch.float32)
        return [PagedKV(*layer, *layer_scales) for layer, layer_scales in zip(pages, scales, strict=True)]


def load_for_serving(
    config: EngineConfig,
    device: torch.device,
    progress: Progress = no_progress,
    backend: Kernels | None = None,
    make_weights: type[Weights] = Weights,
    share: Share = WHOLE,
) -> LoadedModel:
    """
    backend       the kernels to use; None: the best for this device
    make_weights  MeasuredWeights for a model whose sizes alone are wanted
    share         the part of the model that this rank has

    Raises ConfigError if the checkpoint cannot be served with these settings.
    """
    folder = Path(config.model)
    model = read_config(folder, config.max_model_len)  # first, because it names an architecture that is not supported
    with enough_memory("the weights", "--quantization"):  # it maps them
        dtype = choose_dtype(config.dtype, folder, model.names)
    cache_dtype = _CACHE_DTYPES.get(config.kv_cache_dtype, dtype)
    if device.type == "cpu" and cache_dtype == torch.int8 and dtype == torch.float16:
        raise ConfigError("--kv-cache-dtype int8: on a CPU the model can be in bfloat16 or float32, not in float16")
    if cache_dtype in GREATEST and model.head_norms_behind:  # its queries are normalised once these pages are written
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype} is not supported for {model.family}")
    longest = longest_trained(model.max_position_embeddings, config.max_model_len)
    if backend is None:
        backend = choose_backend(
            device,
            dtype,
            config.quantization,
            model.has_grouped_weights,
            is_deterministic=config.deterministic,
            has_float8_weights=model.has_float8_weights,
        )
    ops = load_backend(*backend, config.deterministic)
    packs = config.quantization == "int4" and not model.has_grouped_weights
    with enough_memory("the weights", "--quantization"):
        loaded = load_model(folder, ops, device, dtype, progress, config.max_model_len, make_weights, packs, share)
        if ops.looks_up_rotations:
            loaded.tabulate_rotations(longest)
    spec = KVCacheSpec(
        LayerGroups.of(model.windows, longest),
        model.num_kv_heads,
        model.head_dim,
        cache_dtype.itemsize,
        config.tokens_a_block(device.type),
        scale_bytes=torch.float32.itemsize if cache_dtype in GREATEST else 0,
    )
    return LoadedModel(folder.name, loaded, ops, device, dtype, longest, spec, cache_dtype, share)


@contextmanager
def enough_memory(purpose: str, *flags: str, error: type[EngineError] = NotEnoughMemory) -> Iterator[None]:
    """Raises `error`, which names the flags that can help, if the device's memory runs out inside."""
    try:
        yield
    except RuntimeError as cause:
        if not _is_out_of_memory(cause):
            raise
        reason = str(cause).splitlines()[0].rpartition("DefaultCPUAllocator: ")[2].partition(". ")[0]
        raise error(f"not enough device memory for {purpose} ({reason}); {', '.join(flags)} can help") from cause


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Torch has an exception for its GPU allocator only, not for the host, graphs, cuBLAS or loading kernels."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(part in text for part in _OUT_OF_MEMORY)


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, folder: Path, names: Names) -> torch.dtype:
    """`auto` means float32 for a checkpoint whose embedding is in float32, and bfloat16 for any other."""
    if name != "auto":
        return _DTYPES[name]
    checkpoint = Checkpoint(folder)
    is_float32 = checkpoint.dtype_of(f"{names.as_in(checkpoint.has).embedding}.weight") == torch.float32
    return torch.float32 if is_float32 else torch.bfloat16


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization,
    has_grouped_weights: bool = False,
    is_deterministic: bool = False,
    has_float8_weights: bool = False,
) -> Kernels:
    """The fastest kernel backend and format of weights. Raises ConfigError if none computes with these settings."""
    if device.type == "cpu":
        return _choose_cpu_backend(dtype, quantization, has_grouped_weights, is_deterministic)
    if quantization == "fp8":
        check_fp8("--quantization", device)
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"--device {device} needs Triton: pip install 'pagoda[gpu]'")
    if quantization == "int4" or (quantization == "auto" and (has_grouped_weights or has_float8_weights)):
        return "triton", "groups"
    return "triton", {"int8": "int8-weight", "fp8": "fp8"}.get(quantization, UNQUANTIZED)


def _choose_cpu_backend(
    dtype: torch.dtype, quantization: Quantization, has_grouped_weights: bool, is_deterministic: bool
) -> Kernels:
    if is_deterministic and dtype == torch.float16:
        raise ConfigError("--deterministic: the model can be in bfloat16 or float32, not in float16")
    if is_deterministic and not has_native():
        raise ConfigError("--deterministic needs Pagoda installed where there is a C++ compiler")
    uses_amx = has_native_int8_weight() and not is_deterministic  # the order of its sums depends on the rows
    if quantization == "fp8":
        check_fp8("--quantization", torch.device("cpu"))
    if quantization == "auto":
        quantization = _best_quantization(dtype, has_grouped_weights, uses_amx)
    if quantization == "none":
        return "native" if has_native() else "cpu", UNQUANTIZED
    if dtype == torch.float16:
        raise ConfigError(f"--quantization {quantization}: activations can be bfloat16 or float32, not float16")
    if not has_native():
        raise ConfigError(f"--quantization {quantization} needs Pagoda installed where there is a C++ compiler")
    # Activations stay in bfloat16 if products of bfloat16 are as fast as those of int8.
    return "native", "int8-weight" if quantization == "int8" and uses_amx else quantization


def _best_quantization(dtype: torch.dtype, has_grouped_weights: bool, uses_amx: bool) -> Quantization:
    """What `auto` means on a CPU: the fastest choice, as measured in docs/performance.md.

    Weights in 4 bits are used as the checkpoint holds them, so they lose less than they would in int8. With AMX,
    products of int8 weights are the fastest; without instructions for bytes, products of whole weights are.
    """
    if dtype != torch.bfloat16 or not has_native() or instruction_set() == "generic":
        return "none"
    return "int4" if has_grouped_weights and not uses_amx else "int8"


def check_fp8(flag: str, device: torch.device) -> None:
    """Raises ConfigError if the device does not convert from float8."""
    if device.type != "cuda":
        raise ConfigError(f"{flag} fp8: there are kernels for it on a GPU only")
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"{flag} fp8 needs a GPU of compute capability 8.9 or above (Ada, Hopper, Blackwell)")


def longest_trained(max_position_embeddings: int, wanted: int | None) -> int:
    """The context length that the model was trained for, or the one that is wanted."""
    if wanted is not None and wanted > max_position_embeddings:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's {max_position_embeddings} positions")
    return wanted or max_position_embeddings


def longest_cached(longest: int, token_capacity: int, wanted: int | None) -> int:
    """The context length, limited by what the cache holds."""
    if wanted is not None and wanted > token_capacity:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {token_capacity} tokens that the KV cache holds")
    return min(longest, token_capacity)
