"""Calls that a chat requires: a model that knows nothing makes them all the same, through a real router and engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from pagoda import Client, InvalidArgument
from pagoda.v1 import control_pb2
from pagoda_server.checkpoints import resolve
from tests.end_to_end.test_http import CHATS, Posted
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [{"name": "add", "parameters": PARAMETERS}, {"name": "now", "parameters": PARAMETERS}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models") / "calling"
    shutil.copytree(resolve("synthetic"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running_server("--model", str(folder), "--http", "127.0.0.1:0") as server:
        with Client(server.address) as client:
            if control_pb2.CAPABILITY_GUIDED not in client.models()[0].capabilities:
                pytest.skip("this server follows no grammars")
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def test_a_named_tool_is_called_once(client: Client) -> None:
    assert client.models()[0].tool_format == "hermes"
    answer = client.answer(chat="Hi", tools=TOOLS, tool_choice={"name": "now"}, max_tokens=400)
    assert (answer.finish_reason, answer.text, answer.matched) == ("tool_calls", "", True)
    (call,) = answer.tool_calls
    assert call.name == "now"
    assert set(call.parsed) == {"a", "b"}
    assert call.parsed["a"] in range(10)


def test_at_least_one_tool_is_called_and_the_conversation_goes_on(client: Client) -> None:
    answers = [client.answer(chat=f"Hi {at}", tools=TOOLS, tool_choice="required", max_tokens=400) for at in range(4)]
    for answer in answers:
        assert answer.tool_calls
        if answer.finish_reason == "tool_calls":  # not cut off
            assert answer.text == ""
            assert all(call.parsed["b"] in ("x", "y") for call in answer.tool_calls)
    call = answers[0].tool_calls[0]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments}]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert client.answer(chat=turns, tools=TOOLS, max_tokens=2).tokens


def test_structured_output_by_function_calling_works_as_langchain_asks_for_it(server: Server) -> None:
    """The request of `with_structured_output(schema, method="function_calling")`."""
    joke = {"type": "function", "function": {"name": "Joke", "description": "A joke.", "parameters": PARAMETERS}}
    body = {
        "messages": [{"role": "user", "content": "Tell me one."}],
        "model": None,
        "stream": False,
        "temperature": 0.0,
        "max_completion_tokens": 400,
        "tools": [joke],
        "tool_choice": {"type": "function", "function": {"name": "Joke"}},
        "parallel_tool_calls": False,
    }
    choice = Posted(server, CHATS, body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "Joke"
    assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}


def test_at_most_one_tool_is_called_of_those_that_are_required(server: Server) -> None:
    tools = [{"type": "function", "function": each} for each in TOOLS]
    for at in range(4):
        body = {"messages": [{"role": "user", "content": f"Hi {at}"}], "max_tokens": 400, "tools": tools}
        body |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": at}
        choice = Posted(server, CHATS, body).json()["choices"][0]
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)


def test_unparsed_calls_are_text(client: Client) -> None:
    answer = client.answer(chat="Hi", tools=TOOLS, tool_choice={"name": "add"}, unparsed=True, max_tokens=400)
    assert (answer.finish_reason, answer.tool_calls) == ("stop", [])
    text = answer.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(text)["name"] == "add"


def test_a_schema_that_no_grammar_can_follow_is_refused_with_its_field(client: Client) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"pattern": "("}}}}
    with pytest.raises(InvalidArgument) as refused:
        client.answer(chat="Hi", tools=[tool], tool_choice="required")
    assert refused.value.field == "chat.tools"


@pytest.mark.usefixtures("server")  # which finds out whether grammars are followed
def test_a_call_that_is_not_written_as_json_has_the_schemas_types() -> None:
    with running_server("--tool-format", "gemma4") as other, Client(other.address) as client:
        answer = client.answer(chat="Hi", tools=TOOLS, tool_choice={"name": "now"}, max_tokens=400)
    assert (answer.finish_reason, answer.text, answer.matched) == ("tool_calls", "", True)
    (call,) = answer.tool_calls
    assert call.parsed["a"] in range(10)
    assert call.parsed["b"] in ("x", "y")
