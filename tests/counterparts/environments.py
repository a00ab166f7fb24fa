"""Environments of the counterparts' own, made once under build/counterparts."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "build" / "counterparts"


def python_with(name: str, *requirements: str) -> Path:
    """The Python of an environment that has these packages."""
    folder = HOME / name
    python, mark = folder / "bin" / "python", folder / _mark(requirements)
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        mark.touch()
    return python


def node_with(name: str, *packages: str) -> Path:
    """A folder in which Node finds these packages of npm."""
    folder = HOME / name
    mark = folder / _mark(packages)
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
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


def _mark(packages: tuple[str, ...]) -> str:
    return "installed-" + hashlib.sha256(repr(packages).encode()).hexdigest()[:16]
