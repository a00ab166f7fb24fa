"""What comes back from a machine with a GPU: a folder of logs while the benchmark runs, and one archive of them."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from bench.gpu import ROOT, SOURCES

ARCHIVE = "logs.tar.gz"
MOST_BYTES = 15 << 20  # of all logs before they are compressed, so that the archive stays under 16 MiB
MOST_BYTES_EACH = 2 << 20
LEFT_OUT = "left-out.txt"
# A machine without a network must not wait for one: neither for pip's retries nor for a model on the Hub.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_RETRIES": "0",
    "PIP_RESUME_RETRIES": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def environment(site: Path | None = None) -> dict[str, str]:
    """Return the variables of all processes: no network, and modules from `site`, then from this checkout."""
    places = [*([site] if site else []), ROOT, *SOURCES]
    path = os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])
    return OFFLINE | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def install(wheels: Path, site: Path, log: Path) -> None:
    """Unpack wheels into a folder for this run alone. Raise CalledProcessError if pip cannot."""
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    command += ["--upgrade", "--target", str(site), *map(str, sorted(wheels.glob("*.whl")))]
    with log.open("w") as output:
        subprocess.run(command, stdout=output, stderr=output, check=True, env=os.environ | OFFLINE)


def describe_machine(path: Path) -> None:
    """Write what is installed, and what the driver says about the card."""
    versions = sorted({f"{found.name}=={found.version}" for found in importlib.metadata.distributions()})
    lines = [sys.version, " ".join(os.uname()), *versions]
    if program := shutil.which("nvidia-smi"):
        told = subprocess.run([program, "-q"], capture_output=True, text=True, timeout=20, check=False)
        lines.append(told.stdout + told.stderr)
    path.write_text("\n".join(lines) + "\n")


def archive(folder: Path, out: Path) -> None:
    """Write all files of a folder to out/logs.tar.gz, which is replaced at once: a reader never sees half of it.

    Long files lose their middle. Files beyond the limit for all are named, with the newest kept.
    """
    left = MOST_BYTES
    missing: list[str] = []
    beside = out / f".{ARCHIVE}"
    with gzip.open(beside, "wb", compresslevel=6) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in _newest_first(folder):
            name = str(path.relative_to(folder))
            try:
                content = shortened(path)
            except OSError as error:  # a process that is still being ended may remove its files
                missing.append(f"{name}: {error}")
                continue
            if len(content) > left:
                missing.append(f"{name}: {path.stat().st_size} bytes")
                continue
            left -= len(content)
            _add(tar, name, content)
        if missing:
            _add(tar, LEFT_OUT, "\n".join(missing).encode())
    beside.replace(out / ARCHIVE)


def shortened(path: Path, most: int = MOST_BYTES_EACH) -> bytes:
    """Return a file's content; of a long one its beginning and its end, where causes and failures are."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= most:
            return file.read(most)
        beginning = file.read(most // 2)
        file.seek(size - most // 2)
        return beginning + f"\n… {size - most} bytes are left out here …\n".encode() + file.read(most // 2)


def _newest_first(folder: Path) -> Iterator[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    yield from sorted(files, key=lambda path: -path.stat().st_mtime)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
