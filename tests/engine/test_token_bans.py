"""Repeated n-grams, bad words and untypical tokens are left out as transformers' own processors leave them out."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.runners.cpu.sampler import Sampler
from pagoda_server.engine.runners.sampling import NGRAMS_AT_ONCE, AllowedTokens, TokenBans, fill_mask, num_mask_words
from pagoda_server.kernels import drop_untypical, load_backend

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


def test_typical_tokens_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    rows = torch.randn(12, 500, generator=torch.Generator().manual_seed(2)) * 3
    rows[:, 7] = float("-inf")
    for mass, temperature in ((0.2, 1.0), (0.5, 0.6), (0.9, 2.0), (0.999, 1.0)):
        kept = rows.clone()
        drop_untypical(kept, torch.full((12,), temperature), torch.full((12,), mass))
        theirs = transformers.TypicalLogitsWarper(mass)(torch.empty(12, 0), (rows / temperature).double())
        assert torch.equal(kept > float("-inf"), theirs > float("-inf"))
        assert torch.equal(kept[kept > float("-inf")], rows[kept > float("-inf")])


def test_typical_sampling_may_leave_out_the_most_likely_token_and_mixes_with_other_rows() -> None:
    """One token has a probability of 0.3, and 32 others 0.7 together: to see one of those is what one expects."""
    sampler = Sampler(load_backend("cpu"), VOCAB_SIZE)
    row = torch.full((VOCAB_SIZE,), float("-inf"))
    row[0], row[1:33] = math.log(0.3 / (0.7 / 32)), 0.0

    def sequence(id: int, **params: float) -> Sequence:
        return Sequence(id, [1], Request(1), SamplingParams(**params))  # type: ignore[arg-type]

    others = [sequence(0), sequence(1, temperature=1.0, seed=5)]
    alone = [choice.token for choice in sampler.sample(others, row.expand(2, -1).clone())]
    for seed in range(20):
        seqs = [*others, sequence(2 + seed, temperature=1.0, typical_p=0.4, seed=seed)]
        first, second, typical = (choice.token for choice in sampler.sample(seqs, row.expand(3, -1).clone()))
        assert [first, second] == alone
        assert 1 <= typical < 33


def test_typical_sampling_leaves_broken_rows_broken() -> None:
    rows = torch.zeros(3, VOCAB_SIZE)
    rows[0, 3], rows[1, 3], rows[2] = float("nan"), float("inf"), float("-inf")
    drop_untypical(rows, torch.ones(3), torch.full((3,), 0.5))
    seqs = [Sequence(id, [1], Request(1), SamplingParams()) for id in range(3)]
    choices = Sampler(load_backend("cpu"), VOCAB_SIZE).sample(seqs, rows)
    assert [choice.token for choice in choices] == [-1] * 3


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
