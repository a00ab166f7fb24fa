"""The fingerprint of a folder's weights: what it depends on, and what not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pagoda_server.checkpoints.fingerprint import PIECE_BYTES, weights_fingerprint
from pagoda_server.checkpoints.folder import CheckpointError

Arrays = Mapping[str, NDArray[Any]]
WEIGHTS = {
    "a.weight": np.arange(4096, dtype=np.float32).reshape(64, 64),
    "b.weight": np.arange(100, dtype=np.float16),
    "tiny": np.array([1, 2], np.int8),
    "empty": np.zeros((0, 4), np.float32),
}


def folder_of(path: Path, *shards: Arrays, config: Mapping[str, object] | None = None) -> Path:
    """A folder with one safetensors file, or several and their index."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    names = ["model.safetensors"] if len(shards) == 1 else [f"{at}.safetensors" for at in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(dict(shard), path / name)
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def changed(name: str, at: int) -> Arrays:
    array = WEIGHTS[name].copy()
    array.reshape(-1)[at] += 1
    return {**WEIGHTS, name: array}


def test_it_does_not_depend_on_how_files_are_split_or_what_the_configuration_says(tmp_path: Path) -> None:
    whole = weights_fingerprint(folder_of(tmp_path / "whole", WEIGHTS))
    assert len(whole) == 64
    last, *others = reversed(WEIGHTS)
    shards = [{last: WEIGHTS[last]}, {name: WEIGHTS[name] for name in others}]
    split = folder_of(tmp_path / "split", *shards, config={"transformers_version": "9"})
    assert weights_fingerprint(split) == whole


@pytest.mark.parametrize(
    "other",
    [
        changed("a.weight", 0),
        changed("a.weight", -1),
        changed("a.weight", (4096 * 4 - PIECE_BYTES) // 3 // 4 + 1),
        changed("b.weight", 0),
        changed("tiny", 1),
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].reshape(32, 128)},
        {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].view(np.int32)},
        {("c.weight" if name == "b.weight" else name): array for name, array in WEIGHTS.items()},
        {name: array for name, array in WEIGHTS.items() if name != "empty"},
    ],
    ids=["first", "last", "inside", "vector", "tiny", "shape", "type", "name", "fewer"],
)
def test_other_weights_have_another_one(tmp_path: Path, other: Arrays) -> None:
    assert weights_fingerprint(folder_of(tmp_path / "one", WEIGHTS)) != weights_fingerprint(
        folder_of(tmp_path / "other", other)
    )


def test_a_gguf_file_has_one_that_its_metadata_does_not_change(tmp_path: Path) -> None:
    def write(name: str, first: float, author: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        writer.add_author(author)
        writer.add_tensor("token_embd.weight", np.full((8, 32), first, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return weights_fingerprint(folder)

    assert write("one", 1.0, "A") == write("same", 1.0, "B")
    assert write("again", 1.0, "A") != write("other", 2.0, "A")


def test_what_is_not_stored_has_none(tmp_path: Path) -> None:
    assert weights_fingerprint(folder_of(tmp_path / "random", WEIGHTS, config={"random_weights": True})) == ""


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "cut", WEIGHTS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        weights_fingerprint(path.parent)
