"""The page's reader of streams in Node, over connections that are really cut."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pagoda_server.router.http.page import ASSETS
from tests.counterparts.environments import program
from tests.end_to_end.test_http import CHATS, Posted
from tests.end_to_end.test_resume import Wire
from tests.servers import running_server

pytestmark = pytest.mark.counterpart
BODY = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 300, "ignore_eos": True,
        "stream": True, "resumable": True, "stream_options": {"include_usage": True}}  # fmt: skip


def content(events: list[str]) -> str:
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]] == [300]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def test_an_answer_goes_on_when_its_connection_or_its_engine_is_lost(tmp_path: Path) -> None:
    api = shutil.copy(ASSETS / "api.js", tmp_path / "api.mjs")
    with running_server("--model", "synthetic", "--step-ms", "10", "--http", "127.0.0.1:0") as server:
        posted = Posted(server, CHATS, {**BODY, "resumable": False})
        expected = content(list(posted.events()))
        wire = Wire(server.http.removeprefix("http://"))
        page = subprocess.Popen(
            [program("node"), Path(__file__).parent / "resuming_page.mjs", api, f"http://{wire.address}{CHATS}",
             json.dumps(BODY)], text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert page.stdout is not None
        found = []
        for line in page.stdout:
            found.append(line.rstrip("\n"))
            if len(found) in (40, 120):
                wire.cut()
            elif len(found) == 80:
                server.engine().kill()
        wire.close()
        assert page.wait(60) == 0
        assert content(found) == expected
