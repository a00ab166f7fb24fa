"""The real model through real processes gives transformers' answers, whatever else runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch

from pagoda import Client
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.end_to_end.asking import Answer, ask, chat, engine_load, request
from tests.engine.random_schemas import assert_matches
from tests.servers import Server, running_server

pytestmark = pytest.mark.thorough

COUNT = 16
PROMPTS = [
    "The capital of Sweden is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "La capitale de la France est",
    "Photosynthesis is the process by which",
    "She opened the door and saw",
]
OTHERS = [f"Number {at} of the other requests says: " + "and so on, " * (at % 9) for at in range(31)]


@pytest.fixture(scope="module")
def reference(plain_model_folder: Path) -> dict[str, list[int]]:
    """Greedy tokens of each prompt by transformers, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain_model_folder, dtype=torch.float32).eval()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    ids = tokenizer(PROMPTS, return_tensors="pt", padding=True)  # in one batch, which reads the weights once a token
    with torch.inference_mode():
        outputs = model.generate(
            **ids, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    return dict(zip(PROMPTS, outputs[:, ids["input_ids"].shape[1] :].tolist(), strict=True))


def request_as_reference(prompt: str, count: int = COUNT) -> inference_pb2.GenerateRequest:
    """transformers' min_new_tokens keeps end-of-sequence tokens from being chosen; so does min_tokens."""
    message = request(prompt, max_tokens=count)
    message.stopping.ignore_eos = False
    message.stopping.min_tokens = count
    return message


@pytest.fixture(scope="module")
def exact_server(default_model_folder: Path) -> Iterator[Server]:
    """float32, a token budget that cuts prompts into chunks, and a cache too small for all: preemption included."""
    arguments = ("--dtype", "float32", "--token-budget", "80", "--kv-cache-gb", "0.03", "--threads", "2")
    with running_server("--model", str(default_model_folder), *arguments) as server:
        yield server


@pytest.fixture
def exact(exact_server: Server) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(exact_server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def load_of(server: Server) -> control_pb2.EngineLoad:
    with grpc.insecure_channel(server.address) as channel:
        return engine_load(control_pb2_grpc.ControlStub(channel))


def test_greedy_tokens_are_transformers_alone(
    exact: inference_pb2_grpc.InferenceStub, reference: dict[str, list[int]]
) -> None:
    for prompt in PROMPTS:
        assert ask(exact, request_as_reference(prompt)).ids() == reference[prompt], prompt


def test_greedy_tokens_are_transformers_in_one_batch_with_31_others_and_under_preemption(
    exact_server: Server, exact: inference_pb2_grpc.InferenceStub, reference: dict[str, list[int]]
) -> None:
    before = load_of(exact_server).preemptions
    with ThreadPoolExecutor(64) as threads:
        others = [threads.submit(ask, exact, request(other, max_tokens=30)) for other in OTHERS]
        answers = dict(
            zip(PROMPTS, threads.map(lambda prompt: ask(exact, request_as_reference(prompt)), PROMPTS), strict=True)
        )
        assert all(len(other.result().ids()) == 30 for other in others)
    for prompt in PROMPTS:
        assert answers[prompt].ids() == reference[prompt], prompt
    load = load_of(exact_server)
    assert load.preemptions > before, "the cache holds a dozen of them"
    assert load.blocks_referenced == 0


def test_64_streams_at_once_each_keep_their_tokens_and_return_every_block(
    exact_server: Server, exact: inference_pb2_grpc.InferenceStub, reference: dict[str, list[int]]
) -> None:
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(64)]
    with ThreadPoolExecutor(64) as threads:
        answers: list[Answer] = list(threads.map(lambda prompt: ask(exact, request_as_reference(prompt)), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == reference[prompt], prompt
        text = exact.Detokenize(inference_pb2.DetokenizeRequest(token_ids=answer.ids())).text
        assert answer.text() == text, "the deltas of a stream are the text of its own tokens"
    load = load_of(exact_server)
    assert (load.running, load.waiting, load.blocks_referenced) == (0, 0, 0)
    assert load.blocks_free + load.blocks_evictable == load.blocks_total


def test_greedy_tokens_are_transformers_from_a_cached_prefix(
    exact: inference_pb2_grpc.InferenceStub, reference: dict[str, list[int]]
) -> None:
    # A prompt that continues an earlier one's answer starts from that one's blocks, output included.
    for prompt in PROMPTS[:3]:
        earlier = ask(exact, request_as_reference(prompt)).ids()
        ids = list(exact.Tokenize(inference_pb2.TokenizeRequest(prompt=prompt)).token_ids)
        message = inference_pb2.GenerateRequest(token_ids={"ids": ids + earlier[:-4]}, sampling={"temperature": 0})
        message.stopping.max_tokens = message.stopping.min_tokens = 4
        answer = ask(exact, message)
        assert answer.responses[-1].usage.cached_tokens >= 16
        assert answer.ids() == reference[prompt][-4:]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(exact: inference_pb2_grpc.InferenceStub) -> None:
    message = request("A dragon and a knight met and", max_tokens=20, sampling={"temperature": 0.9, "top_p": 0.95})
    message.sampling.seed = 42
    alone = ask(exact, message)
    with ThreadPoolExecutor(20) as threads:
        crowd = [threads.submit(ask, exact, request(other, max_tokens=25)) for other in OTHERS[:12]]
        answers = list(threads.map(lambda _: ask(exact, message), range(4)))
        assert all(other.result() for other in crowd)
    assert {tuple(answer.ids()) for answer in answers} == {tuple(alone.ids())}
    message.sampling.seed = 43
    assert ask(exact, message).ids() != alone.ids()


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [False, True])
def test_beams_are_those_of_transformers(exact_server: Server, plain_model_folder: Path, early_stopping: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain_model_folder, dtype=torch.float32).eval()
    for at, prompt in enumerate(PROMPTS):
        width, penalty = 2 + at % 4, (0.5, 1.0, 2.0)[at % 3]
        ids = tokenizer(prompt, return_tensors="pt")
        ends = [tokenizer.eos_token_id, tokenizer.encode(".")[0]]
        with torch.inference_mode():
            out = model.generate(
                **ids,
                max_new_tokens=COUNT,
                num_beams=width,
                num_return_sequences=2,
                length_penalty=penalty,
                early_stopping=early_stopping,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=tokenizer.eos_token_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
        with Client(exact_server.address) as client:
            found = client.beam_search(
                prompt=prompt,
                beams=width,
                max_tokens=COUNT,
                length_penalty=penalty,
                early_stopping="enough" if early_stopping else "estimated",
                stop_token_ids=ends,
                ignore_eos=True,
            )
        theirs = out.sequences[:, ids["input_ids"].shape[1] :].tolist()
        for ours, tokens, score in zip(found, theirs, out.sequences_scores.tolist(), strict=False):
            ended = next((place for place, id in enumerate(tokens, 1) if id in ends), len(tokens))
            assert list(ours.tokens) == tokens[:ended], prompt
            assert ours.score == pytest.approx(score, abs=1e-3)


def test_logprobs_of_the_chosen_and_the_most_likely_agree(exact: inference_pb2_grpc.InferenceStub) -> None:
    message = request("The capital of Sweden is", max_tokens=6)
    message.output.logprobs = 3
    for token in ask(exact, message).tokens():
        assert token.id == token.top[0].id, "greedy takes the most likely"
        assert token.logprob == pytest.approx(token.top[0].logprob)
        assert [top.logprob for top in token.top] == sorted((top.logprob for top in token.top), reverse=True)
        assert all(top.logprob <= 0 for top in token.top)


def test_logit_bias_and_penalties_change_what_is_chosen(exact: inference_pb2_grpc.InferenceStub) -> None:
    plain = ask(exact, request("Yes yes yes yes yes", max_tokens=12)).ids()
    banned = request("Yes yes yes yes yes", max_tokens=12)
    banned.sampling.logit_bias[plain[0]] = -100
    assert plain[0] not in ask(exact, banned).ids()
    frequent = request("Yes yes yes yes yes", max_tokens=12, sampling={"temperature": 0, "frequency_penalty": 10.0})
    ids = ask(exact, frequent).ids()
    assert len(set(ids)) > len(set(plain))


def test_only_allowed_tokens_are_chosen_and_logprobs_stay_those_of_the_model(
    exact: inference_pb2_grpc.InferenceStub,
) -> None:
    message = request("The capital of Sweden is", max_tokens=8)
    message.output.logprobs = 1
    plain = ask(exact, message)
    allowed = sorted(set(range(500, 600)) - set(plain.ids()))
    message.sampling.allowed_token_ids[:] = allowed
    restricted = ask(exact, message)
    assert set(restricted.ids()) <= set(allowed)
    first, token = plain.tokens()[0], restricted.tokens()[0]
    assert token.top[0].id == first.id
    assert token.top[0].logprob == pytest.approx(first.logprob)
    assert token.logprob < first.logprob


@pytest.mark.parametrize(
    ("sampling", "min_tokens", "field"),
    [
        ({"allowed_token_ids": [2]}, 5, "sampling.allowed_token_ids"),  # it ends the sequence
        ({"allowed_token_ids": [5, 6], "no_repeat_ngram_size": 1}, 0, "sampling.allowed_token_ids"),
        ({"repetition_penalty": 1e-38}, 0, "sampling.repetition_penalty"),
    ],
)
def test_rules_that_leave_no_token_are_the_requests_mistake(
    exact: inference_pb2_grpc.InferenceStub, sampling: dict[str, Any], min_tokens: int, field: str
) -> None:
    message = request("Yes yes yes", max_tokens=9, sampling=sampling)
    message.stopping.min_tokens, message.stopping.ignore_eos = min_tokens, False
    with pytest.raises(grpc.RpcError) as caught:
        ask(exact, message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: ")


@pytest.fixture(scope="module")
def served_by_default(default_model_folder: Path) -> Iterator[Server]:
    """The default model without any flag except the port."""
    with running_server() as server:
        yield server


def test_the_question_about_sweden_is_answered(served_by_default: Server) -> None:
    with grpc.insecure_channel(served_by_default.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        answer = ask(inference, chat("What is the capital of Sweden?", max_tokens=40))
        assert "Stockholm" in answer.text()
        assert answer.finished().reason == inference_pb2.FINISH_REASON_STOP
        assert "<|im_end|>" not in answer.text()


def test_sizes_are_those_of_the_model(served_by_default: Server) -> None:
    with grpc.insecure_channel(served_by_default.address) as channel:
        control = control_pb2_grpc.ControlStub(channel)
        engine = control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines[0].info
    # 30 layers, 3 KV heads of 64, bfloat16
    assert engine.kv_cache.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert engine.kv_cache.total_bytes <= 500_000_000 < engine.kv_cache.total_bytes + engine.kv_cache.bytes_per_block


def weight_bytes_kept(engine: control_pb2.EngineInfo) -> float:
    """Most bytes of weights that a backend keeps. With int8 products the embedding is read from the head."""
    embedding_bytes = engine.vocab_size * 576 * 2
    int8 = (64 + 12) / 128  # of bfloat16: beside 64 values there are two scales at most and a sum, float32 each
    if engine.kernel_backend.startswith("native-int8-weight"):
        return embedding_bytes + engine.weight_bytes * int8
    if engine.kernel_backend.startswith("native-int8"):
        return engine.weight_bytes * int8
    if engine.kernel_backend.startswith("native-int4"):
        other_bytes = engine.weight_bytes - embedding_bytes
        return embedding_bytes * int8 + other_bytes * 42 / 40  # beside the 40 bytes of 64 values there is an offset
    has_products_in_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return embedding_bytes + engine.weight_bytes * (1 if has_products_in_bfloat16 else 2)


def test_the_engine_takes_450_megabytes_beside_its_weights_and_its_cache(served_by_default: Server) -> None:
    with grpc.insecure_channel(served_by_default.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        long = "A sentence to fill a step's token budget with, and another one. " * 40
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda at: ask(inference, request(f"{at} {long}", max_tokens=2)), range(8)))
        control = control_pb2_grpc.ControlStub(channel)
        engine = control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines[0].info
        load = engine_load(control)
    # Blocks that no token has touched are not resident.
    used_bytes = (load.blocks_total - load.blocks_free) * engine.kv_cache.bytes_per_block
    resident = served_by_default.engine().memory_info().rss
    assert resident < 0.45e9 + weight_bytes_kept(engine) + used_bytes, f"{resident} {engine.kernel_backend}"
    assert psutil.Process(served_by_default.process.pid).memory_info().rss < 0.4e9


def test_the_default_model_answers_in_json(served_by_default: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    message = chat("Describe Stockholm in JSON.", 60)
    message.guided.json_schema = json.dumps(schema)
    with grpc.insecure_channel(served_by_default.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        answer = ask(inference, message)
        assert_matches(answer.text(), schema)
        assert answer.finished().grammar
        assert answer.responses[-1].usage.forced_tokens >= 6
        message.output.logprobs = 0
        alone = ask(inference, message)
    assert_matches(alone.text(), schema)
    assert alone.responses[-1].usage.forced_tokens == 0
