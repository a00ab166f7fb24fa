from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.launches import Compiled
from tests.kernels.triton.compile_gate import TABLE, Item, Outcome, violations

# A minute of compiling for GPUs other than this machine's, with the release of Triton that made the table.
pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(not IS_INTERPRETED, reason="a gate for machines without a GPU"),
]

SIMULATED = pytest.mark.simulated
ROOT = Path(__file__).parent.parent.parent.parent


def python(cache: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the gate with compiled kernels. It may use the user's compiler cache, which is keyed by content."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow  # `make compile-gate` does the same
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_every_kernel_compiles_as_recorded(capability: str) -> None:
    result = python(None, "tests.kernels.triton.compile_gate", f"--only={capability}")
    assert result.returncode == 0, result.stderr


@pytest.mark.simulated
def test_rules_hold_with_any_release_of_triton(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text('{"triton": "0.0.0", "kernels": {}}')
    names = ["sound", "meant-narrow", "spills", "narrow", "hoards", "broken"]
    result = python(tmp_path, "tests.kernels.triton.faulty_kernels", str(table), *names)
    assert "rules only" in result.stdout
    assert result.returncode == 1
    complaints = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for generation in ("sm_80", "sm_90", "sm_100"):
        spills, narrow, hoards, broken = (line for line in complaints if f"error: {generation} " in line)
        assert "spills: _centre spills" in spills
        assert "narrow: _centre loads at most 4 bytes at a time, not 16" in narrow
        assert "hoards: _hoard takes" in hoards
        assert "broken: _centre does not compile" in broken
    assert len(complaints) == 12


@pytest.mark.parametrize("capability", ["90", *(pytest.param(each, marks=SIMULATED) for each in ("80", "100"))])
def test_a_kernel_that_starts_early_must_wait_before_all_but_loads_of_constants(
    tmp_path: Path, capability: str
) -> None:
    table = tmp_path / "table.json"
    table.write_text('{"triton": "0.0.0", "kernels": {}}')
    faults = ["reads-early", "stores-early", "returns-early", "never-waits"]
    only = f"--only={capability}"
    result = python(tmp_path, "tests.kernels.triton.faulty_kernels", str(table), "dependent", *faults, only)
    generation = f"sm_{capability}"
    if generation == "sm_80":  # it has no such launches
        assert result.returncode == 0
        assert re.search(r"sm_80 never-waits: _copy .* dependent 0 unguarded 0", result.stdout)
        return
    assert result.returncode == 1
    for fault in faults:
        complaint = rf"error: {generation} {fault}: _copy accesses memory or leaves [1-9]\d* times before it waits"
        assert re.search(complaint, result.stderr)
    assert f"error: {generation} never-waits: _copy does not let the kernel after it start" in result.stderr
    assert re.search(rf"{generation} dependent: _copy .* dependent 1 unguarded 0", result.stdout)
    assert " dependent: _copy accesses" not in result.stderr


def test_kernels_start_early_where_the_gpu_can() -> None:
    recorded = json.loads(TABLE.read_text())["kernels"]
    for name, row in recorded.items():
        assert row["dependent"] == (not name.startswith("sm_80")), name


@pytest.mark.simulated
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_last_program_of_a_divided_context_sees_the_parts_of_all_others(capability: str) -> None:
    ptx = python(None, "tests.kernels.triton.print_ptx", capability, "_attend_split").stdout
    before, count, after = ptx.partition("atom.global.gpu.acq_rel.add")
    assert count
    assert "bar.sync" in before[before.rindex("st.global") :], "one thread counts for all that have stored"
    assert "bar.sync" in after[: after.index("ld.global")], "all threads load what one has acquired"


def test_matrix_instructions_that_are_awaited_one_by_one_break_a_rule() -> None:
    launch = SimpleNamespace(capability=90, options={})
    found = []
    for products, waits in ((24, 24), (12, 2), (1, 1), (0, 0)):
        compiled = Compiled(4, 3, 100, 0, 0, load=16, store=16, products=products, waits=waits)
        found += violations([Outcome(Item(f"{products} and {waits}", launch, narrow=False), compiled)])  # type: ignore[arg-type]
    assert found == ["24 and 24 waits for each of its 24 matrix instructions"]


@pytest.mark.simulated
def test_a_kernel_that_has_changed_fails(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    written = python(tmp_path, "tests.kernels.triton.faulty_kernels", str(table), "sound", "--write")
    assert written.returncode == 0, written.stderr
    recorded = json.loads(table.read_text())
    recorded["kernels"]["sm_90 sound: _centre"]["registers"] += 1
    table.write_text(json.dumps(recorded))
    result = python(tmp_path, "tests.kernels.triton.faulty_kernels", str(table), "sound")
    assert result.returncode == 1
    assert "error: sm_90 sound: _centre: was {" in result.stderr
    assert "sm_80" not in result.stderr
