"""The kernels choose what the reference chooses; tiles are small, so that rows have many."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.kernels.gumbel import gumbel
from pagoda_server.kernels.row_sampling import (
    MAX_BIASES,
    MAX_STOPS,
    SampledRows,
    SamplingRows,
    allocate_rows,
    sample_rows,
)
from pagoda_server.kernels.triton import row_sampling
from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.kernels.triton.row_sampling import Config, sample_rows_triton
from tests.kernels.plain_noise import noise_key
from tests.kernels.sampling_rows import any_sequence, drafts_of, poisoned, rows_for, sequence, write_drafts, write_row
from tests.kernels.triton.device import DEVICE

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # the interpreter's NumPy, of logarithms of 0


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles_of(512, monkeypatch)


def use_tiles_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(tile=tokens, scan_warps=4, chunk=1024, choice_warps=4)
    monkeypatch.setattr(row_sampling, "tuned", lambda op, key, default: config)


def rows_of(seqs: list[Sequence], vocab: int) -> tuple[SamplingRows, Tensor, Tensor]:
    sampling = rows_for(vocab, len(seqs), DEVICE)
    for at, seq in enumerate(seqs):
        write_row(sampling, at, seq)
    positions = torch.tensor([seq.num_tokens for seq in seqs], dtype=torch.int32, device=DEVICE)
    return sampling, torch.arange(len(seqs), dtype=torch.int32, device=DEVICE), positions


def both(seqs: list[Sequence], logits: Tensor) -> tuple[SampledRows, SampledRows]:
    """What the reference and the kernels choose, after a check that they left equal rows behind."""
    expected, actual = poisoned(len(seqs), DEVICE), poisoned(len(seqs), DEVICE)
    sampling, rows, positions = rows_of(seqs, logits.shape[1])
    other = replace(sampling, counts=sampling.counts.clone(), last_token=sampling.last_token.clone())
    sample_rows(logits.clone(), rows, positions, sampling, expected)
    sample_rows_triton(logits, rows, positions, other, actual)
    assert torch.equal(sampling.counts, other.counts)
    assert torch.equal(sampling.last_token, other.last_token)
    return expected, actual


def random_logits(rows: int, vocab: int, spread: float, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(vocab)
    return (torch.randn(rows, vocab) * spread).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("vocab", "spread", "dtype"),
    [
        (300, 3.0, torch.float32),
        (513, 3.0, torch.bfloat16),
        (1536, 8.0, torch.float16),
        (2999, 0.01, torch.float32),
        (2999, 2.0, torch.bfloat16),
    ],
    ids=str,
)
def test_any_row_chooses_what_the_reference_chooses(vocab: int, spread: float, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    seqs = [any_sequence(number, vocab, rng) for number in range(16)]
    expected, actual = both(seqs, random_logits(len(seqs), vocab, spread, dtype))
    assert torch.equal(actual.tokens, expected.tokens)
    for at, seq in enumerate(seqs):
        count = seq.params.logprobs
        if count is not None:
            torch.testing.assert_close(actual.chosen[at], expected.chosen[at], atol=1e-5, rtol=0)
            assert torch.equal(actual.top_ids[at, :count], expected.top_ids[at, :count])
            torch.testing.assert_close(actual.top[at, :count], expected.top[at, :count], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 3},
        {"top_k": 60},
        {"top_k": 1000},  # more than there are groups
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"min_p": 0.2},
        {"top_n_sigma": 0.7},
        {"top_k": 40, "top_n_sigma": 1.5},
        {"top_k": 900, "top_p": 0.7},
        {"top_p": 0.8, "min_p": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_rows_of_ties_keep_and_drop_them_together(rules: dict[str, float], step: float) -> None:
    vocab = 2048  # no group is padding
    logits = random_logits(3, vocab, 1.0, torch.float32)
    logits = (logits / step).round() * step if step else torch.zeros_like(logits)
    seqs = [sequence(n, [1], [], temperature=1.3, seed=n, **rules) for n in range(3)]
    expected, actual = both(seqs, logits)
    assert torch.equal(actual.tokens, expected.tokens)


@pytest.mark.parametrize(("top_p", "spread"), [(0.3, 0.3), (0.9, 0.3), (0.9, 3.0), (0.999, 3.0)])
def test_top_p_looks_at_every_group_where_the_leading_ones_hold_too_little(
    top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the larger spread, most tokens are too unlikely to be listed."""
    use_tiles_of(4096, monkeypatch)
    vocab = 64 * 300  # more groups than it looks at first
    logits = random_logits(2, vocab, spread, torch.float32)
    seqs = [sequence(n, [1], [], temperature=1.0, seed=n, top_p=top_p, min_p=(n % 2) * 0.1) for n in range(2)]
    expected, actual = both(seqs, logits)
    assert torch.equal(actual.tokens, expected.tokens)


