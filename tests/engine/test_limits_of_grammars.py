"""Where llguidance meets a limit of its own, an output is right or an error, whenever its masks are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tokenizers

from pagoda.v1 import inference_pb2
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.runners.sampling import fill_mask

pytestmark = pytest.mark.thorough

ROWS = 49_152  # of the default model's embedding
END = 2
TEXT = "The quick brown fox jumps over the lazy dog and then runs away from the very angry farmer who lives in town."
LETTERS = r"(\p{L}+ ?){1,30}\."
FORMATS = {
    "words": ({"regex": LETTERS}, TEXT),
    "more words": ({"regex": r"(\p{L}{1,20} ?){1,300}\."}, TEXT),
    "words of words": ({"regex": r"(\w+[ ,.]?){1,200}\."}, TEXT),
    "a long pattern": (
        {"json_schema": json.dumps({"type": "string", "pattern": "^" + "([a-z]{1,20} ?)" * 35 + "$"})},
        json.dumps(" ".join((TEXT[:-9].lower().split() * 2)[:35])),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(default_model_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))


def filled(mask: GrammarMask, tokens: list[int]) -> np.ndarray:
    while not mask.is_ready(tokens, 10.0):
        pass
    words = np.zeros(ROWS // 32, dtype=np.int32)
    fill_mask(mask, tokens, words)
    assert not mask.fault, f"after {len(tokens)} tokens"
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)


@pytest.mark.parametrize("way", range(6))
@pytest.mark.parametrize("name", FORMATS)
def test_a_text_that_matches_is_allowed_to_its_end_however_its_masks_come(
    name: str, way: int, default_model_folder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    """The sequences share an automaton. One of them needs each mask, others need few: they meet its limit first."""
    format, text = FORMATS[name]
    make = Grammars(default_model_folder, ROWS).mask_maker(inference_pb2.Guided(**format))  # type: ignore[arg-type]
    ids, chance = tokenizer.encode(text, add_special_tokens=False).ids, Random(way)
    masks = [make(prompt_len=0, stop_ids=[END]) for _ in range(4)]
    for at in range(len(ids) + 1):
        for each, mask in enumerate(masks):
            if at < len(ids):
                assert mask.follow(ids[:at]) is not None, "it is not complete"
                if chance.random() < (1.0, 0.1, 0.1, 0.02)[each] or not mask.surely_allows(ids[:at], ids[at]):
                    assert filled(mask, ids[:at])[ids[at]]
            elif mask.follow(ids) is not None:
                assert filled(mask, ids)[END]


def greedy(make: Callable[..., GrammarMask], first_ids: list[int], way: int) -> list[int]:
    """Choose the first of these ids that is allowed, again and again, until the output is complete."""
    mask, tokens, chance = make(prompt_len=0, stop_ids=[END]), list[int](), Random(way)
    while len(tokens) < 400 and mask.follow(tokens) is not None:
        choice = first_ids[len(tokens) % len(first_ids)]
        if chance.random() < 0.5 or not mask.surely_allows(tokens, choice):
            allowed = filled(mask, tokens)
            choice = choice if allowed[choice] else int(allowed.argmax())
        if choice == END:
            break
        tokens.append(choice)
    return tokens


def test_one_sequence_of_choices_has_one_outcome(default_model_folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    ids = tokenizer.encode(TEXT * 3, add_special_tokens=False).ids
    outcomes = set()
    for way in range(8):
        make = Grammars(default_model_folder, ROWS).mask_maker(inference_pb2.Guided(regex=LETTERS))
        outcomes.add(tokenizer.decode(greedy(make, ids, way)))
    (text,) = outcomes
    assert re.fullmatch(r"([^\W\d_]+ ?){1,30}\.", text)


def test_an_automaton_that_has_met_a_limit_is_not_kept_for_later_requests(
    default_model_folder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    found, ids = Grammars(default_model_folder, ROWS), tokenizer.encode(TEXT, add_special_tokens=False).ids
    for _ in range(3):
        mask = found.mask_maker(inference_pb2.Guided(regex=LETTERS))(prompt_len=0, stop_ids=[END])
        assert filled(mask, ids[:3])[ids[3]]
        assert filled(mask, ids[:10])[ids[10]]
        assert mask.follow(ids) is None or filled(mask, ids)[END]
