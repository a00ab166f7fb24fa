"""Models of every architecture that GGUF files are imported from compute what transformers computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.checkpoints.folder import GGUF
from pagoda_server.checkpoints.gguf_families import FAMILIES
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.checkpoints.weight_files import open_weights
from tests.checkpoints.tiny_gguf import TinyModel, gguf_tensors
from tests.engine.tiny_models import MODELS, ShuffledBlocks, load_runner, next_chunk, save_model, step_logits

VOCAB_SIZE = 264  # of the vocabulary in tiny files


def changed(name: str, **fields: Any) -> PreTrainedConfig:
    """One of MODELS with other fields."""
    config = MODELS[name]
    return type(config)(**(config.to_dict() | {"vocab_size": VOCAB_SIZE, "dtype": None} | fields))


# Architecture of the file, and the model that it is made from.
CASES: dict[str, tuple[str, PreTrainedConfig]] = {
    "llama": ("llama", changed("llama with biases")),
    "llama, yarn": ("llama", changed("yarn rope")),
    "llama, linear": ("llama", changed("linear rope")),
    "qwen2": ("qwen2", changed("qwen2")),
    "qwen3": ("qwen3", changed("qwen3")),
    "olmo2": ("olmo2", changed("olmo2")),
    "olmo3": ("olmo2", changed("olmo3")),
    "gemma": ("gemma", changed("gemma")),
    "gemma2": ("gemma2", changed("gemma2", query_pre_attn_scalar=16, final_logit_softcapping=30.0)),
    "gemma3": ("gemma3", changed("gemma3", query_pre_attn_scalar=16, num_hidden_layers=6, layer_types=None)),
    "phi3": ("phi3", changed("phi3")),
    "phi3, a part rotated": ("phi3", changed("phi3 with a part of each head rotated")),
    "phi3, longrope": ("phi3", changed("phi3 with longrope")),
    "smollm3": ("smollm3", changed("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], layer_types=None)),
    "granite": ("granite", changed("granite")),
    "granite, tied": ("granite", changed("granite, tied")),
    "apertus": ("apertus", changed("apertus", rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "arcee": ("arcee", changed("arcee")),
    "ministral3": (
        "mistral3",
        changed(
            "ministral3",
            rope_parameters=MODELS["ministral3"].rope_parameters | {"mscale": 1.0, "mscale_all_dim": 0.5},
        ),
    ),
    "glm4": ("glm4", changed("glm4")),
    "exaone4": ("exaone4", changed("exaone4")),
    "exaone4 without a window": ("exaone4", changed("exaone4 without a window")),
    "seed_oss": ("seed_oss", changed("seed_oss")),
    "ernie4_5": ("ernie4_5", changed("ernie4_5")),
    "starcoder2": ("starcoder2", changed("starcoder2", sliding_window=None)),
    "stablelm": ("stablelm", changed("stablelm")),
    "stablelm, parallel": ("stablelm", changed("stablelm, parallel")),
    "nemotron": ("nemotron", changed("nemotron")),
    "cohere": ("command-r", changed("cohere")),
    "cohere2": ("cohere2", changed("cohere2", num_hidden_layers=4, layer_types=None)),
    "gpt_neox": ("gptneox", changed("gpt_neox")),
    "gpt_neox, not parallel": ("gptneox", changed("gpt_neox, not parallel")),
    "gpt2": ("gpt2", changed("gpt2", n_inner=None)),
    "hunyuan dense": ("hunyuan-dense", changed("hunyuan_v1_dense")),
    "olmo": ("olmo", changed("olmo", attention_bias=False)),
    "phi2": ("phi2", changed("phi", intermediate_size=192)),
    "jais2": ("jais2", changed("jais2")),
    "mixtral": ("llama", changed("mixtral")),
    "qwen2_moe": ("qwen2moe", changed("qwen2_moe")),
    "qwen3_moe": ("qwen3moe", changed("qwen3_moe")),
    "olmoe": ("olmoe", changed("olmoe")),
    "granitemoe": ("granitemoe", changed("granitemoe")),
    "granitemoeshared": ("granitemoe", changed("granitemoeshared")),
    "glm4_moe": ("glm4moe", changed("glm4_moe", first_k_dense_replace=1, norm_topk_prob=True)),
    "glm4_moe with groups of experts": ("glm4moe", changed("glm4_moe with groups of experts")),
    "dots1": ("dots1", changed("dots1", sliding_window=None, layer_types=None)),
    "ernie4_5_moe": ("ernie4_5-moe", changed("ernie4_5_moe")),
    "minimax_m2": ("minimax-m2", changed("minimax_m2")),
    "gpt_oss": ("gpt-oss", changed("gpt_oss", swiglu_limit=7.0)),
    "gpt_bigcode": ("starcoder", changed("gpt_bigcode", n_inner=None)),
}


def imported(tiny: TinyModel, tmp_path: Path) -> Path:
    folder = tmp_path / "imported"
    folder.mkdir(parents=True)
    import_gguf(tiny.write(folder / GGUF), folder, no_progress)
    return folder


def tiny(case: str, tmp_path: Path) -> TinyModel:
    architecture, config = CASES[case]
    return TinyModel(architecture, save_model(config, tmp_path / "saved"))


def test_every_architecture_has_a_model_here() -> None:
    assert {name.split()[0] for name in FAMILIES} == {architecture for architecture, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_an_imported_file_computes_the_logits_of_its_model(case: str, tmp_path: Path) -> None:
    model = tiny(case, tmp_path)
    if "longrope" in case:
        for length in ("long", "short"):
            factors = model.model.config.rope_parameters[f"{length}_factor"]
            model.tensors[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    folder = imported(model, tmp_path)
    runner = load_runner(folder)
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=53)
    logits = step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])
    with torch.inference_mode():
        expected = model.model(torch.tensor([prompt])).logits[0, -1]
    assert expected.std() > 0.1  # or every model would do
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_moe", "glm4_moe", "granitemoe"])
def test_gate_and_up_of_experts_may_be_one_tensor(case: str, tmp_path: Path) -> None:
    model = tiny(case, tmp_path)
    apart = open_weights(imported(model, tmp_path / "apart"))
    for name, values in gguf_tensors(model.family, model.model).items():
        if "ffn_gate_exps" in name:
            up = name.replace("gate", "up")
            both = np.concatenate([values, gguf_tensors(model.family, model.model)[up]], axis=1)
            model.tensors |= {name: None, up: None, name.replace("gate", "gate_up"): both}
    together = open_weights(imported(model, tmp_path / "together"))
    assert together.keys() == apart.keys()
    for name, stored in apart.items():
        np.testing.assert_array_equal(together[name].whole(slice(None)), stored.whole(slice(None)), err_msg=name)


def test_old_files_have_a_tensor_for_each_expert_of_mixtral(tmp_path: Path) -> None:
    model = tiny("mixtral", tmp_path)
    apart = open_weights(imported(model, tmp_path / "new"))
    for name, values in gguf_tensors("llama", model.model).items():
        if "_exps" in name:
            model.tensors[name] = None
            model.tensors |= {name.replace("_exps", f".{number}"): each for number, each in enumerate(values)}
    old = open_weights(imported(model, tmp_path / "old"))
    assert old.keys() == apart.keys()
    for name, stored in apart.items():
        np.testing.assert_array_equal(old[name].whole(slice(None)), stored.whole(slice(None)), err_msg=name)


def test_numbers_of_layers_that_are_missing_or_too_few_are_refused(tmp_path: Path) -> None:
    model = tiny("apertus", tmp_path)
    model.metadata = {"xielu.alpha_n": [0.5]}
    with pytest.raises(CheckpointError, match=r"xielu\.alpha_n is not a list of 2 float32"):
        imported(model, tmp_path)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.MXFP4])
def test_experts_keep_the_values_of_their_format(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    config = changed("gpt_oss", hidden_size=64, intermediate_size=96)
    model = TinyModel("gpt-oss", save_model(config, tmp_path / "saved"))
    name = "blk.1.ffn_up_exps.weight"
    model.kinds[name] = kind
    stored = open_weights(imported(model, tmp_path))
    experts = gguf_tensors("gpt-oss", model.model)[name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(experts, kind), kind)
    for number in range(len(experts)):
        part = stored[f"model.layers.1.mlp.experts.{number}.up_proj.weight"]
        assert part.grouping is not None
        np.testing.assert_array_equal(part.groups(slice(None)).dequantize(part.grouping), expected[number])


def test_layers_that_predict_a_further_token_are_left_out(tmp_path: Path) -> None:
    model = tiny("glm4_moe", tmp_path)
    model.metadata = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    model.tensors = {"blk.2.nextn.eh_proj.weight": np.zeros((48, 96), np.float32)}
    assert not [name for name in open_weights(imported(model, tmp_path)) if "layers.2." in name]


@pytest.mark.parametrize(
    ("case", "field", "value", "message"),
    [
        ("qwen3_moe", "expert_gating_func", 2, "qwen3moe.expert_gating_func is 2; 1 is supported"),
        ("qwen3_moe", "expert_weights_scale", 2.5, "qwen3moe.expert_weights_scale is 2.5, which is not computed"),
        ("mixtral", "expert_weights_norm", False, "llama.expert_weights_norm is False; True is supported"),
        ("granitemoe", "expert_group_count", 4, "granitemoe.expert_group_count is 4, which is not computed"),
        ("granite", "rope.scaling.finetuned", False, "granite.rope.scaling.finetuned is False; True is supported"),
        ("glm4", "rope.dimension_count", 7, "glm4.rope.dimension_count is 7; pairs are rotated"),
        ("qwen3", "attention.head_count_kv", 4, "qwen3.attention.head_count_kv is 4, which do not divide 6 heads"),
        ("qwen3", "expert_count", 8, "qwen3.expert_count is 8; experts of this architecture are not supported"),
        ("gpt_oss", "expert_count", 5, "ffn_gate_exps.weight has shape .*, not parts of 5 experts"),
        ("glm4_moe", "leading_dense_block_count", 2, "glm4moe.expert_count is 8, but no layer has experts"),
        ("cohere2", "rope.freq_base_swa", 5e5, "cohere2.rope.freq_base_swa is 500000.0; only that of all layers"),
        ("exaone4", "attention.sliding_window_pattern", [True], "sliding_window_pattern is a list of 1 for 2 layers"),
        ("gemma2", "attn_logit_softcapping", float("nan"), "gemma2.attn_logit_softcapping is nan; a finite"),
        ("stablelm", "use_parallel_residual", True, "stablelm.use_parallel_residual is True; False is supported"),
    ],
)
def test_a_field_that_is_not_computed_is_refused_by_its_name(
    case: str, field: str, value: object, message: str, tmp_path: Path
) -> None:
    model = tiny(case, tmp_path)
    model.metadata = {f"{model.family}.{field}": value}
    with pytest.raises(CheckpointError, match=message):
        imported(model, tmp_path)
