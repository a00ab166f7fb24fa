"""From a step plan to tokens: the only place that touches tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.progress import Progress, no_progress
from engine.config import EngineConfig, Quantization
from engine.errors import ConfigError
from engine.kv_cache import DEFAULT_CPU_BYTES, allocate, count_blocks, free_gpu_bytes
from engine.models import load_model, read_config
from engine.runner_info import KVCacheSpec, RunnerInfo
from engine.sampler import Sampler
from engine.sequence import Chunk, Sampled, SamplingParams, Sequence, StepPlan, TokenLogprobs
from engine.step_arrays import StepArrays
from engine.steps_in_flight import Computed
from engine.weights import stored_dtype
from kernels import PagedKV, has_native, has_native_int8, keep_freed_memory, load_backend, set_num_threads

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """A model with its paged KV cache. Raises ConfigError if the checkpoint cannot be served with these settings."""

    def __init__(self, config: EngineConfig, progress: Progress = no_progress) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        set_num_threads(torch.get_num_threads())
        folder = Path(config.model)
        device, dtype = choose_device(config.device), choose_dtype(config.dtype, folder)
        if config.overlap == "on" and device.type == "cpu":
            raise ConfigError("--overlap on: a CPU has computed a step when it is launched")
        model = read_config(folder)
        longest = longest_trained(model.max_position_embeddings, config.max_model_len)

        self._device = device
        self._ops = load_backend(choose_backend(device, dtype, config.quantization))
        self._model = load_model(folder, self._ops, device, dtype, progress)
        keep_freed_memory()
        self._sampler = Sampler(self._ops, model.vocab_size, device)
        self._arrays = StepArrays(config.token_budget, longest, config.block_size)

        spec = KVCacheSpec(model.num_layers, model.num_kv_heads, model.head_dim, dtype.itemsize, config.block_size)
        num_blocks = count_blocks(spec, self._cache_bytes(config, spec, dtype))
        self._cache = allocate(spec, num_blocks, device, dtype)
        self.info = RunnerInfo(
            model=folder.name,
            architecture=model.family,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            kernel_backend=self._ops.name,
            vocab_size=model.vocab_size,
            max_model_len=longest_cached(longest, num_blocks * spec.block_size, config.max_model_len),
            weight_bytes=self._model.weight_bytes,
            kv_cache=spec,
            num_blocks=num_blocks,
        )

    @property
    def lookahead(self) -> int:
        return 0

    def launch(self, plan: StepPlan) -> Computed:
        return Computed(self.execute(plan))

    def execute(self, plan: StepPlan) -> Sampled:
        """Computes a plan. Doing so twice writes the same cache and chooses the same tokens."""
        return self._execute(plan, self._cache)

    @torch.inference_mode()
    def logits(self, chunk: Chunk) -> Tensor:
        """Computes a chunk as `execute` would; returns the logits after each of its tokens.

        chunk   at most a token budget long; earlier tokens of its sequence are computed
        return  [chunk.length, vocab], in the dtype of the weights
        """
        inputs = self._arrays.pack([chunk], self._ops, self._cache[0], self._model.config.sliding_window)
        every_row = torch.arange(chunk.length, device=self._device)
        return self._model.forward(replace(inputs, logit_rows=every_row), self._cache)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, cache: list[PagedKV]) -> Sampled:
        inputs = self._arrays.pack(plan.chunks, self._ops, cache[0], self._model.config.sliding_window)
        logits = self._model.forward(inputs, cache)
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

    def _cache_bytes(self, config: EngineConfig, spec: KVCacheSpec, dtype: torch.dtype) -> int:
        if config.kv_cache_gb is not None:
            return int(config.kv_cache_gb * 1e9)
        if self._device.type == "cpu":
            return DEFAULT_CPU_BYTES
        return free_gpu_bytes(self._device, self._step_bytes(config, spec, dtype))

    def _step_bytes(self, config: EngineConfig, spec: KVCacheSpec, dtype: torch.dtype) -> int:
        """What the largest step allocates on the GPU: as many tokens as it may have, of as many sampling sequences."""
        longest = longest_trained(self._model.config.max_position_embeddings, config.max_model_len)
        token_budget = min(config.token_budget, config.max_num_seqs * longest)
        plan = largest_plan(token_budget, config.max_num_seqs, config.block_size)
        num_blocks = max(chunk.seq.blocks[-1] for chunk in plan.chunks) + 1
        cache = allocate(spec, num_blocks, self._device, dtype)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._execute(plan, cache)
        return torch.cuda.max_memory_allocated(self._device) - before


def largest_plan(token_budget: int, max_num_seqs: int, block_size: int) -> StepPlan:
    """A step that uses the whole token budget and draws a token for every sequence there can be."""
    length = token_budget // max_num_seqs
    blocks_each = -(-length // block_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=0)
    chunks = []
    for number in range(max_num_seqs):
        seq = Sequence(number, [0] * length, length, params, arrived=0.0, deadline=math.inf)
        seq.blocks = list(range(number * blocks_each, (number + 1) * blocks_each))
        chunks.append(Chunk(seq, 0, length, samples=True))
    return StepPlan(chunks)


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, folder: Path) -> torch.dtype:
    """auto: bfloat16, but float32 for a checkpoint of float32."""
    if name != "auto":
        return _DTYPES[name]
    is_float32 = stored_dtype(folder, "model.embed_tokens.weight") == torch.float32
    return torch.float32 if is_float32 else torch.bfloat16


def choose_backend(device: torch.device, dtype: torch.dtype, quantization: Quantization) -> str:
    """The name of a kernel backend. Raises ConfigError if there is none with these properties."""
    if quantization == "int8":
        if device.type != "cpu":
            raise ConfigError(f"--quantization int8: there are kernels for it on a CPU only, not on {device}")
        if dtype == torch.float16:
            raise ConfigError("--quantization int8: activations can be bfloat16 or float32, not float16")
        if not has_native_int8():
            raise ConfigError(
                "--quantization int8 needs a CPU with AVX-512 VNNI, and Pagoda installed where there is a C++ compiler"
            )
        return "native-int8"
    if device.type != "cpu":
        return "reference"
    if quantization == "auto" and dtype == torch.bfloat16 and has_native_int8():
        return "native-int8"
    return "native" if has_native() else "cpu"


def longest_trained(max_position_embeddings: int, wanted: int | None) -> int:
    """The context that the model was trained for, or what is wanted of it."""
    if wanted is not None and wanted > max_position_embeddings:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's {max_position_embeddings} positions")
    return wanted or max_position_embeddings


def longest_cached(longest: int, token_capacity: int, wanted: int | None) -> int:
    """The context as far as the cache holds it."""
    if wanted is not None and wanted > token_capacity:
        raise ConfigError(f"--max-model-len {wanted} exceeds the {token_capacity} tokens that the KV cache holds")
    return min(longest, token_capacity)
