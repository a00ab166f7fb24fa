"""Grammars on real tokenizers of several families: byte-level and SentencePiece, with added tokens special or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from pagoda.v1 import inference_pb2
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.runners.sampling import fill_mask, num_mask_words
from pagoda_server.router.answers.lark import Lark
from tests.real_models import TOKENIZERS, tokenizer_folder

pytestmark = pytest.mark.thorough

PROMPT = [1, 2, 3]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"const": "Zürich 🙂"}, "kind": {"enum": ["alpha", "beta"]}},
    "required": ["city", "kind"],
    "additionalProperties": False,
}

families = pytest.mark.parametrize("family", sorted(TOKENIZERS))


@cache
def tokenizer_of(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def grammars(family: str, rest: int | None = None) -> tuple[tokenizers.Tokenizer, Grammars, int]:
    """A family's grammars, for a vocabulary that leaves this rest when divided by 32; None: for the tokenizer's own."""
    folder = tokenizer_folder(family)
    tokenizer = tokenizer_of(folder)
    vocab_size = tokenizer.get_vocab_size()
    if rest is not None:
        vocab_size += (rest - vocab_size) % 32
    return tokenizer, Grammars(folder, vocab_size), vocab_size


def written(tokenizer: tokenizers.Tokenizer, make: Callable[..., GrammarMask], vocab_size: int, last: bool) -> str:
    """Follow a grammar to its end, with the first or the last token that it allows each time. Return the text."""
    mask, output = make(prompt_len=len(PROMPT), stop_ids=[]), list[int]()
    while (forced := mask.follow([*PROMPT, *output])) is not None:
        if not forced:
            words = np.full(num_mask_words(vocab_size), -1, dtype=np.int32)
            fill_mask(mask, [*PROMPT, *output], words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not len(allowed) and mask.follow([*PROMPT, *output]) is None:
                break
            assert len(allowed), f"{mask.fault} after {tokenizer.decode(output)!r}"
            forced = [int(allowed[-1 if last else 0])]
        output += forced
        assert len(output) < 500
    return str(tokenizer.decode(output, skip_special_tokens=False))


@families
@pytest.mark.parametrize("rest", [0, 1, 17, 31])
def test_json_is_right_whatever_the_vocabulary_leaves_when_divided_by_32(family: str, rest: int) -> None:
    tokenizer, made, vocab_size = grammars(family, rest)
    make = made.mask_maker(inference_pb2.Guided(json_schema=json.dumps(SCHEMA)))
    for last in (False, True):
        assert json.loads(written(tokenizer, make, vocab_size, last))["city"] == "Zürich 🙂"


@families
def test_text_that_spells_an_added_token_is_written(family: str) -> None:
    """llguidance would force the added token there, and then refuse it. Special ones are no text."""
    tokenizer, made, vocab_size = grammars(family)
    added = tokenizer.get_added_tokens_decoder().values()
    spelled = [token.content for token in added if not token.special]
    for text in spelled[:: max(1, len(spelled) // 12)]:
        option = f"a{text}b"
        make = made.mask_maker(inference_pb2.Guided(choice=inference_pb2.Choice(options=[option])))
        assert written(tokenizer, make, vocab_size, last=False) == option


@families
def test_an_added_token_that_a_grammar_names_is_that_token(family: str) -> None:
    tokenizer, made, vocab_size = grammars(family)
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if id < vocab_size}
    for text in sorted(added)[:: max(1, len(added) // 12)]:
        lark = Lark({text: added[text]})
        guided = inference_pb2.Guided(ebnf_grammar=lark.grammar(lark.sequence(f"a{text}b")))
        mask, output = made.mask_maker(guided)(prompt_len=0, stop_ids=[]), list[int]()
        while forced := mask.follow(output):
            output += forced
        if not output:  # "a" may begin several tokens
            continue
        assert added[text] in output
