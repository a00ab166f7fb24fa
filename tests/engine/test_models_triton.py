"""Models on the kernels for GPUs. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels import (
    INT4,
    PLAIN,
    Backend,
    Experts,
    ExpertWeights,
    GroupedWeight,
    Linear,
    Use,
    load_backend,
)
from pagoda_server.kernels.linear import LinearMaker
from pagoda_server.kernels.triton.configs import trying
from pagoda_server.kernels.triton.product import NO_KERNEL
from tests.checkpoints.quantized_tensors import packed_in_4_bits
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


def prompt_logits(backend: Backend, folder: Path, monkeypatch: pytest.MonkeyPatch, prompt: list[int]) -> Tensor:
    runner = runner_on(backend, folder, monkeypatch)
    return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])


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

    def logits(name: str) -> Tensor:
        return prompt_logits(load_backend(name, weights), tmp_path, monkeypatch, prompt)

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

    def logits(name: str, weights: str) -> Tensor:
        return prompt_logits(load_backend(name, weights), tmp_path, monkeypatch, prompt)

    with trying("linear_4_bits", **fields):
        found = logits("triton", "groups")
    for weights in ("groups", "unquantized"):  # their values are the same
        torch.testing.assert_close(found, logits("reference", weights), atol=1e-3, rtol=1e-3)


def rewrite(folder: Path, quantization: dict[str, str], encode: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Encode the matrices of a checkpoint's layers, except those of routers."""
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        is_encoded = ".layers." in name and tensor.ndim == 2 and "mlp.gate.weight" not in name
        tensors |= encode(name, tensor) if is_encoded else {name: tensor}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def in_float8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """With a scale for each output, or one for all."""
    scales = weight.abs().amax(dim=None if "q_proj" in name else 1, keepdim=True) / 448
    scales = scales.flatten() if "q_proj" in name else scales
    return {name: (weight / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}


@pytest.mark.parametrize("weights", ["groups", "fp8"])
def test_weights_in_float8_keep_their_values(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(MODELS["llama"], tmp_path)
    rewrite(tmp_path, {"quant_method": "fp8"}, in_float8)
    backend, formats = load_backend("triton", weights), list[object]()
    make = backend.makers[weights]

    def watched(weight: object, bias: Tensor | None, use: Use = PLAIN, /) -> Linear:
        formats.append(weight.format.is_float if isinstance(weight, GroupedWeight) else "whole")
        return make(weight, bias, use)

    prompt = random_prompt(13, seed=3)
    found = prompt_logits(replace(backend, makers={**backend.makers, weights: watched}), tmp_path, monkeypatch, prompt)
    layers = MODELS["llama"].num_hidden_layers
    assert formats == ["whole", *[True] * 4 * layers], "the head, then the products of the layers"
    if weights == "groups":
        torch.testing.assert_close(
            found, prompt_logits(load_backend("reference"), tmp_path, monkeypatch, prompt), atol=1e-3, rtol=1e-3
        )


def test_weights_of_experts_in_groups_have_the_logits_of_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deepcopy(MODELS["qwen3_moe"])
    config.hidden_size, config.moe_intermediate_size = 64, 32
    save_model(config, tmp_path)
    rewrite(tmp_path, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, packed_in_4_bits)
    backend, formats = load_backend("triton", "groups"), list[object]()
    join = backend.join

    def watched(make: LinearMaker, weights: Iterable[ExpertWeights], count: int, use: Use, /) -> Experts:
        found = list(weights)
        formats.extend(each.down.format for each in found)
        return join(make, found, count, use)

    prompt = random_prompt(13, seed=3)
    found = prompt_logits(replace(backend, join=watched), tmp_path, monkeypatch, prompt)
    assert formats == [INT4] * config.num_experts * config.num_hidden_layers
    expected = prompt_logits(load_backend("reference"), tmp_path, monkeypatch, prompt)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
