"""Models of every architecture that GGUF files are imported from compute what transformers computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from pagoda_server.checkpoints.folder import GGUF
from pagoda_server.checkpoints.gguf_families import FAMILIES
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from tests.checkpoints.tiny_gguf import TinyModel
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
    "gemma3": ("gemma3", changed("gemma3", query_pre_attn_scalar=16)),
    "phi3": ("phi3", changed("phi3")),
    "phi3, a part rotated": ("phi3", changed("phi3 with a part of each head rotated")),
    "phi3, longrope": ("phi3", changed("phi3 with longrope")),
    "smollm3": ("smollm3", changed("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], layer_types=None)),
    "granite": ("granite", changed("granite")),
    "granite, tied": ("granite", changed("granite, tied")),
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
    "gpt_bigcode": ("starcoder", changed("gpt_bigcode", n_inner=None)),
}


def test_every_architecture_has_a_model_here() -> None:
    assert {name.split()[0] for name in FAMILIES} == {architecture for architecture, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_an_imported_file_computes_the_logits_of_its_model(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    theirs = save_model(config, tmp_path / "saved")
    folder = tmp_path / "imported"
    folder.mkdir()
    tiny = TinyModel(architecture, theirs)
    if "longrope" in case:
        for length in ("long", "short"):
            tiny.tensors[f"rope_factors_{length}.weight"] = np.float32(config.rope_parameters[f"{length}_factor"])
    import_gguf(tiny.write(folder / GGUF), folder, no_progress)
    runner = load_runner(folder)
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=53)
    logits = step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(prompt, 1))])
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0, -1]
    assert expected.std() > 0.1  # or every model would do
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
