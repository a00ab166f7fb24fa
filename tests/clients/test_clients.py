"""Both clients against a server that fails, delays and answers on demand."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2

from pagoda import (
    AlreadyExists,
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    DeadlineExceeded,
    FinishReason,
    InvalidArgument,
    NotFound,
    Overloaded,
    PagodaError,
    PermissionDenied,
    Score,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Usage,
)
from pagoda.v1 import admin_pb2, chat_pb2, inference_pb2
from tests.clients.conftest import Asyncio, Blocking
from tests.clients.fake_server import FakeServer, answer, answer_without_end, fail, retry_after, running, silence
from tests.servers import free_address

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_answer_arrives_as_chunks_with_the_end_last(client: Blocking) -> None:
    first, second, last = client.collect("generate", "Say hello", logprobs=1)
    assert first == Chunk("r", 0, "Hello", tokens=(0,), logprobs=(TokenLogprob(-0.5, ((0, -0.5),)),))
    assert second.text == " world"
    assert (last.finish_reason, last.matched, last.text) == (FinishReason.STOP, ".", "")
    assert last.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1)
    assert last.timing == Timing(0.25, 0.0, 0.0, 0.0, 0.0, 1.5, 0, 0, 0, 0, 0)


def test_every_option_reaches_its_field(client: Blocking, server: FakeServer) -> None:
    client.collect(
        "generate",
        token_ids=[1, 2, 3],
        max_tokens=64,
        min_tokens=2,
        stop="end",
        stop_token_ids=[7],
        ignore_eos=True,
        include_stop_in_output=True,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.125,
        top_n_sigma=1.5,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={5: -100.0},
        allowed_token_ids=[5, 6],
        no_repeat_ngram_size=3,
        bad_words=["no"],
        seed=1 << 63,
        n=2,
        logprobs=0,
        prompt_logprobs=2,
        unparsed=True,
        json_schema={"type": "object"},
        max_draft_tokens=4,
        text=True,
        token_bytes=True,
        prompt_ids=True,
        special_tokens=True,
        cache_salt="salt",
        bypass_cache=True,
        priority=-3,
        ttft_s=0.25,
        tpot_s=0.0625,
        model="fake",
        request_id="mine",
    )
    assert server.requests == [
        inference_pb2.GenerateRequest(
            request_id="mine",
            model="fake",
            token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
            sampling=inference_pb2.Sampling(
                temperature=0.5,
                top_k=40,
                top_p=0.75,
                min_p=0.125,
                top_n_sigma=1.5,
                repetition_penalty=1.5,
                presence_penalty=0.25,
                frequency_penalty=-0.25,
                logit_bias={5: -100.0},
                allowed_token_ids=[5, 6],
                seed=1 << 63,
                n=2,
                no_repeat_ngram_size=3,
                bad_words=["no"],
            ),
            stopping=inference_pb2.Stopping(
                max_tokens=64,
                min_tokens=2,
                stop=["end"],
                stop_token_ids=[7],
                ignore_eos=True,
                include_stop_in_output=True,
            ),
            output=inference_pb2.Output(
                text=True,
                special_tokens=True,
                token_bytes=True,
                logprobs=0,
                prompt=True,
                prompt_logprobs=2,
                unparsed=True,
            ),
            guided=inference_pb2.Guided(json_schema='{"type": "object"}'),
            max_draft_tokens=4,
            cache=inference_pb2.Cache(salt="salt", bypass=True),
            priority=-3,
            slo=inference_pb2.Slo(ttft_s=0.25, tpot_s=0.0625),
        )
    ]


def test_options_left_out_or_none_are_the_servers_defaults(client: Blocking, server: FakeServer) -> None:
    client.collect("generate", "text", max_tokens=None, stop=["a", "b"])
    expected = inference_pb2.GenerateRequest(message="text", stopping=inference_pb2.Stopping(stop=["a", "b"]))
    assert server.requests == [expected]


def test_a_chat_is_a_conversation_or_one_question(client: Blocking, server: FakeServer) -> None:
    client.collect("chat", "Why?")
    turns = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "I"}]
    client.collect("chat", turns, continue_last=True)
    question, conversation = (request.chat for request in server.requests)
    user, system, assistant = chat_pb2.ROLE_USER, chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_ASSISTANT
    assert question == chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role=user, content="Why?")])
    assert [(message.role, message.content) for message in conversation.messages] == [
        (system, "Be kind."),
        (assistant, "I"),
    ]
    assert conversation.continue_last


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop_token_ids": [1 << 40]}, "stopping.stop_token_ids"),
        ({"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
        ({"stop": 7}, "stopping.stop"),
        ({"stop": ["fine", "\ud800"]}, "stopping.stop"),
        ({"request_id": 7}, "request_id"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
    ],
)
def test_a_value_that_fits_no_field_is_refused_before_any_call(
    options: dict[str, Any], field: str, client: Blocking, server: FakeServer
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.collect("generate", "text", **options)
    assert caught.value.field == field
    assert server.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -1}, "sampling.top_k: is -1, must be from 0 to 4294967295"),
        ({"priority": 1 << 31}, "priority: is 2147483648, must be from -2147483648 to 2147483647"),
        ({"stop_token_ids": [3, -2]}, "stopping.stop_token_ids: is -2, must be from 0 to 4294967295"),
        ({"logit_bias": {-5: 1.0}}, "sampling.logit_bias: is -5, must be from 0 to 4294967295"),
        ({"model": "a\ud800"}, "model: is not text: there is no valid character at position 1"),
    ],
)
def test_the_refusal_names_field_value_and_limit(options: dict[str, Any], message: str, server: FakeServer) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgument, match=f"^{re.escape(message)}$"):
        client.generate("text", **options)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"content": "x"}], "chat.messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "chat.messages[1].content"),
        ([{"role": ["user"], "content": "x"}], "chat.messages[0].role"),
        ([{"role": "user", "content": None}], "chat.messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "chat.messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "chat.messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "chat.messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "chat.messages[0].content[0]"),
        (["x"], "chat.messages[0]"),
        (7, "chat.messages"),
        ([{"role": "user", "content": "x", "surprise": 1}], "chat.messages[0]"),
        ([{"role": "tool", "content": "x", "tool_call_id": 7}], "chat.messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {}}], "chat.messages[0].content"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "chat.messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"name": 7}]}], "chat.messages[0].tool_calls[0].name"),
        ([{"role": "assistant", "tool_calls": [{"function": 7}]}], "chat.messages[0].tool_calls[0].function"),
    ],
)
@pytest.mark.parametrize("method", ["generate", "tokenize"])
def test_what_is_no_conversation_is_refused_before_any_call(
    messages: Any, field: str, method: str, server: FakeServer
) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgument) as caught:
        getattr(client, method)(chat=messages)
    assert caught.value.field == field
    assert server.requests == []


def test_parts_of_a_message_travel_as_parts(client: Blocking, server: FakeServer) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    client.collect("chat", [{"role": "user", "content": parts}])
    (message,) = server.requests[0].chat.messages
    assert ([part.text for part in message.parts], message.content) == (["first", "second"], "")


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "as OpenAI's clients have it"])
def test_tools_calls_and_template_kwargs_are_plain_values(
    is_nested: bool, client: Blocking, server: FakeServer
) -> None:
    def tool(**function: Any) -> dict[str, Any]:
        return {"type": "function", "function": function} if is_nested else function

    call = {"id": "c1", **tool(name="add", arguments={"b": 1, "a": "é"})}
    client.collect(
        "chat",
        [
            {"role": "user", "content": "2+3?", "name": "ann"},
            {"role": "assistant", "content": None, "reasoning": "I add.", "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "c1", "refusal": None},
        ],
        tools=[tool(name="add", description="Adds.", parameters={"type": "object"}), tool(name="noop")],
        tool_choice="auto",
        template_kwargs={"enable_thinking": False, "budget": 3, "of": [None, "x", {"a": 0.5}]},
        max_tokens=5,
    )
    (request,) = server.requests
    user, assistant, result = request.chat.messages
    assert (user.name, assistant.reasoning, result.tool_call_id) == ("ann", "I add.", "c1")
    assert list(assistant.tool_calls) == [chat_pb2.ToolCall(id="c1", name="add", arguments='{"b": 1, "a": "é"}')]
    assert list(request.chat.tools) == [
        chat_pb2.Tool(name="add", description="Adds.", parameters='{"type": "object"}'),
        chat_pb2.Tool(name="noop"),
    ]
    assert request.chat.tool_choice == chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_AUTO)
    assert MessageToDict(request.chat.template_kwargs) == {
        "enable_thinking": False, "budget": 3, "of": [None, "x", {"a": 0.5}]
    }  # fmt: skip
    assert request.stopping.max_tokens == 5
    client.collect("chat", "Hi", tool_choice=tool(name="add"), tools=[tool(name="add", parameters="{}")])
    assert server.requests[-1].chat.tool_choice == chat_pb2.ToolChoice(tool="add")
    assert server.requests[-1].chat.tools[0].parameters == "{}"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": "add"}, "chat.tools"),
        ({"tools": ["add"]}, "chat.tools[0]"),
        ({"tools": [{"name": 7}]}, "chat.tools[0].name"),
        ({"tools": [{"name": "f", "parameters": {"a": {1, 2}}}]}, "chat.tools[0].parameters"),
        ({"tools": [{"name": "f", "parameters": {"a": math.nan}}]}, "chat.tools[0].parameters"),
        ({"tool_choice": "perhaps"}, "chat.tool_choice"),
        ({"template_kwargs": ["x"]}, "chat.template_kwargs"),
        ({"template_kwargs": {"a": object()}}, "chat.template_kwargs"),
    ],
)
def test_a_chat_option_that_does_not_fit_is_refused_before_any_call(
    options: dict[str, Any], field: str, client: Blocking, server: FakeServer
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.collect("chat", "Hi", **options)
    assert caught.value.field == field
    assert server.requests == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "input: is nothing; give one of message, prompt, chat, token_ids"),
        ({"message": "a", "prompt": "b"}, "input: is message and prompt; give one of"),
        ({"prompt": "a", "tools": []}, "tools: goes with chat, not with prompt"),
        ({"message": "a", "template_kwargs": {}}, "template_kwargs: goes with chat, not with message"),
    ],
)
def test_a_call_has_one_input(given: dict[str, Any], message: str, client: Blocking, server: FakeServer) -> None:
    with pytest.raises(InvalidArgument, match=f"^{re.escape(message)}"):
        client.collect("generate", **given)
    assert server.requests == []


def test_each_input_reaches_its_field(client: Blocking, server: FakeServer) -> None:
    client.collect("generate", "said")
    client.collect("generate", prompt="as it stands")
    client.collect("generate", token_ids=[])
    client.collect("generate", chat=[{"role": "user", "content": "Hi"}])
    assert [request.WhichOneof("input") for request in server.requests] == ["message", "prompt", "token_ids", "chat"]
    assert (server.requests[0].message, server.requests[1].prompt) == ("said", "as it stands")


def test_bytes_reasoning_and_tool_calls_arrive(client: Blocking, server: FakeServer) -> None:
    top = [inference_pb2.TopToken(id=1, bytes=b"\xc3", logprob=-1)]
    token = inference_pb2.Token(id=1, bytes=b"\xc3", logprob=-1, top=top)
    deltas = [
        inference_pb2.Tokens(tokens=[token], reasoning="Let me see"),
        inference_pb2.Tokens(tool_call=inference_pb2.ToolCallDelta(index=1, id="c", name="add", arguments="{")),
    ]
    messages = [inference_pb2.GenerateResponse(tokens=tokens) for tokens in deltas]
    end = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_TOOL_CALLS)
    messages.append(inference_pb2.GenerateResponse(finished=end))
    server.behaviours = [lambda request, context: iter(messages)]
    thought, called, last = client.collect("generate", "text")
    assert (thought.text, thought.reasoning, thought.token_bytes) == ("", "Let me see", (b"\xc3",))
    assert thought.logprobs == (TokenLogprob(-1.0, ((1, -1.0),), (b"\xc3",)),)
    assert (called.tool_call, called.token_bytes) == (ToolCallDelta(1, "c", "add", "{"), ())
    assert last.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize(
    ("method", "argument", "field"),
    [
        ("generate", "a\ud800", "message"),
        ("tokenize", "\ud800", "message"),
        ("detokenize", [-1], "token_ids"),
        ("watch_load", "often", "interval_s"),
        ("step_trace", "long", "last_s"),
        ("abort", "\ud800", "request_id"),
    ],
)
def test_a_wrong_argument_is_named_before_any_call(
    method: str, argument: Any, field: str, client: Blocking, server: FakeServer
) -> None:
    stream = method in ("generate", "watch_load", "step_trace")
    with pytest.raises(InvalidArgument) as caught:
        (client.collect if stream else client.call)(method, argument)
    assert caught.value.field == field
    assert server.requests == []


@pytest.mark.parametrize("name", ["token", "tenant"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_metadata_that_cannot_travel_is_refused_by_name_alone(kind: type, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: must be printable ASCII text$"):
        kind(**{name: "sécret"})


def test_no_deadline_is_as_long_as_an_infinite_one(client: Blocking, server: FakeServer) -> None:
    for timeout_s in (math.inf, 1e18):
        client.collect("generate", "text", timeout_s=timeout_s)
    client.collect("generate", "text", connection={"timeout_s": math.inf})
    assert all(remaining_s is None or remaining_s > 1e9 for remaining_s in server.remaining_s)


async def test_a_closed_client_is_cancelled(server: FakeServer) -> None:
    client, aio = Client(server.address), AsyncClient(server.address)
    begun = client.generate("text")
    client.close()
    await aio.close()
    with pytest.raises(Cancelled, match="the client is closed"):
        client.load()
    with pytest.raises(Cancelled, match="the client is closed"):
        next(begun)
    with pytest.raises(Cancelled, match="the client is closed"):
        await aio.load()
    with pytest.raises(Cancelled, match="the client is closed"):
        await anext(aio.generate("text"))


def test_authorities_are_read_from_a_path_or_its_text(tmp_path: Path) -> None:
    pem = tmp_path / "authorities.pem"
    pem.write_bytes(trustme.CA().cert_pem.bytes())
    for path in (pem, str(pem)):
        Client("127.0.0.1:1", tls=path).close()
    with pytest.raises(FileNotFoundError):
        Client("127.0.0.1:1", tls=str(tmp_path / "none.pem"))


def test_an_unknown_role_or_option_is_refused_before_any_call(client: Blocking, server: FakeServer) -> None:
    with pytest.raises(InvalidArgument, match="'robot' is none of system, user, assistant, tool"):
        client.collect("chat", [{"role": "robot", "content": ""}])
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        client.collect("generate", "text", temprature=1.0)
    assert server.requests == []


def test_token_travels_as_bearer_metadata(client: Blocking, server: FakeServer) -> None:
    client.collect("generate", "text", connection={"token": "secret"})
    client.collect("generate", "text")
    assert server.metadata[0]["authorization"] == "Bearer secret"
    assert "authorization" not in server.metadata[1]


def test_leaving_the_loop_cancels_the_call(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [answer_without_end]
    assert [chunk.text for chunk in client.take_two_then_leave("generate", "text")] == ["more ", "more "]
    assert server.ended.wait(60)


def test_leaving_a_load_watch_cancels_it(client: Blocking, server: FakeServer) -> None:
    assert [load.requests for load in client.take_two_then_leave("watch_load", 0.05)] == [0, 1]
    assert server.ended.wait(60)
    assert server.requests[0].interval_s == 0.05


def test_closing_the_iterator_before_it_is_read_makes_no_call(server: FakeServer) -> None:
    with Client(server.address) as client:
        client.generate("text").close()
    assert server.requests == []


async def test_cancelling_the_reading_task_cancels_the_call(server: FakeServer) -> None:
    server.behaviours = [silence]
    async with AsyncClient(server.address) as client:

        async def read() -> None:
            async for _ in client.generate("text"):
                pass

        task = asyncio.create_task(read())
        assert await asyncio.to_thread(server.begun.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.ended.wait, 5)


def test_many_streams_share_one_blocking_client(server: FakeServer) -> None:
    texts: list[str] = []
    with Client(server.address) as client:
        threads = [
            threading.Thread(target=lambda: texts.append("".join(c.text for c in client.generate("text"))))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert texts == ["Hello world"] * 8


def test_unavailable_is_tried_again_before_the_first_message(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [fail(UNAVAILABLE), fail(UNAVAILABLE), answer("at last")]
    assert client.collect("generate", "text")[0].text == "at last"
    assert len(server.requests) == 3


def test_unavailable_after_the_first_message_is_not_tried_again(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [fail(UNAVAILABLE, "engine died", after=1), answer("again")]
    with pytest.raises(Unavailable, match="engine died"):
        client.collect("generate", "text")
    assert len(server.requests) == 1


def test_retries_are_bounded(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [fail(UNAVAILABLE)]
    with pytest.raises(Unavailable):
        client.collect("generate", "text", connection={"retries": 1})
    assert len(server.requests) == 2
    with pytest.raises(Unavailable):
        client.collect("generate", "text", connection={"retries": 0})
    assert len(server.requests) == 3


def test_a_short_call_is_tried_again_too(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [fail(UNAVAILABLE), answer("")]
    assert client.call("tokenize", "ab") == [97, 98]


def test_a_server_that_starts_late_is_reached(client: Blocking) -> None:
    address = free_address()
    with pytest.raises(Unavailable):
        type(client)(address).collect("generate", "text", connection={"retries": 0})

    def start_late() -> None:
        time.sleep(0.3)
        with running(FakeServer(), address):
            finished.wait(120)

    finished = threading.Event()
    late = threading.Thread(target=start_late)
    late.start()
    try:
        assert len(type(client)(address).collect("generate", "text", connection={"retries": 10})) == 3
    finally:
        finished.set()
        late.join()


def test_overload_is_tried_again_after_the_suggested_delay(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [fail(EXHAUSTED, "full", retry_after(0.3)), answer("admitted")]
    start = time.monotonic()
    assert client.collect("generate", "text")[0].text == "admitted"
    assert time.monotonic() - start >= 0.3


def test_overload_whose_delay_outlasts_the_deadline_fails_at_once(client: Blocking, server: FakeServer) -> None:
    queue = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"queue_depth": "12"})
    server.behaviours = [fail(EXHAUSTED, "full", retry_after(500.0), queue)]
    start = time.monotonic()
    with pytest.raises(Overloaded, match="full") as caught:
        client.collect("generate", "text", timeout_s=300.0)
    assert (caught.value.retry_after_s, caught.value.queue_depth) == (500.0, 12)
    assert caught.value.reason == "QUEUE_FULL"
    assert time.monotonic() - start < 200


def test_overload_without_a_delay_is_final(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [fail(EXHAUSTED, "message too large")]
    with pytest.raises(Overloaded) as caught:
        client.collect("generate", "text")
    assert caught.value.retry_after_s is None
    assert len(server.requests) == 1


def test_deadline_ends_a_silent_stream_and_the_server_hears_of_it(client: Blocking, server: FakeServer) -> None:
    server.behaviours = [silence]
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.collect("generate", "text", timeout_s=1.0)
    assert 0.95 < time.monotonic() - start < 60
    assert 0.0 < server.remaining_s[0] <= 1.05
    assert server.ended.wait(60)


@pytest.mark.thorough
def test_the_clients_deadline_holds_where_the_call_has_none_and_spans_retries(
    client: Blocking, server: FakeServer
) -> None:
    server.behaviours = [fail(EXHAUSTED, "full", retry_after(1.0)), silence]
    with pytest.raises(DeadlineExceeded):
        client.collect("generate", "text", connection={"timeout_s": 4.0})
    first, second = server.remaining_s
    assert second < first - 0.8  # the delay, less what gRPC rounds up


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, Unimplemented),
        (grpc.StatusCode.INTERNAL, PagodaError),
    ],
)
def test_each_status_is_its_own_error(
    code: grpc.StatusCode, kind: type[PagodaError], client: Blocking, server: FakeServer
) -> None:
    server.behaviours = [fail(code, "because")]
    with pytest.raises(PagodaError, match="because") as caught:
        client.collect("generate", "text")
    assert type(caught.value) is kind
    assert caught.value.code == code


def test_an_invalid_argument_names_its_field(client: Blocking, server: FakeServer) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.temperature", description="too hot")
    details = error_details_pb2.BadRequest(field_violations=[violation])
    server.behaviours = [fail(grpc.StatusCode.INVALID_ARGUMENT, "too hot", details)]
    with pytest.raises(InvalidArgument) as caught:
        client.collect("generate", "text", temperature=1e9)
    assert caught.value.field == "sampling.temperature"


def test_an_unsupported_field_is_named(client: Blocking, server: FakeServer) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="lora_name")
    details = error_details_pb2.BadRequest(field_violations=[violation])
    server.behaviours = [fail(grpc.StatusCode.UNIMPLEMENTED, "not yet", details), fail(grpc.StatusCode.UNIMPLEMENTED)]
    for field in ("lora_name", None):
        with pytest.raises(Unimplemented) as caught:
            client.collect("generate", "text")
        assert (caught.value.field, caught.value.code) == (field, grpc.StatusCode.UNIMPLEMENTED)


def test_the_short_calls_answer(client: Blocking, server: FakeServer) -> None:
    assert client.call("detokenize", [104, 105]) == "hi"
    assert client.call("tokenize", prompt="hi", add_special_tokens=False) == [104, 105]
    assert server.requests[-1] == inference_pb2.TokenizeRequest(prompt="hi", add_special_tokens=False)
    assert client.call("tokenize", "hi") == [104, 105]
    assert server.requests[-1] == inference_pb2.TokenizeRequest(message="hi", add_special_tokens=True)
    client.call("tokenize", chat=[{"role": "user", "content": "hi"}], tools=[{"name": "f"}])
    assert [tool.name for tool in server.requests[-1].chat.tools] == ["f"]
    with pytest.raises(TypeError, match="unknown option 'max_tokens'"):
        client.call("tokenize", "hi", max_tokens=5)
    assert [message.content for message in server.requests[-1].chat.messages] == ["hi"]
    assert client.call("server_info").version == "1.2.3"
    assert [model.name for model in client.call("models")] == ["fake"]
    assert client.call("load").engines[0].running == 3
    assert client.call("flush_cache") == 7
    client.call("abort", "mine")
    client.call("drain", timeout_s=5.0)
    assert server.requests[-2] == admin_pb2.AbortRequest(request_id="mine")
    client.call("abort", "theirs", tenant="acme")
    assert server.requests[-1] == admin_pb2.AbortRequest(request_id="theirs", tenant="acme")


def test_prompt_ids_come_on_a_chunk_of_their_own(client: Blocking, server: FakeServer) -> None:
    prompt = inference_pb2.GenerateResponse(
        prompt=inference_pb2.Prompt(tokens=[inference_pb2.Token(id=id) for id in (4, 5)])
    )
    server.behaviours = [lambda request, context: iter([prompt])]
    assert client.collect("generate", "text", prompt_ids=True) == [Chunk("", prompt_ids=(4, 5))]


def test_prompt_log_probabilities_come_with_the_ids(client: Blocking, server: FakeServer) -> None:
    parts = [
        inference_pb2.GenerateResponse(prompt=inference_pb2.Prompt(tokens=[inference_pb2.Token(id=4)])),
        inference_pb2.GenerateResponse(prompt=inference_pb2.Prompt(tokens=[inference_pb2.Token(id=5, logprob=-1.5)])),
    ]
    server.behaviours = [lambda request, context: iter(parts)]
    assert client.collect("generate", "text", prompt_logprobs=0) == [
        Chunk("", prompt_ids=(4,)),
        Chunk("", prompt_ids=(5,), logprobs=(TokenLogprob(-1.5),)),
    ]
    assert server.requests[-1].output.HasField("prompt_logprobs")


def test_texts_and_ids_are_embedded(client: Blocking, server: FakeServer) -> None:
    options = {"pooling": "mean", "normalize": False, "dimensions": 2, "cache_salt": "s", "priority": 3}
    assert client.call("embed", ["text", [1, 2]], **options) == [[0.5, -0.25]] * 2
    assert server.requests[-1] == inference_pb2.EmbedRequest(
        inputs=[
            inference_pb2.EmbedInput(text="text"),
            inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=[1, 2])),
        ],
        pooling=inference_pb2.POOLING_MEAN,
        normalize=False,
        dimensions=2,
        priority=3,
        cache=inference_pb2.Cache(salt="s"),
    )
    client.call("embed", ["text"], model=None)
    assert server.requests[-1] == inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="text")])


def test_continuations_are_scored(client: Blocking, server: FakeServer) -> None:
    scores = client.call("score", ["yes", [5]], "Is it?", token_bytes=True, bypass_cache=True)
    assert scores == [Score(-0.5, (7,), (-0.5,), (b"x",))] * 2
    assert server.requests[-1] == inference_pb2.ScoreRequest(
        message="Is it?",
        continuations=[
            inference_pb2.Continuation(text="yes"),
            inference_pb2.Continuation(token_ids=inference_pb2.TokenIds(ids=[5])),
        ],
        token_bytes=True,
        cache=inference_pb2.Cache(bypass=True),
    )
    assert client.call("score", ["x"], token_ids=[1, 2]) == [Score(-0.5, (7,), (-0.5,))]
    client.call("score", ["x"], chat="Hi", template_kwargs={"enable_thinking": False})
    assert server.requests[-1].chat.HasField("template_kwargs")


@pytest.mark.parametrize(
    ("method", "arguments", "options", "field"),
    [
        ("embed", ["a text"], {}, "inputs"),
        ("embed", [["x", [-1]]], {}, "inputs[1].token_ids.ids"),
        ("embed", [["x"]], {"pooling": "max"}, "pooling"),
        ("score", ["a text", "Hi"], {}, "continuations"),
        ("score", [["x", "\ud800"], "Hi"], {}, "continuations[1].text"),
        ("score", [["x"]], {}, "input"),
    ],
)
def test_texts_that_cannot_be_sent_are_named(
    client: Blocking, method: str, arguments: list[Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.call(method, *arguments, **options)
    assert caught.value.field == field


def test_a_finish_reason_from_the_future_is_other(client: Blocking, server: FakeServer) -> None:
    finished = inference_pb2.GenerateResponse(finished=inference_pb2.Finished(reason=99, stop_token_id=0))
    server.behaviours = [lambda request, context: iter([finished])]
    (chunk,) = client.collect("generate", "text")
    assert (chunk.finish_reason, chunk.matched) == (FinishReason.OTHER, 0)


def test_tls_is_refused_by_a_server_without_it(server: FakeServer) -> None:
    for kind in (Blocking, Asyncio):
        with pytest.raises(Unavailable):
            kind(server.address).collect("generate", "text", connection={"tls": True, "retries": 0})
    assert server.requests == []
