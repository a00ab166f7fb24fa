from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Recorder, set_num_threads
from pagoda_server.kernels.activate import SWIGLU, activate_native
from pagoda_server.kernels.native_module import native
from pagoda_server.kernels.recording import empty
from pagoda_server.kernels.rms_norm import rms_norm_native

pytestmark = pytest.mark.skipif(native is None, reason="no compiler at installation")

WEIGHT = torch.rand(32)


def chain(x: Tensor) -> Tensor:
    """Run ops whose intermediate results die early, except one that is used again at the end."""
    first = rms_norm_native(x, WEIGHT, 1e-5)
    second = rms_norm_native(first, WEIGHT, 1e-5)
    for _ in range(5):
        second = rms_norm_native(second, WEIGHT, 1e-5)
    return activate_native(rms_norm_native(second, WEIGHT, 1e-5, first), SWIGLU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_computes_with_what_its_inputs_hold_by_then(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.WEIGHT", WEIGHT.to(dtype))
    x = torch.randn(7, 32).to(dtype)
    recording = Recorder().record(lambda: chain(x))
    assert torch.equal(recording.result, chain(x)), "what is recorded runs as well"
    for _ in range(3):
        x.copy_(torch.randn(7, 32))
        assert recording.replay()
        assert torch.equal(recording.result, chain(x))


def test_memory_of_results_that_are_gone_is_used_again_and_shared_by_recordings() -> None:
    recorder, addresses = Recorder(), set()
    for rows in (16, 9, 13):  # from 9 on all results fit into the buffers of 16 rows
        x = torch.randn(rows, 32)

        def compute(x: Tensor = x) -> Tensor:
            for _ in range(4):
                x = rms_norm_native(x, WEIGHT, 1e-5)
                addresses.add(x.data_ptr())
            return x

        recorder.record(compute)
    assert len(addresses) == 2


def test_a_recording_outlives_its_recorder_and_changes_of_the_number_of_threads() -> None:
    x = torch.randn(600, 32)
    recording = Recorder().record(lambda: chain(x))
    expected = recording.result.clone()
    threads = torch.get_num_threads()
    try:
        for number in (1, 3, 2):
            set_num_threads(number)
            recording.result.fill_(torch.nan)
            assert recording.replay()
            assert torch.equal(recording.result, expected)
    finally:
        set_num_threads(threads)


def test_a_recording_does_not_run_with_another_instruction_set_in_use() -> None:
    assert native is not None
    x = torch.randn(3, 32)
    recording = Recorder().record(lambda: chain(x))
    in_use = native.instruction_set()
    others = [name for name in native.instruction_sets() if name != in_use]
    try:
        native.use_instruction_set(others[0])
        recording.result.fill_(7)
        assert not recording.replay()
        assert (recording.result == 7).all()
    finally:
        native.use_instruction_set(in_use)
    assert recording.replay()
    assert torch.equal(recording.result, chain(x))


def test_ops_of_other_threads_are_not_recorded() -> None:
    x, elsewhere = torch.randn(3, 32), torch.randn(3, 32)
    expected = elsewhere + 1

    def compute() -> Tensor:
        thread = threading.Thread(target=lambda: rms_norm_native(torch.ones(3, 32), WEIGHT, 1e-5, elsewhere))
        thread.start()
        thread.join()
        return chain(x)

    recording = Recorder().record(compute)
    assert recording.replay()
    assert torch.equal(elsewhere, expected), "its residual has been added to once"


def test_a_recording_that_fails_leaves_none_open() -> None:
    assert native is not None

    def compute() -> Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        Recorder().record(compute)
    with pytest.raises(ValueError, match="has not begun a recording"):
        native.end_recording()
    assert empty(2, 3, dtype=torch.bfloat16).untyped_storage().nbytes() == 12, "torch's own memory again"
