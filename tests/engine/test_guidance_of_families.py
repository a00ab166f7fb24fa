"""Grammars on real tokenizers of several families: byte-level and SentencePiece, with added tokens special or not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer

from pagoda.v1 import inference_pb2
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.guidance.vocabulary import Vocabulary
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


@pytest.mark.parametrize(
    ("family", "rest"),
    [
        pytest.param(family, rest, marks=[pytest.mark.nightly] * (rest != 0 and family != "qwen3"))
        for family in sorted(TOKENIZERS)
        for rest in (0, 1, 17, 31)
    ],
)
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


@families
def test_tokens_and_forced_text_are_those_that_llguidance_reads_itself(family: str) -> None:
    content = (tokenizer_folder(family) / "tokenizer.json").read_bytes()
    vocabulary, theirs = Vocabulary(content, 0), LLTokenizer(content.decode(), slices=[])
    named = {*vocabulary.special_token_ids, *tokenizer_of(tokenizer_folder(family)).get_added_tokens_decoder()}
    found = [theirs.decode_bytes([id]) for id in range(theirs.vocab_size) if id not in named]
    ours = enumerate(vocabulary.tokens[: theirs.vocab_size])
    # llguidance marks names with the byte 255, which is in no text, and decodes it to nothing.
    assert found == [token.removeprefix(b"\xff") for id, token in ours if id not in named]
    for text in ('{"city": "Zürich 🙂", "n": 12345}', "\n\n  def f(x):\n\treturn x  ", " a", "a  b", "東京 ١٢ e\u0301"):
        assert vocabulary(text) == theirs.tokenize_str(text)


@families
def test_other_threads_go_on_while_a_vocabulary_is_read(family: str) -> None:
    """In one call of llguidance they would wait for nearly all of it."""
    content = (tokenizer_folder(family) / "tokenizer.json").read_bytes()
    is_over, gaps = threading.Event(), list[float]()

    def tick() -> None:
        last = time.monotonic()
        while not is_over.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    Vocabulary(content, 0).for_grammars()
    took_s = time.monotonic() - began
    is_over.set()
    ticking.join()
    assert max(gaps) <= took_s / 2
