"""Streams of the OpenAI API whose clients go on from the last event that they have, over a real socket."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc
from pagoda_server.checkpoints import resolve
from tests.end_to_end.test_http import CHATS, COMPLETIONS, Posted, wait_idle
from tests.end_to_end.test_required_calls import PARAMETERS, TEMPLATE
from tests.servers import Server, running_server

SYNTHETIC = ("--http", "127.0.0.1:0", "--step-ms", "2")
USAGE = {"stream": True, "resumable": True, "stream_options": {"include_usage": True}}
FIXED: dict[str, Any] = {**USAGE, "temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True}
CHAT = FIXED | {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = FIXED | {"prompt": "Once"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CASES = {
    "chat": (CHATS, CHAT),
    "siblings with log-probabilities": (CHATS, CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2}),
    "completion": (COMPLETIONS, TEXT),
    "completions with log-probabilities": (COMPLETIONS, TEXT | {"n": 2, "logprobs": 1}),
    "calls": (CHATS, CHAT | {"n": 2, "tools": [TOOL], "tool_choice": "required", "max_tokens": 120}),
    "one token": (CHATS, CHAT | {"max_tokens": 1}),
    "stop string": (CHATS, CHAT | {"stop": ["never" * 9, "e"], "max_tokens": 300}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model can call tools."""
    folder = tmp_path_factory.mktemp("models") / "calling"
    shutil.copytree(resolve("synthetic"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running_server("--model", str(folder), *SYNTHETIC) as server:
        yield server


class Event(NamedTuple):
    id: str
    data: str


def events(posted: Posted) -> Iterator[Event]:
    """The events of an answer, each with the last id that came."""
    assert posted.status == 200, posted.error()
    id = ""
    for line in posted.response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            id = value
        elif name == "data":
            yield Event(id, value)


def asked(server: Server, path: str, body: dict[str, Any], last: str = "", **headers: str) -> Iterator[Event]:
    return events(Posted(server, path, body, **headers, **({"last_event_id": last} if last else {})))


def gathered(found: Sequence[Event]) -> dict[Any, Any]:
    """All that the events say, whatever stands together in one of them."""
    said: dict[Any, Any] = defaultdict(list)
    for event in found:
        if event.data == "[DONE]":
            said["done"].append(True)
            continue
        chunk = json.loads(event.data)
        assert "error" not in chunk, chunk
        said["heads"] = sorted({*said["heads"], (chunk["created"], chunk["model"], chunk["object"])})
        if chunk.get("usage"):
            chunk["usage"].pop("prompt_tokens_details")  # a sequence may find its own beginning in the cache
            said["usage"].append(chunk["usage"])
        for choice in chunk["choices"]:
            index, logprobs = choice["index"], choice["logprobs"] or {}
            for name, part in {**choice.get("delta", {}), "text": choice.get("text", "")}.items():
                if name == "tool_calls":
                    for call in part:
                        said[index, "call", call["index"], "name"].append(call["function"].get("name"))
                        said[index, "call", call["index"]] += call["function"]["arguments"]
                else:
                    said[index, name] += part if name != "role" else [part]
            for name in ("content", "tokens", "token_logprobs", "top_logprobs", "text_offset"):
                said[index, "logprobs", name] += logprobs.get(name) or []
            if choice["finish_reason"]:
                said[index, "ends"].append(choice["finish_reason"])
    said = {key: [each for each in value if each is not None] for key, value in said.items()}
    return {key: value for key, value in said.items() if value}


@pytest.mark.parametrize("name", CASES)
def test_a_client_goes_on_from_every_event_of_an_answer_and_gets_what_it_lacks(server: Server, name: str) -> None:
    path, body = CASES[name]
    whole = list(asked(server, path, body))
    expected = gathered(whole)
    assert (expected["done"], len(expected["usage"])) == ([True], 1)
    assert sum(len(expected[index, "ends"]) for index in range(body.get("n", 1))) == body.get("n", 1)
    ids = [event.id for event in whole[:-1]]
    assert len({*ids}) == len(ids), "each event but the last has an id of its own"
    for at, id in enumerate(ids, start=1):
        rest = list(asked(server, path, body, id))
        assert gathered([*whole[:at], *rest]) == expected, f"from {id}"
        assert not {event.id for event in rest[:-1]} & set(ids[:at])


@pytest.mark.parametrize("name", ["siblings with log-probabilities", "calls"])
def test_an_answer_whose_connection_is_cut_after_every_event_is_whole(server: Server, name: str) -> None:
    path, body = CASES[name]
    expected = gathered(list(asked(server, path, body)))
    found: list[Event] = []
    while not found or found[-1].data != "[DONE]":
        posted = Posted(server, path, body, **({"last_event_id": found[-1].id} if found else {}))
        found.append(next(events(posted)))
        posted.response.close()
        posted.connection.close()
    expected["heads"] = gathered(found)["heads"]  # another second
    assert gathered(found) == expected
    with grpc.insecure_channel(server.address) as channel:
        wait_idle(control_pb2_grpc.ControlStub(channel))


def test_a_stream_is_taken_over_while_its_first_connection_still_reads(server: Server) -> None:
    body = CHAT | {"max_tokens": 400}
    first = asked(server, CHATS, body, x_request_id="both")
    seen = [next(first) for _ in range(20)]
    rest = list(asked(server, CHATS, body, seen[-1].id))
    assert len("".join(gathered([*seen, *rest])[0, "content"])) > 0
    assert gathered([*seen, *rest])["usage"][0]["completion_tokens"] == 400
    expected = gathered(list(asked(server, CHATS, body)))
    assert gathered([*seen, *rest])[0, "content"] == expected[0, "content"]
    *_, last = first
    error = json.loads(last.data)["error"]
    assert (error["code"], error["message"]) == ("aborted", "another call has resumed the stream")


@pytest.mark.thorough
def test_a_stream_goes_on_when_its_engine_was_killed(server: Server) -> None:
    body = CHAT | {"n": 2, "max_tokens": 400, "logprobs": True}
    expected = gathered(list(asked(server, CHATS, body)))
    stream = asked(server, CHATS, body)
    seen = [next(stream) for _ in range(20)]
    server.engine().kill()
    *more, last = stream
    error = json.loads(last.data)["error"]
    assert (error["code"], error["type"]) == ("resumable", "server_error")
    seen += more
    assert last.id == seen[-1].id, "the error's event has no id of its own"
    refused = Posted(server, CHATS, body, last_event_id=last.id)
    assert (refused.status, refused.error()["code"]) == (503, "unavailable")
    assert refused.response.headers["retry-after"]
    server.wait_ready()
    found = gathered([*seen, *asked(server, CHATS, body, last.id)])
    expected["heads"] = found["heads"]
    assert found == expected


@pytest.mark.parametrize(
    ("id", "body", "status", "param", "code", "message"),
    [
        ("x", {}, 400, "last-event-id", None, "is not the id of an event of this server"),
        ("5:1.0:ü", {}, 404, None, "stream_not_found", "no stream is kept under this id; see --resume-s"),
        ("5:1.0.2.fffffffe:kept", {}, 400, "last-event-id", None, "is not the id of an event of this server"),
        ("5:" + "9" * 10 + ".0:kept", {}, 400, "last-event-id", None, "is not the id of an event of this server"),
        ("5:1.0,2.0:kept", {}, 400, "last-event-id", None, "is of 2 sequences, the request has n = 1"),
        ("5:999.0:kept", {}, 400, "last-event-id", None, "is 999; 24 tokens were sent"),
        ("5:1.0:other", {}, 404, None, "stream_not_found", "no stream is kept under this id; see --resume-s"),
        ("5:1.0:kept", {"resumable": None}, 400, "resumable", None, "must be true, as it was when the stream began"),
        ("5:1.0:kept", {"no": 1}, 400, "no", None, None),
        ("", {"stream": False, "stream_options": None}, 400, "resumable", None, "needs stream to be true"),
        ("", {"echo": True}, 400, "resumable", None, "cannot be given beside echo"),
        ("", {"prompt": ["a", "b"]}, 400, "resumable", None, "needs a single prompt"),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_words(
    server: Server, id: str, body: dict[str, Any], status: int, param: str | None, code: str, message: str | None
) -> None:
    list(asked(server, COMPLETIONS, TEXT, x_request_id="kept"))
    refused = Posted(server, COMPLETIONS, TEXT | body, last_event_id=id)
    error = refused.error()
    assert (refused.status, error["type"]) == (status, "invalid_request_error")
    assert error["param"] == param
    if message is not None:
        assert error["message"] == f"{param or 'last-event-id'}: {message}"
    if code is not None:
        assert error["code"] == code


def test_nobody_resumes_the_stream_of_another_tenant(server: Server) -> None:
    *_, last = asked(server, COMPLETIONS, TEXT, x_pagoda_tenant="one")
    for headers in ({"x_pagoda_tenant": "two"}, {}):
        refused = Posted(server, COMPLETIONS, TEXT, last_event_id=last.id, **headers)
        assert (refused.status, refused.error()["code"]) == (404, "stream_not_found")
    assert [event.data for event in asked(server, COMPLETIONS, TEXT, last.id, x_pagoda_tenant="one")] == ["[DONE]"]


def test_an_id_carries_any_request_id(server: Server) -> None:
    first, *_ = asked(server, COMPLETIONS, TEXT, x_request_id="a:b ü,%1")
    assert first.id.isascii()
    assert list(asked(server, COMPLETIONS, TEXT, first.id))[-1].data == "[DONE]"


def test_a_stream_that_is_not_resumable_has_no_ids(server: Server) -> None:
    assert {event.id for event in asked(server, CHATS, CHAT | {"resumable": False})} == {""}


@pytest.mark.thorough
def test_a_stream_is_kept_for_as_long_as_the_server_is_told_to() -> None:
    with running_server("--model", "synthetic", *SYNTHETIC, "--resume-s", "1") as server:
        *_, last = asked(server, COMPLETIONS, TEXT)
        time.sleep(1.2)
        assert Posted(server, COMPLETIONS, TEXT, last_event_id=last.id).status == 404
    with running_server("--model", "synthetic", *SYNTHETIC, "--resume-s", "0") as server:
        refused = Posted(server, COMPLETIONS, TEXT)
        assert (refused.status, refused.error()["code"]) == (400, "unsupported_parameter")


@pytest.mark.thorough
def test_a_stream_is_resumed_whichever_router_is_asked() -> None:
    with running_server("--model", "synthetic", *SYNTHETIC, "--workers", "2") as server:
        body = TEXT | {"max_tokens": 300, "n": 2}
        expected = gathered(list(asked(server, COMPLETIONS, body)))
        found: list[Event] = []
        with contextlib.ExitStack() as stack:
            for _ in range(24):  # connections, which do not all reach the same router
                posted = Posted(server, COMPLETIONS, body, **({"last_event_id": found[-1].id} if found else {}))
                stack.callback(posted.connection.close)
                found.append(next(events(posted)))
            found += asked(server, COMPLETIONS, body, found[-1].id)
        expected["heads"] = gathered(found)["heads"]
        assert gathered(found) == expected
        for _ in range(12):
            refused = Posted(server, COMPLETIONS, body, last_event_id=f"5:999.0,1.0:{found[-1].id.split(':')[2]}")
            assert (refused.status, refused.error()["type"]) == (400, "invalid_request_error")
