from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_server.kernels import load_backend

NAMES = [
    *("reference", "cpu", "native", "native-whole", "native-int8", "native-int8-weight", "native-int4"),
    *("native-whole-deterministic", "native-int8-deterministic", "native-int4-deterministic"),
    *("triton", "triton-int8", "triton-fp8"),
    *("triton-deterministic", "triton-int8-deterministic", "triton-fp8-deterministic"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_is_loaded_by_its_name(name: str) -> None:
    assert load_backend(name).name == name


def test_the_error_for_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'cuda'; known: reference, .*, triton-fp8-deterministic$"):
        load_backend("cuda")


@pytest.mark.thorough
def test_only_the_backends_of_a_gpu_load_triton() -> None:
    check = "import sys, pagoda_server.kernels as k; k.load_backend('cpu'); sys.exit('triton' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", check], cwd=root, check=False).returncode == 0
