"""Host blocks with real pages: the runners of a CPU and of a device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.cuda import DeviceRunner
from tests.engine.test_device_runner import (
    BACKEND,
    FailsAt,
    Served,
    ask,
    device_runner,
    fill_cache,
    one_by_one,
    outputs,
)
from tests.engine.tiny_models import load_runner, saved_model

ROOM_GB = 1e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory)


def served_by(
    kind: str,
    folder: Path,
    num_blocks: int = 24,
    prefix_caching: bool = False,
    room_gb: float = ROOM_GB,
    **settings: object,
) -> Served:
    if kind == "cpu":
        runner = load_runner(folder, max_num_seqs=6, token_budget=19, max_model_len=120, host_kv_gb=room_gb)
    else:
        runner = device_runner(folder, BACKEND, host_kv_gb=room_gb, **settings)  # type: ignore[assignment]
    fill_cache(runner, math.nan)
    assert runner.info.num_host_blocks > 50
    served = Served(runner, num_blocks, prefix_caching=prefix_caching, host_blocks=runner.info.num_host_blocks)
    served.scheduler.costs.chunk_s = lambda *_: math.inf  # type: ignore[method-assign]
    return served


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_loaded_sequence_generates_what_an_undisturbed_run_does(llama: Path, overlap: str) -> None:
    check_loaded_sequences(served_by("device", llama, overlap=overlap), llama)


def test_a_loaded_sequence_of_a_cpu_generates_what_an_undisturbed_run_does(llama: Path) -> None:
    check_loaded_sequences(served_by("cpu", llama), llama)


def check_loaded_sequences(served: Served, folder: Path) -> None:
    seqs = ask(served, 16)
    served.run()
    assert outputs(seqs) == one_by_one(folder, 16)
    counters, host = served.scheduler.counters, served.scheduler.host.load()
    assert counters.preemptions > 0
    assert host.loaded_tokens > 20
    assert counters.recomputed_tokens < 0.2 * counters.preempted_tokens
    assert host.blocks_used == 0
    assert served.scheduler.costs.block_copy_s, "the runner tells how long copies take"


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_a_prefix_that_was_evicted_generates_what_an_undisturbed_run_does(llama: Path, kind: str) -> None:
    served = served_by(kind, llama, prefix_caching=True, room_gb=4 * ROOM_GB)
    for _ in range(3):
        seqs = ask(served, 16)
        served.run()
        assert outputs(seqs) == one_by_one(llama, 16)
    assert served.scheduler.host.load().hit_tokens > 50


def test_steps_that_fail_once_change_no_token_of_a_loaded_sequence(llama: Path) -> None:
    served = served_by("device", llama)
    runner = served.steps._runner
    assert not isinstance(runner, ModelRunner)
    served.steps._runner = FailsAt(runner, launches={12, 31}, reads={20, 45})  # type: ignore[arg-type]
    seqs = ask(served, 16)
    served.run()
    assert outputs(seqs) == one_by_one(llama, 16)
    assert served.scheduler.host.load().loaded_tokens > 0


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_bytes_of_a_host_block_come_back_to_the_last_bit(llama: Path, kind: str) -> None:
    runner = served_by(kind, llama).steps._runner
    assert isinstance(runner, ModelRunner | DeviceRunner)
    fill_cache(runner, 0.7)
    runner.copy(StepPlan([], saves=[(3, 0)]))
    saved = bytes(runner.host_row(0))
    assert len(saved) == runner.info.kv_cache.bytes_per_block
    changed = bytes(byte ^ 1 for byte in saved)
    runner.host_row(1)[:] = changed
    runner.copy(StepPlan([], loads=[(1, 5)]))
    runner.copy(StepPlan([], saves=[(5, 2), (3, 4)]))
    assert bytes(runner.host_row(2)) == changed
    assert bytes(runner.host_row(4)) == saved


def test_host_memory_that_holds_no_block_is_a_mistake(llama: Path) -> None:
    with pytest.raises(ConfigError, match="--host-kv-gb 1e-09 holds no block"):
        load_runner(llama, host_kv_gb=1e-9)
