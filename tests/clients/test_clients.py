"""Both clients against a server that fails, dawdles and answers on demand."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
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
    Timing,
    TokenLogprob,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Usage,
)
from pagoda.v1 import inference_pb2
from tests.clients.conftest import Asyncio, Blocking
from tests.clients.fake_server import FakeServer, answer, answer_without_end, fail, retry_after, running, silence

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_answer_arrives_as_chunks_with_the_end_last(client: Blocking) -> None:
    first, second, last = client.collect("generate", "Say hello", logprobs=1)
    assert first == Chunk("r", 0, "Hello", (0,), (TokenLogprob(-0.5, ((0, -0.5),)),))
    assert second.text == " world"
    assert (last.finish_reason, last.matched, last.text) == (FinishReason.STOP, ".", "")
    assert last.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1)
    assert last.timing == Timing(0.25, 0.0, 0.0, 0.0, 0.0, 1.5, 0, 0, 0, 0, 0)


def test_every_option_reaches_its_field(client: Blocking, server: FakeServer) -> None:
    client.collect(
        "generate",
        [1, 2, 3],
        max_tokens=64,
        min_tokens=2,
        stop="end",
        stop_token_ids=[7],
        ignore_eos=True,
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
        logprobs=0,
        text=True,
        prompt_ids=True,
        special_tokens=True,
        cache_salt="salt",
        bypass_cache=True,
        priority=-3,
        ttft_ms=250.0,
        tpot_ms=50.0,
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
            ),
            stopping=inference_pb2.Stopping(
                max_tokens=64, min_tokens=2, stop=["end"], stop_token_ids=[7], ignore_eos=True
            ),
            output=inference_pb2.Output(text=True, logprobs=0, prompt=True, special_tokens=True),
            cache=inference_pb2.Cache(salt="salt", bypass=True),
            priority=-3,
            slo=inference_pb2.Slo(ttft_ms=250.0, tpot_ms=50.0),
        )
    ]


def test_options_left_out_or_none_are_the_servers_defaults(client: Blocking, server: FakeServer) -> None:
    client.collect("generate", "text", max_tokens=None, stop=["a", "b"])
    expected = inference_pb2.GenerateRequest(text="text", stopping=inference_pb2.Stopping(stop=["a", "b"]))
    assert server.requests == [expected]


def test_a_chat_is_a_conversation_or_one_question(client: Blocking, server: FakeServer) -> None:
    client.collect("chat", "Why?")
    turns = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "I"}]
    client.collect("chat", turns, continue_last=True)
    question, conversation = (request.chat for request in server.requests)
    user, system, assistant = inference_pb2.ROLE_USER, inference_pb2.ROLE_SYSTEM, inference_pb2.ROLE_ASSISTANT
    assert question == inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=user, content="Why?")])
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
        ({"model": "a\ud800"}, "model: is no text: what stands at position 1 is no character of Unicode"),
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
        (None, "chat.messages"),
    ],
)
@pytest.mark.parametrize("method", ["chat", "tokenize"])
def test_what_is_no_conversation_is_refused_before_any_call(
    messages: Any, field: str, method: str, server: FakeServer
) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgument) as caught:
        getattr(client, method)(messages)
    assert caught.value.field == field
    assert server.requests == []


def test_parts_of_text_are_joined(client: Blocking, server: FakeServer) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    client.collect("chat", [{"role": "user", "content": parts}])
    assert server.requests[0].chat.messages[0].content == "first\nsecond"


@pytest.mark.parametrize(
    ("method", "argument", "field"),
    [
        ("generate", "a\ud800", "text"),
        ("tokenize", "\ud800", "text"),
        ("detokenize", [-1], "token_ids"),
        ("model_info", 5, "model"),
        ("watch_load", math.nan, "interval_s"),
        ("watch_load", 1e300, "interval_s"),
        ("watch_load", "often", "interval_s"),
        ("trace", "long", "last_s"),
        ("abort", "\ud800", "request_id"),
    ],
)
def test_a_wrong_argument_is_named_before_any_call(
    method: str, argument: Any, field: str, client: Blocking, server: FakeServer
) -> None:
    stream = method in ("generate", "watch_load", "trace")
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
    assert server.ended.wait(5)


def test_leaving_a_load_watch_cancels_it(client: Blocking, server: FakeServer) -> None:
    assert [load.running for load in client.take_two_then_leave("watch_load", 0.05)] == [0, 1]
    assert server.ended.wait(5)
    assert server.requests[0].interval.ToMilliseconds() == 50


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(Unavailable):
        type(client)(address).collect("generate", "text", connection={"retries": 0})

    def start_late() -> None:
        time.sleep(0.3)
        with running(FakeServer(), address):
            finished.wait(20)

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
    server.behaviours = [fail(EXHAUSTED, "full", retry_after(50.0), queue)]
    start = time.monotonic()
    with pytest.raises(Overloaded, match="full") as caught:
        client.collect("generate", "text", timeout_s=30.0)
    assert (caught.value.retry_after_s, caught.value.queue_depth) == (50.0, 12)
    assert time.monotonic() - start < 20.0


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
    assert 0.95 < time.monotonic() - start < 20.0
    assert 0.0 < server.remaining_s[0] <= 1.05
    assert server.ended.wait(5)


def test_the_clients_deadline_holds_where_the_call_has_none_and_spans_retries(
    client: Blocking, server: FakeServer
) -> None:
    server.behaviours = [fail(UNAVAILABLE), silence]
    with pytest.raises(DeadlineExceeded):
        client.collect("generate", "text", connection={"timeout_s": 0.5})
    first, second = server.remaining_s
    assert second < first - 0.04  # the shortest backoff is half of 0.1 s


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


def test_the_short_calls_answer(client: Blocking, server: FakeServer) -> None:
    assert client.call("detokenize", [104, 105]) == "hi"
    assert client.call("tokenize", "hi", raw=True, add_special_tokens=False) == [104, 105]
    assert server.requests[-1] == inference_pb2.TokenizeRequest(text="hi", raw=True, add_special_tokens=False)
    client.call("tokenize", [{"role": "user", "content": "hi"}])
    assert [message.content for message in server.requests[-1].chat.messages] == ["hi"]
    assert client.call("server_info").version == "1.2.3"
    assert client.call("model_info", "other").name == "other"
    assert client.call("load").running == 3
    assert client.call("flush_cache") == 7
    client.call("abort", "mine")
    client.call("drain", timeout_s=5.0)
    assert server.requests[-2].request_id == "mine"


def test_prompt_ids_come_on_a_chunk_of_their_own(client: Blocking, server: FakeServer) -> None:
    prompt = inference_pb2.GenerateResponse(prompt=inference_pb2.Prompt(token_ids=[4, 5]))
    server.behaviours = [lambda request, context: iter([prompt])]
    assert client.collect("generate", "text", prompt_ids=True) == [Chunk("", prompt_ids=(4, 5))]


def test_a_finish_reason_from_the_future_is_other(client: Blocking, server: FakeServer) -> None:
    finished = inference_pb2.GenerateResponse(finished=inference_pb2.Finished(reason=99, token_id=0))
    server.behaviours = [lambda request, context: iter([finished])]
    (chunk,) = client.collect("generate", "text")
    assert (chunk.finish_reason, chunk.matched) == (FinishReason.OTHER, 0)


def test_tls_is_refused_by_a_server_without_it(server: FakeServer) -> None:
    for kind in (Blocking, Asyncio):
        with pytest.raises(Unavailable):
            kind(server.address).collect("generate", "text", connection={"tls": True, "retries": 0})
    assert server.requests == []
