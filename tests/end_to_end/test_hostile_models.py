"""Model folders with absurd contents: a real server says what is wrong in one line, at once, with exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagoda_server.checkpoints import resolve
from tests.checkpoints.tiny_gguf import tiny_model
from tests.servers import ROOT

pytestmark = pytest.mark.thorough

HUGE = 10**12
AT_ONCE_S = 100.0  # with imports of torch, on a busy machine


def serve(model: Path, **keywords: Any) -> tuple[str, float]:
    """Start a server that cannot start. Returns its only error line, and the seconds until it exited."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0", "--model", str(model)],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, **keywords,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors, result.stderr
    assert all(len(line) < 1000 for line in errors)
    assert result.stderr.count("the engine started") <= 1
    return errors[0], time.monotonic() - started


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the synthetic model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512,
        )
    ).save_pretrained(folder)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(resolve("synthetic") / name, folder)
    return folder


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


RELATIVES: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**4299}, "num_hidden_layers"),
    ({"hidden_size": HUGE}, "hidden_size"),
    ({"hidden_size": 1 << 24, "head_dim": 1 << 16}, "model.embed_tokens.weight has shape"),
    ({"vocab_size": HUGE}, "vocab_size"),
    ({"num_attention_heads": HUGE, "head_dim": 8}, "num_attention_heads"),
    ({"num_key_value_heads": -1}, "num_key_value_heads"),
    ({"head_dim": HUGE}, "head_dim"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"rope_parameters": None, "rope_theta": 10**400}, "rope_theta"),
    ({"rope_parameters": None, "rope_theta": float("inf")}, "rope_theta"),
    ({"rope_parameters": {"rope_type": ["x"]}}, "RoPE type"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, "factor"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1e300}},
        "positions",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}},
        "RoPE",
    ),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "RoPE"),
    ({"architectures": [["x"] * 10**6]}, "architectures"),
    ({"tie_word_embeddings": "x" * 10**6}, "tie_word_embeddings"),
    ({"model_type": "synthetic", "vocab_size": "many"}, "vocab_size"),
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_position_embeddings": HUGE}, "max_position_embeddings"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "synthetic", "max_position_embeddings": HUGE}, "max_position_embeddings"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in RELATIVES),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_absurd_config_is_one_line_at_once(model: Path, fields: dict[str, Any], named: str) -> None:
    edit(model / "config.json", **fields)
    error, took_s = serve(model)
    assert named in error
    assert took_s < AT_ONCE_S


NESTED = "[" * 100_000
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a nested config": (lambda f: (f / "config.json").write_text('{"a":' + NESTED), "nested too deep"),
    "a nested tokenizer config": (lambda f: (f / "tokenizer_config.json").write_text('{"a":' + NESTED), "nested"),
    "a nested generation config": (lambda f: (f / "generation_config.json").write_text('{"a":' + NESTED), "nested"),
    "a nested tokenizer": (lambda f: (f / "tokenizer.json").write_text('{"model":' + NESTED), "tokenizer.json"),
    "a huge config": (lambda f: os.truncate(f / "config.json", 8 << 30), "config.json has more than"),
    "a huge tokenizer": (lambda f: os.truncate(f / "tokenizer.json", 8 << 30), "tokenizer.json has more than"),
    "a huge template": (lambda f: os.truncate(f / "chat_template.jinja", 1 << 30), "chat_template.jinja has more than"),
    "a tokenizer of ids without tokens": (lambda f: with_token_id(f, (1 << 32) - 1), "token id"),
    "many templates": (lambda f: (f / "chat_template.jinja").unlink() or edit(f / "tokenizer_config.json",
                       chat_template=[7, {"name": [1]}, {"name": "default", "template": "{% for %}"}]), "template"),
    "too many ends": (lambda f: edit(f / "generation_config.json", eos_token_id=list(range(200))), "eos_token_id"),
    "an end of no token": (lambda f: edit(f / "generation_config.json", eos_token_id=HUGE), "eos_token_id"),
    "a header of absurd length": (lambda f: header(f, "{}", 1 << 62), "safetensors"),
    "a header that is nested": (lambda f: header(f, "[" * 50_000), "safetensors"),
    "a header of absurd offsets": (lambda f: header(f, json.dumps({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62],
                                   "data_offsets": [0, (1 << 64) - 1]}})), "safetensors"),
    "an index that is nested": (lambda f: index(f, '{"weight_map":' + NESTED), "nested"),
    "an index of no names": (lambda f: index(f, '{"weight_map": {"a": 7, "b": "\\u0000"}}'), "not a safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_an_absurd_file_is_one_line_at_once(model: Path, name: str) -> None:
    damage, named = DAMAGE[name]
    damage(model)
    error, took_s = serve(model)
    assert named in error
    assert took_s < AT_ONCE_S


def with_token_id(folder: Path, id: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def header(folder: Path, text: str, length: int | None = None) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length or len(text)) + text.encode())


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


ABSURD_METADATA: list[tuple[str, object]] = [
    ("llama.embedding_length", (1 << 32) - 1),
    ("llama.attention.head_count", (1 << 32) - 1),
    ("llama.attention.head_count", 0),
    ("llama.attention.head_count_kv", 0),
    ("llama.context_length", (1 << 32) - 1),
    ("llama.rope.freq_base", float("nan")),
    ("llama.attention.layer_norm_rms_epsilon", float("inf")),
    ("tokenizer.ggml.eos_token_id", (1 << 32) - 1),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.block_count", (1 << 32) - 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ABSURD_METADATA),
    ],
)
def test_an_absurd_gguf_file_is_one_line_at_once(name: str, value: object, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.metadata[name] = value
    path = model.write(tmp_path / "absurd.gguf")
    error, took_s = serve(path, env={**os.environ, "PAGODA_CACHE": str(tmp_path / "cache")})
    assert error
    assert took_s < AT_ONCE_S


def test_a_disk_that_fills_up_during_an_import_is_one_line(tmp_path: Path) -> None:
    """A limit of the file size stands in for the disk's: both are errors of write()."""
    env = {**os.environ, "PAGODA_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh",
         sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0", "--model", "synthetic"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=env,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr[-2000:]
    assert "Traceback" not in result.stderr
    assert "error: synthetic was not imported into" in result.stderr
    assert "File too large" in result.stderr
