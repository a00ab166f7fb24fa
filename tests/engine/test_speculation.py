"""Drafts change no token: a runner and a scheduler with drafts give what they give without, whatever is guessed."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import EndReason, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan, TokenLogprobs
from pagoda_server.engine.drafting import PromptLookup, Speculation
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.cpu.draft_model import DraftModel
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.sampling import AllowedTokens
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels import has_native
from pagoda_server.settings.engine import EngineConfig
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, ShuffledBlocks, load_runner, random_prompt, save_model, step
from tests.engine.unreliable import UnreliableRunner

needs_native = pytest.mark.skipif(not has_native(), reason="needs compiled code")
BLOCK_SIZE = 4
NUM_BLOCKS = 36  # fewer than the sequences of a schedule want at once


@dataclass
class Served:
    """What came of each sequence of a schedule, by its number."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    ends: dict[int, EndReason] = field(default_factory=dict)
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = copy.deepcopy(MODELS["smollm"])
    config.head_dim = 16
    folder = tmp_path_factory.mktemp("model")
    save_model(config, folder)
    return folder


def requests_of(seed: int) -> list[list[Sequence]]:
    """Draw requests of every kind of sampling; some share the beginning of their prompts."""
    draw = random.Random(seed)
    common = random_prompt(30, seed)
    groups = []
    for number in range(9):
        prompt = common[: draw.choice((0, 13, 26))] + random_prompt(draw.randint(1, 12), 100 * seed + number)
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.9)),
            seed=draw.randrange(1000),
            repetition_penalty=draw.choice((1.0, 1.3)),
            presence_penalty=draw.choice((0.0, 0.4)),
            frequency_penalty=draw.choice((0.0, 0.2)),
            logit_bias=draw.choice(((), ((7, 2.0),))),
            max_tokens=draw.randint(1, 36),
            min_tokens=draw.choice((0, 12)),
            stop_token_ids=frozenset(draw.sample(range(VOCAB_SIZE), 4)),
            logprobs=draw.choice((None, 0, 3)),
        )
        params = replace(params, min_tokens=min(params.min_tokens, params.max_tokens))
        mask = draw.choice((None, AllowedTokens(range(3, 12))))
        count = draw.choice((1, 1, 3))
        request = Request(len(prompt), shares_prompt=count > 1)
        seqs = [replace(params, seed=params.seed + at) for at in range(count)]
        groups.append([Sequence(10 * number + at, list(prompt), request, each, mask) for at, each in enumerate(seqs)])
    return groups


def serve(runner: ModelRunner, seed: int, speculation: Speculation | None, failures: int = 0) -> Served:
    """Serve a drawn schedule to its end: sequences arrive between steps, and one is aborted."""
    now, served, draw = 0.0, Served(), random.Random(seed)
    windows = runner.info.kv_cache.groups.windows
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS * len(windows), BLOCK_SIZE),
        max_num_seqs=6,
        token_budget=24,
        max_model_len=80,
        clock=lambda: now,
        windows=windows,
        speculation=speculation,
    )
    unreliable = UnreliableRunner(runner)
    steps = StepsInFlight(scheduler, unreliable)
    waiting = requests_of(seed)
    while waiting or scheduler.running or scheduler.num_waiting:
        if waiting and draw.random() < 0.5:
            for seq in waiting.pop(0):
                scheduler.add(seq)
        if failures and draw.random() < 0.1:
            unreliable.failures = [draw.choice(("at launch", "computed"))]
        plan = scheduler.schedule()
        assert plan.num_tokens <= 24
        now += 1.0
        if not plan.is_empty:
            steps.launch(plan)
        if len(steps):
            steps.commit_oldest()
        scheduler.check_integrity()
        output = scheduler.take_output()
        for id, token, logprobs in zip(output.sequences, output.tokens, output.logprobs, strict=True):
            served.tokens.setdefault(id, []).append(token)
            served.logprobs.setdefault(id, []).append(logprobs)
        for ended in output.ended:
            served.ends[ended.seq.id] = ended.reason
            served.drafted += ended.seq.account.drafted_tokens
            served.accepted += ended.seq.account.accepted_tokens
    served.preemptions = scheduler.counters.preemptions
    assert (served.drafted, served.accepted) == (scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens)
    return served


