from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Draws, sample_cpu
from pagoda_server.kernels.backend import CPU, NATIVE, REFERENCE, Backend
from pagoda_server.kernels.gumbel import gumbel
from pagoda_server.kernels.sample import row_sums
from pagoda_server.kernels.sample_cpu import LEADING_TOKENS
from tests.kernels.backends import BACKENDS
from tests.kernels.plain_noise import noise_key

BOTH = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@dataclass(frozen=True)
class Draw:
    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    seed: int = 0
    position: int = 0


def draws(*rows: Draw) -> Draws:
    return Draws(
        rows=torch.tensor([d.row for d in rows], dtype=torch.int64),
        temperature=torch.tensor([d.temperature for d in rows], dtype=torch.float32),
        top_k=torch.tensor([d.top_k for d in rows], dtype=torch.int64),
        top_p=torch.tensor([d.top_p for d in rows], dtype=torch.float32),
        min_p=torch.tensor([d.min_p for d in rows], dtype=torch.float32),
        top_n_sigma=torch.tensor([d.top_n_sigma for d in rows], dtype=torch.float32),
        seed=torch.tensor([d.seed for d in rows], dtype=torch.int64),
        positions=torch.tensor([d.position for d in rows], dtype=torch.int64),
    )


def drawn(backend: Backend, row: Tensor, count: int = 4000, **rules: float) -> Tensor:
    """How often each token is drawn from one row of logits, over `count` positions."""
    many = draws(*(Draw(row=at, position=at, **rules) for at in range(count)))  # type: ignore[arg-type]
    tokens = backend.sample(row.repeat(count, 1), many)
    return torch.bincount(tokens, minlength=len(row)) / count


def kept_by_hand(
    row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, top_n_sigma: float
) -> set[int]:
    """Tokens that survive the rules, ties included, found by walking down the sorted distribution in Python."""
    least_logit = float(row.max()) - top_n_sigma * pstdev(row.tolist()) if top_n_sigma else -math.inf
    scores = [float(x) / temperature for x in row]
    if top_k:
        least = sorted(scores, reverse=True)[min(top_k, len(scores)) - 1]
        scores = [score if score >= least else -math.inf for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    total, mass, nucleus = sum(weights), 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        mass, nucleus = mass + weight, weight
        if mass >= top_p * total:
            break
    return {
        token
        for token, weight in enumerate(weights)
        if weight > 0 and (top_p == 1 or weight >= nucleus) and weight >= min_p and row[token] >= least_logit
    }


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_do_not_draw_take_their_most_likely_token(backend: Backend, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 301).to(dtype)
    expected = logits.double().argmax(dim=-1)
    assert torch.equal(backend.sample(logits, draws()), expected)
    mixed = backend.sample(logits, draws(Draw(row=1, temperature=100.0), Draw(row=3, temperature=100.0)))
    assert torch.equal(mixed[[0, 2, 4]], expected[[0, 2, 4]])


@BOTH
def test_draws_follow_the_softmax_of_logits_over_temperature(backend: Backend) -> None:
    row = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    for temperature in (0.5, 1.0, 3.0):
        expected = (row / temperature).softmax(dim=0)
        assert (drawn(backend, row, temperature=temperature) - expected).abs().max() < 0.03


@BOTH
@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10_000},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_n_sigma": 0.01},
        {"top_n_sigma": 1.0},
        {"top_n_sigma": 1.0, "temperature": 3.0},
        {"top_n_sigma": 20.0},
        {"top_k": 9, "top_p": 0.6},
        {"top_k": 12, "top_p": 0.9, "top_n_sigma": 1.2},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
        {"top_k": 3, "min_p": 0.01, "temperature": 0.3},
    ],
    ids=str,
)
def test_only_tokens_that_the_rules_keep_are_drawn_and_all_of_them_are(
    backend: Backend, rules: dict[str, float]
) -> None:
    row = torch.randn(23)
    row[4] = row[17]  # a tie
    kept = kept_by_hand(row, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0} | rules)  # type: ignore[arg-type]
    shares = drawn(backend, row, **rules)
    assert {token for token, share in enumerate(shares.tolist()) if share} <= kept
    weights = (row / rules.get("temperature", 1.0)).softmax(dim=0)
    outside = [token for token in range(23) if token not in kept]
    weights[outside] = 0
    assert (shares - weights / weights.sum()).abs().max() < 0.04


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_the_cpu_chooses_what_the_reference_chooses_however_many_tokens_are_kept(spread: float) -> None:
    vocab = LEADING_TOKENS[-1] + 700
    logits = torch.randn(24, vocab) * spread
    rules = [
        {},
        {"top_k": 5},
        {"top_k": LEADING_TOKENS[0]},
        {"top_k": LEADING_TOKENS[0] + 1},
        {"top_k": LEADING_TOKENS[1] + 1},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"top_k": 1000, "top_p": 0.5},
        {"top_k": 300, "top_p": 0.99, "min_p": 0.5},
        {"top_n_sigma": 1.5},
        {"top_n_sigma": 3.0, "top_p": 0.9},
        {"temperature": 1e-10},
        {"temperature": 50.0, "top_p": 0.9},
    ]
    batch = draws(*(Draw(row=at, seed=at, **rules[at % len(rules)]) for at in range(24)))  # type: ignore[arg-type]
    assert torch.equal(CPU.sample(logits, batch), REFERENCE.sample(logits, batch))


