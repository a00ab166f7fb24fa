"""No kernel is compiled while serving: it would hold up all sequences for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_server.kernels.triton.configs import IS_INTERPRETED

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.simulated
def test_a_start_compiles_every_kernel_that_any_request_needs() -> None:
    command = [sys.executable, "-m", "tests.engine.recorded_serving"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # kernels as they are on a GPU
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    models = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(models) == 6
    for told in models:
        assert told["new"] == [], f"{told['model']}, {told['backend']}"
        attention = {"_attend_chunks", "_attend_split"}
        if "deterministic" in told["backend"]:
            attention = {"_attend_parts", "_merge_parts", "_multiply", "_add_up"}
        assert attention | {"_rope_and_store_kv", "choice_kernel"} <= set(told["needed"])
