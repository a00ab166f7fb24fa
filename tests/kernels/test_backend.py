from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_server.kernels import load_backend


@pytest.mark.parametrize(
    ("name", "weights", "is_deterministic", "shown"),
    [
        ("reference", "unquantized", False, "reference"),
        ("cpu", "unquantized", False, "cpu"),
        ("native", "int8-weight", False, "native-int8-weight"),
        ("native", "int4", True, "native-int4-deterministic"),
        ("triton", "unquantized", True, "triton-deterministic"),
        ("triton", "fp8", False, "triton-fp8"),
    ],
)
def test_a_backend_is_loaded_by_its_name_for_a_format(
    name: str, weights: str, is_deterministic: bool, shown: str
) -> None:
    backend = load_backend(name, weights, is_deterministic)
    assert (backend.name, backend.weights, backend.is_deterministic) == (name, weights, is_deterministic)
    assert str(backend) == shown


def test_the_errors_for_an_unknown_backend_or_format_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'cuda'; known: reference, cpu, native, triton$"):
        load_backend("cuda")
    with pytest.raises(ValueError, match=r"native has no .* 'fp8'; known: unquantized, int8, int8-weight, int4$"):
        load_backend("native", "fp8")


@pytest.mark.thorough
def test_only_the_backends_of_a_gpu_load_triton() -> None:
    check = "import sys, pagoda_server.kernels as k; k.load_backend('cpu'); sys.exit('triton' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", check], cwd=root, check=False).returncode == 0
