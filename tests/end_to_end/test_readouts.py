"""Embed, Score and log-probabilities of prompts, through a real router and a real engine with the synthetic model."""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import (
    HIDDEN_SIZE,
    advance,
    expected_hidden,
    expected_logprobs,
    expected_tokens,
)
from tests.end_to_end.asking import ask, engine_load, request
from tests.end_to_end.test_resume import Wire
from tests.servers import Server

VOCAB_SIZE = 258
POOLINGS = {
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
    "cls": inference_pb2.POOLING_CLS,
}


def checksums(ids: list[int]) -> list[int]:
    return list(itertools.accumulate(ids, advance, initial=0))[1:]


def vector(ids: list[int], pooling: str) -> list[float]:
    states = [expected_hidden(each) for each in checksums(ids)]
    rows = {"last": states[-1:], "mean": states, "cls": states[:1]}[pooling]
    return [sum(values) / len(rows) for values in zip(*rows, strict=True)]


def scaled(values: list[float]) -> list[float]:
    return [value / math.hypot(*values) for value in values]


def logprobs(ids: list[int]) -> list[float]:
    """Those of each token but the first."""
    pairs = zip(checksums(ids), ids[1:], strict=False)
    return [expected_logprobs(checksum, 0, VOCAB_SIZE, id).chosen for checksum, id in pairs]


def embed_request(*texts: str, **fields: Any) -> inference_pb2.EmbedRequest:
    return inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=text) for text in texts], **fields)


def score_request(*texts: str, **fields: Any) -> inference_pb2.ScoreRequest:
    return inference_pb2.ScoreRequest(
        continuations=[inference_pb2.Continuation(text=text) for text in texts], **({"prompt": "input"} | fields)
    )


def wait_until_idle(control: control_pb2_grpc.ControlStub) -> control_pb2.EngineLoad:
    deadline = time.monotonic() + 60
    while True:
        server, load = control.GetLoad(control_pb2.GetLoadRequest()), engine_load(control)
        if not (server.requests or server.reserved_tokens or load.running or load.waiting or load.blocks_referenced):
            return load
        assert time.monotonic() < deadline, "something is still held"
        time.sleep(0.01)


# -- Embed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_input_has_its_vector(inference: inference_pb2_grpc.InferenceStub, pooling: str) -> None:
    texts = ["one", "a longer one " * 200, "x", "one"]
    message = embed_request(*texts, pooling=POOLINGS[pooling])
    message.inputs.add(token_ids=inference_pb2.TokenIds(ids=[7, 257, 9]))
    response = inference.Embed(message)
    inputs = [*(list(text.encode()) for text in texts), [7, 257, 9]]
    assert len(response.embeddings) == len(inputs)
    for found, ids in zip(response.embeddings, inputs, strict=True):
        assert found.values == pytest.approx(scaled(vector(ids, pooling)), abs=1e-6)
    assert response.request_id
    assert response.usage.prompt_tokens == sum(map(len, inputs))
    assert response.usage.completion_tokens == 0


def test_vectors_are_cut_before_they_are_scaled(inference: inference_pb2_grpc.InferenceStub) -> None:
    whole = vector(list(b"text"), "last")
    raw = inference.Embed(embed_request("text", normalize=False))
    assert list(raw.embeddings[0].values) == whole
    cut = inference.Embed(embed_request("text", normalize=False, dimensions=3))
    assert list(cut.embeddings[0].values) == whole[:3]
    both = inference.Embed(embed_request("text", dimensions=3))
    assert both.embeddings[0].values == pytest.approx(scaled(whole[:3]), abs=1e-6)


def test_256_inputs_and_generated_streams_share_the_engine(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    texts = [f"input number {at} " * (1 + at % 9) for at in range(256)]
    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(ask, inference, request(f"stream {at}", max_tokens=60)) for at in range(4)]
        response = inference.Embed(embed_request(*texts, pooling=inference_pb2.POOLING_MEAN, normalize=False))
        for at, stream in enumerate(streams):
            assert stream.result().ids() == expected_tokens(f"stream {at}".encode(), 60, VOCAB_SIZE)
    for text, found in zip(texts, response.embeddings, strict=True):
        assert found.values == pytest.approx(vector(list(text.encode()), "mean"), abs=1e-6)
    wait_until_idle(control)


# -- Score --------------------------------------------------------------------------------------------------------


def test_continuations_have_the_log_probabilities_computed_by_hand(
    inference: inference_pb2_grpc.InferenceStub,
) -> None:
    texts = [" first", " second one", "x", " first"]
    message = score_request(*texts, token_bytes=True)
    message.continuations.add(token_ids=inference_pb2.TokenIds(ids=[256, 5]))
    response = inference.Score(message)
    parts = [*(list(text.encode()) for text in texts), [256, 5]]
    for score, part in zip(response.scores, parts, strict=True):
        expected = logprobs([*b"input", *part])[len("input") - 1 :]
        assert [token.id for token in score.tokens] == part
        assert [token.logprob for token in score.tokens] == expected
        assert score.logprob == pytest.approx(sum(expected))
    assert b"".join(token.bytes for token in response.scores[1].tokens) == b" second one"
    assert response.usage.prompt_tokens == len("input") + sum(map(len, parts))


