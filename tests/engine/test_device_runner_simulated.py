"""The runner of a device on a simulated one, which computes as late as it may: the tests of both, run there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import loaded_model
from kernels import Backend, HeadNorms, PagedKV, load_backend
from tests.engine import test_device_runner
from tests.engine.test_device_runner import *  # noqa: F403
from tests.engine.test_on_gpu import (
    test_a_cache_that_the_device_cannot_hold_names_the_flag,  # noqa: F401
    test_graphs_give_what_the_kernels_give_one_by_one,  # noqa: F401
    test_launching_waits_for_nothing,  # noqa: F401
    test_without_a_size_the_cache_takes_most_of_what_is_free,  # noqa: F401
)
from tests.simulated_cuda import SimulatedCuda


@pytest.fixture(autouse=True, params=["late", "at once"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    monkeypatch.setattr(test_device_runner, "DEVICE", "cuda")
    with SimulatedCuda(is_late=request.param == "late").in_place_of_cuda(monkeypatch) as device:
        monkeypatch.setattr(
            loaded_model,
            "load_backend",
            lambda name: launched_reference(device) if name == "reference" else load_backend(name),
        )
        yield device


def launched_reference(device: SimulatedCuda) -> Backend:
    """The reference, whose ops look at their inputs, as if each were a kernel: faster than Triton's interpreter."""
    reference = load_backend("reference")

    def queries(
        qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: PagedKV, norms: HeadNorms | None = None
    ) -> Tensor:
        return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv.num_kv_heads, kv.head_dim)

    return replace(
        reference,
        paged_attention=device.as_kernel(reference.paged_attention, lambda q, kv, plan: torch.empty_like(q)),
        rope_and_store_kv=device.as_kernel(reference.rope_and_store_kv, queries),
        sample_rows=device.as_kernel(reference.sample_rows, lambda *_: None),
    )
