"""A row on the device gives the very tokens that the sampler gives its sequence from the host."""

from __future__ import annotations

import random

import pytest
import torch

from pagoda_server.engine.runners.cpu.sampler import Sampler
from pagoda_server.kernels import load_backend
from pagoda_server.kernels.gumbel import noise_keys
from pagoda_server.kernels.row_sampling import sample_rows
from tests.kernels.plain_noise import noise_key
from tests.kernels.sampling_rows import any_sequence, drafts_of, poisoned, rows_for, sequence, write_drafts, write_row

VOCAB = 333


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(load_backend("reference"), VOCAB)


def test_noise_keys_on_the_device_are_those_of_the_host() -> None:
    rng = random.Random(1)
    seeds = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, *(rng.randrange(1 << 64) for _ in range(200))]
    positions = [rng.randrange(1 << 31) for _ in seeds]
    signed = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds])
    expected = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert noise_keys(signed, torch.tensor(positions)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_chooses_what_the_sampler_chooses_step_after_step(sampler: Sampler, dtype: torch.dtype) -> None:
    rng = random.Random(2)
    torch.manual_seed(2)
    seqs = [any_sequence(number, VOCAB, rng) for number in range(200)]
    places = rng.sample(range(240), len(seqs))
    sampling = rows_for(VOCAB, max_rows=240)
    for place, seq in zip(places, seqs, strict=True):
        write_row(sampling, place, seq)
    for _ in range(3):
        logits = (torch.randn(len(seqs), VOCAB) * 3).to(dtype)
        positions = torch.tensor([seq.num_tokens for seq in seqs], dtype=torch.int32)
        out = poisoned(len(seqs))
        sample_rows(logits.clone(), torch.tensor(places, dtype=torch.int32), positions, sampling, out)
        choices = sampler.sample(seqs, logits.clone())
        assert out.tokens.tolist() == [choice.token for choice in choices]
        assert sampling.last_token[places].tolist() == out.tokens.tolist()
        for at, (seq, choice) in enumerate(zip(seqs, choices, strict=True)):
            if choice.logprobs is not None:
                count = len(choice.logprobs.top)
                assert out.chosen[at].item() == choice.logprobs.chosen
                assert out.top[at, :count].tolist() == choice.logprobs.top
            seq.tokens.append(choice.token)


def test_a_row_behind_drafts_chooses_as_if_they_were_tokens_and_notes_nothing(sampler: Sampler) -> None:
    rng = random.Random(4)
    torch.manual_seed(4)
    seqs = [any_sequence(number, VOCAB, rng) for number in range(100)]
    places = rng.sample(range(120), len(seqs))
    drafts = drafts_of(seqs, VOCAB, rng)
    sampling = rows_for(VOCAB, max_rows=120, max_drafts=800)
    for place, seq in zip(places, seqs, strict=True):
        write_row(sampling, place, seq)
    rows, positions, verified = write_drafts(sampling, places, seqs, drafts)
    before = sampling.counts.clone()
    logits = torch.randn(len(rows), VOCAB) * 3
    out = poisoned(len(rows))
    sample_rows(logits.clone(), rows, positions, sampling, out, verified)
    choices = sampler.sample(seqs, logits.clone(), drafts)
    assert len(choices) > len(seqs) + 100
    assert out.tokens.tolist() == [choice.token for choice in choices]
    drafted = [places[number] for number in drafts]
    assert torch.equal(sampling.counts[drafted], before[drafted])
    assert sampling.last_token[drafted].tolist() == [seqs[number].tokens[-1] for number in drafts]
    assert not torch.equal(sampling.counts, before)
    for at, choice in enumerate(choices):
        if choice.logprobs is not None:
            assert out.chosen[at].item() == choice.logprobs.chosen


def test_counts_that_the_device_keeps_are_those_of_a_row_written_anew() -> None:
    rng = random.Random(3)
    seqs = [any_sequence(number, VOCAB, rng) for number in range(60)]
    kept, anew = rows_for(VOCAB, len(seqs)), rows_for(VOCAB, len(seqs))
    for at, seq in enumerate(seqs):
        write_row(kept, at, seq)
    rows, out = torch.arange(len(seqs), dtype=torch.int32), poisoned(len(seqs))
    for _ in range(4):
        positions = torch.tensor([seq.num_tokens for seq in seqs], dtype=torch.int32)
        sample_rows(torch.randn(len(seqs), VOCAB) * 3, rows, positions, kept, out)
        for seq, token in zip(seqs, out.tokens.tolist(), strict=True):
            seq.tokens.append(token)
    for at, seq in enumerate(seqs):
        write_row(anew, at, seq)
        if seq.params.has_penalties:
            assert torch.equal(kept.counts[at], anew.counts[at])


def test_padding_chooses_nothing_and_a_broken_row_changes_nothing() -> None:
    sampling = rows_for(VOCAB, 3)
    for at in range(3):
        write_row(sampling, at, sequence(at, [5], [6], repetition_penalty=2.0))
    before = sampling.counts.clone()
    logits = torch.randn(3, VOCAB)
    logits[0, 9], logits[1] = torch.nan, torch.nan
    out = poisoned(3)
    sample_rows(logits, torch.tensor([2, -1, 1], dtype=torch.int32), torch.full((3,), 2).int(), sampling, out)
    assert out.tokens[:2].tolist() == [-1, -77]
    assert sampling.last_token[[0, 2]].tolist() == [6, 6]
    assert torch.equal(sampling.counts[[0, 2]], before[[0, 2]])
    assert sampling.counts[1].sum() == before[1].sum() + 1


def test_equally_likely_tokens_come_in_ascending_order() -> None:
    sampling = rows_for(VOCAB, 1)
    write_row(sampling, 0, sequence(0, [5], [], logprobs=4))
    logits, out = torch.zeros(1, VOCAB), poisoned(1)
    logits[0, 77] = 1.0
    sample_rows(logits, torch.zeros(1).int(), torch.ones(1).int(), sampling, out)
    assert out.top_ids[0, :4].tolist() == [77, 0, 1, 2]
