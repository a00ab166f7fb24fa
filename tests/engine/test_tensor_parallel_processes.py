"""A group of processes generates what one process does, step by step, and ends with any of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.engine.core.errors import ConfigError, EngineError
from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.runners import readings
from pagoda_server.engine.runners.cpu.leader import Leader
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.settings import EXIT_FAILURE, EngineConfig
from tests.engine.lora import random_pairs, with_adapter, write_adapter
from tests.engine.test_adapters import modules_of
from tests.engine.test_readouts import READOUTS, Served
from tests.engine.test_speculation import knowing, serve
from tests.engine.test_tensor_parallel import logits_of, settings_of
from tests.engine.tiny_models import (
    VOCAB_SIZE,
    ShuffledBlocks,
    generate,
    load_runner,
    next_chunk,
    random_prompt,
    saved_model,
)

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


def test_a_group_computes_with_an_adapter_that_is_loaded_while_it_runs(
    folder: Path, group: Group, tmp_path: Path
) -> None:
    alone, runner = load_runner(folder), group.runner
    assert alone.adapters is not None
    assert runner.adapters is not None
    paths = [write_adapter(tmp_path / str(seed), random_pairs(modules_of(alone), seed=seed)) for seed in range(3)]
    ours = [alone.adapters.load(path) for path in paths]
    theirs = []
    for seed, path in enumerate(paths):
        theirs.append(runner.adapters.load(path))
        assert logits_of(runner).isfinite().all(), "steps without adapters go on"
        for slot in (0, 1):  # so that slots change hands
            seqs = [
                with_adapter(ShuffledBlocks(each).sequence(random_prompt(9, seed=slot), 6), adapters[seed], slot)
                for each, adapters in ((alone, ours), (runner, theirs))
            ]
            expected, found = (generate(each, seq, 5) for each, seq in zip((alone, runner), seqs, strict=True))
            assert found == expected
    assert [each.identity for each in theirs] == [each.identity for each in ours]
    torch.testing.assert_close(logits_of(runner, theirs[1]), logits_of(alone, ours[1]), atol=1e-4, rtol=1e-4)
    dropped = runner.adapters._dropped
    assert not dropped
    del theirs[2], seqs
    generate(runner, ShuffledBlocks(runner).sequence(random_prompt(9, seed=0), 2), 1)  # the sampler keeps the last one
    assert list(dropped) == [2], "what the leader has let go, the others forget with the next step"
    logits_of(runner)
    assert not dropped
    assert not group.lost.is_set()


def test_no_rank_keeps_an_adapter_that_one_of_them_cannot_load(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = group.runner.adapters
    assert adapters is not None
    modules = dict(adapters._banks.modules)
    folders = [write_adapter(tmp_path / str(seed), random_pairs(modules, seed=seed)) for seed in range(2)]
    good = adapters.load(folders[0])
    with pytest.raises(FileNotFoundError):
        adapters.load(tmp_path / "missing")
    load = adapters._banks.load
    monkeypatch.setattr(adapters._banks, "load", lambda path: load(folders[0]))
    with pytest.raises(CheckpointError, match="rank 1 has read other bytes"):
        adapters.load(folders[1])
    with pytest.raises(FileNotFoundError, match="rank 1: "):  # rank 0 alone finds it
        adapters.load(tmp_path / "missing")
    (folders[1] / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="rank 1: "):
        adapters.load(folders[1])
    assert list(adapters._dropped) == [1, 2, 3, 4]
    assert logits_of(group.runner, good).isfinite().all()
    assert adapters.load(folders[0]).identity == good.identity
    assert not group.lost.is_set()


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


def test_a_rank_that_hangs_while_it_loads_an_adapter_is_noticed(folder: Path, tmp_path: Path) -> None:
    group = Group(settings_of(folder, tensor_parallel=2, hang_timeout_s=2.0))
    adapters = group.runner.adapters
    assert adapters is not None
    adapter = write_adapter(tmp_path / "adapter", random_pairs(dict(adapters._banks.modules), seed=1))
    group.leader.processes[0].send_signal(signal.SIGSTOP)
    with pytest.raises(EngineError, match="a rank has not answered for 2 s"):
        adapters.load(adapter)
    assert group.lost.is_set()
    group.leader.close()


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
