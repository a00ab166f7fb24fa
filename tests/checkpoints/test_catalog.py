"""The names that a user may give a model."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pagoda_server.checkpoints import (
    DEFAULT_MODEL,
    AvailableModel,
    CheckpointError,
    FoundModel,
    catalog,
    find_model,
    gguf_import,
    list_models,
    resolve,
    verify,
)
from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.dequantized import dequantized, write_dequantized
from tests.checkpoints.tiny_gguf import tiny_model


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache.default().root == tmp_path / "own"
    monkeypatch.delenv("PAGODA_CACHE")
    assert Cache.default().root == tmp_path / "xdg" / "pagoda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Cache.default().root == tmp_path / "home" / ".cache" / "pagoda"


def test_the_default_model_is_smollm2(default_model_folder: Path) -> None:
    verify(default_model_folder)
    config = json.loads((default_model_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    generation = json.loads((default_model_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert (generation["do_sample"], generation["temperature"], generation["top_p"]) == (True, 0.2, 0.9)
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    assert tokenizer.encode("x = 12345").tokens == ["x", "Ġ=", "Ġ", "1", "2", "3", "4", "5"]
    assert "You are a helpful AI assistant named SmolLM" in (default_model_folder / "chat_template.jinja").read_text()


def test_a_plain_copy_is_made_once_and_of_quantized_folders_alone(
    default_model_folder: Path, plain_model_folder: Path
) -> None:
    assert dequantized(plain_model_folder) == plain_model_folder != default_model_folder
    assert dequantized(default_model_folder) == plain_model_folder
    assert plain_model_folder.name not in {model.name for model in list_models()}


def test_the_imported_default_model_knows_the_capital_of_sweden(plain_model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain_model_folder)
    model = AutoModelForCausalLM.from_pretrained(plain_model_folder, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of Sweden?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    answer = tokenizer("The capital of Sweden is Stockholm.<|im_end|>").input_ids
    ids = torch.tensor([tokenizer(prompt).input_ids + answer])
    with torch.inference_mode():
        chosen = model(ids).logits[0].argmax(-1).tolist()
    assert chosen[-1 - len(answer) : -1] == answer  # each token is the likeliest after those before it: greedy


def test_synthetic_tokens_are_bytes(own_cache: Path) -> None:
    folder = resolve("synthetic")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "all of it: 🙂\x00\n é"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [256, 97, 257]
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "synthetic",
        "vocab_size": 258,
        "max_position_embeddings": 32768,
    }
    assert resolve(str(folder)) == folder


def test_an_imported_file_can_be_called_by_its_folders_name(own_cache: Path, tmp_path: Path) -> None:
    path = tiny_model("qwen3").write(tmp_path / "My model.gguf")
    folder = resolve(str(path))
    assert folder.name.startswith("My-model-")
    assert resolve(folder.name) == folder


def test_the_list_shows_imported_models_and_those_that_first_use_imports(own_cache: Path, tmp_path: Path) -> None:
    *packages, synthetic = list_models()
    assert [model.name for model in packages] == [DEFAULT_MODEL, "qwen2.5-coder-0.5b-instruct", "gemma-3-270m"]
    assert packages[0] == AvailableModel(DEFAULT_MODEL, "llama", "GGUF Q4_1", 134_515_008, download_bytes=92_871_040)
    assert synthetic == AvailableModel("synthetic", "synthetic")
    tiny = tiny_model("qwen2")
    tiny.metadata = {"general.file_type": 15}
    before = time.time()
    folder = resolve(str(tiny.write(tmp_path / "tiny.gguf")))
    imported = list_models()[-1]
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    parameters = sum(parameter.numel() for parameter in tiny.model.parameters())
    assert imported.imported_s is not None
    assert before - 1 < imported.imported_s < time.time() + 1
    expected = AvailableModel(folder.name, "qwen2", "GGUF Q4_K_M", parameters, folder, size_bytes)
    assert replace(imported, imported_s=None) == expected


@pytest.mark.parametrize("content", [b"{", b"[]", b'"\xff"'])
def test_a_model_with_a_damaged_config_is_one_line_of_the_list(content: bytes, own_cache: Path, tmp_path: Path) -> None:
    folder = resolve(str(tiny_model("qwen2").write(tmp_path / "tiny.gguf")))
    config = folder / "config.json"
    config.write_bytes(content.ljust(config.stat().st_size))
    listed = list_models()[-1]
    assert (listed.name, listed.family) == (folder.name, "damaged config.json")


def test_a_local_folder_is_used_where_it_lies(own_cache: Path, tmp_path: Path) -> None:
    folder = local_folder(own_cache, tmp_path)
    assert resolve(str(folder)) == folder
    assert os.path.samefile(resolve(os.path.relpath(folder)), folder)


def test_a_folder_has_its_own_name_however_it_is_written(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local_folder(own_cache, tmp_path)
    monkeypatch.chdir(folder)
    for written in (".", "./", "../local", "../local/", f"{folder}/", str(folder)):
        assert find_model(written).name == "local"
    (tmp_path / "alias").symlink_to(folder)
    assert find_model(f"{tmp_path}/alias").name == "alias"


def test_a_hub_model_has_the_name_that_was_asked_for(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "7b1d0c2"
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(catalog, "obtain_hub_model", lambda *_: snapshot)
    assert find_model("org/name") == FoundModel("org/name", snapshot)


def test_a_gguf_file_is_served_by_its_own_name_and_listed_by_its_contents(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen3").write(tmp_path / "mine.Q8_0.gguf")
    monkeypatch.chdir(tmp_path)
    found = find_model("mine.Q8_0.gguf")
    assert found == find_model(str(path))
    assert found.name == "mine.Q8_0"
    listed = list_models()[-1].name
    assert listed.startswith("mine.Q8_0-")
    assert find_model(listed) == FoundModel(listed, found.folder)


def test_a_file_that_is_refused_is_not_read_whole_before(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen2").write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"gpt-2"))
    monkeypatch.setattr(gguf_import, "sha256_of", lambda *_: pytest.fail("it is read whole"))
    with pytest.raises(CheckpointError, match="architecture gpt-2 is not supported; supported: llama,"):
        resolve(str(path))


def local_folder(own_cache: Path, tmp_path: Path) -> Path:
    """A folder as transformers writes them."""
    (tmp_path / "local").mkdir()
    write_dequantized(resolve(str(tiny_model("llama").write(tmp_path / "tiny.gguf"))), tmp_path / "local")
    return tmp_path / "local"


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_local_folder_without_a_part_names_it(missing: str, own_cache: Path, tmp_path: Path) -> None:
    folder = local_folder(own_cache, tmp_path)
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        resolve(str(folder))


def test_local_weights_cut_short_are_noticed(own_cache: Path, tmp_path: Path) -> None:
    folder = local_folder(own_cache, tmp_path)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, truncated or corrupt"):
        resolve(str(folder))


def test_every_shard_of_local_weights_must_be_there(own_cache: Path, tmp_path: Path) -> None:
    folder = local_folder(own_cache, tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        resolve(str(folder))
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    assert resolve(str(folder)) == folder


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "", "..", "part/a.safetensors"])
def test_an_index_names_files_of_the_folder_alone(name: str, own_cache: Path, tmp_path: Path) -> None:
    folder = local_folder(own_cache, tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json names .*, which is not a safetensors file of the folder"):
        resolve(str(folder))


@pytest.mark.parametrize(("offsets", "message"), [((0, 8, 0, 8), "begins at byte"), ((0, 8, 12, 20), "begins at byte")])
def test_tensors_that_overlap_or_leave_a_hole_are_refused(
    offsets: tuple[int, ...], message: str, own_cache: Path, tmp_path: Path
) -> None:
    folder = local_folder(own_cache, tmp_path)
    entries = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [offsets[at], offsets[at + 1]]}
        for name, at in (("one", 0), ("two", 2))
    }
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(max(offsets))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"truncated or corrupt: .*tensor two {message}"):
        resolve(str(folder))


def test_a_path_that_is_no_file_is_not_looked_for_elsewhere(own_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file models/absent\.gguf"):
        resolve("models/absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match=r"pipe\.gguf is not a regular file"):
        resolve(str(tmp_path / "pipe.gguf"))
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    with pytest.raises(CheckpointError, match=r"loop\.gguf is not a regular file"):
        resolve(str(tmp_path / "loop.gguf"))


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_local_configuration_is_named(content: str, own_cache: Path, tmp_path: Path) -> None:
    folder = local_folder(own_cache, tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve(str(folder))


def test_the_error_for_an_unknown_name_lists_the_valid_ones(own_cache: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no model 'unheard-of': give {DEFAULT_MODEL}, .* synthetic, a folder"):
        resolve("unheard-of")


@pytest.mark.parametrize("model", ["x" * 5000, "~no-such-user/model", "a\0b"])
def test_a_name_that_cannot_be_a_path_is_one_clear_error(own_cache: Path, model: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read|there is no model") as caught:
        resolve(model)
    assert len(str(caught.value)) < 500


def test_a_folder_without_permission_is_one_clear_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_dir(path: Path) -> bool:  # a parent folder that this user may not enter; faked because root may
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(CheckpointError, match="'/private/model' cannot be read: Permission denied"):
        resolve("/private/model")


def test_a_hub_name_without_a_network_is_a_clear_error(own_cache: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "pagoda_server.checkpoints", "some-org/some-model"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "error: some-org/some-model is not a folder here, and the Hugging Face Hub did not provide it"
    )
    assert result.stderr.count("\n") == 1


def test_the_command_prints_the_folder_alone_on_standard_output(own_cache: Path) -> None:
    command = [sys.executable, "-m", "pagoda_server.checkpoints", "synthetic", "--verify"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{own_cache / 'models' / 'synthetic'}\n"


def test_importing_the_package_loads_no_torch_and_no_numpy() -> None:
    heavy = "{'torch', 'numpy', 'gguf', 'transformers'}"
    code = f"import sys, pagoda_server.checkpoints; assert not {heavy} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
