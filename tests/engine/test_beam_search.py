"""Beam search in the router gives the results of transformers in float32, on the runners of a CPU and of a device."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.engine.loop.steps_in_flight import Runner
from pagoda_server.router.request.beam_search import BeamSearchStream
from tests.engine.test_device_runner import Served, device_runner
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, load_runner, random_prompt, save_model
from tests.router.beam_reference import EARLY_STOPPING, beam_params
from tests.router.stepped_channel import SteppedChannel

THEIRS: dict[int, bool | str] = {
    inference_pb2.EARLY_STOPPING_ESTIMATED: False,
    inference_pb2.EARLY_STOPPING_ENOUGH: True,
    inference_pb2.EARLY_STOPPING_BEST: "never",
}


@dataclass(frozen=True)
class Model:
    """
    folder    where it is saved
    expected  transformers' hypotheses and scores for each of the `cases`
    """

    folder: Path
    expected: list[tuple[list[list[int]], list[float]]]


def theirs_of(model: Any, submit: engine_pb2.Submit) -> tuple[list[list[int]], list[float]]:
    beams, prompt = submit.sampling.beam_search, list(submit.prompt)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=submit.max_tokens,
            min_new_tokens=submit.min_tokens or None,
            num_beams=beams.width,
            num_return_sequences=submit.sampling.n,
            length_penalty=beams.length_penalty,
            early_stopping=THEIRS[beams.early_stopping],
            do_sample=False,
            eos_token_id=list(submit.stop_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for ids in out.sequences[:, len(prompt) :].tolist():
        end = next((at for at, id in enumerate(ids, 1) if id in submit.stop_token_ids), len(ids))
        found.append(ids[:end])
    return found, out.sequences_scores.tolist()


def cases() -> Iterator[engine_pb2.Submit]:
    """With these ids some beams never end and others end often."""
    combinations = itertools.product((2, 3, 4, 5), (-0.5, 1.0, 2.0), EARLY_STOPPING)
    for at, (width, penalty, early_stopping) in enumerate(combinations):
        yield engine_pb2.Submit(
            prompt=random_prompt(7 + at % 5, seed=at),
            sampling=inference_pb2.Sampling(n=1 + at % width, beam_search=beam_params(width, penalty, early_stopping)),
            max_tokens=9,
            min_tokens=at % 2,
            stop_token_ids=sorted(random.Random(at).sample(range(VOCAB_SIZE), (0, 4, 15)[at // 2 % 3])),
            logprobs=0,
        )


@pytest.fixture(scope="module", params=["llama", "mistral with a sliding window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    theirs = save_model(MODELS[request.param], folder)
    theirs.generation_config.eos_token_id = None
    return Model(folder, [theirs_of(theirs, submit) for submit in cases()])


@pytest.mark.parametrize("kind", ["cpu", "device"])
async def test_hypotheses_and_scores_equal_those_of_transformers(model: Model, kind: str) -> None:
    settings = {"max_num_seqs": 6, "token_budget": 19, "max_model_len": 120}
    folder = model.folder
    runner: Runner = load_runner(folder, **settings) if kind == "cpu" else device_runner(folder, **settings)
    reasons: Counter[int] = Counter()
    for submit, (expected, scores) in zip(cases(), model.expected, strict=True):
        served = Served(runner, 60)
        stream = BeamSearchStream(SteppedChannel(served), submit)  # type: ignore[arg-type]
        await stream.wait()
        for inbox, tokens, score in zip(stream.inboxes, expected, scores, strict=True):
            assert inbox.tokens == tokens, submit
            assert inbox.score == pytest.approx(score, abs=1e-3)
            total = sum(found.logprob for found in inbox.logprobs)
            assert total / len(tokens) ** submit.sampling.beam_search.length_penalty == pytest.approx(score, abs=1e-3)
            assert inbox.ended is not None
            reasons[inbox.ended.reason] += 1
        assert served.pool.num_referenced == 0
    assert min(reasons[engine_pb2.END_REASON_STOP], reasons[engine_pb2.END_REASON_LENGTH]) > 5, (
        "some end in the middle, and some do not"
    )
