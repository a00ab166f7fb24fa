"""A model that several ranks compute together says what one rank says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from pagoda_server.checkpoints import quantized_weights, resolve
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.models.share import Share
from pagoda_server.engine.runners import load
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.settings import EngineConfig
from tests.checkpoints.quantized_tensors import FORMATS, random_matrix
from tests.checkpoints.tiny_gguf import tiny_model
from tests.engine.lora import random_pairs, with_adapter, write_adapter
from tests.engine.test_adapters import modules_of
from tests.engine.test_speculation import needs_native
from tests.engine.thread_ranks import ThreadRanks
from tests.engine.tiny_models import (
    BLOCK_SIZE,
    MODELS,
    VOCAB_SIZE,
    ShuffledBlocks,
    load_runner,
    random_prompt,
    save_model,
    saved_model,
)

pytestmark = pytest.mark.timeout(120)

PROMPT = random_prompt(20, seed=1)
DIFFERENT = ("llama with biases", "olmo2", "gpt2", "gpt_neox", "phi3", "mixtral", "gpt_oss", "qwen2_moe")


def logits_of(runner: ModelRunner, adapter: Adapter | None = None) -> Tensor:
    seq = with_adapter(ShuffledBlocks(runner).sequence(PROMPT, 1), adapter, 1)
    first = runner.logits(Chunk(seq, 0, 13, False)).float()
    return torch.cat((first, runner.logits(Chunk(seq, 13, len(PROMPT) - 13, False)).float()))


def settings_of(folder: Path, **settings: object) -> EngineConfig:
    defaults = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "kv_cache_gb": 0.002, "threads": 1}
    return EngineConfig(str(folder), **(defaults | settings))  # type: ignore[arg-type]


def cases() -> list[ParameterSet]:
    """Every model on 2 and 3 ranks; in the fast tests, one of each way to cut a tensor."""
    return [
        pytest.param(name, count, marks=[] if count == 2 and name in DIFFERENT else pytest.mark.thorough)
        for name in MODELS
        for count in (2, 3)
    ]


def check_close(found: Tensor, expected: Tensor) -> None:
    """Sums of float32 are rounded as their largest addends are, in an order that differs with the processor."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(("name", "count"), cases())
def test_ranks_compute_the_logits_of_one(name: str, count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = saved_model(name, tmp_path_factory)
    alone, ranks = load_runner(folder), ThreadRanks(count)
    runners = [ModelRunner(settings_of(folder), share=share) for share in ranks.shares]
    assert all(runner.info.weight_bytes < alone.info.weight_bytes for runner in runners)
    expected = logits_of(alone)
    for found in ranks.run(lambda share: logits_of(runners[share.rank])):
        check_close(found, expected)


@pytest.mark.parametrize(("name", "count"), cases())
def test_ranks_compute_the_logits_of_one_with_an_adapter(
    name: str, count: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = saved_model(name, tmp_path_factory)
    alone, ranks = load_runner(folder), ThreadRanks(count)
    assert alone.adapters is not None
    runners = [ModelRunner(settings_of(folder), share=share) for share in ranks.shares]
    # Small enough that sums are not much larger than those of the base model, whose tolerance this is.
    path = write_adapter(tmp_path / "adapter", random_pairs(modules_of(alone), size=0.1))
    expected = logits_of(alone, alone.adapters.load(path))
    assert not torch.allclose(expected, logits_of(alone), atol=0.01), "an adapter that changes little tests nothing"

    def computed(share: Share) -> Tensor:
        runner = runners[share.rank]
        assert runner.adapters is not None
        return logits_of(runner, runner.adapters.load(path))

    for found in ranks.run(computed):
        check_close(found, expected)


def imported(folder: Path, kind: Kind, **sizes: object) -> Path:
    tiny = tiny_model("llama", **sizes)
    tiny.quantisation = kind
    import_gguf(tiny.write(folder / "model.gguf"), folder, no_progress)
    return folder


@needs_native
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [*((kind, "int4") for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0, Kind.F32)), (Kind.F32, "int8")],
)
def test_ranks_keep_the_groups_of_a_file_or_make_the_same(
    kind: Kind, quantization: str, count: int, tmp_path: Path
) -> None:
    """Where sums differ in their last bits, activations are now and then rounded to another int8."""
    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 384}
    folder = imported(tmp_path, kind, head_dim=32 * (4 - count), **sizes)
    settings = settings_of(folder, quantization=quantization)
    alone = ModelRunner(settings)
    ranks = ThreadRanks(count)
    runners = [ModelRunner(settings, share=share) for share in ranks.shares]
    assert all(runner.info.weight_bytes < alone.info.weight_bytes for runner in runners)
    expected = logits_of(alone)
    for found in ranks.run(lambda share: logits_of(runners[share.rank])):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_ranks_read_each_code_of_a_quantized_checkpoint_once(
    form: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization, kind = FORMATS[form]
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
    save_model(LlamaConfig(**sizes, **heads), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= random_matrix(form, name.removesuffix(".weight"), *tensors.pop(name).shape)
    save_file(tensors, tmp_path / "model.safetensors")
    num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith(f"_proj.{kind}"))

    elements, read = quantized_weights._elements, list[int]()

    def counting(*args: Any) -> Any:
        read.append((found := elements(*args)).nbytes)
        return found

    monkeypatch.setattr(quantized_weights, "_elements", counting)
    settings, ranks = settings_of(tmp_path, quantization="none"), ThreadRanks(count)
    alone = ModelRunner(settings)
    assert sum(read) == num_bytes
    runners, parts = list[ModelRunner](), list[int]()
    for share in ranks.shares:
        read.clear()
        runners.append(ModelRunner(settings, share=share))
        parts.append(sum(read))
    assert sum(parts) == num_bytes
    assert max(parts) < num_bytes / count * 1.4, "three KV heads make one and two on two ranks"
    expected = logits_of(alone)
    for found in ranks.run(lambda share: logits_of(runners[share.rank])):
        check_close(found, expected)


@needs_native
@pytest.mark.parametrize(
    ("count", "sizes", "message"),
    [
        (
            4,
            {"num_key_value_heads": 4},
            "--tensor-parallel 4: inputs 0 to 16 of tensor model.layers.0.self_attn.o_proj.weight would cut a group of"
            " 32 that share a scale",
        ),
        (
            2,
            {"intermediate_size": 32},
            "--tensor-parallel 2: tensor model.layers.0.mlp.down_proj.weight has 1 groups of 32 inputs that share a"
            " scale, fewer than ranks",
        ),
    ],
)
def test_a_cut_through_a_group_is_refused_before_anything_is_read(
    count: int, sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = imported(tmp_path, Kind.Q4_0, **sizes)
    reports: list[object] = []
    with pytest.raises(ConfigError, match=f"{message}; --quantization int8 and none cut anywhere"):
        ModelRunner(
            settings_of(folder, quantization="int4"), lambda *report: reports.append(report), share=Share(0, count)
        )
    assert not reports
    ModelRunner(settings_of(folder, quantization="none"), share=Share(0, count))


def test_what_needs_whole_blocks_or_has_no_layers_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = saved_model("llama", tmp_path_factory)
    config = settings_of(folder, kv_store=str(folder), host_kv_gb=1.0, tensor_parallel=2)
    with pytest.raises(ConfigError, match="--kv-store needs --tensor-parallel 1"):
        load.load_runner(config, folder, no_progress)
    with pytest.raises(ConfigError, match="--tensor-parallel: the synthetic model has no layers to cut"):
        load.load_runner(EngineConfig("synthetic", tensor_parallel=2), resolve("synthetic", no_progress), no_progress)
