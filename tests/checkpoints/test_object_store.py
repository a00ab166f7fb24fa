"""Models at URLs, in a store that is a folder of this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from pagoda_server.checkpoints import CheckpointError, find_model, list_models, object_store, verify
from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.folder import linked_gguf
from pagoda_server.checkpoints.synthetic import obtain_synthetic_model
from tests.checkpoints.tiny_gguf import tiny_model


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model in the store, without SHA256SUMS. The cache is empty."""
    made = obtain_synthetic_model(Cache(tmp_path / "other-cache"), lambda *_: None)
    folder = tmp_path / "store" / "tiny"
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("manifest.json"))
    (folder / "notes.txt").write_text("not listed: not fetched")
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    return folder


def publish(folder: Path, *names: str) -> str:
    """Write SHA256SUMS for these files, or for all but the notes; return the folder's URL."""
    listed = names or sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in listed]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return f"file://{folder}"


def test_a_model_at_a_url_is_fetched_once_and_verified(stored: Path) -> None:
    url = publish(stored)
    found = find_model(url)
    assert found.name == "tiny"
    assert (found.folder / "tokenizer.json").read_bytes() == (stored / "tokenizer.json").read_bytes()
    assert not (found.folder / "notes.txt").exists()
    verify(found.folder)
    (stored / "tokenizer.json").unlink()
    assert find_model(f"{url}/").folder == found.folder, "it is there already"
    assert found.folder.name in {model.name for model in list_models()}


def test_a_model_that_has_changed_there_is_fetched_anew(stored: Path) -> None:
    before = find_model(publish(stored)).folder
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"note": "second"}))
    after = find_model(publish(stored)).folder
    assert before != after
    assert json.loads((after / "config.json").read_text())["note"] == "second"


def test_what_was_fetched_last_serves_while_the_store_is_away(stored: Path) -> None:
    url = publish(stored)
    found = find_model(url)
    stored.rename(stored.with_name("away"))
    assert find_model(url).folder == found.folder
    with pytest.raises(CheckpointError, match="has no SHA256SUMS that can be read"):
        find_model(f"{url}-other")


