"""Messages, responses and token counts over a real socket: the same answers, limits and ends as elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagoda.v1 import control_pb2_grpc
from tests.end_to_end.test_http import CHATS, SYNTHETIC, Posted, wait_idle
from tests.servers import Server, running_server

MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
PLACES = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*SYNTHETIC, "--max-requests", str(PLACES)) as server:
        yield server


def events(posted: Posted) -> list[Any]:
    return [json.loads(line) for line in posted.events() if line.startswith("{")]


def test_all_apis_give_the_same_answer(server: Server) -> None:
    chat = Posted(server, CHATS, HI | {"max_tokens": 20, "temperature": 0}).json()
    text = chat["choices"][0]["message"]["content"]
    message = Posted(server, MESSAGES, HI | {"max_tokens": 20, "temperature": 0}).json()
    assert [block["text"] for block in message["content"]] == [text]
    usage = message["usage"]
    num_prompt_tokens = chat["usage"]["prompt_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt_tokens
    streamed = events(Posted(server, MESSAGES, HI | {"max_tokens": 20, "temperature": 0, "stream": True}))
    assert "".join(each["delta"].get("text", "") for each in streamed if "delta" in each) == text
    body = {"input": "Hi", "max_output_tokens": 20, "temperature": 0}
    response = Posted(server, RESPONSES, body).json()
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens"] == num_prompt_tokens
    last = events(Posted(server, RESPONSES, body | {"stream": True}))[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == text
    assert Posted(server, COUNT, HI).json() == {"input_tokens": num_prompt_tokens}


def test_texts_and_chats_become_ids_and_ids_become_texts(server: Server) -> None:
    ids = Posted(server, "/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert (ids["count"], ids["tokens"]) == (6, [*"héllo".encode()])
    assert len(ids["token_strs"]) == 6
    assert Posted(server, "/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "héllo"}
    chat = Posted(server, "/tokenize", HI).json()
    assert chat["count"] == Posted(server, COUNT, HI).json()["input_tokens"]
    refused = Posted(server, "/detokenize", {"tokens": [1, 100_000]})
    assert (refused.status, refused.error()["param"]) == (400, "tokens[1]")
    refused = Posted(server, "/tokenize", {"prompt": "x", "model": "other"})
    assert (refused.status, refused.error()["code"]) == (404, "model_not_found")


def test_errors_have_the_form_of_their_api(server: Server) -> None:
    refused = Posted(server, MESSAGES, {"model": "other", "max_tokens": 1, **HI})
    assert refused.status == 404
    answer = refused.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
    refused = Posted(server, MESSAGES, HI | {"max_tokens": 10**7})
    assert (refused.status, refused.error()["type"]) == (400, "invalid_request_error")
    refused = Posted(server, RESPONSES, {"input": "x", "max_output_tokens": 10**7})
    assert (refused.status, refused.error()["param"]) == (400, "max_output_tokens")


def test_a_full_server_still_counts_tokens(server: Server) -> None:
    long = HI | {"max_tokens": 5000, "stream": True}
    streams = [Posted(server, MESSAGES, long, x_request_id=f"long-{index}") for index in range(PLACES)]
    for stream in streams:
        assert stream.response.readline() == b"event: message_start\n"
    refused = Posted(server, MESSAGES, HI | {"max_tokens": 1})
    assert (refused.status, refused.error()["type"]) == (429, "rate_limit_error")
    assert Posted(server, COUNT, HI).status == 200
    for stream in streams:
        stream.connection.close()
    with grpc.insecure_channel(server.address) as channel:
        wait_idle(control_pb2_grpc.ControlStub(channel))


def test_a_token_may_come_as_an_api_key(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    with running_server(*SYNTHETIC, "--auth-token-file", str(token)) as server:
        body = HI | {"max_tokens": 1}
        assert Posted(server, MESSAGES, body).status == 401
        assert Posted(server, MESSAGES, body, x_api_key="wrong").status == 401
        assert Posted(server, MESSAGES, body, x_api_key="s3cret").status == 200
        assert Posted(server, MESSAGES, body, x_api_key="s3cret", authorization="Bearer wrong").status == 401


def test_the_servers_end_is_an_error_event() -> None:
    with running_server(*SYNTHETIC, "--grace-s", "0") as server:
        message = Posted(server, MESSAGES, HI | {"max_tokens": 5000, "stream": True})
        response = Posted(server, RESPONSES, {"input": "Hi", "max_output_tokens": 5000, "stream": True})
        for posted in (message, response):
            assert posted.response.readline().startswith(b"event: ")
        server.process.terminate()
        assert events(message)[-1]["error"]["type"] == "overloaded_error"
        last = events(response)[-1]
        assert (last["type"], last["code"]) == ("error", "aborted")
