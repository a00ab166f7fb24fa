"""The pooling of an embedding model is read from its folder, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints.folder import CheckpointError
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.router.errors import ConfigError
from pagoda_server.router.text.pooling import pooling_of
from tests.checkpoints.tiny_gguf import tiny_model

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write_pooling(folder: Path, config: Any, modules: Any = MODULES) -> None:
    """Write the files of Sentence Transformers; `config` of the pooling."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(modules))


def modes(*chosen: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 48} | {f"pooling_mode_{mode}": mode in chosen for mode in MODES}


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        (modes("lasttoken"), inference_pb2.POOLING_LAST),
        (modes("mean_tokens"), inference_pb2.POOLING_MEAN),
        (modes("cls_token"), inference_pb2.POOLING_CLS),
        ({"pooling_mode": "mean"}, inference_pb2.POOLING_MEAN),
    ],
)
def test_the_pooling_is_the_one_that_the_files_name(
    config: Any, pooling: inference_pb2.Pooling, tmp_path: Path
) -> None:
    write_pooling(tmp_path, config, MODULES[:2])
    assert pooling_of(tmp_path) == pooling
    write_pooling(tmp_path, config)
    assert pooling_of(tmp_path) == pooling


@pytest.mark.parametrize(
    ("config", "modules", "reason"),
    [
        (modes("max_tokens"), MODULES, "the pooling must be one of .*; it is max_tokens"),
        (modes("cls_token", "mean_tokens"), MODULES, "it is cls_token, mean_tokens"),
        (modes(), MODULES, "it is none"),
        ({"pooling_mode": ["mean"]}, MODULES, "it is "),
        ([], MODULES, "holds a list, not an object"),
        (modes("lasttoken"), [*MODULES, {"type": "sentence_transformers.models.Dense"}], "they are .*, Dense"),
        (modes("lasttoken"), MODULES[:1], "they are Transformer"),
        (modes("lasttoken"), {"1": 2}, "they are none"),
        (modes("lasttoken"), [7, None], "they are None, None"),
        (modes("lasttoken"), [MODULES[0], MODULES[1] | {"path": "../1_Pooling"}], "must be a folder here"),
        (modes("lasttoken"), [MODULES[0], MODULES[1] | {"path": 7}], "must be a folder here"),
        (modes("lasttoken"), [MODULES[0], MODULES[1] | {"path": "2_Pooling"}], "there is no .*2_Pooling"),
    ],
)
def test_vectors_that_embed_does_not_make_are_refused(config: Any, modules: Any, reason: str, tmp_path: Path) -> None:
    write_pooling(tmp_path, config, modules)
    with pytest.raises(ConfigError, match=reason) as error:
        pooling_of(tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"modules\.json is (nested too deep|not JSON)"):
        pooling_of(tmp_path)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        (0, inference_pb2.POOLING_LAST),
        (1, inference_pb2.POOLING_MEAN),
        (2, inference_pb2.POOLING_CLS),
        (3, inference_pb2.POOLING_LAST),
    ],
)
def test_the_pooling_of_a_gguf_file_is_kept(kind: int, pooling: inference_pb2.Pooling, tmp_path: Path) -> None:
    import_gguf(gguf_with_pooling(kind, tmp_path), tmp_path, no_progress)
    assert pooling_of(tmp_path) == pooling


def test_a_gguf_file_of_a_reranker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"qwen3\.pooling_type is 4, which is not computed"):
        import_gguf(gguf_with_pooling(4, tmp_path), tmp_path, no_progress)


def gguf_with_pooling(kind: int, folder: Path) -> Path:
    tiny = tiny_model("qwen3")
    tiny.metadata["qwen3.pooling_type"] = kind
    return tiny.write(folder / "model.gguf")
