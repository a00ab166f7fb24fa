"""Builds of the clients in Go and C++ with Debian's compilers and libraries, without a network."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.counterparts.environments import HOME, program

ROOT = Path(__file__).parents[2]
GO_LIBRARIES = Path("/usr/share/gocode")


def needs(*paths: str) -> None:
    """Skip the test if a library is not installed."""
    for path in paths:
        if not Path(path).exists():
            pytest.skip(f"needs {path}: tests/counterparts/install")


def go_environment() -> dict[str, str]:
    """Environment variables for which Go finds Debian's libraries, and the client under the name of its module.

    Debian's libraries are no modules but a GOPATH.
    """
    program("go")
    needs(*(f"{GO_LIBRARIES}/src/google.golang.org/{name}" for name in ("grpc", "protobuf", "genproto")))
    link = HOME / "go" / "src" / "pagoda" / "clients" / "go"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(ROOT / "clients" / "go")
    return {**os.environ, "GO111MODULE": "off", "GOPATH": f"{HOME / 'go'}:{GO_LIBRARIES}"}


def cpp_program(source: Path) -> Path:
    """Build a program beside its source, with the stubs of the example in C++."""
    for name in ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin"):
        program(name)
    needs("/usr/include/grpcpp/grpcpp.h")
    build = HOME / "cpp"  # the stubs, which take longest, are compiled once
    command = ["make", "-s", "-C", ROOT / "clients" / "cpp", f"BUILD={build}", f"EXAMPLE={source}"]
    subprocess.run([*command, build / "stream"], check=True)
    return (build / "stream").rename(source.with_suffix(""))
