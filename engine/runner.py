"""From a step plan to tokens: the only place that touches tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache import DEFAULT_CPU_BYTES, allocate, count_blocks, free_gpu_bytes
from engine.models import ModelConfig, load_model, read_config
from engine.runner_info import KVCacheSpec, RunnerInfo
from engine.sampler import Sampler
from engine.sequence import Chunk, Sampled, Sequence, StepPlan, TokenLogprobs
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
        dtype = _choose_dtype(config.dtype, folder)
        self._ops = load_backend("cpu" if self._device.type == "cpu" else "reference")
        self._model = load_model(folder, self._ops, self._device, dtype, progress)
        self._sampler = Sampler(self._ops, model.vocab_size, self._device)
        spec = KVCacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, dtype.itemsize, config.block_size)
        longest = _longest_trained(model, config.max_model_len)
        num_blocks = count_blocks(spec, self._cache_budget_bytes(config, spec, longest, dtype))
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
