"""Downloads of the Hub by the real command, from a server on loopback that cuts connections and sends wrong bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_server.checkpoints.dequantized import write_dequantized
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from tests.checkpoints.fake_hub import FakeHub, fake_hub
from tests.checkpoints.tiny_gguf import tiny_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("folder")
    imported = folder.parent / "imported"
    imported.mkdir()
    import_gguf(tiny_model("qwen2").write(imported / "model.gguf"), imported, no_progress)
    write_dequantized(imported, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {"1_Pooling/config.json": b"{}"}


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path) -> Iterator[FakeHub]:
    gguf = tiny_model("qwen2").write(tmp_path / "tiny.gguf").read_bytes()
    repositories = {
        "org/folder": files | {"README.md": b"# No part of it", "pytorch_model.bin": b"x" * 20_000},
        "org/files": {
            "tiny-Q8_0.gguf": b"GGUF other",
            "tiny.Q4_K_M.gguf": gguf,
            "mmproj-F16.gguf": b"GGUF",
            "a.md": b"a",
        },
        "org/neither": {"a.md": b"a"},
    }
    with fake_hub(repositories) as hub:
        yield hub


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pagoda(hub: FakeHub, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **environment}
    return subprocess.run(
        [sys.executable, "-m", "pagoda_server.cli", *arguments],
        env={**os.environ, "PAGODA_CACHE": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_is_downloaded_shown_and_found_again_without_a_network(
    hub: FakeHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repositories["org/folder"] |= {"onnx/config.json": b"{}"}
    pulled = pagoda(hub, tmp_path, "pull", "org/folder")
    assert pulled.returncode == 0, pulled.stderr
    assert "Downloading org/folder" in pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert contents(folder) == files, "and nothing else of the repository"
    assert tmp_path / "cache" / "hub" in folder.parents
    hub.repositories.clear()
    again = pagoda(hub, tmp_path, "pull", "org/folder", HF_ENDPOINT="http://127.0.0.1:9")
    assert (again.returncode, again.stdout) == (0, pulled.stdout)
    (row,) = (line for line in pagoda(hub, tmp_path, "list").stdout.splitlines() if "org/folder" in line)
    assert row.split()[:3] == ["org/folder", "qwen2", "safetensors"]


LARGE = {"extra.safetensors": bytes(25_000_000)}  # the library writes pieces of 10 MB


def first_byte_of(range: str) -> int:
    return int(range.removeprefix("bytes=").removesuffix("-"))


@pytest.mark.thorough
def test_a_connection_that_is_cut_goes_on_where_it_was_cut(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["org/folder"] |= LARGE
    hub.cuts = [21_500_000]
    pulled = pagoda(hub, tmp_path, "pull", "org/folder")
    assert pulled.returncode == 0, pulled.stderr
    (range,) = hub.ranges
    assert first_byte_of(range) >= 20_000_000


@pytest.mark.thorough
def test_a_download_that_was_given_up_goes_on_in_the_next_process(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["org/folder"] |= LARGE
    hub.cuts = [21_500_000] + [0] * 50
    failed = pagoda(hub, tmp_path, "pull", "org/folder")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: org/folder is not a folder here, and the Hugging Face Hub")
    assert "org/folder" not in pagoda(hub, tmp_path, "list").stdout
    hub.cuts, hub.ranges, hub.sent = [], [], {}
    assert pagoda(hub, tmp_path, "pull", "org/folder").returncode == 0
    (range,) = hub.ranges
    assert first_byte_of(range) >= 20_000_000
    assert hub.sent == {"extra.safetensors": 25_000_000 - first_byte_of(range)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_bytes_are_refused_and_fetched_anew(name: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupted.add(name)
    failed = pagoda(hub, tmp_path, "pull", "org/folder")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(f"error: {name} was not downloaded as the Hub describes")
    assert "org/folder" not in pagoda(hub, tmp_path, "list").stdout
    hub.corrupted.clear()
    assert pagoda(hub, tmp_path, "pull", "org/folder").returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hf.co/org/files", "org/files:q4_k_m"])
def test_a_gguf_file_is_chosen_by_its_quantization(name: str, hub: FakeHub, tmp_path: Path) -> None:
    pulled = pagoda(hub, tmp_path, "pull", name)
    assert pulled.returncode == 0, pulled.stderr
    assert Path(pulled.stdout.strip()).name.startswith("tiny.Q4_K_M-")
    assert set(hub.sent) == {"tiny.Q4_K_M.gguf"}


@pytest.mark.thorough
def test_what_is_not_there_is_named(hub: FakeHub, tmp_path: Path) -> None:
    missing = pagoda(hub, tmp_path, "pull", "org/files:Q5_0")
    assert missing.stderr.splitlines()[-1] == "error: org/files has no GGUF file in Q5_0; it has Q4_K_M, Q8_0"
    neither = pagoda(hub, tmp_path, "pull", "org/neither")
    assert "org/neither has neither safetensors weights nor a .gguf file" in neither.stderr
    unknown = pagoda(hub, tmp_path, "pull", "org/unknown")
    assert unknown.returncode == 1
    assert unknown.stderr.count("error") == 1


@pytest.mark.thorough
def test_a_removed_model_is_gone_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    pagoda(hub, tmp_path, "pull", "org/folder")
    pagoda(hub, tmp_path, "pull", "synthetic")
    assert pagoda(hub, tmp_path, "rm", "org/folder").returncode == 0
    assert not list((tmp_path / "cache" / "hub").glob("models--*"))
    listed = pagoda(hub, tmp_path, "list").stdout
    assert "org/folder" not in listed
    assert "synthetic" in listed


@pytest.mark.thorough
def test_files_in_the_hubs_own_cache_are_used_there_and_never_removed(
    hub: FakeHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    code = "import huggingface_hub as h, sys; print(h.snapshot_download('org/folder', allow_patterns=sys.argv[1:]))"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code, *files], env=environment, capture_output=True, text=True, check=True
    )
    hub.sent.clear()
    pulled = pagoda(hub, tmp_path, "pull", "org/folder")
    assert (pulled.stdout, hub.sent) == (done.stdout, {})
    assert pagoda(hub, tmp_path, "rm", "org/folder").returncode == 0
    assert contents(Path(done.stdout.strip())) == files
