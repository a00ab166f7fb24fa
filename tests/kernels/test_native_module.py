"""PAGODA_INSTRUCTION_SET applies to compiled code and torch, and a wrong name is one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagoda_server.kernels.native_module import native
from tests.kernels.backends import BACKENDS, INSTRUCTION_SETS

ROOT = Path(__file__).parent.parent.parent
REPORT = """
import pagoda_server.kernels as kernels, torch
print(kernels.instruction_set(), kernels.has_native(), torch.backends.cpu.get_cpu_capability())
"""
CAPABILITIES = {"generic": "DEFAULT", "avx2": "AVX2", "avxvnni": "AVX2", "avx512": "AVX512", "amx": "AVX512"}


# It imports torch, which takes a second, and computes nothing: torch looks at its variables at its first operation. For
# each line of its input it runs code in a fork.
FORKS = """
import json, os, sys, torch
for line in sys.stdin:
    code, variables, out, err = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ.update(variables)
    for at, name in enumerate((out, err), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), at)
    exec(code)
    break
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.communicate(timeout=60)


@pytest.fixture
def run(forks: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run code in a process that has imported torch and nothing of ours, with these variables."""

    def run_in_fork(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        assert forks.stdin is not None
        assert forks.stdout is not None
        out, err = tmp_path / "out", tmp_path / "err"
        print(json.dumps([code, variables, str(out), str(err)]), file=forks.stdin, flush=True)
        status = int(forks.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())

    return run_in_fork


@pytest.mark.thorough
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_forced_instruction_set_is_that_of_compiled_code_and_of_torch(name: str, run: Run) -> None:
    result = run(REPORT, PAGODA_INSTRUCTION_SET=name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [name, "True", CAPABILITIES.get(name, "DEFAULT")]


def test_onednn_has_no_bfloat16_where_avx2_is_forced(run: Run) -> None:
    if "avx2" not in INSTRUCTION_SETS:
        pytest.skip("needs a processor with AVX2, and compiled code")
    check = "import kernels, torch; print(torch.ops.mkldnn._is_mkldnn_bf16_supported())"
    assert run(check, PAGODA_INSTRUCTION_SET="avx2").stdout.split() == ["False"]


def test_none_leaves_plain_torch_as_it_is(run: Run) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    expected = [capability.lower(), "False", capability]
    assert run(REPORT, PAGODA_INSTRUCTION_SET="none").stdout.split() == expected


def test_the_error_for_an_unsupported_name_lists_the_supported_ones(run: Run) -> None:
    result = run(REPORT, PAGODA_INSTRUCTION_SET="sse9")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    usable = native.instruction_sets() if native is not None else []
    assert last.endswith(
        f"PAGODA_INSTRUCTION_SET=sse9: this processor and build support {', '.join([*usable, 'none'])}"
    )


def test_it_is_too_late_once_torch_has_computed(run: Run) -> None:
    slowest = INSTRUCTION_SETS[-1:]
    if not slowest or CAPABILITIES.get(slowest[0], "DEFAULT") == torch.backends.cpu.get_cpu_capability():
        pytest.skip("needs a processor for which there is compiled code in two versions")
    result = run("import torch; torch.ones(9).exp(); import pagoda_server.kernels", PAGODA_INSTRUCTION_SET=slowest[0])
    assert "torch is already using" in result.stderr.splitlines()[-1]


def test_ops_are_tested_with_every_instruction_set() -> None:
    assert len(BACKENDS) == 2 + len(INSTRUCTION_SETS)


@pytest.mark.thorough
def test_an_engine_refuses_a_wrong_name_in_one_line(default_model_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pagoda_server.engine",
        "--model",
        str(default_model_folder),
        "--listen",
        "127.0.0.1:0",
    ]
    environment = os.environ | {"PAGODA_INSTRUCTION_SET": "sse9"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: PAGODA_INSTRUCTION_SET=sse9: this processor")
