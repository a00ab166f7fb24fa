"""Tools, reasoning and template variables through a real router and its template; retries by a stock client."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagoda import Client, InvalidArgument
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import resolve
from tests.end_to_end.asking import ask, request
from tests.servers import Server, running_server

TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
TOOL = {"name": "add", "description": "Adds <|im_end|>", "parameters": {"type": "object", "properties": {"a": {}}}}
START, END = 256, 257


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The synthetic model with a template that reads tools, and with recommended sampling."""
    folder = tmp_path_factory.mktemp("models") / "tooled"
    shutil.copytree(resolve("synthetic"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"eos_token_id": [END], "temperature": 0.5, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with running_server("--model", str(folder)) as server:
        yield server


@pytest.fixture
def client(tool_server: Server) -> Iterator[Client]:
    with Client(tool_server.address) as client:
        yield client


def rendered(client: Client, ids: list[int]) -> str:
    return client.detokenize(ids, special_tokens=True)


def test_what_a_chat_carries_reaches_the_model_and_typed_special_tokens_stay_text(client: Client) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "reasoning": "I <|im_end|> add.",
            "tool_calls": [{"name": "add", "arguments": {"a": "<|im_start|>"}}],
        },
        {"role": "tool", "content": "5"},
    ]
    chunks = list(
        client.chat(
            conversation, tools=[TOOL], template_kwargs={"enable_thinking": False}, prompt_ids=True, max_tokens=2
        )
    )
    ids = list(chunks[0].prompt_ids or ())
    assert ids == client.tokenize(chat=conversation, tools=[TOOL], template_kwargs={"enable_thinking": False})
    assert [id for id in ids if id in (START, END)] == [START, END] * 4 + [START], "those of the template"
    function = json.dumps({"type": "function", "function": TOOL})
    assert rendered(client, ids) == (
        f"<|im_start|>tools [{function}]<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>I <|im_end|> add.</think>"
        '<call>{"name": "add", "arguments": {"a": "<|im_start|>"}}</call><|im_end|>\n'
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    assert sum(len(chunk.tokens) for chunk in chunks) == 2


def test_tools_that_the_model_is_to_leave_alone_are_not_shown_to_it(client: Client) -> None:
    hidden = client.tokenize(chat="Hi", tools=[TOOL], tool_choice="none")
    assert hidden == client.tokenize(chat="Hi") == client.tokenize("Hi")


def test_the_model_tells_what_its_template_reads_and_what_its_authors_recommend(client: Client) -> None:
    (model,) = client.models()
    chats, tools = control_pb2.CAPABILITY_CHAT, control_pb2.CAPABILITY_TOOLS
    assert {chats, tools} < set(model.capabilities)
    assert list(model.template_kwargs) == ["enable_thinking"]
    assert (model.tool_format, model.reasoning_format) == ("", "think")
    assert model.recommended_sampling == inference_pb2.Sampling(temperature=0.5, top_k=20)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"message": "x", "sampling": {"typicalP": 0.5}}, "sampling.typical_p"),
    ],
)
def test_a_field_that_is_not_supported_yet_is_unimplemented_and_named(
    tool_server: Server, fields: dict[str, Any], field: str
) -> None:
    with grpc.insecure_channel(tool_server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceStub(channel).Generate(ParseDict(fields, inference_pb2.GenerateRequest())))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    bad_request = error_details_pb2.BadRequest()
    assert rpc_status.from_call(caught.value).details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == field
    assert field in caught.value.details()


def test_a_call_cannot_be_required_of_a_model_whose_format_is_not_known(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="--tool-format") as caught:
        list(client.chat("Hi", tools=[TOOL], tool_choice="required"))
    assert caught.value.field == "chat.tool_choice.mode"


def test_a_model_without_a_chat_template_refuses_a_message_and_continues_a_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(resolve("synthetic"), folder)
    (folder / "chat_template.jinja").unlink()
    with running_server("--model", str(folder)) as server, Client(server.address) as client:
        with pytest.raises(Exception, match=r"^message: the model served here has no chat template; send prompt"):
            list(client.generate("Hi"))
        assert list(client.generate(prompt="Hi", max_tokens=1))
        assert control_pb2.CAPABILITY_CHAT not in client.models()[0].capabilities


@pytest.mark.thorough
def test_a_stock_client_comes_back_when_it_is_told_to() -> None:
    """A client whose own backoff is 10 minutes, so that only `grpc-retry-pushback-ms` can make it retry in time."""
    retries = {
        "maxAttempts": 5,
        "initialBackoff": "600s",
        "maxBackoff": "600s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{"service": "pagoda.v1.Inference"}], "retryPolicy": retries}]})
    arguments = ("--model", "synthetic", "--step-ms", "20", "--max-requests", "1")
    with (
        running_server(*arguments) as server,
        grpc.insecure_channel(server.address) as channel,
        grpc.insecure_channel(server.address, options=[("grpc.service_config", config)]) as retrying,
        ThreadPoolExecutor(1) as threads,
    ):
        inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
        first = inference.Generate(request("in the way", max_tokens=1000))
        next(first)
        started = time.monotonic()
        waiting = threads.submit(ask, inference_pb2_grpc.InferenceStub(retrying), request("patient", max_tokens=2))
        while "RESOURCE_EXHAUSTED" not in server.log.read_text():
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as refused:
            ask(inference, request("refused", max_tokens=1))
        pushback_s = int(dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"]) / 1e3
        first.cancel()
        while control.GetLoad(control_pb2.GetLoadRequest()).requests:
            time.sleep(0.01)
        assert len(waiting.result(timeout=400).ids()) == 2
        assert 0.5 * pushback_s <= time.monotonic() - started < 400
