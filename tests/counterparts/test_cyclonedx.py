"""What the images list of themselves, checked by the authors of CycloneDX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.counterparts.environments import python_with

pytestmark = pytest.mark.counterpart

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))
"""


def test_the_list_keeps_to_the_schema(tmp_path: Path) -> None:
    listed = tmp_path / "sbom.cdx.json"
    subprocess.run([sys.executable, ROOT / "deploy" / "sbom.py", "pagoda-engine", listed], check=True)
    python = python_with("cyclonedx", "cyclonedx-python-lib[json-validation]>=11,<12")
    checked = subprocess.run([python, "-c", SCRIPT, listed], capture_output=True, text=True, check=True)
    assert checked.stdout.strip() == "None"
