"""README's table of ways to reach a server: the lines of the shell run as they stand, with the addresses exchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.counterparts.environments import program
from tests.servers import Server, running_server

pytestmark = pytest.mark.counterpart

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent  # grpcurl and pagoda are there, as is the Python that has the client


def rows() -> dict[str, str]:
    """What the table's second column tells, by the first."""
    table = (ROOT / "README.md").read_text().partition("| from | one line | read on |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (.+?) \| `(.+?)`[^|]* \| \[", table, re.MULTILINE)
    assert len(found) > 5
    return dict(found)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--model", "synthetic", "--default-max-tokens", "5", "--http", "127.0.0.1:0") as server:
        yield server


@pytest.mark.parametrize(
    ("name", "tool", "answer"),
    [
        ("curl", "curl", r'"finish_reason": ?"length"'),
        ("grpcurl", "grpcurl", r'"reason": "FINISH_REASON_LENGTH"'),
        ("Python", "python", r"\S"),
        ("Prometheus", "curl", r"pagoda_num_requests_running\{"),
        ("a terminal", "pagoda", r"Pagoda synthetic  ● serving"),
    ],
)
def test_a_line_of_the_shell_works_as_it_stands(server: Server, name: str, tool: str, answer: str) -> None:
    environment = os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}", "PAGODA_ADDRESS": server.address}
    if not (TOOLS / tool).exists():
        program(tool)
    line = rows()[name].replace("http://127.0.0.1:8000", server.http).replace("127.0.0.1:50051", server.address)
    line = line.replace("Client()", f'Client("{server.address}")')
    result = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert re.search(answer, result.stdout), result.stdout


def test_what_is_no_line_of_the_shell_names_what_exists() -> None:
    """The clients' own tests run such calls; these only keep the table from naming something else."""
    told = rows()
    typescript = (ROOT / "clients" / "typescript" / "src" / "client.ts").read_text()
    assert "new Pagoda().stream(" in told["TypeScript"]
    assert 'constructor(address = "127.0.0.1:50051"' in typescript
    assert re.search(r"^  stream\(input", typescript, re.MULTILINE)
    go = "".join(path.read_text() for path in (ROOT / "clients" / "go" / "pagoda").glob("*.go"))
    for declared in ("func (c *Client) Stream(", "func Message(", ") Next() bool", ") Text() string"):
        assert declared in go
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {"cpu", "metrics"} == set(re.findall(r"--profile (\w+)", told["Grafana"]))
    assert compose["grafana"]["profiles"] == compose["prometheus"]["profiles"] == ["metrics"]
    for method in re.findall(r"\.(\w+)\(", told["Go"]):
        assert re.search(rf"func .*\b{method}\(", go) or method == "Print"
