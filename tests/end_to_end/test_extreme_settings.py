"""Settings at the ends of their documented ranges: the server starts, or says in one line why it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import grpc
import pytest

from pagoda_server.settings import RouterSettings
from pagoda_server.settings.engine import MAX_CONTEXT
from pagoda_server.settings.setting import MOST_A_CORE, about, flag
from tests.end_to_end.asking import request
from tests.end_to_end.test_tenants import ACME, Stubs, tenants_file
from tests.servers import running_server

pytestmark = pytest.mark.thorough

MOST = MOST_A_CORE * (os.cpu_count() or 1)


def highest_numbers() -> list[str]:
    """The router's numbers, each at the upper end of its range."""
    highest = {flag(declared.name): about(declared).at_most for declared in fields(RouterSettings)}
    return [f"--max-model-len={MAX_CONTEXT}", *(f"{name}={most}" for name, most in highest.items() if most is not None)]


def test_a_server_starts_with_its_numbers_as_high_as_they_may_be(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(tenants_file("acme"))
    settings = [*highest_numbers(), f"--tenants-file={tenants}"]
    with running_server("--model", "synthetic", *settings, "--http", "127.0.0.1:0") as server:
        with grpc.insecure_channel(server.address) as channel:
            assert Stubs(channel).ask(ACME, request("Hi", max_tokens=3)).text()
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("name", ["workers", "threads"])
def test_more_threads_or_processes_than_the_machine_has_use_for_are_refused(name: str) -> None:
    command = [sys.executable, "-m", "pagoda_server.cli", "serve", "--model", "synthetic", f"--{name}={MOST + 1}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"--{name} must be at most {MOST}, 4 for each core of this machine, not {MOST + 1}" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_an_http_port_that_is_taken_is_one_line() -> None:
    with running_server("--model", "synthetic", "--http", "127.0.0.1:0") as server:
        taken = server.http.removeprefix("http://")
        command = [sys.executable, "-m", "pagoda_server.cli", "serve", "--model", "synthetic", "--http", taken]
        ended = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert [line for line in ended.stderr.splitlines() if " INFO " not in line] == [
        f"error: --http: cannot bind {taken}: Address already in use"
    ]


@pytest.mark.parametrize("limit_gb", [1.1, 1.2])
def test_an_engine_without_memory_for_its_model_ends_the_server_at_once(
    default_model_folder: Path, limit_gb: float
) -> None:
    serve = [sys.executable, "-m", "pagoda_server.cli", "serve", "--listen", "127.0.0.1:0", "--threads", "1"]
    command = ["prlimit", f"--as={int(1e9 * limit_gb)}", *serve, "--model", str(default_model_folder)]
    # glibc reserves 64 MB of addresses for each thread's arena: a core more would spend the limit before the model.
    one_arena = os.environ | {"MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=one_arena)
    assert ended.returncode == 2
    assert "error: not enough" in ended.stderr
    assert "Traceback" not in ended.stderr
