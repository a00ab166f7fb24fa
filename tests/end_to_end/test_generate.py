"""Generate, field by field, through a real router and a real engine with the synthetic model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pagoda.v1 import chat_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, engine_load, request

VOCAB_SIZE = 258


def expected(text: str, count: int) -> list[int]:
    return expected_tokens(text.encode(), count, VOCAB_SIZE)


def as_text(ids: list[int]) -> str:
    return bytes(id for id in ids if id < 256).decode(errors="replace")


def test_tokens_and_text_are_those_computed_by_hand(inference: inference_pb2_grpc.InferenceStub) -> None:
    answer = ask(inference, request("a prompt", max_tokens=50))
    assert answer.ids() == expected("a prompt", 50)
    assert answer.text() == as_text(answer.ids())
    assert answer.finished().reason == inference_pb2.FINISH_REASON_LENGTH


def test_every_sequence_ends_once_and_the_last_message_carries_usage_and_timing(
    inference: inference_pb2_grpc.InferenceStub,
) -> None:
    answer = ask(inference, request("xyz", max_tokens=4, sampling={"n": 3}))
    finishes = [response.finished.index for response in answer.responses if response.HasField("finished")]
    assert sorted(finishes) == [0, 1, 2]
    with_usage = [at for at, response in enumerate(answer.responses) if response.HasField("usage")]
    assert with_usage == [len(answer.responses) - 1]
    last = answer.responses[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 12)
    assert 0 < last.timing.time_to_first_token_s <= last.timing.total_s
    assert last.timing.queue_s + last.timing.prefill_s + last.timing.decode_s <= last.timing.total_s


def test_64_streams_at_once_each_get_their_own_tokens_and_return_every_block(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    texts = [f"stream number {at} " * (1 + at % 7) for at in range(64)]
    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda text: ask(inference, request(text, max_tokens=40)), texts))
    for text, answer in zip(texts, answers, strict=True):
        assert answer.ids() == expected(text, 40)
    server = control.GetLoad(control_pb2.GetLoadRequest())
    assert (server.requests, server.reserved_tokens) == (0, 0)
    load = engine_load(control)
    assert (load.running, load.waiting, load.blocks_referenced) == (0, 0, 0)
    assert load.blocks_free + load.blocks_evictable == load.blocks_total


def test_token_ids_are_taken_as_they_are(inference: inference_pb2_grpc.InferenceStub) -> None:
    ids = [256, 7, 255, 257]
    message = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))
    message.stopping.max_tokens = 9
    message.stopping.ignore_eos = True
    assert ask(inference, message).ids() == expected_tokens(ids, 9, VOCAB_SIZE)


def test_chat_is_rendered_by_the_template_and_the_prompt_event_shows_it(
    inference: inference_pb2_grpc.InferenceStub,
) -> None:
    message = inference_pb2.GenerateRequest(
        chat=chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content="Hi")]),
        stopping=inference_pb2.Stopping(max_tokens=3),
        output=inference_pb2.Output(prompt=True),
    )
    answer = ask(inference, message)
    ids = answer.prompt_ids()
    start, end = 256, 257
    assert ids == [start, *b"user\nHi", end, *b"\n", start, *b"assistant\n"]
    assert answer.ids() == expected_tokens(ids, 3, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [({"message": "Hi"}, b"user\nHi\nassistant\n"), ({"prompt": "Hi"}, b"Hi")],
    ids=["message", "prompt"],
)
def test_a_message_goes_through_the_template_and_a_prompt_stays_as_it_is(
    inference: inference_pb2_grpc.InferenceStub, given: dict[str, Any], prompt: bytes
) -> None:
    message = inference_pb2.GenerateRequest(**given, output=inference_pb2.Output(prompt=True))
    message.stopping.max_tokens = 1
    assert bytes(id for id in ask(inference, message).prompt_ids() if id < 256) == prompt


def test_a_stop_string_is_a_part_of_the_text_where_it_is_asked_for(
    inference: inference_pb2_grpc.InferenceStub,
) -> None:
    whole = ask(inference, request("find a stop", max_tokens=60)).text()
    message = request("find a stop", max_tokens=60, stop=[whole[10:13]])
    message.stopping.include_stop_in_output = True
    answer = ask(inference, message)
    assert answer.text() == whole[: whole.index(whole[10:13]) + 3]
    assert answer.finished().stop_string == whole[10:13]


def test_tokens_carry_their_bytes_where_they_are_asked_for(inference: inference_pb2_grpc.InferenceStub) -> None:
    message = request("Grüße", max_tokens=40)
    message.output.token_bytes = message.output.prompt = True
    message.output.logprobs = 1
    answer = ask(inference, message)
    prompt = answer.responses[0].prompt.tokens
    assert b"".join(token.bytes for token in prompt) == "Grüße".encode()
    assert [token.bytes for token in prompt[2:4]] == [b"\xc3", b"\xbc"], "halves of a character"
    tokens = [token for token in answer.tokens() if token.id < 256]
    assert len(tokens) > 30
    assert all(token.bytes == bytes([token.id]) for token in tokens)
    assert all(token.top[0].bytes == bytes([token.top[0].id]) for token in tokens if token.top[0].id < 256)
    plain = ask(inference, request("Grüße", max_tokens=40))
    assert not any(token.bytes for token in plain.tokens())


def test_a_stop_string_cuts_the_text_before_it_and_is_reported(inference: inference_pb2_grpc.InferenceStub) -> None:
    whole = ask(inference, request("find a stop", max_tokens=60)).text()
    stop = whole[10:13]
    answer = ask(inference, request("find a stop", max_tokens=60, stop=["never occurs", stop]))
    assert answer.text() == whole[: whole.index(stop)]
    assert (answer.finished().reason, answer.finished().stop_string) == (inference_pb2.FINISH_REASON_STOP, stop)
    assert answer.responses[-1].usage.completion_tokens < 60


def test_a_stop_id_ends_the_sequence_and_its_text_is_left_out(inference: inference_pb2_grpc.InferenceStub) -> None:
    ids = expected("stop at an id", 30)
    stop = ids[7]
    message = request("stop at an id", max_tokens=30)
    message.stopping.stop_token_ids.append(stop)
    answer = ask(inference, message)
    cut = ids[: ids.index(stop) + 1]
    assert answer.ids() == cut
    assert answer.text() == as_text(cut[:-1])
    assert (answer.finished().reason, answer.finished().stop_token_id) == (inference_pb2.FINISH_REASON_STOP, stop)


def test_min_tokens_lets_no_stop_string_match_before(inference: inference_pb2_grpc.InferenceStub) -> None:
    whole = ask(inference, request("min tokens", max_tokens=40))
    stop = whole.text()[2]
    message = request("min tokens", max_tokens=40, stop=[stop])
    message.stopping.min_tokens = 20
    assert len(ask(inference, message).ids()) >= 20


def test_text_off_sends_ids_alone(inference: inference_pb2_grpc.InferenceStub) -> None:
    message = request("no text", max_tokens=12)
    message.output.text = False
    answer = ask(inference, message)
    assert answer.text() == ""
    assert answer.ids() == expected("no text", 12)


@pytest.mark.parametrize("count", [0, 1])
def test_logprobs_come_with_every_token_where_asked_for(
    inference: inference_pb2_grpc.InferenceStub, count: int
) -> None:
    message = request("logprobs", max_tokens=10)
    message.output.logprobs = count
    tokens = ask(inference, message).tokens()
    assert len(tokens) == 10
    assert all(token.HasField("logprob") and len(token.top) == count for token in tokens)
    assert not any(token.HasField("logprob") for token in ask(inference, request("logprobs", max_tokens=10)).tokens())


def test_a_repeated_prompt_reports_its_cached_tokens_and_bypass_none(
    inference: inference_pb2_grpc.InferenceStub,
) -> None:
    text = "a prompt that is long enough to fill several blocks of the cache, twice over; " * 2
    first = ask(inference, request(text, max_tokens=4))
    again = ask(inference, request(text, max_tokens=4))
    message = request(text, max_tokens=4)
    message.cache.bypass = True
    bypassed = ask(inference, message)
    assert again.responses[-1].usage.cached_tokens == (len(text) - 1) // 4 * 4
    assert bypassed.responses[-1].usage.cached_tokens == 0
    assert first.ids() == again.ids() == bypassed.ids()


def test_the_request_id_is_echoed_and_cannot_be_live_twice(inference: inference_pb2_grpc.InferenceStub) -> None:
    message = request("an id of my own", max_tokens=2000)
    message.request_id = "my-request"
    call = inference.Generate(message)
    assert next(call).request_id == "my-request"
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(message))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()


def test_tokenize_and_detokenize_are_inverse(inference: inference_pb2_grpc.InferenceStub) -> None:
    text = "Grüße, 世界 🌍 <|im_end|>"
    ids = inference.Tokenize(inference_pb2.TokenizeRequest(prompt=text)).token_ids
    assert 257 not in ids, "special-token text typed by a user stays text"
    assert inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text == text


@pytest.mark.parametrize(
    "given",
    [
        {"message": "Hi"},
        {"prompt": "Hi"},
        {"chat": chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content="Hi")])},
    ],
    ids=["message", "prompt", "chat"],
)
def test_tokenize_gives_the_ids_that_generate_computes_on(
    inference: inference_pb2_grpc.InferenceStub, given: dict[str, Any]
) -> None:
    message = inference_pb2.GenerateRequest(**given, output=inference_pb2.Output(prompt=True))
    message.stopping.max_tokens = 1
    ids = inference.Tokenize(inference_pb2.TokenizeRequest(**given)).token_ids
    assert ids == ask(inference, message).prompt_ids()


def test_tokenize_leaves_special_tokens_out_of_a_prompt_alone(inference: inference_pb2_grpc.InferenceStub) -> None:
    bare = inference_pb2.TokenizeRequest(prompt="Hi", add_special_tokens=False)
    assert list(inference.Tokenize(bare).token_ids) == list(b"Hi")
    with pytest.raises(grpc.RpcError, match="add_special_tokens: must be true"):
        inference.Tokenize(inference_pb2.TokenizeRequest(message="Hi", add_special_tokens=False))


def test_a_prompt_that_ends_inside_a_character_succeeds(inference: inference_pb2_grpc.InferenceStub) -> None:
    message = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=list("é".encode())[:1]))
    message.stopping.max_tokens = 3
    answer: Answer = ask(inference, message)
    assert len(answer.ids()) == 3
