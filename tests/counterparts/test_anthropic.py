"""The Messages API with Anthropic's own client."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.counterparts.environments import python_with
from tests.servers import running_server

pytestmark = pytest.mark.counterpart
TOKEN = "s3cret"


def test_the_client_understands_every_answer(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    program = [python_with("anthropic", "anthropic>=0.70,<2"), Path(__file__).parent / "anthropic_client.py"]
    arguments = ("--http", "127.0.0.1:0", "--auth-token-file", str(token), "--tool-format", "hermes")
    with running_server(*arguments) as server:
        ended = subprocess.run([*program, server.http, TOKEN], capture_output=True, text=True, timeout=600)
    assert ended.stdout.split() == ["messages", "tools", "errors"], ended.stderr
