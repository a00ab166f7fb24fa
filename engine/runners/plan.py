"""`python -m pagoda_server.engine.runners.plan FOLDER`: what serving a model on a CPU takes, before it is served.

Prints a JSON list with an entry for each precision that this machine can serve. Only headers of weights are read.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from ...kernels import UNQUANTIZED
from ...settings.engine import EngineConfig, KVCacheDType, Quantization
from ...settings.setting import SettingError
from ..core.errors import ConfigError
from ..models.measured_weights import MeasuredWeights
from .loaded_model import LoadedModel, load_for_serving

# What an engine takes beside weights and KV cache, as docs/models.md measures it: bytes of Python, torch and code, and
# bytes for each value of a token's activations in a step. Without quantization oneDNN keeps the code of its products.
BASE_BYTES, SCRATCH_BYTES = 262_000_000, 2_240
BASE_UNQUANTIZED_BYTES, SCRATCH_UNQUANTIZED_BYTES = 277_000_000, 2_090


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine takes with one choice of precision.

    weights             bytes of the packed weights
    rest                bytes of Python, torch, code and what a full step computes
    kv_bytes_per_token  by the dtype of the KV cache
    """

    quantization: Quantization
    kernels: str
    weights: int
    rest: int
    kv_bytes_per_token: dict[str, int]
    max_model_len: int


def plans_of(folder: Path) -> list[Plan]:
    """A plan for each precision. Raises ConfigError if the model cannot be served at all."""
    found: list[Plan] = []
    refused: ConfigError | None = None
    for quantization in get_args(Quantization):
        try:
            plan = _plan(EngineConfig(model=str(folder), quantization=quantization))
        except ConfigError as error:  # this machine, or this model, has no such precision
            refused = refused or error
            continue
        found.append(plan)
    if not found and refused:
        raise refused
    return found


def _plan(config: EngineConfig) -> Plan:
    device = torch.device("cpu")
    per_token: dict[str, int] = {}
    for dtype in get_args(KVCacheDType):
        if dtype == "fp8":  # there are kernels for it on a GPU only
            continue
        try:
            loaded = load_for_serving(replace(config, kv_cache_dtype=dtype), device, make_weights=MeasuredWeights)
        except ConfigError:
            if dtype == "auto":
                raise
            continue  # this model has no such cache
        per_token[dtype] = loaded.spec.bytes_per_token
    return Plan(
        config.quantization,
        str(loaded.ops),
        loaded.model.weight_bytes,
        _rest_of(loaded),
        per_token,
        loaded.longest,
    )


def _rest_of(loaded: LoadedModel) -> int:
    config = loaded.model.config
    values = 2 * config.ffn_size + 4 * config.hidden_size
    if loaded.ops.weights == UNQUANTIZED:
        return BASE_UNQUANTIZED_BYTES + SCRATCH_UNQUANTIZED_BYTES * values
    return BASE_BYTES + SCRATCH_BYTES * values


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pagoda_server.engine.runners.plan", description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        plans = plans_of(parser.parse_args().folder)
    except (ConfigError, SettingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(plan) for plan in plans]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
