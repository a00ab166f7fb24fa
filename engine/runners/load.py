"""Chooses the runner that serves a checkpoint: on a CPU, on a device, or the synthetic one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pagoda_server.checkpoints import Progress
from pagoda_server.checkpoints.folder import read_json_object
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.loop.steps_in_flight import Runner
from pagoda_server.engine.runners.runner_info import RunnerInfo
from pagoda_server.engine.runners.synthetic import load_synthetic
from pagoda_server.settings.engine import EngineConfig


class InformedRunner(Runner, Protocol):
    @property
    def info(self) -> RunnerInfo: ...


def load_runner(config: EngineConfig, folder: Path, progress: Progress) -> InformedRunner:
    """Raises ConfigError if the checkpoint cannot be served with these settings."""
    try:
        model_config = read_json_object(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    if model_config.get("model_type") == "synthetic":
        return load_synthetic(config, model_config)
    if config.step_ms is not None:
        raise ConfigError("--step-ms: only the synthetic model has a step time to choose")
    # By default threads spin for long at the end of a parallel region. If another process has taken the core of the one
    # thread that still works, each of a step's many regions can then last a time slice (docs/performance.md).
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
