"""Recorded decode steps give the same bits as the same steps computed op by op."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels import (
    UNQUANTIZED,
    Recording,
    has_native,
    has_native_int8_weight,
    load_backend,
    set_num_threads,
)
from pagoda_server.kernels.native_module import native
from pagoda_server.settings.request import MAX_DRAFT_TOKENS
from tests.engine.test_device_runner import Served
from tests.engine.tiny_models import (
    MODELS,
    ONE_OF_EACH_FAMILY,
    ShuffledBlocks,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step,
    step_logits,
)

COMPILED = [("int8", False), ("int8", True), ("int4", False), ("int4", True), (UNQUANTIZED, True)]
if has_native_int8_weight():
    COMPILED.append(("int8-weight", False))

pytestmark = pytest.mark.skipif(not has_native(), reason="products do not run in compiled code here")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model whose head size has compiled attention."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            config = copy.deepcopy(MODELS[name])
            config.head_dim, config.hidden_size = 16, 16 * config.num_attention_heads
            if config.model_type == "opt":
                config.word_embed_proj_dim = config.hidden_size
            folders[name] = tmp_path_factory.mktemp("model")
            save_model(config, folders[name])
        return folders[name]

    return save


def load(folder: Path, dtype: str = "float32", **settings: int | str) -> ModelRunner:
    runner = load_runner(folder, dtype=dtype, quantization="int8", **settings)
    assert runner._recorded is not None
    return runner


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list that grows whenever Python calls an op."""
    op, calls = getattr(native, name), []

    def count(*arguments: object) -> object:
        calls.append(name)
        return op(*arguments)

    monkeypatch.setattr(native, name, count)
    return calls


def check_decodes(runner: ModelRunner, seqs: list[Sequence]) -> None:
    """Return a step's logits: op by op, recorded, and replayed."""
    assert runner._recorded is not None
    chunks = [next_chunk(seq) for seq in seqs]
    with torch.inference_mode():
        expected = step_logits(runner, chunks)
        for _ in range(2):
            assert torch.equal(runner._recorded.logits(chunks), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*ONE_OF_EACH_FAMILY, "smollm", "llama3 rope"])
def test_logits_have_the_same_bits_with_any_sequences_in_any_order(
    saved: Callable[[str], Path], name: str, dtype: str
) -> None:
    runner = load(saved(name), dtype, threads=2)
    blocks, shuffled = ShuffledBlocks(runner), random.Random(0)
    seqs = [blocks.sequence(random_prompt(length, seed=length), 20) for length in (1, 3, 15, 16, 17, 40, 70)]
    step(runner, [next_chunk(seq) for seq in seqs])
    for count in (7, 1, 2, 7, 5, 1, 6, 7, 3, 2):
        batch = shuffled.sample(seqs, count)
        check_decodes(runner, batch)
        step(runner, [next_chunk(seq) for seq in batch])
    moved = seqs[2]  # as after a preemption: other blocks, and all its tokens at once
    moved.blocks, moved.num_computed = blocks.sequence(moved.tokens, 20).blocks, 0
    step(runner, [next_chunk(moved)])
    check_decodes(runner, seqs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("weights", "is_deterministic"), COMPILED)