RULES: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1e-10},
    {"temperature": 1.2e-38, "top_p": 0.9},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 1000},
    {"top_k": 10_000, "top_p": 0.8},
    {"top_p": 0.95},
    {"top_p": 0.5, "temperature": 3.0},
    {"top_p": 1e-6, "temperature": 50.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.3, "top_p": 0.9, "top_k": 9},
    {"top_n_sigma": 1.0, "top_p": 0.9},
]


def model_like(rows: int, vocab: int) -> Tensor:
    """Logits as models have them: most are far below a few, each row's at another height."""
    logits = 3 * torch.randn(rows, vocab) + 10 * torch.randn(rows, 1)
    few = torch.randint(0, vocab, (rows, min(vocab, 12)))
    return logits.scatter_add_(1, few, torch.empty(few.shape).exponential_(0.2))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 75, 1000, 9001])
def test_every_backend_draws_the_same_tokens(backend: Backend, dtype: torch.dtype, vocab: int) -> None:
    flat = torch.randn(17, vocab) * 0.01
    tied = torch.randn(17, vocab).round()
    banned = model_like(17, vocab).masked_fill_(torch.rand(17, vocab) < 0.7, -torch.inf)
    logits = torch.cat((model_like(51, vocab), flat, tied, banned)).to(dtype)
    logits[5, vocab // 2] = torch.nan
    logits[9, -1] = torch.inf
    for seed in range(3):
        order = torch.randperm(len(logits)).tolist()
        batch = draws(*(Draw(row, seed=seed, position=row, **RULES[at % len(RULES)]) for at, row in enumerate(order)))  # type: ignore[arg-type]
        tokens = backend.sample(logits, batch)
        assert torch.equal(tokens, REFERENCE.sample(logits, batch))
        assert tokens[5] == tokens[9] == -1


@BOTH
def test_scores_that_differ_by_a_rounding_are_ordered_as_the_reference_orders_them(backend: Backend) -> None:
    keys = torch.tensor([noise_key(seed, 0) for seed in range(40)])
    logits = -gumbel(keys[:, None], torch.arange(2000))
    batch = draws(*(Draw(row, seed=row) for row in range(40)))
    assert torch.equal(backend.sample(logits, batch), REFERENCE.sample(logits, batch))


@BOTH
def test_masses_that_end_where_top_p_does_are_cut_as_the_reference_cuts_them(backend: Backend) -> None:
    halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
    for top_p in (0.5, 0.75, 0.875, 0.9375):
        batch = draws(*(Draw(row, seed=row, top_p=top_p) for row in range(200)))
        logits = halves.repeat(200, 1)
        assert torch.equal(backend.sample(logits, batch), REFERENCE.sample(logits, batch))


def test_compiled_code_leaves_hardly_a_draw_to_torch(
    each_instruction_set: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(sample_cpu, "_draw", lambda logits, best, tokens, draws: left.append(len(draws.rows)))
    usual = [rules for rules in RULES if rules.get("top_k", 0) < 257 and "top_n_sigma" not in rules]
    for seed in range(20):
        logits = model_like(3 * len(usual), 4000)
        rows = [Draw(row, seed=seed, position=row, **usual[row % len(usual)]) for row in range(len(logits))]  # type: ignore[arg-type]
        NATIVE.sample(logits, draws(*rows))
    assert sum(left) < 4


@BOTH
def test_banned_tokens_do_not_count_for_the_standard_deviation(backend: Backend) -> None:
    row = torch.full((60,), -torch.inf)
    row[[3, 20, 21, 50]] = torch.tensor([2.0, 1.0, 0.0, -1.0])  # deviation: 1.118
    shares = drawn(backend, row, top_n_sigma=1.0, temperature=5.0)
    assert shares.nonzero()[:, 0].tolist() == [3, 20]


@BOTH
def test_ties_around_the_last_kept_token_are_kept_together(backend: Backend) -> None:
    row = torch.full((600,), -1.0)
    row[100:400] = 2.0  # more than the leading tokens that the CPU looks at first
    for rules in ({"top_k": 10}, {"top_p": 0.1}):
        assert drawn(backend, row, count=2000, **rules).nonzero()[:, 0].min() >= 100
        assert len(drawn(backend, row, count=4000, **rules).nonzero()) > 290


@BOTH
@pytest.mark.parametrize("temperature", [1e-10, 1.2e-38])
def test_the_lowest_temperatures_act_greedily(backend: Backend, temperature: float) -> None:
    logits = torch.randn(4, 50) * 100
    tokens = backend.sample(logits, draws(*(Draw(row, temperature, top_p=0.9, seed=row) for row in range(4))))
    assert torch.equal(tokens, logits.argmax(dim=-1))


@BOTH
def test_a_draw_is_the_same_alone_and_in_any_batch(backend: Backend) -> None:
    logits = torch.randn(16, 999)
    rows = [Draw(row=at, temperature=1.5, top_k=at * 40, top_p=1 - at / 40, seed=at) for at in range(16)]
    together = backend.sample(logits, draws(*rows))
    for draw in rows:
        alone = draws(Draw(0, draw.temperature, draw.top_k, draw.top_p, seed=draw.seed))
        assert backend.sample(logits[draw.row : draw.row + 1], alone)[0] == together[draw.row]


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rules", [None, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_that_holds_nan_or_infinity_has_no_token_and_spoils_no_other(
    backend: Backend, bad: float, rules: dict[str, float] | None
) -> None:
    logits = torch.randn(3, 700)
    batch = draws(*(Draw(row, **rules) for row in range(3))) if rules is not None else draws()  # type: ignore[arg-type]
    expected = backend.sample(logits, batch)
    logits[1, 5] = bad
    assert backend.sample(logits, batch).tolist() == [expected[0], -1, expected[2]]


@BOTH
def test_banned_tokens_are_never_drawn_and_a_row_of_them_has_no_token(backend: Backend) -> None:
    logits = torch.full((2, 9), -torch.inf)
    logits[0, 3] = -50.0
    assert backend.sample(logits, draws(Draw(0, temperature=100.0), Draw(1))).tolist() == [3, -1]


@BOTH
def test_the_most_likely_token_that_is_drawn_is_drawn_under_any_rules_and_masks(backend: Backend) -> None:
    generator, dice = torch.Generator().manual_seed(9), random.Random(9)
    rules: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_n_sigma": 0.5}]
    rules += [{"top_k": 40, "top_p": 0.95, "min_p": 0.01}]
    num_drawn = 0
    for _ in range(20):
        logits = torch.randn(60, 1000, generator=generator) * dice.choice([1.0, 2.0, 4.0])
        logits[7, 3], logits[8, 4] = float("nan"), float("inf")
        many = draws(
            *(Draw(row, 0.8, seed=row, position=dice.randrange(99), **dice.choice(rules)) for row in range(50))
        )
        found, expected = backend.likeliest_if_drawn(logits, many), REFERENCE.likeliest_if_drawn(logits, many)
        is_sure = found >= 0
        assert torch.equal(found[is_sure], expected[is_sure])
        assert (is_sure == (expected >= 0)).float().mean() > 0.99, "compiled code may leave some to torch"
        num_drawn += int(is_sure[:50].sum())
        masked = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.5, float("-inf"))
        rows = is_sure.nonzero()[:, 0]
        masked[rows, found[rows]] = logits[rows, found[rows]]
        assert torch.equal(backend.sample(masked, many)[rows], found[rows])
        assert found[7] == found[8] == -1
    assert 100 < num_drawn < 900


