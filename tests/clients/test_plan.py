"""`pagoda plan` in a real process, and the weights that it counts beside those of a loaded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.models.measured_weights import MeasuredWeights, bytes_of
from pagoda_server.engine.runners.loaded_model import load_for_serving
from pagoda_server.engine.runners.plan import plans_of
from pagoda_server.settings.engine import EngineConfig
from tests.checkpoints.tiny_gguf import tiny_model
from tests.engine.tiny_models import ONE_OF_EACH_FAMILY, saved_model

SLACK_BYTES = 1024  # tables of rotations, which are no weights


def counted_and_loaded(folder: Path, quantization: str, dtype: str) -> tuple[int, int]:
    config = EngineConfig(str(folder), quantization=quantization, dtype=dtype)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    counted = load_for_serving(config, cpu, make_weights=MeasuredWeights).model.weight_bytes
    model = load_for_serving(config, cpu).model
    # How the rows of products are arranged is kept for adapters, and is no weight: 8 bytes a row, of some families.
    return counted, bytes_of(model) - bytes_of([product.rows for product in model.adapted_products])


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_counted_weights_are_those_of_a_loaded_model(
    name: str, quantization: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    counted, loaded = counted_and_loaded(saved_model(name, tmp_path_factory), quantization, "bfloat16")
    assert loaded - SLACK_BYTES <= counted <= loaded


def test_a_cache_that_the_model_cannot_have_is_refused_and_not_planned(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = saved_model("hunyuan_v1_dense", tmp_path_factory)
    assert {tuple(plan.kv_bytes_per_token) for plan in plans_of(folder)} == {("auto",)}
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is not supported for hunyuan_v1_dense"):
        load_for_serving(EngineConfig(str(folder), kv_cache_dtype="int8"), torch.device("cpu"))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_counted_weights_of_many_rows_are_those_of_a_loaded_model(
    quantization: str, is_tied: bool, tmp_path: Path
) -> None:
    """So many that each product is made of a part of its rows, which is then scaled."""
    tiny = tiny_model(
        "llama", vocab_size=70_000, hidden_size=256, intermediate_size=20_000, tie_word_embeddings=is_tied
    )
    tiny.quantisation = tiny.quantisation.Q4_1
    folder = tmp_path / "folder"
    folder.mkdir()
    import_gguf(tiny.write(folder / "model.gguf"), folder, no_progress)
    counted, loaded = counted_and_loaded(folder, quantization, "bfloat16")
    assert counted == pytest.approx(loaded, rel=0.001)


def test_the_command_prints_what_each_precision_takes_and_how_much_fits(tmp_path: Path) -> None:
    path = tiny_model("qwen2").write(tmp_path / "tiny.gguf")
    environment = os.environ | {"PAGODA_CACHE": str(tmp_path / "cache"), "COLUMNS": "120"}
    command = [sys.executable, "-m", "pagoda_server.cli", "plan", str(path), "--tokens", "100", "--memory"]
    done, twice, wrong = (
        subprocess.run([*command, size], env=environment, capture_output=True, text=True, check=False)
        for size in ("1GB", "2GB", "2 apples")
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:] if " MB " in line]
    assert {row[0] for row in rows} == {"none", "int4", "int8"}
    config = json.loads(next((tmp_path / "cache" / "models").glob("*/config.json")).read_text())
    kv_bytes = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * 4  # float32
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("none"))
    assert f"{kv_bytes / 1e3:.1f} kB" in row

    def fitting(printed: str) -> int:
        (row,) = (line for line in printed.splitlines() if line.startswith("none"))
        return int(row.split()[-1].replace(",", ""))

    assert fitting(twice.stdout) - fitting(done.stdout) == pytest.approx(1e9 / (100 * kv_bytes), abs=1)
    assert wrong.returncode == 2
    assert "must be a size such as 24GB" in " ".join(wrong.stderr.replace("│", " ").split())