def test_one_row_keeps_exactly_the_tokens_that_the_reference_keeps() -> None:
    row = random_logits(1, 330, 2.0, torch.float32)
    for rules in ({"top_k": 6}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_n_sigma": 1.5}):
        seqs = [sequence(n, [1], [], temperature=2.0, seed=n, **rules) for n in range(12)]
        expected, actual = both(seqs, row.repeat(len(seqs), 1))
        assert torch.equal(actual.tokens, expected.tokens)
        assert len(actual.tokens.unique()) > 2


def test_the_lowest_of_equally_likely_tokens_is_taken_and_comes_first() -> None:
    logits = torch.zeros(2, 2100, device=DEVICE)
    logits[1, [700, 1999]] = 4.0
    seqs = [sequence(n, [1], [], logprobs=20) for n in range(2)]
    _, actual = both(seqs, logits)
    assert actual.tokens.tolist() == [0, 700]
    assert actual.top_ids.tolist() == [list(range(20)), [700, 1999, *range(18)]]


@pytest.mark.parametrize("rules", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_has_no_token_and_spoils_no_other(bad: float, rules: dict[str, float]) -> None:
    logits = random_logits(3, 1100, 1.0, torch.bfloat16)
    seqs = [sequence(n, [1], [2], seed=n, repetition_penalty=1.2, logprobs=2, **rules) for n in range(3)]
    good, _ = both(seqs, logits)
    logits[1, slice(None) if bad == -torch.inf else 900] = bad
    _, actual = both(seqs, logits)
    assert actual.tokens.tolist() == [good.tokens[0], -1, good.tokens[2]]
    assert torch.equal(actual.top_ids[[0, 2], :2], good.top_ids[[0, 2], :2])


def test_a_ban_hides_a_broken_logit_as_it_does_in_the_reference() -> None:
    logits = random_logits(1, 700, 1.0, torch.float32)
    logits[0, 650] = torch.inf
    expected, actual = both([sequence(0, [1], [], min_tokens=3, stop_token_ids=frozenset({650}))], logits)
    assert actual.tokens.item() == expected.tokens.item() != -1


@pytest.mark.parametrize("rules", [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.9}], ids=str)
def test_a_mask_restricts_its_row_alone_and_hides_broken_logits_that_it_forbids(rules: dict[str, float]) -> None:
    vocab = 1100
    logits = random_logits(12, vocab, 1.0, torch.bfloat16)
    logits[::2, 700] = torch.nan
    allowed = [0, 31, 32, 600, 1023, 1099]
    seqs = [sequence(n, [1], [2], seed=n, logprobs=1, **rules, allowed=() if n % 2 else allowed) for n in range(12)]
    expected, actual = both(seqs, logits)
    assert torch.equal(actual.tokens, expected.tokens)
    assert set(actual.tokens[::2].tolist()) <= set(allowed)
    assert not set(actual.tokens[1::2].tolist()) <= set(allowed)


def test_a_mask_that_allows_nothing_leaves_no_token() -> None:
    seqs = [sequence(n, [1], [], temperature=n / 2, seed=n, allowed=[2000]) for n in range(3)]
    _, actual = both(seqs, random_logits(3, 700, 1.0, torch.float32))
    assert actual.tokens.tolist() == [-1, -1, -1]


def test_padding_is_left_alone_and_rows_may_come_in_any_order() -> None:
    vocab, rng = 900, random.Random(5)
    seqs = [any_sequence(number, vocab, rng) for number in range(7)]
    sampling, _, lengths = rows_of(seqs, vocab)
    other = replace(sampling, counts=sampling.counts.clone(), last_token=sampling.last_token.clone())
    rows = torch.tensor([4, -1, 0, 6, -1], dtype=torch.int32, device=DEVICE)
    positions = lengths[rows.clamp(min=0).long()]
    wide = random_logits(5, vocab + 60, 3.0, torch.float32)
    logits = wide[:, :vocab]  # rows further apart than their length
    logits[rows < 0] = torch.nan
    expected, actual = poisoned(5, DEVICE), poisoned(5, DEVICE)
    sample_rows(logits.clone(), rows, positions, sampling, expected)
    sample_rows_triton(logits, rows, positions, other, actual)
    assert torch.equal(actual.tokens, expected.tokens)
    assert actual.tokens[[1, 4]].tolist() == [-77, -77]
    assert torch.equal(other.counts, sampling.counts)
    assert torch.equal(other.last_token, sampling.last_token)


def test_rows_behind_drafts_choose_what_the_reference_chooses() -> None:
    vocab, rng = 1100, random.Random(6)
    seqs = [any_sequence(number, vocab, rng) for number in range(12)]
    seqs += [sequence(12 + at, [5] * 3, [6], repetition_penalty=1.4, frequency_penalty=0.5) for at in range(4)]
    drafts = drafts_of(seqs, vocab, rng) | {13: (5, 700, 700, 6), 14: (1, 2)}
    sampling = rows_for(vocab, len(seqs), DEVICE, max_drafts=80)
    for at, seq in enumerate(seqs):
        write_row(sampling, at, seq)
    rows, positions, verified = write_drafts(sampling, list(range(len(seqs))), seqs, drafts)
    other = replace(sampling, counts=sampling.counts.clone(), last_token=sampling.last_token.clone())
    logits = random_logits(len(rows), vocab, 1.0, torch.bfloat16)
    logits[:, [5, 6, 700]] += 3.0
    expected, actual = poisoned(len(rows), DEVICE), poisoned(len(rows), DEVICE)
    sample_rows(logits.clone(), rows, positions, sampling, expected, verified)
    sample_rows_triton(logits, rows, positions, other, actual, verified)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(other.counts, sampling.counts)
    assert torch.equal(other.last_token, sampling.last_token)
    without = poisoned(len(rows), DEVICE)
    sample_rows(logits.clone(), rows, positions, other, without)
    assert not torch.equal(without.tokens, expected.tokens), "drafts make a difference"


def test_each_step_counts_the_token_it_chose() -> None:
    vocab = 600
    seqs = [sequence(0, [3], [], frequency_penalty=1.0), sequence(1, [3], [])]
    sampling, rows, positions = rows_of(seqs, vocab)
    logits = torch.zeros(2, vocab, device=DEVICE)
    logits[:, 555], logits[:, 40] = 2.5, 1.0
    chosen = []
    for step in range(4):
        out = poisoned(2, DEVICE)
        sample_rows_triton(logits, rows, positions + step, sampling, out)
        chosen.append(out.tokens.tolist())
    assert chosen == [[555, 555], [555, 555], [40, 555], [555, 555]]
    assert sampling.counts[0, [555, 40]].tolist() == [3, 1]
    assert sampling.counts[1].sum() == sampling.counts[1, 3]  # no penalties: only the prompt


def test_a_draw_without_limits_has_the_noise_of_its_seed_and_position() -> None:
    vocab, seed = 1000, 0xFFFF_FFFF_8000_0001
    seqs = [sequence(0, [1] * length, [], temperature=1.0, seed=seed) for length in range(1, 14)]
    _, actual = both(seqs, torch.zeros(len(seqs), vocab, device=DEVICE))
    keys = torch.tensor([noise_key(seed, seq.num_tokens) for seq in seqs])
    assert actual.tokens.tolist() == gumbel(keys[:, None], torch.arange(vocab)).argmax(dim=-1).tolist()


@contextmanager
def counted_loads(tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count by tensor the elements that kernels load, masked ones too. A load that is not made counts nothing."""
    from triton.runtime.interpreter import InterpreterBuilder

    loads: Counter[str] = Counter()
    load = InterpreterBuilder.create_masked_load

    def noting(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        places = np.atleast_1d(ptrs.data).ravel()
        for name, tensor in tensors.items():
            first = tensor.data_ptr()
            loads[name] += int(((places >= first) & (places < first + tensor.nbytes)).sum())
        return load(self, ptrs, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", noting)
        yield loads


@pytest.mark.skipif(not IS_INTERPRETED, reason="counts the loads of the interpreter")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_without_rules_reads_its_logits_once_and_no_list_of_a_served_row(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, batch = 1536, 3
    sampling = allocate_rows(batch, vocab, MAX_STOPS, MAX_BIASES, torch.device(DEVICE))
    sampling.temperature.fill_(temperature)
    ids = torch.arange(MAX_BIASES, dtype=torch.int32)
    unread = {name: getattr(sampling, name) for name in ("stop_ids", "bias_ids", "bias", "token_masks", "counts")}
    for name, garbage in (("stop_ids", ids[:MAX_STOPS]), ("bias_ids", ids), ("bias", torch.nan), ("counts", 7)):
        unread[name][:] = garbage
    logits = random_logits(batch, vocab, 2.0, torch.bfloat16)
    rows = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    kept = {each.name: getattr(sampling, each.name) for each in fields(SamplingRows)}
    out = poisoned(batch, DEVICE)
    with counted_loads({"logits": logits, **kept}, monkeypatch) as loads:
        sample_rows_triton(logits, rows, rows + 5, sampling, out)
    assert loads["logits"] == batch * vocab
    assert {name: loads[name] for name in unread} == dict.fromkeys(unread, 0)
    expected = logits.float().argmax(dim=1).tolist()
    assert (out.tokens.tolist() == expected) == (temperature == 0)


@pytest.mark.skipif(not IS_INTERPRETED, reason="counts the loads of the interpreter")
def test_only_a_row_that_has_biases_or_holds_stops_back_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 512  # one tile
    sampling = allocate_rows(4, vocab, MAX_STOPS, MAX_BIASES, torch.device(DEVICE))
    sampling.num_biases[0], sampling.bias_ids[0, 0], sampling.bias[0, 0] = 1, 40, 9.0
    sampling.stop_ids[:] = 7
    sampling.num_stops[1:3] = 1
    sampling.min_position[1] = 6  # the positions of rows 2 and 3 are past theirs
    logits = torch.zeros(1, vocab, device=DEVICE)
    logits[:, 7] = 1.0
    lists = {"stop_ids": sampling.stop_ids, "bias_ids": sampling.bias_ids, "bias": sampling.bias}
    reads, tokens = [], []
    for number in range(4):
        row, out = torch.tensor([number], dtype=torch.int32, device=DEVICE), poisoned(1, DEVICE)
        with counted_loads(lists, monkeypatch) as loads:
            sample_rows_triton(logits, row, torch.full_like(row, 5), sampling, out)
        reads.append(sum(loads.values()) > 0)
        tokens.append(out.tokens.item())
    assert reads == [True, True, False, False]
    assert tokens == [40, 0, 7, 7]


def test_the_same_rows_choose_the_same_tokens_with_the_same_logprobs_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_tiles_of(2048, monkeypatch)
    vocab, count, repeats = (2100, 4, 2) if IS_INTERPRETED else (128_256, 64, 100)
    rng = random.Random(0)
    seqs = [any_sequence(number, vocab, rng) for number in range(count)]
    logits = random_logits(count, vocab, 2.0, torch.bfloat16)
    found = set()
    for _ in range(repeats):
        sampling, rows, positions = rows_of(seqs, vocab)
        out = poisoned(count, DEVICE)
        sample_rows_triton(logits, rows, positions, sampling, out)
        results = (out.tokens, out.chosen, out.top_ids, out.top, sampling.last_token, sampling.counts)
        found.add(tuple(result.cpu().numpy().tobytes() for result in results))
    assert len(found) == 1
