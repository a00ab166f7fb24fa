"""Environments of the counterparts' own, made once under build/counterparts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "build" / "counterparts"


def python_with(name: str, *requirements: str) -> Path:
    """The Python of an environment that has these packages."""
    folder = HOME / name
    python, mark = folder / "bin" / "python", folder / _mark(requirements)
    with _alone(name):
        if not mark.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
            subprocess.run([*pip, *requirements], check=True)
            mark.touch()
    return python


def node_with(name: str, *packages: str) -> Path:
    """A folder in which Node finds these packages of npm."""
    folder = HOME / name
    mark = folder / _mark(packages)
    with _alone(name):
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            subprocess.run(
                [program("npm"), "install", "--silent", "--no-fund", "--no-audit", *packages], cwd=folder, check=True
            )
            mark.touch()
    return folder


def program(*names: str) -> str:
    """The path of the first of these programs that is installed. Skips the test if none is."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip(f"needs {' or '.join(names)}: tests/counterparts/install")


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait while another worker makes this environment."""
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _mark(packages: tuple[str, ...]) -> str:
    return "installed-" + hashlib.sha256(repr(packages).encode()).hexdigest()[:16]
