"""Repeated n-grams and bad words are left out as transformers' own processors leave them out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pagoda_server.engine.runners.sampling import NGRAMS_AT_ONCE, AllowedTokens, TokenBans, fill_mask, num_mask_words

VOCAB_SIZE = 40


def allowed_by(mask: TokenBans, tokens: list[int]) -> set[int]:
    words = np.empty(num_mask_words(VOCAB_SIZE), dtype=np.int32)
    fill_mask(mask, tokens, words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(bits.nonzero()[0].tolist())


def kept_by(processor: object, tokens: list[int]) -> set[int]:
    """What one of transformers' processors keeps."""
    scores = processor(torch.tensor([tokens], dtype=torch.long), torch.zeros(1, VOCAB_SIZE))  # type: ignore[operator]
    return set((scores[0] > float("-inf")).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ngrams_are_those_of_transformers(size: int) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.NoRepeatNGramLogitsProcessor(size)
    draw = random.Random(size)
    mask, tokens = TokenBans(prompt_len=3, ngram_size=size), [1, 2, 1]
    for _ in range(60):
        assert allowed_by(mask, tokens) == kept_by(processor, tokens), tokens
        tokens.append(draw.randrange(4))


def test_the_mask_follows_from_the_tokens_alone_whichever_it_saw_before() -> None:
    draw = random.Random(7)
    mask = TokenBans(prompt_len=2, ngram_size=3)
    tokens = [draw.randrange(3) for _ in range(30)]
    for _ in range(300):  # as drafts that are refused, and sequences that were cut
        keep = draw.randrange(len(tokens))
        tokens = tokens[:keep] + [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        assert allowed_by(mask, tokens) == allowed_by(TokenBans(prompt_len=2, ngram_size=3), tokens)


def test_bad_words_are_those_of_transformers_in_the_output() -> None:
    transformers = pytest.importorskip("transformers")
    draw = random.Random(3)
    for _ in range(20):
        words = [[draw.randrange(4) for _ in range(draw.randrange(1, 4))] for _ in range(6)]
        processor = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None)
        prompt, output = [draw.randrange(4) for _ in range(3)], [draw.randrange(4)]
        mask = TokenBans(len(prompt), bad_words=words)
        for _ in range(10):
            assert allowed_by(mask, prompt + output) == kept_by(processor, output), (words, output)
            output.append(draw.randrange(4))


def test_a_word_that_began_in_the_prompt_may_end() -> None:
    mask = TokenBans(prompt_len=2, bad_words=[[5, 6], [7]])
    assert 6 in allowed_by(mask, [1, 5])
    assert 6 not in allowed_by(mask, [1, 5, 5])
    assert 7 not in allowed_by(mask, [1, 5])


def test_bans_come_on_top_of_what_is_allowed() -> None:
    mask = TokenBans(1, ngram_size=1, bad_words=[[33], [100]], allowed=AllowedTokens([2, 3, 33, 39]))
    assert allowed_by(mask, [3]) == {2, 39}


def test_n_grams_of_a_long_prompt_are_taken_in_over_several_steps() -> None:
    tokens = [7] * 30_000
    mask, num_steps = TokenBans(len(tokens), ngram_size=2), 1
    assert mask.is_slow, "nothing is drafted for it"
    while not mask.is_ready(tokens, 0.0):
        num_steps += 1
    assert not mask.is_slow
    assert num_steps >= len(tokens) // NGRAMS_AT_ONCE - 1
    assert allowed_by(mask, tokens) == set(range(VOCAB_SIZE)) - {7}


def test_a_sequence_that_is_alone_waits_for_the_n_grams_of_its_prompt() -> None:
    assert TokenBans(30_000, ngram_size=2).is_ready([7] * 30_000, timeout_s=600.0)


def test_a_mask_of_short_prompts_is_ready_at_once() -> None:
    mask = TokenBans(NGRAMS_AT_ONCE, ngram_size=2)
    assert not mask.is_slow
    assert mask.is_ready([7] * NGRAMS_AT_ONCE, 0.0)