def test_a_chat_is_rendered_before_its_continuations(inference: inference_pb2_grpc.InferenceStub) -> None:
    response = inference.Score(score_request("Yes", "No", prompt=None, message="Hi"))
    start, end = 256, 257
    prompt = [start, *b"user\nHi", end, *b"\n", start, *b"assistant\n"]
    for score, text in zip(response.scores, (b"Yes", b"No"), strict=True):
        expected = logprobs([*prompt, *text])[len(prompt) - 1 :]
        assert [token.logprob for token in score.tokens] == expected


@pytest.mark.parametrize("bypass", [False, True])
def test_continuations_share_the_blocks_of_their_input_unless_they_bypass_the_cache(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub, bypass: bool
) -> None:
    before = wait_until_idle(control)
    prompt = f"what all of them share, {bypass} " * 30
    message = score_request(*(f"ending {at}" for at in range(100)), prompt=prompt)
    message.cache.bypass = bypass
    response = inference.Score(message)
    for at, score in enumerate(response.scores):
        expected = logprobs([*f"{prompt}ending {at}".encode()])[len(prompt) - 1 :]
        assert [token.logprob for token in score.tokens] == expected
    after = wait_until_idle(control)
    prompt_tokens, cached_tokens = (
        after.prompt_tokens - before.prompt_tokens,
        after.cached_tokens - before.cached_tokens,
    )
    assert prompt_tokens == response.usage.prompt_tokens + 99 * len(prompt)
    if bypass:
        assert cached_tokens == 0
    else:
        assert cached_tokens > 99 * (len(prompt) - 64), "all but the end of the input is found"


# -- output.prompt_logprobs ---------------------------------------------------------------------------------------


def test_the_prompt_comes_first_with_its_log_probabilities(inference: inference_pb2_grpc.InferenceStub) -> None:
    text = "a prompt that is longer than one message of its log-probabilities " * 12
    for _ in range(2):  # it does not read what the cache holds of it
        message = request(text, max_tokens=20, sampling={"n": 2})
        message.output.prompt_logprobs = 2
        message.output.token_bytes = True
        answer = ask(inference, message)
        num_events = sum(response.HasField("prompt") for response in answer.responses)
        assert num_events == math.ceil(len(text) / 256)
        assert all(response.HasField("prompt") for response in answer.responses[:num_events])
        tokens = [token for response in answer.responses for token in response.prompt.tokens]
        assert b"".join(token.bytes for token in tokens) == text.encode()
        assert not tokens[0].HasField("logprob")
        assert [token.logprob for token in tokens[1:]] == logprobs(list(text.encode()))
        for checksum, token in zip(checksums(list(text.encode())), tokens[1:], strict=False):
            expected = expected_logprobs(checksum, 2, VOCAB_SIZE)
            assert [top.id for top in token.top] == expected.top_ids
            assert [top.logprob for top in token.top] == expected.top
        assert answer.ids(0) == answer.ids(1) == expected_tokens(text.encode(), 20, VOCAB_SIZE)
        assert answer.responses[-1].usage.cached_tokens == 0


# -- what is refused ----------------------------------------------------------------------------------------------

LONG = "x" * 40_000
MANY = {"continuations": [{"text": "x"}] * 257}
BAD_EMBED: list[tuple[str, dict[str, Any]]] = [
    ("inputs", {"inputs": []}),
    ("inputs", {"inputs": [{"text": "x"}] * 257}),
    ("inputs", {"inputs": [{"text": "x"}] * 200_000}),
    ("inputs[1]", {"inputs": [{"text": "x"}, {}]}),
    ("inputs[1].text", {"inputs": [{"text": "x"}, {"text": ""}]}),
    ("inputs[3].text", {"inputs": [{"text": "x"}] * 3 + [{"text": LONG}]}),
    ("inputs[0].token_ids.ids", {"inputs": [{"token_ids": {}}]}),
    ("inputs[0].token_ids.ids[1]", {"inputs": [{"token_ids": {"ids": [1, 258]}}]}),
    ("inputs[0].token_ids.ids", {"inputs": [{"token_ids": {"ids": [1] * 32_768}}]}),
    ("pooling", {"inputs": [{"text": "x"}], "pooling": 9}),
    ("dimensions", {"inputs": [{"text": "x"}], "dimensions": HIDDEN_SIZE + 1}),
    ("dimensions", {"inputs": [{"text": "x"}], "dimensions": 0}),
    ("priority", {"inputs": [{"text": "x"}], "priority": 1001}),
    ("cache.salt", {"inputs": [{"text": "x"}], "cache": {"salt": "x" * 129}}),
    ("request_id", {"inputs": [{"text": "x"}], "request_id": "x" * 129}),
]
BAD_SCORE: list[tuple[str, dict[str, Any]]] = [
    ("input", {"prompt": None, "continuations": [{"text": "x"}]}),
    ("prompt", {"prompt": "", "continuations": [{"text": "x"}]}),
    ("prompt", {"prompt": LONG, "continuations": [{"text": "x"}]}),
    ("continuations", {"continuations": []}),
    ("continuations", MANY),
    ("continuations[1]", {"continuations": [{"text": "x"}, {}]}),
    ("continuations[0].text", {"continuations": [{"text": ""}]}),
    (
        "continuations[2].text",
        {"prompt": LONG[:30_000], "continuations": [{"text": "x"}] * 2 + [{"text": LONG[:3000]}]},
    ),
    ("continuations[0].token_ids.ids[0]", {"continuations": [{"token_ids": {"ids": [1 << 30]}}]}),
]


