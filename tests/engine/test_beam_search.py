"""The rules of beam search: by hand, against all continuations there are, and as transformers has them."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_server.engine.core.beam_search import BeamParams, BeamSearch, EarlyStopping
from pagoda_server.engine.core.sequence import EndReason, SamplingParams, Sequence
from pagoda_server.engine.loop.steps_in_flight import Runner
from tests.engine.test_device_runner import Served, device_runner
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, load_runner, random_prompt, save_model

A, B, END = 0, 1, 2
THEIRS: dict[EarlyStopping, bool | str] = {
    EarlyStopping.ESTIMATED: False,
    EarlyStopping.ENOUGH: True,
    EarlyStopping.BEST: "never",
}


def run(search: BeamSearch, model: dict[tuple[int, ...], dict[int, float]]) -> list[tuple[list[int], float]]:
    """model: probabilities of the tokens that follow a text."""
    while not search.is_over:
        found = []
        for beam in search.beams:
            likely = sorted(model[tuple(beam.path()[0])].items(), key=lambda pair: -pair[1])
            found.append(([token for token, _ in likely], [math.log(p) for _, p in likely]))
        search.advance(found)
    return [(hypothesis.beam.path()[0], hypothesis.score) for hypothesis in search.hypotheses]


def test_a_search_worked_out_by_hand() -> None:
    """A is the likelier start and B the better one, which greedy search does not find."""
    model = {
        (): {A: 0.6, B: 0.3, END: 0.1},
        (A,): {A: 0.4, B: 0.35, END: 0.25},
        (B,): {END: 0.9, A: 0.06, B: 0.04},
        (A, A): {A: 0.5, B: 0.3, END: 0.2},
        (A, B): {A: 0.5, B: 0.3, END: 0.2},
    }
    # Step 1: beams A 0.6, B 0.3 (END, 0.1, is third). Step 2: B END 0.27, A A 0.24, A B 0.21, A END 0.15: B END ends.
    # Step 3 is the last: A A A 0.12 and A B A 0.105 end by their length; the first is kept beside B END.
    search = BeamSearch(BeamParams(width=2, length_penalty=0.0), {END}, min_tokens=0, max_tokens=3)
    assert run(search, model) == [
        ([B, END], pytest.approx(math.log(0.27))),
        ([A, A, A], pytest.approx(math.log(0.12))),
    ]
    assert [hypothesis.matched for hypothesis in search.hypotheses] == [END, None]
    favours_long = BeamSearch(BeamParams(width=2, length_penalty=4.0), {END}, min_tokens=0, max_tokens=3)
    assert [tokens for tokens, _ in run(favours_long, model)] == [[A, A, A], [A, B, A]]
    held_back = BeamSearch(BeamParams(width=2, length_penalty=0.0), {END}, min_tokens=2, max_tokens=3)
    assert END not in run(held_back, model)[0][0][:2]


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_a_search_that_keeps_everything_finds_the_best_there_is(early_stopping: EarlyStopping) -> None:
    rng = random.Random(5)
    texts = [text for length in range(4) for text in itertools.product((A, B), repeat=length)]
    model = {}
    for text in texts:
        weights = [rng.random() for _ in range(3)]
        model[text] = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    every: list[tuple[list[int], float]] = []
    for text in texts:
        sofar = sum(math.log(model[text[:at]][token]) for at, token in enumerate(text))
        last = [END] if len(text) < 3 else [A, B, END]
        every += [([*text, token], sofar + math.log(model[text][token])) for token in last]
    every.sort(key=lambda pair: -pair[1])
    params = BeamParams(width=16, length_penalty=0.0, early_stopping=early_stopping)
    found = run(BeamSearch(params, {END}, min_tokens=0, max_tokens=4), model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in every[:16]]
    assert [score for _, score in found] == pytest.approx([score for _, score in every[:16]])


@dataclass(frozen=True)
class Model:
    """
    folder    where it is saved
    expected  hypotheses and their scores of each of the `cases`, by transformers
    """

    folder: Path
    expected: list[tuple[list[list[int]], list[float]]]


def search_of(served: Served, prompt: list[int], params: SamplingParams) -> list[Sequence]:
    assert params.beams is not None
    width = params.beams.width
    params = replace(params, logprobs=width + len(params.stop_token_ids))
    rows = [Sequence(100 + at, list(prompt), len(prompt), params, 0.0, math.inf) for at in range(width)]
    for row in rows:
        row.peers = tuple(rows)
        served.scheduler.add(row)
    return rows


def theirs_of(model: Any, prompt: list[int], params: SamplingParams, n: int) -> tuple[list[list[int]], list[float]]:
    beams = params.beams
    assert beams is not None
    stops = sorted(params.stop_token_ids)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            num_beams=beams.width,
            num_return_sequences=n,
            length_penalty=beams.length_penalty,
            early_stopping=THEIRS[beams.early_stopping],
            do_sample=False,
            eos_token_id=stops or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for ids in out.sequences[:, len(prompt) :].tolist():
        end = next((at for at, id in enumerate(ids, 1) if id in params.stop_token_ids), len(ids))
        found.append(ids[:end])
    return found, out.sequences_scores.tolist()


def cases() -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts, and what is asked of them; the ids that end a beam leave some searches none and others many ends."""
    combinations = itertools.product((2, 3, 4, 5), (-0.5, 1.0, 2.0), EarlyStopping)
    for at, (width, penalty, early_stopping) in enumerate(combinations):
        yield (
            random_prompt(7 + at % 5, seed=at),
            SamplingParams(
                max_tokens=9,
                min_tokens=at % 2,
                stop_token_ids=frozenset(random.Random(at).sample(range(VOCAB_SIZE), (0, 4, 15)[at // 2 % 3])),
                beams=BeamParams(width, penalty, early_stopping, tells_logprobs=True),
            ),
        )


@pytest.fixture(scope="module", params=["llama", "mistral with a sliding window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    theirs = save_model(MODELS[request.param], folder)
    theirs.generation_config.eos_token_id = None
    expected = []
    for at, (prompt, params) in enumerate(cases()):
        assert params.beams is not None
        expected.append(theirs_of(theirs, prompt, params, n=1 + at % params.beams.width))
    return Model(folder, expected)


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_hypotheses_and_scores_equal_those_of_transformers(model: Model, kind: str) -> None:
    settings = {"max_num_seqs": 6, "token_budget": 19, "max_model_len": 120}
    folder = model.folder
    runner: Runner = load_runner(folder, **settings) if kind == "cpu" else device_runner(folder, **settings)
    reasons: Counter[EndReason] = Counter()
    for (prompt, params), (expected, scores) in zip(cases(), model.expected, strict=True):
        assert params.beams is not None
        served = Served(runner, 60)
        rows = search_of(served, prompt, params)
        served.run()
        ends = {end.seq.id: end for end in served.ended}
        for row, tokens, score in zip(rows, expected, scores, strict=False):
            assert served.told[row.id] == tokens, params
            assert ends[row.id].score == pytest.approx(score, abs=1e-3)
            total = sum(found.chosen for found in served.logprobs[row.id])
            assert total / len(tokens) ** params.beams.length_penalty == pytest.approx(score, abs=1e-3)
            reasons[ends[row.id].reason] += 1
        assert served.pool.num_referenced == 0
    assert min(reasons[EndReason.STOP], reasons[EndReason.LENGTH]) > 5, "some end in the middle, and some do not"
