"""The runner of a device with the GPU's kernels, in Triton's interpreter: the same tokens, and nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sequence import SamplingParams, StepPlan
from kernels.triton.configs import IS_INTERPRETED
from tests.engine.test_device_runner import PARAMS, Served, ask, device_runner, one_by_one, outputs
from tests.engine.tiny_models import MODELS, random_prompt, save_model

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tests of the gpu mark run the same on the device")

READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
WAITING_OPS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(MODELS["qwen3"], folder)
    return folder


def test_kernels_of_the_gpu_generate_what_the_cpu_does(qwen3: Path) -> None:
    served = Served(device_runner(qwen3, "triton"), 30)
    seqs = ask(served, 8, max_tokens=4)
    served.run()
    assert outputs(seqs) == one_by_one(qwen3, 8, max_tokens=4)


class NoWaiting(TorchDispatchMode):
    """Fails for every op whose result the host would have to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING_OPS, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask's size is not known"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_read_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes every read of a tensor by the host, those of the interpreter itself excepted."""
    from triton.runtime.interpreter import GridExecutor

    reads: list[str] = []
    inside = False

    def noted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(*arguments: Any, **keywords: Any) -> Any:
            if not inside:
                reads.append(name)
            return original(*arguments, **keywords)

        return read

    launch = GridExecutor.__call__

    def launched(*arguments: Any, **keywords: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(*arguments, **keywords)
        finally:
            inside = False

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, noted(name))
        patch.setattr(GridExecutor, "__call__", launched)
        with NoWaiting():
            yield reads


def test_no_launch_waits_for_the_device(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(qwen3, "triton")
    served = Served(runner, 60)
    for at, params in enumerate(PARAMS[:6]):
        served.add(random_prompt(4 + 3 * at, seed=at), params)
    launch = runner.launch
    kinds = set()

    def watched(plan: StepPlan) -> Any:
        kinds.add(tuple(sorted({min(chunk.length, 2) for chunk in plan.chunks})))
        with nothing_read_back(monkeypatch) as reads:
            step = launch(plan)
        assert not reads, f"the host reads tensors while it launches a step: {reads}"
        return step

    monkeypatch.setattr(runner, "launch", watched)
    for _ in range(8):
        served.step()
    assert kinds == {(2,), (1, 2), (1,)}, "prompts, both, and decodes alone"
    assert not served.ended


def test_blocks_go_to_host_memory_and_come_back_while_nobody_waits(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device_runner(qwen3, "triton", host_kv_gb=1e-4)
    assert runner._host is not None
    for kv in runner._cache:
        kv.keys.normal_()
        kv.values.normal_()
    before = [kv.keys[[3, 1, 4]].clone() for kv in runner._cache]
    plans = [StepPlan([], saves=[(3, 7), (1, 0), (4, 9)]), StepPlan([], saves=[(2, 1)], loads=[(7, 5), (0, 3), (9, 1)])]
    with nothing_read_back(monkeypatch) as reads:
        copied_s = [runner._host.launch(plan) for plan in plans]
    assert not reads, f"the host reads tensors: {reads}"
    assert all(seconds() > 0 for seconds in copied_s)
    for kv, expected in zip(runner._cache, before, strict=True):
        assert torch.equal(kv.keys[[5, 3, 1]], expected)


def test_a_read_back_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_read_back(monkeypatch) as reads:
        torch.ones(2).tolist()
    assert reads == ["tolist"]
    with pytest.raises(AssertionError, match="_local_scalar_dense waits"), nothing_read_back(monkeypatch):
        torch.ones(1).item()
    with pytest.raises(AssertionError, match="mask's size"), nothing_read_back(monkeypatch):
        torch.ones(3)[torch.tensor([True, False, True])]


def test_int8_weights_serve_too(qwen3: Path) -> None:
    served = Served(device_runner(qwen3, "triton-int8"), 30)
    seqs = [served.add(random_prompt(5 + at, seed=at), SamplingParams(max_tokens=4)) for at in range(3)]
    served.run()
    assert [len(tokens) for tokens in outputs(seqs)] == [4, 4, 4]
