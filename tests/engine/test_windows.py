"""Layers with a sliding window give blocks back, and no token changes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from pagoda_server.engine.core.layer_groups import LayerGroups
from pagoda_server.engine.core.sequence import EndReason, Request, SamplingParams, Sequence, State
from pagoda_server.engine.kv.windows import longest_held, most_held
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.timing.cost_model import CostModel
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import SteppedEngine
from tests.engine.test_device_runner import Served, fill_cache
from tests.engine.test_scheduler import prompt
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, load_runner, random_prompt, save_model

GEMMA_LIKE = (None, 1024, 1024, 1024, 1024, 1024)
FAMILIES = ["gemma3", "olmo3", "exaone4", "ministral", "qwen2 with a sliding window on its upper layer"]


def layers(count: int, every: int, window: int) -> list[int | None]:
    """Return the windows of layers of which each `every`th has none."""
    return [window if number % every else None for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("windows", "size", "num_groups"),
    [
        (layers(18, 6, 512), 3, 6),
        (layers(26, 6, 512), 4, 7),  # 22 layers with a window in 6 groups of 4
        (layers(24, 2, 128), 12, 2),
        (layers(4, 1, 512), 4, 1),
        ([512] * 4, 4, 1),
        (layers(12, 2, 30_000), 12, 1),  # no sequence is much longer
    ],
)
def test_groups_are_of_one_size_and_waste_little(windows: list[int | None], size: int, num_groups: int) -> None:
    groups = LayerGroups.of(windows, 32_768)
    assert (groups.size, len(groups.windows), groups.windows[0]) == (size, num_groups, None)
    assert len(set(groups.places)) == len(windows), "each layer has a place of its own"
    assert all(0 <= index < size for _, index in groups.places)
    if num_groups > 1:
        assert [groups.windows[group] for group in groups.group_of] == windows


def test_a_long_sequence_of_a_model_with_windows_holds_a_quarter_of_the_blocks_at_most() -> None:
    length, columns = 32_768, 32_768 // 16 + 2
    engine = SteppedEngine(
        num_blocks=6 * columns, block_size=16, token_budget=2048, max_model_len=length + 20, windows=GEMMA_LIKE
    )
    seq = engine.add(prompt(length), max_tokens=10)
    most = 0
    while not engine.step().is_empty:
        most = max(most, engine.pool.num_referenced)
    assert engine.outputs[seq.id] == engine.expected(seq)
    assert most <= 0.25 * 6 * columns, "with one table, each of the six groups holds all tokens"
    assert engine.pool.num_pledged == engine.pool.num_referenced == 0


def test_a_sequence_is_refused_only_if_a_pool_cannot_hold_it() -> None:
    span = most_held(9, 16, 4)
    assert longest_held(span + 30, (None, 9), 16, 4) == 4 * 30 > 4 * span
    assert longest_held(20, (None, 9), 16, 4) == 4 * 10, "a short one needs as many of each"
    engine = SteppedEngine(num_blocks=span + 30, max_model_len=500, windows=(None, 9))
    fits, refused = engine.add(prompt(100), max_tokens=20), engine.add(prompt(100), max_tokens=21)
    engine.run()
    assert engine.ended[fits.id].reason is EndReason.LENGTH
    assert engine.outputs[fits.id] == engine.expected(fits)
    assert "the KV cache holds 120" in engine.ended[refused.id].detail


def test_others_use_what_a_sequence_gave_back() -> None:
    """Both could not run at once if each held all of its tokens for all layers."""
    engine = SteppedEngine(num_blocks=120, max_model_len=200, windows=(None, 9, 9))
    seqs = [engine.add(prompt(100, at), max_tokens=60) for at in range(2)]
    together = 0
    while not engine.step().is_empty:
        together += len(engine.scheduler.running) == 2
    assert together > 50
    assert not engine.scheduler.counters.preemptions
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)


@pytest.mark.parametrize("common", [40, 80, 100])
def test_a_prompt_starts_from_any_cached_prefix_while_the_windows_before_it_are_cached(common: int) -> None:
    engine = SteppedEngine(num_blocks=200, max_model_len=200, windows=(None, 9, 5))
    engine.add(prompt(100), max_tokens=2)
    engine.run()
    seq = engine.add([*prompt(100)[:common], *prompt(30, 7)], max_tokens=5)
    engine.run()
    assert seq.account.cached_tokens == common
    assert engine.outputs[seq.id] == engine.expected(seq)


def test_a_prefix_is_used_as_far_as_its_windows_are_left() -> None:
    """What the windows passed is evicted first: only the end of an old sequence can then be continued."""
    engine = SteppedEngine(num_blocks=94, max_model_len=200, windows=(None, 9))
    first = engine.add(prompt(100), max_tokens=4)
    engine.run()
    engine.add(prompt(100, 3), max_tokens=4)
    engine.run()
    end = engine.add(list(first.tokens), max_tokens=4)
    engine.run()
    middle = engine.add(prompt(100)[:30], max_tokens=4)
    engine.run()
    assert (middle.account.cached_tokens, end.account.cached_tokens) == (0, 100)
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in (middle, end))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 41, 44])
def test_siblings_share_what_their_windows_see_of_the_prompt(length: int, lookahead: int) -> None:
    engine = SteppedEngine(max_num_seqs=3, num_blocks=90, prefix_caching=False, lookahead=lookahead, windows=(None, 7))
    seqs = engine.add_siblings(5, prompt(length), max_tokens=12)
    tokens = 0
    while engine.scheduler.num_waiting or engine.scheduler.running or engine.steps:
        tokens += engine.step().num_tokens
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in seqs)
    again = length - (length - 1) // 4 * 4  # of the prompt's last block
    assert tokens - 5 * 11 <= length + 4 * (again if length > 4 else length)
    assert engine.pool.num_referenced == engine.pool.num_pledged == 0


class Poisoned:
    """Writes NaN to all blocks that no sequence holds, before each step."""

    lookahead = 0

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.info = runner, runner.info
        self.served: Served | None = None
        self.num_given_back = 0

    def launch(self, plan):  # type: ignore[no-untyped-def]
        assert self.served is not None
        held = {
            block
            for seq in self.served.scheduler.running
            for table in (seq.blocks, *(window.held for window in seq.blocks.windows))
            for block in table
        } | {block for blocks in self.served.scheduler._tables.prompts.held() for block in blocks}
        free = [block for block in range(self.served.pool.num_blocks) if block not in held]
        self.num_given_back += any(each.first for seq in self.served.scheduler.running for each in seq.blocks.windows)
        for kv in self.runner._pages:
            kv.keys[free] = kv.values[free] = math.nan
        return self.runner.launch(plan)

    def recover(self) -> None:
        self.runner.recover()


@pytest.fixture(scope="module", params=FAMILIES)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model, and what transformers generates greedily behind each of PROMPTS."""
    folder = tmp_path_factory.mktemp("model")
    theirs = save_model(MODELS[request.param], folder)
    outputs = []
    for tokens in PROMPTS:
        ids = torch.tensor([tokens])
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                ids = torch.cat([ids, theirs(ids).logits[:, -1:].argmax(-1)], dim=1)
        outputs.append(ids[0, len(tokens) :].tolist())
    return folder, outputs


