"""Each sequence is sampled by its own parameters, whatever else is in the batch."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence, TokenMask
from pagoda_server.engine.runners.cpu.sampler import Choice, Sampler
from pagoda_server.engine.runners.sampling import AllowedTokens, TokenBans
from pagoda_server.kernels import Backend, load_backend
from tests.engine.next_to_last import NextToLast
from tests.kernels.backends import BACKENDS

VOCAB_SIZE = 40


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(load_backend("cpu"), VOCAB_SIZE)


def sequence(
    number: int, prompt: list[int], output: list[int] | None = None, mask: TokenMask | None = None, **params: Any
) -> Sequence:
    tokens = prompt + (output or [])
    return Sequence(number, tokens, Request(len(prompt)), SamplingParams(**params), token_mask=mask)


def logits_of(**likely: float) -> torch.Tensor:
    """Return a row of zeros except for tokens named t0, t1, …"""
    row = torch.zeros(VOCAB_SIZE)
    for name, value in likely.items():
        row[int(name[1:])] = value
    return row


def sample_one(sampler: Sampler, seq: Sequence, row: torch.Tensor) -> Choice:
    (choice,) = sampler.sample([seq], row[None].clone())
    return choice


def test_no_rows_make_no_choices(sampler: Sampler) -> None:
    assert sampler.sample([], torch.empty(0, VOCAB_SIZE)) == []


def test_repetition_penalty_counts_prompt_and_output(sampler: Sampler) -> None:
    row = logits_of(t1=3.0, t2=2.9, t3=2.0)
    assert sample_one(sampler, sequence(1, [1], [2], repetition_penalty=2.0), row).token == 3
    assert sample_one(sampler, sequence(2, [1], [9], repetition_penalty=2.0), row).token == 2


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_penalties_count_the_output_only(sampler: Sampler, penalty: str) -> None:
    row = logits_of(t1=3.0, t2=2.5)
    assert sample_one(sampler, sequence(1, [1, 1], [5], **{penalty: 1.0}), row).token == 1
    assert sample_one(sampler, sequence(2, [1, 1], [1], **{penalty: 1.0}), row).token == 2


def test_frequency_penalty_grows_with_each_time_a_token_was_chosen(sampler: Sampler) -> None:
    seq = sequence(1, [7], frequency_penalty=1.0)
    row = logits_of(t1=5.0, t2=2.5)
    for _ in range(6):
        seq.tokens.append(sample_one(sampler, seq, row).token)
    assert seq.tokens[1:] == [1, 1, 1, 2, 1, 2]


def test_a_sampler_that_forgot_a_sequence_goes_on_as_if_it_had_not(sampler: Sampler) -> None:
    rows = torch.randn(30, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2
    params = {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 11}
    kept, forgotten = sequence(1, [3, 4], **params), sequence(1, [3, 4], **params)
    other = Sampler(load_backend("cpu"), VOCAB_SIZE)
    for row in rows:
        kept.tokens.append(sample_one(sampler, kept, row).token)
        other.sample([sequence(2, [1])], row[None].clone())
        forgotten.tokens.append(sample_one(other, forgotten, row).token)
    assert kept.tokens == forgotten.tokens


def test_logit_bias_is_added(sampler: Sampler) -> None:
    row = logits_of(t1=3.0)
    assert sample_one(sampler, sequence(1, [0], logit_bias=((4, 3.5), (1, -0.2))), row).token == 4
    assert sample_one(sampler, sequence(2, [0], logit_bias=((1, -100.0),)), row).token != 1


@pytest.mark.parametrize("rules", [{}, {"temperature": 5.0, "top_p": 0.9}], ids=str)
def test_a_sequence_chooses_among_its_allowed_tokens_only(sampler: Sampler, rules: dict[str, float]) -> None:
    row = logits_of(t1=3.0, t5=2.0, t39=1.0)
    mask = AllowedTokens([5, 39, VOCAB_SIZE + 1])
    seqs = [sequence(n, [0], mask=mask if n else None, seed=n, **rules) for n in range(20)]
    first, *others = (choice.token for choice in sampler.sample(seqs, row.repeat(20, 1)))
    assert first not in (5, 39)
    assert set(others) == ({5, 39} if rules else {5})


def test_a_mask_that_allows_no_token_is_the_fault_of_its_row_alone(sampler: Sampler) -> None:
    masks = (None, AllowedTokens([VOCAB_SIZE]), None)
    first, bad, last = sampler.sample([sequence(n, [0], mask=m) for n, m in enumerate(masks)], torch.randn(3, 40))
    assert (first.fault, last.fault) == (None, None)
    assert bad.token == -1
    assert bad.fault is not None
    assert "leave no token" in bad.fault


@pytest.mark.parametrize("share", [0.01, 0.4, 0.9])
def test_the_most_likely_allowed_token_is_chosen_and_the_lowest_of_equal_ones(share: float) -> None:
    vocab, rows = 1000, 40
    generator = torch.Generator().manual_seed(1)
    sampler = Sampler(load_backend("cpu"), vocab)
    logits = torch.randn(rows, vocab, generator=generator).mul(4).round().bfloat16()  # with many equal ones
    is_allowed = torch.rand(rows, vocab, generator=generator) < share
    masks = [AllowedTokens(row.nonzero()[:, 0].tolist()) for row in is_allowed]
    seqs = [sequence(n, [0], mask=mask, **({"logprobs": 1} if n % 2 else {})) for n, mask in enumerate(masks)]
    chosen = [choice.token for choice in sampler.sample(seqs, logits.clone())]
    for token, row, allowed in zip(chosen, logits.float(), is_allowed, strict=True):
        best = row[allowed].max()
        assert token == int(((row == best) & allowed).nonzero()[0])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_masked_rows_choose_the_same_alone_and_beside_any_others(backend: Backend) -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = Sampler(backend, VOCAB_SIZE)
    logits = torch.randn(24, VOCAB_SIZE, generator=generator)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {"logit_bias": ((3, 2.0),)}, {"presence_penalty": 1.0}]
    seqs = [
        sequence(n, [0], [5], AllowedTokens(range(n % 7, VOCAB_SIZE, 5)) if n % 3 else None, seed=n, **kinds[n % 4])
        for n in range(24)
    ]
    together = [choice.token for choice in sampler.sample(seqs, logits.clone())]
    assert together == [sample_one(sampler, seq, row).token for seq, row in zip(seqs, logits, strict=True)]
    assert all((token - n % 7) % 5 == 0 for n, token in enumerate(together) if n % 3)


def test_a_mask_that_depends_on_the_tokens_is_asked_at_each_of_them(sampler: Sampler) -> None:
    seq = sequence(1, [7], mask=NextToLast(VOCAB_SIZE))
    for _ in range(5):
        seq.tokens.append(sample_one(sampler, seq, torch.randn(VOCAB_SIZE)).token)
    assert all(abs(after - before) == 1 for before, after in zip(seq.tokens, seq.tokens[1:], strict=False))


class Reluctant:
    """A mask that tells nothing before it is filled."""

    def __init__(self, mask: TokenMask) -> None:
        self._mask = mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mask, name)

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        return False


def test_the_mask_of_a_most_likely_token_that_is_allowed_is_not_filled(sampler: Sampler) -> None:
    near, far = NextToLast(VOCAB_SIZE), NextToLast(VOCAB_SIZE)
    row = logits_of(t8=3.0, t21=2.0)
    seqs = [sequence(1, [7], mask=near), sequence(2, [20], mask=far), sequence(3, [0], mask=AllowedTokens([4]))]
    assert [choice.token for choice in sampler.sample(seqs, row.repeat(3, 1))] == [8, 21, 4]
    assert (near.asked, far.asked) == ([], [1])


@pytest.mark.thorough
def test_what_a_mask_tells_without_being_filled_changes_no_choice(sampler: Sampler) -> None:
    """Beside each other and with drafts, right ones and wrong ones; rows may hold NaN and infinity."""
    generator, random = torch.Generator().manual_seed(5), Random(5)
    rules = [{}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1}, {"top_n_sigma": 1.0}]
    kinds: list[dict[str, Any]] = [{}, {}, {"logit_bias": ((3, 2.0),)}, {"logprobs": 2}]
    kinds += [{"temperature": temperature, **rule} for rule in rules for temperature in (1.0, 3.0)]
    num_filled = [0, 0]
    for _ in range(400):
        seqs, others, drafts, num_rows = [], [], {}, 0
        for number in range(5):
            last, kind = random.randrange(VOCAB_SIZE), random.choice(kinds)
            masks = [NextToLast(VOCAB_SIZE), NextToLast(VOCAB_SIZE)]
            bans = TokenBans(1, 2) if random.random() < 0.3 else None
            if random.random() < 0.2:
                seqs.append(sequence(number, [last], seed=number, **kind))
                others.append(sequence(number, [last], seed=number, **kind))
            else:
                seqs.append(sequence(number, [last], mask=bans or masks[0], seed=number, **kind))
                others.append(sequence(number, [last], mask=Reluctant(bans or masks[1]), seed=number, **kind))
            run = [min(last + 1 + at, VOCAB_SIZE - 1) for at in range(random.randrange(4))]
            if run:
                drafts[number] = tuple(run)
            num_rows += 1 + len(run)
        logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator).mul(2).round()
        row = 0
        for number, seq in enumerate(seqs):  # most choose their drafts
            for at in range(1 + len(drafts.get(number, ()))):
                if random.random() < 0.8:
                    logits[row, min(seq.tokens[-1] + 1 + at, VOCAB_SIZE - 1)] = 9.0
                row += 1
        for bad in (float("nan"), float("inf"), float("-inf")):
            logits[random.randrange(num_rows), random.randrange(VOCAB_SIZE)] = bad
        chosen, expected = (
            [(each.token, each.fault, each.logprobs) for each in sampler.sample(each, logits.clone(), drafts)]
            for each in (seqs, others)
        )
        row = 0
        for number in range(len(seqs)):
            run = drafts.get(number, ())
            for at in range(1 + len(run)):
                assert repr(chosen[row + at]) == repr(expected[row + at])
                if at < len(run) and chosen[row + at][0] != run[at]:
                    break  # what is chosen behind a draft that is wrong is not read
            row += 1 + len(run)
        for at, these in enumerate((seqs, others)):
            num_filled[at] += sum(len(getattr(seq.token_mask, "asked", ())) for seq in these)
    assert num_filled[0] < 0.75 * num_filled[1]


def test_stop_tokens_cannot_be_chosen_before_min_tokens_exist(sampler: Sampler) -> None:
    row = logits_of(t1=9.0, t2=8.0, t3=7.0)
    stops = frozenset({1, 2, VOCAB_SIZE + 5})
    chosen = [
        sample_one(sampler, sequence(n, [0], [5] * n, min_tokens=2, stop_token_ids=stops), row).token for n in range(4)
    ]
    assert chosen == [3, 3, 1, 1]


def test_top_k_of_one_takes_the_most_likely_token_even_among_ties(sampler: Sampler) -> None:
    row = logits_of(t4=1.0, t9=1.0)
    seqs = [sequence(seed, [0], temperature=5.0, top_k=1, seed=seed) for seed in range(20)]
    assert {choice.token for choice in sampler.sample(seqs, row.repeat(20, 1))} == {4}


def test_seed_and_position_determine_the_token_at_any_load(sampler: Sampler) -> None:
    rows = torch.randn(12, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    seqs = [sequence(n, [0], [1] * n, temperature=1.0 + n / 10, top_p=0.9, seed=n // 2) for n in range(12)]
    together = [choice.token for choice in sampler.sample(seqs, rows.clone())]
    alone = [sample_one(sampler, seq, row).token for seq, row in zip(seqs, rows, strict=True)]
    assert together == alone
    uniform = torch.zeros(64, VOCAB_SIZE)
    at_positions = [sequence(n, [0], [1] * n, temperature=1.0, seed=7) for n in range(64)]
    of_seeds = [sequence(n, [0], temperature=1.0, seed=n) for n in range(64)]
    for varied in (at_positions, of_seeds):
        assert len({choice.token for choice in sampler.sample(varied, uniform.clone())}) > 20


def test_logprobs_are_those_of_the_model_before_anything_changes_its_logits(sampler: Sampler) -> None:
    row = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    seq = sequence(1, [0, 1], [2], temperature=2.0, repetition_penalty=1.5, logit_bias=((6, 50.0),), logprobs=3)
    choice = sample_one(sampler, seq, row)
    expected = row.log_softmax(dim=0)
    assert choice.token == 6
    assert choice.logprobs is not None
    assert choice.logprobs.chosen == pytest.approx(expected[6].item(), abs=1e-5)
    assert choice.logprobs.top_ids == expected.topk(3).indices.tolist()
    assert choice.logprobs.top == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_only_sequences_that_ask_get_logprobs_and_as_many_as_they_ask_for(sampler: Sampler) -> None:
    seqs = [sequence(n, [0], logprobs=count) for n, count in enumerate((None, 0, 2, 100))]
    choices = sampler.sample(seqs, torch.randn(4, VOCAB_SIZE))
    assert [None if c.logprobs is None else len(c.logprobs.top_ids) for c in choices] == [None, 0, 2, VOCAB_SIZE]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 2.0}, "top_p"),
        ({"temperature": 1.0, "min_p": math.nan}, "min_p"),
        ({"temperature": 1.0, "top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias"),
    ],
    ids=str,
)
def test_a_bad_parameter_is_the_fault_of_its_row_alone(sampler: Sampler, params: dict[str, Any], named: str) -> None:
    rows = torch.randn(3, VOCAB_SIZE)
    good = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": ((1, 2.0),), "logprobs": 1}
    seqs = [sequence(1, [0], seed=1, **good), sequence(2, [0], **params), sequence(3, [0], seed=3, **good)]
    first, bad, last = sampler.sample(seqs, rows.clone())
    assert bad.token == -1
    assert bad.fault is not None
    assert named in bad.fault
    assert first == sample_one(sampler, seqs[0], rows[0])
    assert last == sample_one(sampler, seqs[2], rows[2])


def test_logits_of_nan_are_the_fault_of_their_row_alone(sampler: Sampler) -> None:
    rows = torch.randn(3, VOCAB_SIZE)
    rows[1, 7] = math.nan
    seqs = [sequence(n, [0], temperature=float(n), repetition_penalty=1.1, logprobs=2) for n in range(3)]
    first, bad, last = sampler.sample(seqs, rows.clone())
    assert (bad.token, bad.logprobs) == (-1, None)
    assert bad.fault is not None
    assert "NaN" in bad.fault
    assert first == sample_one(sampler, seqs[0], rows[0])
    assert last == sample_one(sampler, seqs[2], rows[2])
