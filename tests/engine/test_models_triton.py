"""Models on the kernels of a GPU, which Triton's interpreter runs where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.runner import ModelRunner
from tests.engine.tiny_models import (
    MODELS,
    ShuffledBlocks,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step,
    step_logits,
)
from tests.kernels.triton.device import DEVICE


def runner_on(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr("engine.runner.choose_backend", lambda *_: backend)
    runner = load_runner(folder, device=DEVICE)
    for kv in runner._cache:
        kv.keys.fill_(torch.nan)
        kv.values.fill_(torch.nan)
    return runner


@pytest.mark.parametrize("model", ["llama with biases", "mistral with a sliding window", "qwen3"])
def test_chunks_and_decodes_have_the_logits_of_transformers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save_model(MODELS[model], tmp_path)
    runner = runner_on("triton", tmp_path, monkeypatch)
    blocks = ShuffledBlocks(runner)
    decoding, chunked, new = (blocks.sequence(random_prompt(length, seed=length), 2) for length in (9, 14, 5))
    step(runner, [next_chunk(decoding), next_chunk(chunked, 6)])
    logits = step_logits(runner, [next_chunk(seq) for seq in (decoding, chunked, new)])
    for seq, ours in zip((decoding, chunked, new), logits, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([seq.tokens])).logits[0, -1]
        torch.testing.assert_close(ours.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("backend", "most"), [("triton-int8", 0.05), ("triton-fp8", 0.2)])
def test_quantized_weights_leave_logits_near_those_of_whole_ones(
    backend: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(MODELS["llama"], tmp_path)
    prompt = random_prompt(13, seed=3)

    def logits(name: str) -> torch.Tensor:
        runner = runner_on(name, tmp_path, monkeypatch)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])

    whole = logits("triton")
    error = (logits(backend) - whole).norm() / whole.norm()
    assert 0 < error < most
