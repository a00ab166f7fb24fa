"""The stubs of buf.gen.yaml for languages without a client here, as far as they can be made without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.counterparts.compilers import ROOT
from tests.counterparts.environments import program

pytestmark = pytest.mark.counterpart

TEMPLATE = ROOT / "buf.gen.yaml"


def buf_generate(template: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [Path(sys.executable).parent / "buf", "generate", "--template", template, "--output", out]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_protoc_makes_java_and_csharp_under_the_names_that_the_protos_give(tmp_path: Path) -> None:
    program("protoc")
    template = yaml.safe_load(TEMPLATE.read_text())
    local = [plugin for plugin in template["plugins"] if "remote" not in plugin]
    assert {plugin["protoc_builtin"] for plugin in local} == {"java", "csharp"}
    (tmp_path / "buf.gen.yaml").write_text(yaml.safe_dump({**template, "plugins": local}))
    done = buf_generate(tmp_path / "buf.gen.yaml", tmp_path)
    assert done.returncode == 0, done.stderr
    stubs = tmp_path / "build" / "stubs"
    assert "package pagoda.v1;" in (stubs / "java/pagoda/v1/GenerateRequest.java").read_text()
    assert "namespace Pagoda.V1 {" in (stubs / "csharp/Inference.cs").read_text()


def test_buf_accepts_the_template(tmp_path: Path) -> None:
    done = buf_generate(TEMPLATE, tmp_path)
    asked = "the server hosted at that remote is unavailable" in done.stderr
    assert asked or done.returncode == 0, done.stderr
    wrong = tmp_path / "buf.gen.yaml"
    wrong.write_text(TEMPLATE.read_text().replace("protoc_builtin", "protoc_bultin"))
    assert "field protoc_bultin not found" in buf_generate(wrong, tmp_path).stderr
