"""The Go client, built with Debian's Go 1.19 and gRPC 1.33: its own tests, and the vectors of all clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counterparts.compilers import ROOT, go_environment
from tests.counterparts.environments import program
from tests.vectors import servers

pytestmark = pytest.mark.counterpart

CLIENT = ROOT / "clients" / "go"
PACKAGES = ("pagoda/clients/go/pagoda", "pagoda/clients/go/pagoda/v1")


def go(*arguments: str, **variables: str) -> str:
    """Run `go`; returns what it prints."""
    ran = subprocess.run(
        ["go", *arguments], env={**go_environment(), **variables}, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_client_is_formatted_and_vetted() -> None:
    go("vet", *PACKAGES)
    sources = [str(path) for path in CLIENT.glob("pagoda/*.go")]
    assert subprocess.run(["gofmt", "-l", *sources], check=True, capture_output=True, text=True).stdout == ""


def test_the_clients_own_tests_pass_and_it_meets_every_vector() -> None:
    with servers.running() as places:
        report = go(
            "test",
            "-v",
            PACKAGES[0],
            PAGODA_VECTORS=str(ROOT / "tests" / "vectors" / "calls.json"),
            PAGODA_SERVERS=json.dumps(places),
        )
    assert len(re.findall(r"^    --- PASS: TestVectors/", report, re.MULTILINE)) == len(servers.VECTORS)
    assert "--- SKIP" not in report


def test_the_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    for plugin in ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
        program(plugin)
    subprocess.run([sys.executable, CLIENT / "generate.py", tmp_path], check=True)
    fresh = sorted(tmp_path.rglob("*.go"))
    assert [path.name for path in fresh] == [path.name for path in sorted(CLIENT.glob("pagoda/v1/*.go"))]
    for path in fresh:
        committed = CLIENT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed} is stale: python clients/go/generate.py"
