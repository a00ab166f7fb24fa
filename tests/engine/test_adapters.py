"""What a model computes with adapters: alone, beside others, in chunks, recorded, and in every layout of weights."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.sequence import Readout, SamplingParams, Sequence
from pagoda_server.engine.core.step import EndReason, StepPlan
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels import has_native
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.lora import merged, random_pairs, scale_of, with_adapter, write_adapter
from tests.engine.test_device_runner import Served
from tests.engine.tiny_models import (
    MODELS,
    ONE_OF_EACH_FAMILY,
    VOCAB_SIZE,
    ShuffledBlocks,
    generate,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step,
)

TOLERANCE = 1e-4  # of logits, absolute and relative
RANK, ALPHA = 4, 6


def modules_of(runner: ModelRunner) -> dict[str, tuple[int, int]]:
    assert runner.adapters is not None
    return dict(runner.adapters.modules)


def load(runner: ModelRunner, folder: Path) -> Adapter:
    assert runner.adapters is not None
    return runner.adapters.load(folder)


def logits_of(runner: ModelRunner, seq: Sequence) -> Tensor:
    return runner.logits(next_chunk(seq)).float()


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_logits_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    theirs = save_model(MODELS[name], tmp_path / "model")
    runner = load_runner(tmp_path / "model")
    pairs = random_pairs(modules_of(runner), RANK)
    adapter = load(runner, write_adapter(tmp_path / "adapter", pairs))
    assert (adapter.rank, len(adapter.identity)) == (RANK, 32)
    with torch.inference_mode():
        tokens = random_prompt(19, seed=1)
        expected = merged(theirs, pairs, scale_of(ALPHA, RANK))(torch.tensor([tokens])).logits[0]
        base = theirs(torch.tensor([tokens])).logits[0]
    found = logits_of(runner, with_adapter(ShuffledBlocks(runner).sequence(tokens, 1), adapter, 2))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert not torch.allclose(base, expected, atol=0.1), "an adapter that changes little tests nothing"


@dataclass(frozen=True)
class Adapted:
    """A runner of one layout of weights, and three adapters: two of all products, one of some."""

    settings: dict[str, Any]
    runner: ModelRunner
    adapters: list[Adapter]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Any]:
    folder = tmp_path_factory.mktemp("lora")
    config = copy.deepcopy(MODELS["qwen2"])
    config.head_dim, config.hidden_size = 16, 16 * config.num_attention_heads  # there is compiled attention for it
    theirs = save_model(config, folder / "model")
    runner = load_runner(folder / "model")
    modules = modules_of(runner)
    some = {name: shape for name, shape in modules.items() if name.endswith(("q_proj", "v_proj", "up_proj"))}
    made = [random_pairs(modules, RANK, seed=1), random_pairs(modules, 1, seed=2), random_pairs(some, 7, seed=3)]
    paths = [
        write_adapter(folder / str(number), pairs, r=len(next(iter(pairs.values()))[0]), use_rslora=number == 2)
        for number, pairs in enumerate(made)
    ]
    return folder / "model", paths, (theirs, made)


# dtype, quantization, and whether a row's base product depends on it alone, as some fast products do not.
LAYOUTS = [
    ("float32", "none", True),
    ("bfloat16", "none", True),
    ("bfloat16", "int8", True),
    ("float32", "int4", True),
    ("bfloat16", "int4", True),
    ("bfloat16", "none", False),
    ("bfloat16", "int8", False),
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def adapted(request: pytest.FixtureRequest, folders: tuple[Path, list[Path], Any]) -> Adapted:
    dtype, quantization, is_deterministic = request.param
    if (quantization != "none" or is_deterministic) and not has_native():
        pytest.skip("there is no compiled code")
    settings = {"dtype": dtype, "quantization": quantization, "deterministic": is_deterministic}
    runner = load_runner(folders[0], **settings)
    return Adapted(settings, runner, [load(runner, path) for path in folders[1]])


def test_adapters_side_by_side_are_each_the_merged_model(folders: tuple[Path, list[Path], Any]) -> None:
    """In float32 and in chunks, one with a rank-stabilized scale: tokens are those of a greedy search."""
    folder, paths, (theirs, made) = folders
    runner = load_runner(folder)
    blocks = ShuffledBlocks(runner)
    adapters = [None, *(load(runner, path) for path in paths)]
    scales = [scale_of(ALPHA, RANK), scale_of(ALPHA, 1), scale_of(ALPHA, 7, is_stabilized=True)]
    models = [theirs, *(merged(theirs, pairs, scale) for pairs, scale in zip(made, scales, strict=True))]
    prompts = [random_prompt(9 + 3 * number, seed=number) for number in range(4)]
    seqs = [
        with_adapter(blocks.sequence(prompt, 8), adapter, slot)
        for slot, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    while any(seq.output_len < 8 for seq in seqs):
        step(runner, [next_chunk(seq, 5) for seq in seqs if seq.output_len < 8])
    for model, prompt, seq in zip(models, prompts, seqs, strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([seq.tokens[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = rows.gather(1, torch.tensor(seq.tokens[len(prompt) :])[:, None])[:, 0]
        best = rows.max(dim=1).values
        assert (best - chosen <= 2 * (TOLERANCE + TOLERANCE * best.abs())).all()


def test_a_sequence_has_the_same_bits_alone_and_beside_other_adapters(adapted: Adapted) -> None:
    if not adapted.settings["deterministic"]:
        pytest.skip("its base products depend on the number of rows")
    runner, adapters = adapted.runner, [None, *adapted.adapters]
    blocks, draw = ShuffledBlocks(runner), random.Random(0)

    def sequences() -> list[Sequence]:
        return [
            with_adapter(blocks.sequence(random_prompt(5 + number, seed=number), 12), adapters[number % 4], number % 4)
            for number in range(6)
        ]

    alone = [generate(runner, seq, 10) for seq in sequences()]
    together = sequences()
    while running := [seq for seq in together if seq.output_len < 10]:
        step(
            runner, [next_chunk(seq, draw.randint(1, 4)) for seq in draw.sample(running, draw.randint(1, len(running)))]
        )
    assert [seq.tokens[seq.request.prompt_len :] for seq in together] == alone
    for seq, index in ((together[0], 0), (together[1], 1)):  # logits, not only tokens
        last = with_adapter(blocks.sequence(seq.tokens, 1), adapters[index], index)
        other = with_adapter(blocks.sequence(seq.tokens, 1), adapters[index], index + 4)
        assert torch.equal(logits_of(runner, last), logits_of(runner, other))


def test_base_rows_beside_adapters_are_those_of_a_runner_without(
    adapted: Adapted, folders: tuple[Path, list[Path], Any]
) -> None:
    runner = adapted.runner
    without = load_runner(folders[0], **adapted.settings, max_adapters=0)
    assert without.adapters is None
    found: list[tuple[list[int], Tensor]] = []
    for each in (runner, without):
        blocks = ShuffledBlocks(each)
        base = blocks.sequence(random_prompt(11, seed=5), 12)
        beside = blocks.sequence(random_prompt(8, seed=6), 12)
        if each is runner:
            with_adapter(beside, adapted.adapters[0], 0)
        for _ in range(10):
            step(each, [next_chunk(base), next_chunk(beside)])
        found.append((base.tokens, logits_of(each, blocks.sequence(base.tokens, 1))))
    (tokens, logits), (expected_tokens, expected_logits) = found
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)


def test_a_slot_that_another_adapter_gets_computes_with_that(adapted: Adapted) -> None:
    runner, (first, second, _) = adapted.runner, adapted.adapters
    blocks, tokens = ShuffledBlocks(runner), random_prompt(7, seed=3)

    def output(adapter: Adapter, slot: int) -> list[int]:
        return generate(runner, with_adapter(blocks.sequence(tokens, 6), adapter, slot), 6)

    expected = [output(first, 0), output(second, 1)]
    assert [output(first, 5), output(second, 5)] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("has_drafts", [False, True])
def test_what_is_cached_preempted_and_drafted_is_what_each_adapter_computes_alone(
    adapted: Adapted, has_drafts: bool
) -> None:
    """More adapters than slots, fewer blocks than all need, and prompts that share their first tokens."""
    if not adapted.settings["deterministic"]:
        pytest.skip("its base products depend on the number of rows")
    runner, adapters = adapted.runner, [None, *adapted.adapters]
    asked = [
        ([*random_prompt(14, seed=number % 2), *random_prompt(number, seed=number)], adapters[number % 4])
        for number in range(12)
    ]
    params = SamplingParams(max_tokens=14)
    alone = []
    for prompt, adapter in asked:
        alone.append(generate(runner, with_adapter(ShuffledBlocks(runner).sequence(prompt, 14), adapter, 0), 14))

    def future(seq: Sequence, most: int) -> list[int]:
        return [*asked[seq.id][0], *alone[seq.id]][seq.num_tokens : seq.num_tokens + most]

    speculation = AlwaysDrafts(Oracle(future, 0.7, VOCAB_SIZE), 4, VOCAB_SIZE) if has_drafts else None
    served = Served(runner, 22, speculation=speculation, num_adapter_slots=2)
    seqs = []
    for prompt, adapter in asked:
        seqs.append(served.add(prompt, params, adapter=adapter))
        served.step()
    served.run()
    assert [served.told[seq.id] for seq in seqs] == alone
    assert served.scheduler.counters.preemptions > 0
    assert served.scheduler.counters.cached_tokens > 0
    if has_drafts:
        assert served.scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_values_that_are_not_finite_with_their_scale_are_refused_with_the_module(
    adapted: Adapted, tmp_path: Path, value: float
) -> None:
    """One of them, in a merged product whose other parts are sound."""
    pairs = random_pairs(modules_of(adapted.runner), RANK)
    name = next(each for each in pairs if each.endswith("k_proj"))
    pairs[name][1][3, 1] = value
    with pytest.raises(CheckpointError, match=f"{name} has values that are not finite"):
        load(adapted.runner, write_adapter(tmp_path / "a", pairs, lora_alpha=10 * RANK))


@pytest.mark.parametrize("is_read", [False, True])
def test_values_that_overflow_end_the_sequences_of_their_adapter_alone(
    adapted: Adapted, tmp_path: Path, is_read: bool
) -> None:
    runner = adapted.runner
    folder = write_adapter(tmp_path / "huge", random_pairs(modules_of(runner), RANK, size=1e18))
    huge, params = load(runner, folder), SamplingParams(max_tokens=8)
    alone = generate(runner, with_adapter(ShuffledBlocks(runner).sequence(random_prompt(9, seed=1), 8), None, 0), 8)
    served = Served(runner, 60, num_adapter_slots=2)
    readout = Readout(1, 0, "last") if is_read else None
    broken = [served.add(random_prompt(9, seed=seed), params, adapter=huge, readout=readout) for seed in range(2)]
    base = served.add(random_prompt(9, seed=1), params)
    other = served.add(random_prompt(9, seed=1), params, adapter=adapted.adapters[0])
    served.run()
    reasons = {ended.seq.id: (ended.reason, ended.field) for ended in served.ended}
    assert [reasons[seq.id] for seq in broken] == [(EndReason.REJECTED, "lora_name")] * 2
    assert [reasons[seq.id] for seq in (base, other)] == [(EndReason.LENGTH, "")] * 2
    if adapted.settings["deterministic"]:
        assert served.told[base.id] == alone
    again = served.add(random_prompt(9, seed=1), params)  # its blocks are those that the broken ones have left
    served.run()
    assert {ended.seq.id: ended.reason for ended in served.ended}[again.id] is EndReason.LENGTH


def test_a_prompt_with_an_adapter_is_read_as_it_is_computed(adapted: Adapted) -> None:
    """Readouts take the hidden states of the same layers."""
    runner, blocks = adapted.runner, ShuffledBlocks(adapted.runner)
    tokens = random_prompt(9, seed=4)
    vectors = []
    for slot, adapter in enumerate([None, *adapted.adapters[:2]]):
        seq = with_adapter(blocks.sequence(tokens, 1), adapter, slot)
        object.__setattr__(seq.request, "readout", Readout(1, 0, "last"))
        sampled = runner.execute(StepPlan([next_chunk(seq)]))
        vectors.append(sampled.readings[0].hidden)
    assert len({tuple(vector) for vector in vectors}) == 3
