"""The rules of beam search: computed by hand, and against all possible continuations."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from pagoda.v1 import inference_pb2
from pagoda_server.router.request.beam_search import BeamSearch
from tests.router.beam_reference import EARLY_STOPPING, beam_params

A, B, END = 0, 1, 2


def run(search: BeamSearch, model: dict[tuple[int, ...], dict[int, float]]) -> list[tuple[list[int], float]]:
    """Search a model given as the probabilities of the tokens that follow a text."""
    while not search.is_over:
        found = []
        for beam in search.beams:
            likely = sorted(model[tuple(beam.path()[0])].items(), key=lambda pair: -pair[1])
            found.append(([token for token, _ in likely], [math.log(p) for _, p in likely]))
        search.advance(found)
    return [(hypothesis.beam.path()[0], hypothesis.score) for hypothesis in search.hypotheses]


def test_a_search_worked_out_by_hand() -> None:
    """A is the likelier start, but B leads to the best text, which greedy search does not find."""
    model = {
        (): {A: 0.6, B: 0.3, END: 0.1},
        (A,): {A: 0.4, B: 0.35, END: 0.25},
        (B,): {END: 0.9, A: 0.06, B: 0.04},
        (A, A): {A: 0.5, B: 0.3, END: 0.2},
        (A, B): {A: 0.5, B: 0.3, END: 0.2},
    }
    # Step 1: beams A 0.6, B 0.3 (END, 0.1, is third). Step 2: B END 0.27, A A 0.24, A B 0.21, A END 0.15: B END ends.
    # Step 3 is the last: A A A 0.12 and A B A 0.105 end by their length; the first is kept beside B END.
    search = BeamSearch(beam_params(width=2, length_penalty=0.0), {END}, min_tokens=0, max_tokens=3)
    assert run(search, model) == [
        ([B, END], pytest.approx(math.log(0.27))),
        ([A, A, A], pytest.approx(math.log(0.12))),
    ]
    assert [hypothesis.matched for hypothesis in search.hypotheses] == [END, None]
    favours_long = BeamSearch(beam_params(width=2, length_penalty=4.0), {END}, min_tokens=0, max_tokens=3)
    assert [tokens for tokens, _ in run(favours_long, model)] == [[A, A, A], [A, B, A]]
    held_back = BeamSearch(beam_params(width=2, length_penalty=0.0), {END}, min_tokens=2, max_tokens=3)
    assert END not in run(held_back, model)[0][0][:2]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_a_search_that_keeps_everything_finds_the_best_there_is(early_stopping: inference_pb2.EarlyStopping) -> None:
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
    params = beam_params(width=16, length_penalty=0.0, early_stopping=early_stopping)
    found = run(BeamSearch(params, {END}, min_tokens=0, max_tokens=4), model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in every[:16]]
    assert [score for _, score in found] == pytest.approx([score for _, score in every[:16]])
