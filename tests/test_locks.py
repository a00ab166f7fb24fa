"""The versions that images hold are those that pyproject.toml allows, each with its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT = tomllib.loads((ROOT / "clients" / "python" / "pyproject.toml").read_text())["project"]
OF_IMAGES = {"base": ("tracing", "certs"), "engine": (), "ray": ("ray",)}  # the extras that each file adds
ENTRY = re.compile(r"([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def entries(name: str) -> dict[str, str]:
    """The versions in a file, whose every line belongs to an entry with a hash."""
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    assert ENTRY.sub("", text) == ""
    return {found[1]: found[2] for found in ENTRY.finditer(text)}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_what_the_project_needs_is_locked_in_a_version_that_it_allows(name: str) -> None:
    locked = {found: version for lock in OF_IMAGES for found, version in entries(lock).items()}
    wanted = [each for extra in OF_IMAGES[name] for each in PROJECT["optional-dependencies"][extra]]
    if name == "base":
        wanted += [*PROJECT["dependencies"], *CLIENT["dependencies"]]
    for each in map(Requirement, wanted):
        if each.name != CLIENT["name"]:
            version = locked[canonicalize_name(each.name)]
            assert each.specifier.contains(version), f"{each} but {version}: make locks"


def test_no_package_is_in_two_files_and_torch_is_pinned_where_it_is_installed() -> None:
    names = [name for lock in OF_IMAGES for name in entries(lock)]
    assert len(names) == len(set(names)) > 0
    (pinned,) = re.findall(r"^ARG TORCH=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (torch,) = map(Requirement, PROJECT["optional-dependencies"]["engine"])
    assert torch.specifier.contains(pinned)
    assert "torch" not in names
