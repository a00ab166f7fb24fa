"""Models on the kernels of a GPU, which Triton's interpreter runs where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.runner import ModelRunner
from tests.engine.tiny_models import MODELS, ShuffledBlocks, load_runner, next_chunk, random_prompt, save_model, step_logits

TOLERANCES = {"triton": 1e-4, "triton-int8": 0.1, "triton-fp8": 0.3}


@pytest.fixture
def on_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("engine.runner.choose_backend", lambda *_: "triton")
    return
