"""Models on the kernels for GPUs. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels import Backend, Linear, load_backend
from pagoda_server.kernels.backend import REFERENCE
from pagoda_server.kernels.linear_quantized import (
    gated_linear_fp8_weight,
    gated_linear_int8_weight,
    linear_fp8_weight,
    linear_int8_weight,
)
from pagoda_server.kernels.triton.configs import trying
from pagoda_server.kernels.triton.product import NO_KERNEL
from tests.engine.tiny_models import (
    MODELS,
    ONE_OF_EACH_FAMILY,
    ShuffledBlocks,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step,
    step_logits,
)
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def runner_on(backend: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.load_backend", lambda _: backend)
    runner = load_runner(folder, device=DEVICE)
    for kv in runner._cache:
        kv.keys.fill_(torch.nan)
        kv.values.fill_(torch.nan)
    return runner


@pytest.mark.parametrize("model", ONE_OF_EACH_FAMILY)
def test_chunks_and_decodes_have_the_logits_of_transformers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save_model(MODELS[model], tmp_path)
    runner = runner_on(load_backend("triton"), tmp_path, monkeypatch)
    blocks = ShuffledBlocks(runner)
    decoding, chunked, new = (blocks.sequence(random_prompt(length, seed=length), 2) for length in (9, 14, 5))
    step(runner, [next_chunk(decoding), next_chunk(chunked, 6)])
    logits = step_logits(runner, [next_chunk(seq) for seq in (decoding, chunked, new)])
    for seq, ours in zip((decoding, chunked, new), logits, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([seq.tokens])).logits[0, -1]
        torch.testing.assert_close(ours.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "linear", "gated_linear"),
    [
        ("triton-int8", linear_int8_weight, gated_linear_int8_weight),
        ("triton-fp8", linear_fp8_weight, gated_linear_fp8_weight),
    ],
)
@pytest.mark.parametrize("fields", [{}, asdict(NO_KERNEL)], ids=["kernel", "library"])
def test_quantized_weights_have_the_logits_of_the_reference_with_the_same_weights(
    name: str,
    linear: MakeLinear,
    gated_linear: MakeLinear,
    fields: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model(MODELS["llama"], tmp_path)
    prompt = random_prompt(13, seed=3)

    def logits(backend: Backend) -> torch.Tensor:
        runner = runner_on(backend, tmp_path, monkeypatch)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])

    expected = logits(replace(REFERENCE, linear=linear, gated_linear=gated_linear))
    with trying(linear.__name__, **fields):
        torch.testing.assert_close(logits(load_backend(name)), expected, atol=1e-3, rtol=1e-3)
