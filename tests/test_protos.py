"""The committed stubs match the committed protos and run where clients run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import google.protobuf
import pytest

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "clients" / "python"
STUBS = sorted(str(path.relative_to(PYTHON)) for path in PYTHON.rglob("*_pb2*") if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    protos = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT / 'protos'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
    ]
    subprocess.run([*command, f"--grpc_python_out={out}", *protos], cwd=ROOT, check=True)
    return out


def test_every_proto_has_its_stubs(regenerated: Path) -> None:
    assert sorted(str(path.relative_to(regenerated)) for path in regenerated.rglob("*_pb2*")) == STUBS


@pytest.mark.parametrize("name", STUBS)
def test_stubs_are_fresh(regenerated: Path, name: str) -> None:
    committed = (PYTHON / name).read_text()
    assert committed == (regenerated / name).read_text(), f"{name} is stale: make protos"


def test_stubs_of_the_adapters_are_fresh(tmp_path: Path) -> None:
    folder = "pagoda_server/router/adapters/protocols"
    protos = sorted((ROOT / "src" / folder).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'src'}"]
    subprocess.run([*command, f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *map(str, protos)], check=True)
    made = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
    assert len(made) == 2 * len(protos) > 0
    for name, text in made.items():
        assert (ROOT / "src" / folder / name).read_text() == text, f"{name} is stale: make protos"


def test_stubs_are_of_the_oldest_supported_protobuf_so_that_6_and_7_run_them() -> None:
    # protobuf runs stubs of its own major version and of the one before; 6 is what it says in each stub.
    generated = {line for name in STUBS if name.endswith("_pb2.py") for line in _version_lines(PYTHON / name)}
    assert generated == {"# Protobuf Python Version: 6.31.1"}
    assert int(google.protobuf.__version__.split(".")[0]) in (6, 7)


def _version_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("# Protobuf Python Version")]
