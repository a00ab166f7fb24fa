"""Beam search through a real router and a real engine with the synthetic model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner

from pagoda.client import Client
from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.cli.__main__ import app
from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.end_to_end.asking import Answer, ask, engine_load, request
from tests.router.beam_reference import EARLY_STOPPING, Expected, beam_params, expected_beams
from tests.servers import Server

VOCAB_SIZE = 258
STOPS = frozenset({5, 77, 130, 201})


def search(text: str, max_tokens: int, n: int, params: inference_pb2.BeamSearch) -> inference_pb2.GenerateRequest:
    message = request(text, max_tokens)
    message.stopping.stop_token_ids.extend(STOPS)
    message.sampling.n = n
    message.sampling.beam_search.CopyFrom(params)
    return message


def check(answer: Answer, expected: list[Expected]) -> None:
    for index, one in enumerate(expected):
        assert answer.ids(index) == one.tokens
        end = answer.finished(index)
        assert end.score == pytest.approx(one.score, rel=1e-6)
        assert (end.stop_token_id if end.HasField("stop_token_id") else None) == one.matched
        text = one.tokens if one.matched is None else one.tokens[:-1]
        assert answer.text(index) == bytes(id for id in text if id < 256).decode(errors="replace")


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_n_hypotheses_come_best_first_at_the_end(
    inference: inference_pb2_grpc.InferenceStub, early_stopping: inference_pb2.EarlyStopping
) -> None:
    for width in (2, 4, 16):
        params = beam_params(width, 0.8 if width == 4 else 1.0, early_stopping)
        expected = expected_beams(list(b"beams"), 30, params, VOCAB_SIZE, STOPS)
        for n in (1, width // 2, width):
            answer = ask(inference, search("beams", 30, n, params))
            check(answer, expected[:n])
            ends = [response.finished.index for response in answer.responses if response.HasField("finished")]
            assert ends == list(range(n))
            usage = answer.responses[-1].usage
            assert usage.completion_tokens == sum(len(one.tokens) for one in expected[:n])


def test_searches_and_streams_beside_each_other_change_no_token(inference: inference_pb2_grpc.InferenceStub) -> None:
    params = beam_params(5)

    def one(at: int) -> None:
        text = f"number {at}"
        if at % 2:
            assert ask(inference, request(text, 60)).ids() == expected_tokens(text.encode(), 60, VOCAB_SIZE)
        else:
            expected = expected_beams(list(text.encode()), 40, params, VOCAB_SIZE, STOPS)
            check(ask(inference, search(text, 40, 2, params)), expected[:2])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(16)))


def test_a_search_that_is_cancelled_gives_everything_back(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    before = engine_load(control).output_tokens
    call = inference.Generate(search("endless", 20_000, 1, beam_params(4, 4.0, inference_pb2.EARLY_STOPPING_BEST)))
    deadline = time.monotonic() + 60
    while (load := engine_load(control)).output_tokens < before + 40:
        assert time.monotonic() < deadline, "four beams never ran"
        time.sleep(0.01)
    assert control.GetLoad(control_pb2.GetLoadRequest()).reserved_tokens == 4 * (len("endless") + 20_000), (
        "room for each of the beams"
    )
    threading.Timer(0.0, call.cancel).start()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    while control.GetLoad(control_pb2.GetLoadRequest()).requests:
        assert time.monotonic() < deadline, "it is still admitted"
        time.sleep(0.01)
    while (load := engine_load(control)).running or load.blocks_referenced:
        assert time.monotonic() < deadline, "its blocks never came back"
        time.sleep(0.01)


@pytest.mark.parametrize("aborts", [True, False])
def test_a_search_that_is_aborted_or_late_tells_no_hypothesis(
    inference: inference_pb2_grpc.InferenceStub, admin: admin_pb2_grpc.AdminStub, aborts: bool
) -> None:
    message = search("endless", 20_000, 2, beam_params(4, 4.0, inference_pb2.EARLY_STOPPING_BEST))
    message.request_id = "endless"
    call = inference.Generate(message, timeout=60.0 if aborts else 0.5)
    if not aborts:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return
    deadline = time.monotonic() + 60
    while True:
        try:
            admin.Abort(admin_pb2.AbortRequest(request_id="endless"))
            break
        except grpc.RpcError as error:  # it is not admitted yet
            if error.code() is not grpc.StatusCode.NOT_FOUND or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
    ends = [response.finished for response in call]
    assert [(end.index, end.reason) for end in ends] == [
        (0, inference_pb2.FINISH_REASON_CANCELLED),
        (1, inference_pb2.FINISH_REASON_CANCELLED),
    ]
    assert not any(end.HasField("score") for end in ends)


def test_the_prompt_is_counted_once_and_every_second_has_its_place(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub
) -> None:
    text = "its own prompt, for the account of a search"
    before = engine_load(control)
    message = search(text, 12, 2, beam_params(4))
    message.stopping.min_tokens = 12
    first, second = (ask(inference, message).responses[-1] for _ in range(2))
    load = engine_load(control)
    assert load.prompt_tokens - before.prompt_tokens == 2 * len(text)
    assert load.output_tokens - before.output_tokens == 2 * (1 + 4 * 11)
    assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (len(text), 0)
    assert second.usage.cached_tokens == load.cached_tokens - before.cached_tokens >= len(text) - 5
    assert first.usage.completion_tokens == 2 * 12
    timing = first.timing
    assert timing.prefill_s > 0
    assert timing.decode_s > 11 * 0.0019, "eleven steps of 2 ms"
    assert timing.queue_s + timing.prefill_s + timing.decode_s + timing.preempted_s <= timing.total_s


def test_the_python_client_asks_for_beams_and_tells_scores(synthetic_server: Server) -> None:
    with Client(synthetic_server.address) as client:
        chunks = list(client.generate(prompt="beams", beams=3, n=2, max_tokens=9, ignore_eos=True, logprobs=0))
        expected = expected_beams(list(b"beams"), 9, beam_params(3), VOCAB_SIZE)
        scores = [chunk.score for chunk in chunks if chunk.finish_reason]
        assert scores == [pytest.approx(one.score) for one in expected[:2]]
        best = [chunk for chunk in chunks if chunk.index == 0]
        assert [id for chunk in best for id in chunk.tokens] == expected[0].tokens
        total = sum(found.logprob for chunk in best for found in chunk.logprobs)
        assert total / 9 == pytest.approx(expected[0].score)


def test_the_command_writes_the_best_hypothesis(synthetic_server: Server) -> None:
    command = ["generate", "best", "--raw", "--beams", "3", "--max-tokens", "12", "--address", synthetic_server.address]
    result = CliRunner().invoke(app, command)
    eos = frozenset({256, 257})
    best = expected_beams(list(b"best"), 12, beam_params(3), VOCAB_SIZE, eos)[0]
    text = bytes(id for id in best.tokens if id < 256).decode(errors="replace")
    assert result.stdout.rstrip("\n") == text.rstrip("\n")
    wrong = CliRunner().invoke(app, [*command, "--beams", "17"])
    assert wrong.exit_code == 1
    assert "sampling.beam_search.width: is 17, must be from 2 to 16" in wrong.stderr