def masks_of(is_allowed: Tensor) -> Tensor:
    """[rows, ceil(vocab / 32)] int32 with a bit for each allowed token, and the bits beyond the vocabulary set."""
    rows, vocab = is_allowed.shape
    padded = torch.nn.functional.pad(is_allowed, (0, -vocab % 32), value=True)
    bits = padded.view(rows, -1, 32).long() << torch.arange(32)
    return bits.sum(dim=-1).to(torch.int32)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 75, 4000])
def test_a_masked_row_takes_its_most_likely_allowed_token_and_the_lowest_of_equal_ones(
    backend: Backend, dtype: torch.dtype, vocab: int
) -> None:
    rows = torch.tensor([5, 0, 6, 2, 9, 8])
    logits = torch.randn(10, vocab).mul(2).round().to(dtype)  # with many equal ones
    is_allowed = torch.rand(len(rows), vocab) < torch.tensor([0, 0.002, 0.1, 0.9, 1, 0])[:, None]
    is_allowed[5, vocab // 2] = True
    tokens = backend.most_likely_allowed(logits, rows, masks_of(is_allowed))
    for token, row, allowed in zip(tokens.tolist(), logits[rows].tolist(), is_allowed, strict=True):
        ids = allowed.nonzero()[:, 0].tolist()
        assert token == max(ids, key=lambda id: (row[id], -id), default=-1)


@BOTH
@pytest.mark.parametrize("vocab", [5, 75, 1000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_allowed_tokens_that_are_nan_or_infinite_break_a_masked_row(
    backend: Backend, bad: float, vocab: int
) -> None:
    for at in (0, vocab // 2, vocab - 1):
        logits = torch.randn(4, vocab)
        logits[1:, at] = bad
        is_allowed = torch.ones(4, vocab, dtype=torch.bool)
        is_allowed[2, at] = False
        is_allowed[3] = False
        is_allowed[3, at] = True
        finite = logits.nan_to_num(nan=-1e9, posinf=-1e9, neginf=-1e9).argmax(dim=-1).tolist()
        second = finite[1] if bad < 0 else -1
        tokens = backend.most_likely_allowed(logits, torch.arange(4), masks_of(is_allowed))
        assert tokens.tolist() == [finite[0], second, finite[2], -1]


def test_a_row_has_the_same_sum_alone_and_in_a_batch() -> None:
    torch.set_num_threads(2)
    rows = torch.randn(3, 100_000, dtype=torch.float64)
    together = row_sums(rows)
    assert [row_sums(row[None]).item() for row in rows] == together.tolist()