def test_files_in_subfolders_are_fetched_and_verified(stored: Path) -> None:
    (stored / "1_Pooling").mkdir()
    (stored / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    url = publish(stored, "config.json", "tokenizer.json", "1_Pooling/config.json")
    sums = (stored / "SHA256SUMS").read_text().replace("  1_Pooling", "  ./1_Pooling")  # as `find` writes them
    (stored / "SHA256SUMS").write_text(sums)
    folder = find_model(url).folder
    fetched = folder / "1_Pooling" / "config.json"
    assert fetched.read_bytes() == (stored / "1_Pooling" / "config.json").read_bytes()
    verify(folder)
    fetched.write_text('{"pooling_mode": "last"}')
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json has SHA-256"):
        verify(folder)


def test_a_gguf_file_at_a_url_is_fetched_alone_and_imported_once(stored: Path) -> None:
    file = tiny_model("qwen2").write(stored / "mine.F32.gguf")
    tiny_model("qwen2", seed=1).write(stored / "other.gguf")
    url = f"{publish(stored, file.name, 'other.gguf')}/{file.name}"
    found = find_model(url)
    assert found.name == "mine.F32"
    gguf = linked_gguf(found.folder)
    assert gguf is not None
    assert gguf.read_bytes() == file.read_bytes()
    assert gguf.parent == found.folder.resolve(), "it is in the cache, and stays when the store goes"
    verify(found.folder)
    (stored / "other.gguf").write_bytes(b"another list, which has the same sum of this file")
    publish(stored, file.name, "other.gguf")
    file.unlink()
    assert find_model(url).folder == found.folder
    stored.rename(stored.with_name("away"))
    assert find_model(url).folder == found.folder
    assert [model.name for model in list_models()][-1] == found.folder.name


def test_a_gguf_file_that_cannot_be_served_is_refused_by_its_name(stored: Path) -> None:
    (stored / "broken.gguf").write_bytes(b"GGUF")
    url = publish(stored, "broken.gguf")
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        find_model(f"{url}/broken.gguf")
    with pytest.raises(CheckpointError, match=r"does not list absent\.gguf"):
        find_model(f"{url}/absent.gguf")
    with pytest.raises(CheckpointError, match=r"lists no config\.json.*it lists broken\.gguf: give the URL of one"):
        find_model(url)


def test_a_store_in_memory_serves_as_well(stored: Path) -> None:
    memory = fsspec.filesystem("memory")
    publish(stored)
    memory.put(f"{stored}/", "/bucket/tiny/", recursive=True)
    try:
        verify(find_model("memory://bucket/tiny").folder)
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_file_longer_than_its_store_says_is_not_read_to_its_end(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = publish(stored)
    size = LocalFileSystem.size

    def says(store: object, path: str) -> int | None:
        return 3 if path.endswith("tokenizer.json") else size(store, path)

    monkeypatch.setattr(LocalFileSystem, "size", says)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has more than 3 bytes, the size that its store says"):
        find_model(url)
    monkeypatch.setattr(LocalFileSystem, "size", lambda *_: None)
    monkeypatch.setattr(object_store, "MAX_UNSIZED_BYTES", 8)
    with pytest.raises(CheckpointError, match="has more than 8 bytes"):
        find_model(url)
    monkeypatch.setattr(LocalFileSystem, "size", lambda *_: 1 << 60)
    with pytest.raises(CheckpointError, match=f"needs .* bytes; the disk of {stored.parent.parent / 'cache'}.* left"):
        find_model(url)


def test_a_file_that_differs_from_its_sum_is_refused_and_the_rest_is_kept_for_the_next_try(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, whole = publish(stored), (stored / "tokenizer.json").read_bytes()
    (stored / "tokenizer.json").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has SHA-256 .* as SHA256SUMS says"):
        find_model(url)
    (stored / "tokenizer.json").write_bytes(whole)
    fetched = []
    fetch_file = object_store._fetch_file

    def count(store: object, path: str, *rest: object) -> None:
        fetched.append(Path(path).name)
        fetch_file(store, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(object_store, "_fetch_file", count)
    verify(find_model(url).folder)
    assert "tokenizer.json" in fetched
    assert "config.json" not in fetched


@pytest.mark.parametrize(
    ("sums", "complaint"),
    [
        (f"{'0' * 64}  ../config.json\n", "line 1: must be a SHA-256 and the path of a file"),
        (f"{'0' * 64}  a/../../config.json\n", "line 1"),
        (f"{'0' * 64}  /config.json\n", "line 1"),
        (f"{'0' * 64}  a//config.json\n", "line 1"),
        (f"{'0' * 64}  a/.hidden\n", "line 1"),
        (f"{'0' * 64}  a/b/c/d/config.json\n", "line 1: .* in at most 3 folders"),
        (f"{'0' * 64}  a\n{'1' * 64}  a/b/c\n", "lists a as a file and as a folder"),
        (f"{'0' * 64}  tokenizer.json\n", "lists no config.json, as a model's folder has$"),
        (f"{'0' * 64}  .hidden\n", "line 1"),
        (f"{'0' * 64}  manifest.json\n", "line 1"),
        (f"{'0' * 64}  config.json\n{'1' * 64}  config.json\n", "line 2: must be .* each file once"),
        ("no sums\n", "line 1"),
        ("", "lists 0 files"),
        ("".join(f"{at:064x}  file-{at}\n" for at in range(4097)), "lists 4097 files; from 1 to 4096"),
        ("x" * ((1 << 20) + 1), "more than 1048576 bytes"),
        (f"{'0' * 64}  config.json\n{'0' * 64}  absent.json\n", "cannot be fetched"),
    ],
)
def test_a_list_of_sums_that_is_wrong_is_refused_in_one_line(stored: Path, sums: str, complaint: str) -> None:
    (stored / "SHA256SUMS").write_text(sums)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        find_model(f"file://{stored}")
    assert "\n" not in str(caught.value)


def test_a_store_that_needs_another_package_says_which(stored: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no SHA256SUMS that can be read: .*s3fs"):
        find_model("s3://bucket/tiny")