def field_of(error: grpc.RpcError) -> str:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    (detail,) = rpc_status.from_call(error).details
    bad = error_details_pb2.BadRequest()
    detail.Unpack(bad)
    return bad.field_violations[0].field


@pytest.mark.parametrize(("field", "fields"), BAD_EMBED)
def test_a_bad_embed_request_is_refused_by_field(
    inference: inference_pb2_grpc.InferenceStub, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        inference.Embed(inference_pb2.EmbedRequest(**fields))
    assert field_of(caught.value) == field


@pytest.mark.parametrize(("field", "fields"), BAD_SCORE)
def test_a_bad_score_request_is_refused_by_field(
    inference: inference_pb2_grpc.InferenceStub, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        inference.Score(inference_pb2.ScoreRequest(**({"prompt": "x"} | fields)))
    assert field_of(caught.value) == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("output.prompt_logprobs", {"output": {"prompt_logprobs": 21}}),
        ("resumable", {"output": {"prompt_logprobs": 1}, "resumable": True}),
    ],
)
def test_prompt_logprobs_that_cannot_be_told_are_refused(
    inference: inference_pb2_grpc.InferenceStub, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(inference_pb2.GenerateRequest(prompt="x", **fields)))
    assert field_of(caught.value) == field


# -- how a call ends ----------------------------------------------------------------------------------------------


def long_calls(inference: inference_pb2_grpc.InferenceStub) -> dict[str, Any]:
    """Calls that take the engine minutes: thousands of steps."""
    texts = [str(at) * 30_000 for at in range(9)] * 20
    salt = inference_pb2.Cache(bypass=True)
    inputs = [inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=text.encode())) for text in texts[:40]]
    return {
        "Embed": (inference.Embed, inference_pb2.EmbedRequest(inputs=inputs, cache=salt, request_id="long")),
        "Score": (inference.Score, score_request(*"abcdefgh" * 32, prompt=texts[0], cache=salt, request_id="long")),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["Embed", "Score"])
@pytest.mark.parametrize("end", ["cancel", "abort", "deadline"])
def test_a_call_that_ends_early_gives_everything_back(
    inference: inference_pb2_grpc.InferenceStub,
    control: control_pb2_grpc.ControlStub,
    admin: admin_pb2_grpc.AdminStub,
    method: str,
    end: str,
) -> None:
    wait_until_idle(control)
    call, message = long_calls(inference)[method]
    running = call.future(message, timeout=3.0 if end == "deadline" else 300.0)
    deadline = time.monotonic() + 60
    while not (running.done() or engine_load(control).running):
        assert time.monotonic() < deadline, "it never ran"
        time.sleep(0.01)
    if end == "cancel":
        threading.Timer(0.0, running.cancel).start()
    elif end == "abort":
        admin.Abort(admin_pb2.AbortRequest(request_id="long"))
    code = {
        "cancel": grpc.StatusCode.CANCELLED,
        "abort": grpc.StatusCode.ABORTED,
        "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    }[end]
    assert running.code() is code
    wait_until_idle(control)


@pytest.mark.parametrize("method", ["Embed", "Score"])
def test_a_connection_that_is_lost_gives_everything_back(
    synthetic_server: Server, control: control_pb2_grpc.ControlStub, method: str
) -> None:
    wait_until_idle(control)
    wire = Wire(synthetic_server.address)
    with grpc.insecure_channel(wire.address) as channel:
        call, message = long_calls(inference_pb2_grpc.InferenceStub(channel))[method]
        running = call.future(message, timeout=300)
        while not engine_load(control).running:
            assert not running.done(), running.code()
            time.sleep(0.01)
        wire.cut()
        assert running.code() is grpc.StatusCode.UNAVAILABLE, "in the middle"
    wire.close()
    wait_until_idle(control)
    assert "Traceback" not in synthetic_server.log.read_text()


def test_the_model_tells_what_it_can_do(control: control_pb2_grpc.ControlStub) -> None:
    (info,) = control.ListModels(control_pb2.ListModelsRequest()).models
    assert info.hidden_size == HIDDEN_SIZE
    assert {control_pb2.CAPABILITY_EMBED, control_pb2.CAPABILITY_SCORE} <= set(info.capabilities)
