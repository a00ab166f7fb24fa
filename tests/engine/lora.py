"""Adapters with random weights as PEFT writes them, and models that they are merged into."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.sequence import Sequence

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none"}


def random_pairs(
    modules: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0, size: float = 0.2
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module, [rank, in] and [out, rank]."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (size * torch.randn(rank, inputs, generator=draw), size * torch.randn(outputs, rank, generator=draw))
        for name, (inputs, outputs) in modules.items()
    }


def write_adapter(
    folder: Path,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Write a folder like PEFT's."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": list(pairs)} | fields))
    tensors = {}
    for module, (down, up) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype).contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: Any, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> Any:
    """A copy of transformers' model whose weights are W + scale · B · A."""
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, (down, up) in pairs.items():
            weight = modules[name].weight
            added = scale * up @ down
            weight += added if weight.shape == added.shape and "Conv1D" not in str(type(modules[name])) else added.T
    return model


def scale_of(alpha: float, rank: int, *, is_stabilized: bool = False) -> float:
    return alpha / (math.sqrt(rank) if is_stabilized else rank)


def with_adapter(seq: Sequence, adapter: Adapter | None, slot: int) -> Sequence:
    """A sequence as the scheduler starts it."""
    seq.request = replace(seq.request, adapter=adapter)
    seq.adapter_slot = -1 if adapter is None else slot
    return seq
