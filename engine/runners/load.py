"""Which runner serves a checkpoint: the model's own, or the synthetic one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pagoda_server.checkpoints import Progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.loop.steps_in_flight import Runner
from pagoda_server.engine.runners.runner_info import KVCacheSpec, RunnerInfo, count_blocks, count_host_blocks
from pagoda_server.engine.runners.synthetic import StepTime, SyntheticRunner
from pagoda_server.settings.engine import EngineConfig

SYNTHETIC_BYTES_PER_TOKEN = 8  # one checksum
SYNTHETIC_TOKENS = 131_072  # that its cache holds


class InformedRunner(Runner, Protocol):
    @property
    def info(self) -> RunnerInfo: ...


def load_runner(config: EngineConfig, folder: Path, progress: Progress) -> InformedRunner:
    """Raises ConfigError if the checkpoint cannot be served with these settings."""
    model_config = json.loads((folder / "config.json").read_bytes())
    if model_config.get("model_type") == "synthetic":
        return _load_synthetic(config, model_config)
    if config.step_ms is not None:
        raise ConfigError("--step-ms: only the synthetic model has a step time to choose")
    # By default a thread that waits at the end of a parallel region spins for long. When another process has the core
    # of a thread with work left, each of a step's many regions can then last a time slice (docs/performance.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is imported
    return _load_model(replace(config, model=str(folder)), progress)


def _load_model(config: EngineConfig, progress: Progress) -> InformedRunner:
    # Only now: torch takes a second, which the synthetic model does not need.
    try:
        from pagoda_server.engine.runners.loaded_model import check_fp8, choose_device, load_for_serving
    except ValueError as error:  # PAGODA_INSTRUCTION_SET, which kernels read when they are imported
        raise ConfigError(str(error)) from error

    device = choose_device(config.device)
    if device.type == "cpu":
        from pagoda_server.engine.runners.cpu.runner import ModelRunner

        return ModelRunner(config, progress)
    from pagoda_server.engine.runners.cuda import DeviceRunner

    if config.kv_cache_dtype == "fp8":
        check_fp8("--kv-cache-dtype", device)
    return DeviceRunner(config, load_for_serving(config, device, progress), progress)


def _load_synthetic(config: EngineConfig, model_config: dict[str, int]) -> SyntheticRunner:
    _check_synthetic(config)
    step_time = None if config.step_ms is None else StepTime.parse(config.step_ms)
    # One layer of one head of dimension one, in whose cache a slot holds half a checksum as key and half as value.
    spec = KVCacheSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        element_bytes=SYNTHETIC_BYTES_PER_TOKEN // 2,
        block_size=config.tokens_a_block("cpu"),
    )
    budget = spec.bytes_per_token * SYNTHETIC_TOKENS if config.kv_cache_gb is None else int(config.kv_cache_gb * 1e9)
    info = RunnerInfo(
        model="synthetic",
        architecture="synthetic",
        device="cpu",
        dtype="int64",
        kernel_backend="none",
        vocab_size=model_config["vocab_size"],
        max_model_len=config.max_model_len or model_config["max_position_embeddings"],
        weight_bytes=0,
        kv_cache=spec,
        num_blocks=count_blocks(spec, budget),
        num_host_blocks=count_host_blocks(spec, config.host_kv_gb),
    )
    try:
        return SyntheticRunner(info, step_time, lookahead=int(config.overlap == "on"))
    except MemoryError:
        raise ConfigError("not enough memory for the cache; --kv-cache-gb, --host-kv-gb can help") from None


def _check_synthetic(config: EngineConfig) -> None:
    """Raises ConfigError for settings that need a model."""
    for flag, value, allowed in (
        ("--device", config.device, ("auto", "cpu")),
        ("--quantization", config.quantization, ("auto", "none")),
        ("--kv-cache-dtype", config.kv_cache_dtype, ("auto",)),
    ):
        if value not in allowed:
            raise ConfigError(f"{flag} {value}: the synthetic model has no weights and needs no device")
