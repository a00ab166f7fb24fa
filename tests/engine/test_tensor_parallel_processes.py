"""A group of processes generates what one process does, step by step, and ends with any of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda_server.engine.core.errors import ConfigError, EngineError
from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.runners import readings
from pagoda_server.engine.runners.cpu.leader import Leader
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.settings import EXIT_FAILURE, EngineConfig
from tests.engine.test_readouts import READOUTS, Served
from tests.engine.test_speculation import knowing, serve
from tests.engine.test_tensor_parallel import logits_of, settings_of
from tests.engine.tiny_models import VOCAB_SIZE, ShuffledBlocks, load_runner, next_chunk, random_prompt, saved_model

pytestmark = pytest.mark.timeout(200)


class Group:
    """
    lost  set once a rank has ended that was not asked to
    """

    def __init__(self, config: EngineConfig) -> None:
        self.lost = threading.Event()
        self.leader = Leader(config, self.lost.set)
        try:
            self.runner = ModelRunner(config, leader=self.leader)
        except BaseException:
            self.leader.close()
            raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("mistral with a sliding window", tmp_path_factory)


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.thorough)])
def group(folder: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    found = Group(settings_of(folder, tensor_parallel=request.param))
    yield found
    found.leader.close()


def test_a_group_serves_the_tokens_of_one_process(folder: Path, group: Group) -> None:
    """Seeded and greedy, with masks, penalties, shared prompts, preemption, drafts and failed steps."""
    for seed in range(2):
        alone = serve(load_runner(folder), seed, None)
        assert alone.preemptions > 0
        together = serve(group.runner, seed, None)
        assert (together.tokens, together.ends) == (alone.tokens, alone.ends)
        drafted = serve(group.runner, seed, knowing(alone, 0.7), failures=1)
        assert (drafted.tokens, drafted.ends) == (alone.tokens, alone.ends)
        assert drafted.accepted > 0
    assert torch.equal(logits_of(group.runner), logits_of(group.runner)), "the same bits"
    assert not group.lost.is_set()


def test_a_group_reads_from_prompts_what_one_process_reads(
    folder: Path, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "_MAX_LOGITS", 5 * VOCAB_SIZE)  # several slices for a chunk
    found = []
    for runner in (load_runner(folder), group.runner):
        served = Served(runner)
        for number, readout in enumerate(READOUTS):
            served.add(random_prompt(30 + number, seed=number), readout)
        served.run()
        found.append(served.readings)
    alone, together = found
    assert together.keys() == alone.keys()
    for ours, theirs in ((together[id], alone[id]) for id in alone):
        for reading, expected in zip(ours, theirs, strict=True):
            assert reading.hidden == pytest.approx(expected.hidden, abs=1e-5)
            assert [each.top_ids for each in reading.logprobs] == [each.top_ids for each in expected.logprobs]
            assert [each.chosen for each in reading.logprobs] == pytest.approx(
                [each.chosen for each in expected.logprobs], abs=1e-5
            )


def test_a_group_saves_and_loads_the_blocks_of_every_rank(folder: Path) -> None:
    config = settings_of(folder, tensor_parallel=2, host_kv_gb=0.001)
    group = Group(config)
    try:
        runner, blocks = group.runner, ShuffledBlocks(group.runner)
        first = blocks.sequence(random_prompt(8, seed=3), 4)
        runner.execute(StepPlan([next_chunk(first)]))
        second = blocks.sequence(random_prompt(8, seed=3), 4)
        pairs = list(zip(first.blocks, second.blocks, strict=True))
        runner.copy(StepPlan([], saves=[(source, row) for row, (source, _) in enumerate(pairs)]))
        second.num_computed = 7
        loads = [(row, target) for row, (_, target) in enumerate(pairs)]
        loaded = runner.execute(StepPlan([next_chunk(second)], loads=loads))
        copied = blocks.sequence(random_prompt(8, seed=3), 4)
        copied.num_computed = 7
        copies = list(zip(first.blocks, copied.blocks, strict=True))
        assert runner.execute(StepPlan([next_chunk(copied)], copies=copies)).tokens == loaded.tokens
        alone = load_runner(folder)
        other = ShuffledBlocks(alone).sequence(random_prompt(8, seed=3), 4)
        assert alone.execute(StepPlan([next_chunk(other)])).tokens == loaded.tokens
    finally:
        group.leader.close()


def test_a_step_that_fails_between_the_ranks_ends_the_group(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    group.runner.recover()
    seq = ShuffledBlocks(group.runner).sequence(random_prompt(8, seed=1), 4)
    monkeypatch.setattr(group.runner._model, "hidden_states", fail)
    with pytest.raises(MemoryError):
        group.runner.execute(StepPlan([next_chunk(seq)]))
    with pytest.raises(EngineError, match="--tensor-parallel: a step failed on one rank"):
        group.runner.recover()


def test_a_rank_that_dies_is_noticed_while_the_group_is_idle(group: Group) -> None:
    group.leader.processes[-1].kill()
    assert group.lost.wait(30)


def test_a_rank_that_dies_while_it_loads_is_noticed_at_once(folder: Path) -> None:
    lost = threading.Event()
    leader = Leader(settings_of(folder, tensor_parallel=2), lost.set)
    leader.processes[0].kill()
    assert lost.wait(30), "rank 0 would load its own part first"
    leader.close()


def test_a_rank_whose_leader_has_ended_loads_nothing() -> None:
    command = [sys.executable, "-m", "pagoda_server.engine.runners.cpu.follower", "0", "1"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60).returncode == EXIT_FAILURE


def test_a_model_that_cannot_be_cut_is_refused_and_leaves_no_process(folder: Path) -> None:
    config = settings_of(folder, tensor_parallel=7)
    leader = Leader(config)
    try:
        with pytest.raises(ConfigError, match="--tensor-parallel: 3 of the model's 6 attention heads cannot be cut"):
            ModelRunner(config, leader=leader)
    finally:
        leader.close()
    assert all(process.returncode is not None for process in leader.processes)
