"""The Go client, built with Debian's Go 1.19 and gRPC 1.33: its own tests, and the vectors of all clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counterparts.compilers import GO_LIBRARIES, ROOT, go_environment
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


def test_a_project_outside_the_repository_gets_it_as_a_module(tmp_path: Path) -> None:
    """Debian's sources stand in for the modules of a proxy, and empty modules for those that nothing imports."""
    replaced: dict[str, Path] = {"pagoda/clients/go": CLIENT}
    for module in (found := [*requires(CLIENT)]):  # grows while it is read
        if module not in replaced:
            replaced[module] = folder = GO_LIBRARIES / "src" / module
            if not (folder / "go.mod").exists():
                replaced[module] = folder = tmp_path / "empty" / module.replace("/", "_")
                folder.mkdir(parents=True)
                (folder / "go.mod").write_text(f"module {module}\n")
            found += requires(folder)
    project = tmp_path / "project"
    project.mkdir()
    lines = ["module example.com/project", "go 1.19", "require pagoda/clients/go v0.0.0"]
    lines += [f"replace {module} => {folder}" for module, folder in replaced.items()]
    (project / "go.mod").write_text("\n".join(lines))
    (project / "main.go").write_text(
        'package main\n\nimport "pagoda/clients/go/pagoda"\n\nfunc main() { print(pagoda.Prompt("x").GetPrompt()) }\n'
    )
    variables = {"GO111MODULE": "on", "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOPATH": str(tmp_path / "gopath")}
    environment = {**go_environment(), **variables}
    done = subprocess.run(["go", "run", "."], cwd=project, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "x")


def requires(module: Path) -> list[str]:
    """The modules that a go.mod requires."""
    return re.findall(r"^\s*(?:require )?([\w.-]+(?:/[\w.-]+)+) v\d", (module / "go.mod").read_text(), re.MULTILINE)