PROMPTS = [random_prompt(length, seed=length) for length in (33, 5, 47, 12, 21)]
MAX_TOKENS = 20


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_families_with_windows_give_transformers_tokens_and_read_nothing_behind_a_window(
    expected: tuple[Path, list[list[int]]], prefix_caching: bool, drafts: bool
) -> None:
    """In batches and chunks, after preemptions, two sequences a prompt; freed blocks hold NaN if none is cached."""
    folder, outputs = expected
    runner = load_runner(folder, max_num_seqs=6, token_budget=19, max_model_len=120)
    fill_cache(runner, math.nan)
    assert len(runner.info.kv_cache.groups.windows) == 2
    poisoned = Poisoned(runner)

    def future(seq: Sequence, count: int) -> list[int]:
        return outputs[seq.id // 2][seq.output_len : seq.output_len + count]

    rule = AlwaysDrafts(Oracle(future, 0.7, VOCAB_SIZE), 4, VOCAB_SIZE) if drafts else None
    served = Served(runner if prefix_caching else poisoned, 36, prefix_caching=prefix_caching, speculation=rule)
    poisoned.served = served
    numbers, seqs = itertools.count(), []
    for tokens in PROMPTS:
        request = Request(len(tokens), shares_prompt=True)
        for _ in range(2):
            params = SamplingParams(max_tokens=MAX_TOKENS)
            seqs.append(Sequence(next(numbers), list(tokens), request, params))
            served.scheduler.add(seqs[-1])
    served.run()
    assert all(ended.reason is EndReason.LENGTH for ended in served.ended), served.ended
    for seq in seqs:
        assert seq.state is State.FINISHED
        assert seq.tokens[seq.request.prompt_len :] == outputs[seq.id // 2]
    assert served.scheduler.counters.preemptions > 0
    assert prefix_caching or poisoned.num_given_back > 10


def test_families_with_windows_load_what_the_device_had_to_evict(
    expected: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "is_worth_saving", lambda *_: True)
    monkeypatch.setattr(CostModel, "is_worth_loading", lambda *_: True)
    folder, outputs = expected
    runner = load_runner(folder, max_num_seqs=6, token_budget=19, max_model_len=120, host_kv_gb=0.001)
    fill_cache(runner, math.nan)
    served = Served(runner, 40, host_blocks=min(300, runner.info.num_host_blocks))
    for _ in range(3):
        for tokens, output in zip(PROMPTS, outputs, strict=True):
            seq = served.add(list(tokens), SamplingParams(max_tokens=MAX_TOKENS))
            served.run()
            assert seq.tokens[len(tokens) :] == output
    assert served.scheduler.host.load().hit_tokens > 100
    served.scheduler.check_integrity()


def test_a_sequence_that_is_preempted_before_its_first_token_holds_nothing_for_its_siblings() -> None:
    engine = SteppedEngine(block_size=4, lookahead=1, windows=(None, 8))
    first, *others = engine.add_siblings(3, prompt(11), max_tokens=5)
    engine.step()  # the step that computes the prompt is in flight
    engine.scheduler._preempt(first)
    engine.run()
    assert all(engine.outputs[seq.id] == engine.expected(seq) for seq in [first, *others])
