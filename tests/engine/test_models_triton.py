"""Models on the kernels for GPUs. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import gguf
import pytest
import torch

from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels import Backend, load_backend
from pagoda_server.kernels.triton.configs import trying
from pagoda_server.kernels.triton.product import NO_KERNEL
from tests.checkpoints.tiny_gguf import tiny_model
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


def runner_on(backend: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.load_backend", lambda *_: backend)
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


@pytest.mark.parametrize(("weights", "op"), [("int8-weight", "linear_int8_weight"), ("fp8", "linear_fp8_weight")])
@pytest.mark.parametrize("fields", [{}, asdict(NO_KERNEL)], ids=["kernel", "library"])
def test_quantized_weights_have_the_logits_of_the_reference_with_the_same_weights(
    weights: str, op: str, fields: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(MODELS["llama"], tmp_path)
    prompt = random_prompt(13, seed=3)

    def logits(name: str) -> torch.Tensor:
        runner = runner_on(load_backend(name, weights), tmp_path, monkeypatch)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])

    expected = logits("reference")
    with trying(op, **fields):
        torch.testing.assert_close(logits("triton"), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("fields", [{}, asdict(NO_KERNEL)], ids=["kernel", "library"])
def test_weights_in_groups_have_the_logits_of_the_reference_with_the_same_weights(
    fields: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_model("qwen3", head_dim=32, tie_word_embeddings=True)
    tiny.quantisation = gguf.GGMLQuantizationType.Q4_1
    tiny.kinds = {
        "blk.0.attn_v.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.1.attn_k.weight": gguf.GGMLQuantizationType.Q5_0,
        "blk.1.ffn_up.weight": gguf.GGMLQuantizationType.F32,
    }
    import_gguf(tiny.write(tmp_path / "model.gguf"), tmp_path, no_progress)
    prompt = random_prompt(13, seed=3)

    def logits(name: str, weights: str) -> torch.Tensor:
        runner = runner_on(load_backend(name, weights), tmp_path, monkeypatch)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])

    with trying("linear_4_bits", **fields):
        found = logits("triton", "groups")
    for weights in ("groups", "unquantized"):  # their values are the same
        torch.testing.assert_close(found, logits("reference", weights), atol=1e-3, rtol=1e-3)