def knowing(served: Served, accuracy: float) -> AlwaysDrafts:
    """A rule that always drafts, and whose guesses are what was served, with mistakes."""

    def future(seq: Sequence, count: int) -> list[int]:
        return served.tokens.get(seq.id, [])[seq.output_len : seq.output_len + count]

    return AlwaysDrafts(Oracle(future, accuracy, VOCAB_SIZE), 7, VOCAB_SIZE)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_whatever_is_drafted(folder: Path, seed: int) -> None:
    runner = load_runner(folder)
    without = serve(runner, seed, None)
    assert without.drafted == 0
    for accuracy in (1.0, 0.6):
        drafted = serve(runner, seed, knowing(without, accuracy), failures=seed)
        assert drafted.tokens == without.tokens
        assert drafted.ends == without.ends
        assert drafted.accepted > 0
        assert (drafted.accepted < drafted.drafted) or accuracy == 1.0
        for id, found in without.logprobs.items():
            for one, other in zip(found, drafted.logprobs[id], strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert other.chosen == pytest.approx(one.chosen, abs=1e-3)
                    assert len(other.top_ids) == len(one.top_ids)
    assert without.preemptions > 0


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_deterministic_kernels_give_the_same_bits_with_drafts(folder: Path, quantization: str) -> None:
    runner = load_runner(folder, dtype="bfloat16", quantization=quantization, deterministic=True)
    without = serve(runner, 5, None)
    drafted = serve(runner, 5, knowing(without, 0.8))
    assert drafted.accepted > 0
    assert (drafted.tokens, drafted.logprobs) == (without.tokens, without.logprobs)


@pytest.mark.parametrize("backend", ["recorded", "torch"])
def test_a_row_behind_drafts_is_a_decode(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with drafts chooses what single steps choose, in a step of decodes alone and beside a prompt."""
    runner = load_runner(folder)
    if backend == "torch":
        monkeypatch.setattr(runner, "_recorded", None)
    blocks = ShuffledBlocks(runner)
    params = SamplingParams(temperature=0.8, seed=3, logprobs=2)
    alone = blocks.sequence(random_prompt(20, 1), 10, params)
    while alone.output_len < 10:
        step(runner, [Chunk(alone, alone.num_computed, alone.remaining_len, True)])
    for is_beside_prompt in (False, True):
        seq = blocks.sequence(alone.tokens[:20], 10, params)
        step(runner, [Chunk(seq, 0, 20, True)])
        wrong = (alone.tokens[24] + 1) % VOCAB_SIZE
        chunks = [Chunk(seq, 20, 6, True, (*alone.tokens[21:24], wrong, alone.tokens[25]))]
        if is_beside_prompt:
            chunks.append(Chunk(blocks.sequence(random_prompt(9, 2), 1), 0, 9, True))
        sampled = runner.execute(StepPlan(chunks))
        assert [sampled.tokens[0], *(token for token, _ in sampled.more[0])] == alone.tokens[21:25]
        assert all(logprobs is not None and len(logprobs.top) == 2 for _, logprobs in sampled.more[0])


def test_prompt_lookup_drafts_what_a_repeating_answer_repeats(folder: Path) -> None:
    """Answers of few different tokens repeat themselves, which prompt lookup finds."""
    runner = load_runner(folder)
    without = serve(runner, 1, None)
    drafted = serve(runner, 1, AlwaysDrafts(PromptLookup(), 7, VOCAB_SIZE))
    assert drafted.tokens == without.tokens
    assert drafted.drafted > 0


@pytest.fixture(scope="module")
def with_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_model_that_drafts_for_itself_is_always_right(with_tokenizer: Path) -> None:
    """It draws with the sequence's own noise, so that even drawn tokens are guessed. Long prompts take it a while."""
    runner = load_runner(with_tokenizer)
    drafter = DraftModel(
        EngineConfig(str(with_tokenizer), device="cpu", dtype="float32", token_budget=24, max_num_seqs=6),
        with_tokenizer,
        VOCAB_SIZE,
    )
    without = serve(runner, 2, None)
    drafted = serve(runner, 2, AlwaysDrafts(drafter, 5, VOCAB_SIZE))
    assert drafted.tokens == without.tokens
    assert drafted.accepted == drafted.drafted > 50
    assert drafter.token_s > 0


def test_a_model_that_drafts_for_another_one_recovers_from_refusals(with_tokenizer: Path, tmp_path: Path) -> None:
    config = copy.deepcopy(MODELS["smollm"])
    config.num_hidden_layers = 1
    save_model(config, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    runner = load_runner(with_tokenizer)
    settings = EngineConfig(
        str(with_tokenizer), device="cpu", dtype="float32", token_budget=24, max_num_seqs=6, kv_cache_gb=2e-5
    )
    drafter = DraftModel(settings, tmp_path, VOCAB_SIZE)
    without = serve(runner, 2, None)
    drafted = serve(runner, 2, AlwaysDrafts(drafter, 5, VOCAB_SIZE))
    assert drafted.tokens == without.tokens
    assert 0 < drafted.accepted < drafted.drafted


def test_a_model_with_another_tokenizer_is_refused(with_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{ }")
    with pytest.raises(ConfigError, match="another tokenizer"):
        DraftModel(EngineConfig(str(with_tokenizer), device="cpu"), tmp_path, VOCAB_SIZE)
