"""The page in a real Chromium, which another environment's Playwright drives (browser.py)."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pagoda import Client
from tests.counterparts.environments import node_with, program, python_with
from tests.servers import Server, running_server

pytestmark = [pytest.mark.counterpart, pytest.mark.timeout(900)]

Found: TypeAlias = dict[str, dict[str, Any]]
BROWSER = Path(__file__).parent / "browser.py"
FOCUSED = ["theme-button", "log", "message", "send", "pause", "eight"]


def browsed(url: str, folder: Path, *scenarios: str) -> Found:
    """What each scenario has found."""
    program("chromium")
    python = python_with("chromium", "playwright>=1.56,<2")
    command = [python, BROWSER, url, folder, *scenarios]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    found: Found = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def server(default_model_folder: Path) -> Iterator[Server]:
    with running_server("--http", "127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def found(server: Server) -> Found:
    axe = node_with("axe", "axe-core@4.11.0")
    scenarios = (
        "load", "chat", "eight", "formatted", "failing", "settings", "themes", "stop", "keyboard", "hidden", "sizes",
        "accessibility",
    )  # fmt: skip
    return browsed(server.http, axe, *scenarios)


def of(found: Found, scenario: str) -> dict[str, Any]:
    assert "failed" not in found[scenario], found[scenario]["failed"]
    return found[scenario]


def test_the_page_loads_without_an_error_and_asks_no_other_server(found: Found) -> None:
    load = of(found, "load")
    assert load["errors"] == []
    assert load["elsewhere"] == []
    assert load["title"] == f"{load['model']} · Pagoda"


def test_a_chat_is_answered_over_several_turns(found: Found) -> None:
    chat = of(found, "chat")
    assert "Stockholm" in chat["first"]
    assert "Oslo" in chat["second"]
    assert chat["announced"] == chat["first"]
    tokens, rate, ttft = chat["stats"].splitlines()[0].split(" · ")
    assert tokens == "8 tokens"
    assert rate.endswith(" tokens/s")
    assert ttft.startswith("TTFT ")
    assert chat["roles"] == [["user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"]]
    assert chat["turns after a new chat"] == 0
    assert chat["errors"] == []


def test_a_reload_keeps_the_chat_and_a_new_chat_drops_it(found: Found) -> None:
    chat = of(found, "chat")
    asked = ["What is the capital of Sweden?", "And of Norway?"]
    assert chat["reloaded"] == [asked[0], chat["first"], asked[1], chat["second"]]
    assert chat["turns after a new chat"] == 0


def test_headings_and_lists_are_shown_as_such_and_html_as_text(found: Found) -> None:
    formatted = of(found, "formatted")
    assert formatted["tags"] == [
        ["h4", "Bread"],
        ["p", "Mix it on <b>one</b> day,\nbake it on the next."],
        ["ol", ""],
        ["li", ""], ["p", ""], ["strong", "Flour"],
        ["ul", ""], ["li", ""], ["p", "wheat"], ["li", ""], ["p", "rye,"], ["code", "type 997"],
        ["li", ""], ["p", "Water"],
        ["h5", "Then"],
        ["ul", ""], ["li", ""], ["p", "<img src=x onerror=alert(1)>"], ["li", ""], ["p", "wait"],
        ["pre", ""], ["code", "# no heading\n- no item"],
        ["ol", ""], ["li", ""], ["p", "was a good year"],
    ]  # fmt: skip
    assert formatted["errors"] == []


def test_what_failed_can_be_tried_again_with_a_button_in_sight(found: Found) -> None:
    failing = of(found, "failing")
    assert failing["hidden"] == [0] * 7
    assert (failing["buttons"], failing["after a reload"]) == (1, "Try again")


def test_settings_are_sent_and_an_empty_one_is_not(found: Found) -> None:
    settings = of(found, "settings")
    own = {"temperature", "top_p", "max_tokens", "seed"}
    chosen = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 20, "seed": 7}
    sent = [{name: body[name] for name in own & body.keys()} for body in settings["sent"]]
    assert sent == [{}, chosen, chosen, {}]
    system = {"role": "system", "content": "You are a pirate."}
    assert [body["messages"][0] == system for body in settings["sent"]] == [False, True, True, False]
    assert settings["button"] == "Settings (5)"


def test_the_button_names_the_theme_that_it_switches_to(found: Found) -> None:
    light, dark = ["light", "Dark theme"], ["dark", "Light theme"]
    themes = of(found, "themes")["themes"]
    assert themes[1:] == [dark, light]
    assert themes[0][1] == "Dark theme"


def test_each_request_has_its_dot_even_if_steps_are_long() -> None:
    arguments = ("--model", "synthetic", "--step-ms", "700", "--http", "127.0.0.1:0")
    with running_server(*arguments) as server:
        dots = of(browsed(server.http, BROWSER.parent, "dots"), "dots")
    assert dots == {"dots": 8, "count": "8 sequences"}


def test_a_page_says_when_no_engine_is_ready() -> None:
    arguments = ("--model", "synthetic", "--engine", "unix:/nowhere/engine", "--http", "127.0.0.1:0")
    with running_server(*arguments, ready=False) as server:
        unready = of(browsed(server.http, BROWSER.parent, "unready"), "unready")
    assert unready == {"state": "no engine is ready", "count": "no engine is ready"}


def test_eight_prompts_at_once_run_in_one_batch(found: Found) -> None:
    eight = of(found, "eight")
    assert eight["most at once"] >= 6
    assert {"decode", "finished"} <= set(eight["states"])
    assert eight["blocks in use"] > 50
    assert eight["tokens/s"] > 0
    assert eight["colours of steps"] >= 2
    assert len(eight["answers"]) == 8
    assert "Stockholm" in eight["answers"][0]
    assert all("TTFT" in answer for answer in eight["answers"])
    assert any("lighthouse" in name for name in eight["names"])
    assert all(eight[name].endswith((" ms", " s")) for name in ("ttft", "itl"))
    assert eight["errors"] == []


def test_an_answer_stops_at_once_and_gives_its_place_back(found: Found) -> None:
    by_button, by_key = of(found, "stop")["ends"]
    assert "stopped" in by_button["stats"]
    assert "stopped" in by_key["stats"]
    assert (by_button["last"], by_key["last"]) == ("cancelled", "cancelled")


def test_everything_works_with_keys_alone(found: Found) -> None:
    keyboard = of(found, "keyboard")
    order = [name for name in keyboard["order"] if name in FOCUSED]
    assert set(order) == set(FOCUSED)
    start = order.index("theme-button")
    assert (order[start:] + order[:start])[: len(FOCUSED)] == FOCUSED
    assert set(keyboard["outlines"]) == {"solid"}
    assert keyboard["theme"] == "dark"
    assert keyboard["lines"] == "What is the capital\nof Sweden?"
    assert "Stockholm" in keyboard["answer"]
    assert keyboard["is open"]


def test_a_page_that_is_hidden_or_paused_watches_nothing(found: Found) -> None:
    hidden = of(found, "hidden")
    begun, ended, begun_again, ended_again = hidden["counts"]
    assert (begun, ended, begun_again, ended_again) == (1, 1, 2, 2)
    assert hidden["button"] == "Resume"


def test_it_fits_a_phone_and_a_wide_screen(found: Found) -> None:
    for width, fits in of(found, "sizes").items():
        assert fits == {"too wide by": 0, "too small": []}, width


def test_axe_finds_nothing_wrong_in_either_theme(found: Found) -> None:
    for view, report in of(found, "accessibility").items():
        assert report["wrong"] == [], view
        assert report["right"] > 30, view


def test_a_server_with_tokens_and_quotas_explains_itself(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    hashed = hashlib.sha256(b"token of small").hexdigest()
    tenants.write_text(f'[[token]]\nsha256 = "{hashed}"\ntenant = "small"\n[tenant.small]\nmax_requests = 1\n')
    arguments = ("--model", "synthetic", "--step-ms", "20", "--tenants-file", str(tenants), "--http", "127.0.0.1:0")
    with running_server(*arguments) as server, Client(server.address, token="token of small") as client:
        stream = client.generate("hello", max_tokens=20_000, ignore_eos=True)
        next(stream)
        guarded = of(browsed(server.http, tmp_path, "guarded"), "guarded")
        stream.close()
    assert "refused" not in guarded["asked"]
    assert "The server refused this token." in guarded["refused token"]
    assert guarded["trouble"].startswith("The server asks for a token.")
    assert len(guarded["refused"]) == 8
    assert all(words.startswith("The server has too much to do. Try again in") for words in guarded["refused"])
    assert guarded["state"] == "serving small"
    assert guarded["words"].startswith("The server has too much to do. Try again in")
    assert guarded["other tab asks again"]
    assert "token of small" not in guarded["kept for good"]
    assert "token of small" in guarded["kept for the tab"]
    assert "right to observe" in guarded["cache"]
    assert guarded["rows"] == ["decode"]