@pytest.mark.parametrize("model", ["qwen3", "olmo2", "qwen2_moe"])
def test_every_compiled_backend_can_be_recorded(
    saved: Callable[[str], Path],
    model: str,
    weights: str,
    is_deterministic: bool,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = load_backend("native", weights, is_deterministic)
    monkeypatch.setattr("pagoda_server.engine.runners.loaded_model.load_backend", lambda *_: backend)
    runner = load(saved(model), dtype)
    assert runner.info.kernel_backend == str(backend)
    blocks = ShuffledBlocks(runner)
    seqs = [blocks.sequence(random_prompt(length, seed=length), 20) for length in (1, 9, 30)]
    step(runner, [next_chunk(seq) for seq in seqs])
    for batch in (seqs, seqs[1:], seqs):
        check_decodes(runner, batch)
        step(runner, [next_chunk(seq) for seq in batch])


def test_python_calls_no_op_from_the_second_step_of_a_size_on(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(saved("qwen3"))
    blocks = ShuffledBlocks(runner)
    seqs = [blocks.sequence(random_prompt(5, seed=at), 20) for at in range(3)]
    step(runner, [next_chunk(seq) for seq in seqs])
    calls = [count_calls(monkeypatch, name) for name in ("norm", "paged_attention", "head_norms")]

    def ops(batch: list[Sequence]) -> int:
        before = sum(map(len, calls))
        step(runner, [next_chunk(seq) for seq in batch])
        return sum(map(len, calls)) - before

    every = 1 + 4 * 2
    assert [ops(seqs), ops(seqs[:1]), ops(seqs), ops(seqs[1:2]), ops(seqs[1:])] == [every, every, 0, 0, every]
    seqs.append(blocks.sequence(random_prompt(5, seed=9), 20))
    assert ops(seqs) == every, "a step with a prompt is never recorded"
    assert ops(seqs[:2]) == ops(seqs[:3]) == 0


def test_steps_of_more_sequences_than_run_at_once_are_computed_op_by_op(saved: Callable[[str], Path]) -> None:
    runner, most = load(saved("smollm"), max_num_seqs=2), 1 + MAX_DRAFT_TOKENS  # rows of one sequence with drafts
    assert runner._recorded is not None
    blocks = ShuffledBlocks(runner)
    seqs = [blocks.sequence(random_prompt(5, seed=at), 20) for at in range(most + 1)]
    for _ in range(3):
        step(runner, [next_chunk(seq) for seq in seqs])
    rooms = [runner._recorded.has_room_for([next_chunk(seq) for seq in seqs[:count]]) for count in (most, most + 1)]
    assert rooms == [True, False]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["smollm", "mistral with a sliding window"])
def test_preempted_and_copied_sequences_are_served_the_same(
    saved: Callable[[str], Path], name: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = watch_copies(monkeypatch)

    def serve(runner: ModelRunner) -> tuple[dict[int, list[int]], object]:
        served = Served(runner, 30)
        params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, logprobs=3)
        request = Request(11, shares_prompt=True)
        for at in range(4):  # siblings, which copy the block that their prompt ends in
            prompt = random_prompt(11, seed=4)
            served.scheduler.add(Sequence(100 + at, prompt, request, replace(params, seed=at)))
        for at in range(3):
            served.add(random_prompt(5 + at, seed=at), replace(params, seed=at))
        served.run()
        assert served.scheduler.counters.preemptions > 0
        return served.told, served.logprobs

    recorded, eager = (load(saved(name), "bfloat16", kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    eager._recorded = None
    assert serve(recorded) == serve(eager)
    assert len(copied) >= 2
    assert recorded._recorded is not None
    assert len(recorded._recorded._steps) > 2


def watch_copies(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list that gathers the plans that copy blocks."""
    execute, plans = ModelRunner.execute, []

    def watched(self: ModelRunner, plan: StepPlan) -> object:
        if plan.copies:
            plans.append(plan)
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", watched)
    return plans


def test_a_step_is_recorded_again_if_its_recording_cannot_be_replayed(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(saved("smollm"))
    seq = ShuffledBlocks(runner).sequence(random_prompt(5, seed=1), 20)
    for _ in range(3):
        step(runner, [next_chunk(seq)])
    assert runner._recorded is not None
    first = runner._recorded._steps[1, False].recording
    with monkeypatch.context() as patch:
        patch.setattr(Recording, "replay", lambda _: False)
        check_decodes(runner, [seq])
    assert runner._recorded._steps[1, False].recording is not first
    check_decodes(runner, [seq])


def test_a_step_says_whether_it_was_recorded(saved: Callable[[str], Path]) -> None:
    runner = load(saved("smollm"))
    blocks = ShuffledBlocks(runner)
    seqs = [blocks.sequence(random_prompt(5, seed=at), 20) for at in range(3)]
    step(runner, [next_chunk(seq) for seq in seqs])

    def is_first(chunks: list[Chunk]) -> bool:
        return runner.execute(StepPlan(chunks)).is_first

    chunks = [next_chunk(seq) for seq in seqs]
    assert [is_first(chunks[:count]) for count in (3, 1, 3, 2, 1, 2)] == [True, True, False, True, False, False]
    assert not is_first([next_chunk(blocks.sequence(random_prompt(5, seed=9), 20))]), "prompts are never recorded"


def test_threads_can_change_between_a_recording_and_its_replay(saved: Callable[[str], Path]) -> None:
    runner = load(saved("smollm"), threads=2)
    seqs = ShuffledBlocks(runner)
    batch = [seqs.sequence(random_prompt(length, seed=length), 20) for length in (40, 3)]
    step(runner, [next_chunk(seq) for seq in batch])
    threads = torch.get_num_threads()
    try:
        for number in (2, 1, 3):
            set_num_threads(number)
            check_decodes(runner, batch)
    finally:
        set_num_threads(threads)


def test_nothing_is_recorded_where_an_op_is_not_of_the_compiled_module(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_server.kernels.backend.is_compiled_whole", lambda _: False)
    for settings in ({"dtype": "float16"}, {"dtype": "float32", "quantization": "none"}):
        assert load_runner(saved("smollm"), **settings)._recorded is None
