"""Chooses the runner that serves a checkpoint: on a CPU, on a device, or the synthetic one."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...checkpoints import Progress
from ...checkpoints.folder import read_json_object
from ...settings.engine import EngineConfig, StepLimits
from ..core.adapter import AdapterLoader
from ..core.errors import ConfigError, NotEnoughMemory
from ..kv.block_store import HostRows
from ..loop.steps_in_flight import Runner
from .import_torch import import_torch
from .runner_info import RunnerInfo
from .synthetic import load_synthetic

if TYPE_CHECKING:
    from .cuda import DeviceRunner
    from .loaded_model import LoadedModel

log = logging.getLogger("pagoda.engine")


class InformedRunner(Runner, HostRows, Protocol):
    """
    max_choices  tokens that a step can choose, those behind drafts included
    adapters     loads LoRA adapters; None: the runner takes none
    """

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def max_choices(self) -> int: ...

    @property
    def adapters(self) -> AdapterLoader | None: ...


def load_runner(config: EngineConfig, folder: Path, progress: Progress) -> InformedRunner:
    """Raises ConfigError if the checkpoint cannot be served with these settings."""
    try:
        model_config = read_json_object(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    if model_config.get("model_type") == "synthetic":
        if config.tensor_parallel > 1:
            raise ConfigError("--tensor-parallel: the synthetic model has no layers to cut")
        return load_synthetic(config, model_config)
    if config.step_ms is not None:
        raise ConfigError("--step-ms: only the synthetic model has a step time to choose")
    import_torch()
    return _load_model(replace(config, model=str(folder)), progress)


def _load_model(config: EngineConfig, progress: Progress) -> InformedRunner:
    # Only now: torch takes a second, which the synthetic model does not need.
    try:
        from .loaded_model import check_fp8, choose_device, load_for_serving
    except ValueError as error:  # PAGODA_INSTRUCTION_SET, which kernels read when they are imported
        raise ConfigError(str(error)) from error

    device = choose_device(config.device)
    if device.type == "cpu":
        from .cpu.runner import ModelRunner

        if config.tensor_parallel == 1:
            return ModelRunner(config, progress)
        if sys.platform != "linux":
            raise ConfigError("--tensor-parallel needs Linux, which ends the ranks of a process that was killed")
        if config.kv_store:
            raise ConfigError("--kv-store needs --tensor-parallel 1: a rank has only a part of each block")
        from .cpu.leader import Leader

        return ModelRunner(config, progress, Leader(config))
    if config.tensor_parallel > 1:
        raise ConfigError("--tensor-parallel: only --device cpu has kernels that sum over processes")
    if config.kv_cache_dtype == "fp8":
        check_fp8("--kv-cache-dtype", device)
    return load_on_device(config, load_for_serving(config, device, progress), progress)


def load_on_device(config: EngineConfig, loaded: LoadedModel, progress: Progress) -> DeviceRunner:
    """Make a runner whose steps fit into the device's memory beside a KV cache that holds the tokens of a step.

    Where they do not fit, limits that are not set are halved. Raises ConfigError if the smallest do not fit either.
    """
    import torch

    from .cuda import DeviceRunner

    *larger, least = config.step_limits_to_try(loaded.device.type)
    for limits in larger:
        runner = None
        try:
            runner = DeviceRunner(_with(config, limits), loaded, progress)
            if config.kv_cache_gb is not None or runner.info.token_capacity >= limits.token_budget:
                return runner
            reason = f"the KV cache beside them would hold {runner.info.token_capacity} tokens"
        except ConfigError as error:
            if config.kv_cache_gb is not None and not isinstance(error, NotEnoughMemory):
                raise  # it is not the steps that leave too little
            reason = str(error)
        log.warning(
            "steps of %d sequences and %d tokens are too large for this device: %s; trying half of what is not set",
            limits.max_num_seqs, limits.token_budget, reason,
        )  # fmt: skip
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    return DeviceRunner(_with(config, least), loaded, progress)


def _with(config: EngineConfig, limits: StepLimits) -> EngineConfig:
    return replace(config, max_num_seqs=limits.max_num_seqs, token_budget=limits.token_budget)
