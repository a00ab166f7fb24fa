"""From a step plan to tokens: the only place that touches tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache import DEFAULT_CPU_BYTES, allocate, count_blocks, free_gpu_bytes
from engine.models import ModelConfig, load_model, read_config
from engine.runner_info import KVCacheSpec, RunnerInfo
from engine.sampler import Sampler
from engine.sequence import Chunk, Sampled, SamplingParams, Sequence, StepPlan, TokenLogprobs
from engine.step_arrays import StepArrays
from engine.weights import Progress, no_progress, stored_dtype
from kernels import load_backend

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A model with its paged KV cache. Raises ConfigError if the checkpoint cannot be served with these settings."""

    def __init__(self, config: EngineConfig, progress: Progress = no_progress) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        folder = Path(config.model)
        self._device = _choose_device(config.device)
        self._model_config = model = read_config(folder)
        self._dtype = dtype = _choose_dtype(config.dtype, folder)
        self._ops = load_backend("cpu" if self._device.type == "cpu" else "reference")
        self._model = load_model(folder, self._ops, self._device, dtype, progress)
        self._sampler = Sampler(self._ops, model.vocab_size, self._device)
        spec = KVCacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, dtype.itemsize, config.block_size)
        longest = _longest_trained(model, config.max_model_len)
        num_blocks = count_blocks(spec, self._cache_budget_bytes(config, spec))
        self.info = RunnerInfo(
            model=folder.name,
            architecture=model.family,
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            kernel_backend=self._ops.name,
            vocab_size=model.vocab_size,
            max_model_len=_longest_cached(longest, num_blocks * spec.block_size, config.max_model_len),
            weight_bytes=self._model.weight_bytes,
            kv_cache=spec,
            num_blocks=num_blocks,
        )
        self._cache = allocate(spec, num_blocks, self._device, dtype)
        self._arrays = StepArrays(config.token_budget, config.max_num_seqs, self.info.max_model_len, spec.block_size)

    def _cache_budget_bytes(self, config: EngineConfig, spec: KVCacheSpec) -> int:
        """What was asked for; else a fixed size on a CPU, and on a GPU what the weights and the largest step leave."""
        if config.kv_cache_gb is not None:
            return int(config.kv_cache_gb * 1e9)
        if self._device.type == "cpu":
            return DEFAULT_CPU_BYTES
        return free_gpu_bytes(self._device, self._profile_step_bytes(config, spec))

    @torch.inference_mode()
    def _profile_step_bytes(self, config: EngineConfig, spec: KVCacheSpec) -> int:
        """Memory that the largest step takes at its peak, beside weights and cache: found by running one."""
        length = min(config.token_budget, self._model_config.max_position_embeddings)
        num_blocks = -(-length // spec.block_size)
        cache = allocate(spec, num_blocks, self._device, self._dtype)
        arrays = StepArrays(length, 1, length, spec.block_size)
        params = SamplingParams()
        seq = Sequence(0, [0] * length, length, params, arrived=0.0, deadline=math.inf, blocks=list(range(num_blocks)))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        inputs = arrays.pack([Chunk(seq, 0, length)]).to_inputs(self._ops, cache[0], self._model_config.sliding_window)
        # Every sequence may sample in one step.
        inputs = replace(inputs, logit_rows=inputs.logit_rows.expand(config.max_num_seqs))
        self._model.forward(inputs, cache).float()
        return torch.cuda.max_memory_allocated(self._device) - before

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled:
        """Computes a plan; doing so twice writes the same cache and chooses the same tokens."""
        inputs = self._arrays.pack(plan.chunks).to_inputs(self._ops, self._cache[0], self._model_config.sliding_window)
        logits = self._model.forward(inputs, self._cache)
        sampling = [at for at, chunk in enumerate(plan.chunks) if chunk.samples]
        choices = self._sampler.sample([plan.chunks[at].seq for at in sampling], logits)

        tokens = [-1] * len(plan.chunks)
        logprobs: list[TokenLogprobs | None] = [None] * len(plan.chunks)
        faults: dict[int, str] = {}
        for at, choice in zip(sampling, choices, strict=True):
            tokens[at], logprobs[at] = choice.token, choice.logprobs
            if choice.fault is not None:
                faults[at] = choice.fault
        return Sampled(tokens, logprobs, faults)


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device")
    return torch.device(device)


def _choose_dtype(dtype: str, folder: Path) -> torch.dtype:
    """`auto` computes in bfloat16, whose range is float32's, unless the checkpoint itself is float32."""
    if dtype != "auto":
        return _DTYPES[dtype]
    stored = stored_dtype(folder, "model.embed_tokens.weight")
    return torch.float32 if stored == torch.float32 else torch.bfloat16


def _longest_trained(model: ModelConfig, wanted: int | None) -> int:
    longest = model.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {longest} positions that the model was trained for")
    return wanted or longest


def _longest_cached(longest: int, capacity: int, wanted: int | None) -> int:
    """One sequence has to fit into the cache: a wish that does not is an error, the model's own limit gives way."""
    if wanted is not None and wanted > capacity:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the {capacity} tokens that the KV cache holds: raise --kv-cache-gb"
        )
    return min(longest, capacity)
