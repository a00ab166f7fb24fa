"""PAGODA_INSTRUCTION_SET applies to compiled code and torch, and a wrong name is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
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


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_forced_instruction_set_is_that_of_compiled_code_and_of_torch(name: str) -> None:
    result = run(REPORT, PAGODA_INSTRUCTION_SET=name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [name, "True", CAPABILITIES.get(name, "DEFAULT")]


def test_onednn_has_no_bfloat16_where_avx2_is_forced() -> None:
    if "avx2" not in INSTRUCTION_SETS:
        pytest.skip("needs a processor with AVX2, and compiled code")
    check = "import kernels, torch; print(torch.ops.mkldnn._is_mkldnn_bf16_supported())"
    assert run(check, PAGODA_INSTRUCTION_SET="avx2").stdout.split() == ["False"]


def test_none_leaves_plain_torch_as_it_is() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    expected = [capability.lower(), "False", capability]
    assert run(REPORT, PAGODA_INSTRUCTION_SET="none").stdout.split() == expected


def test_the_error_for_an_unsupported_name_lists_the_supported_ones() -> None:
    result = run(REPORT, PAGODA_INSTRUCTION_SET="sse9")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    usable = native.instruction_sets() if native is not None else []
    assert last.endswith(
        f"PAGODA_INSTRUCTION_SET=sse9: this processor and build support {', '.join([*usable, 'none'])}"
    )


def test_it_is_too_late_once_torch_has_computed() -> None:
    slowest = INSTRUCTION_SETS[-1:]
    if not slowest or CAPABILITIES.get(slowest[0], "DEFAULT") == torch.backends.cpu.get_cpu_capability():
        pytest.skip("needs a processor for which there is compiled code in two versions")
    result = run("import torch; torch.ones(9).exp(); import pagoda_server.kernels", PAGODA_INSTRUCTION_SET=slowest[0])
    assert "torch is already using" in result.stderr.splitlines()[-1]


def test_ops_are_tested_with_every_instruction_set() -> None:
    assert len(BACKENDS) == 2 + len(INSTRUCTION_SETS)


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
