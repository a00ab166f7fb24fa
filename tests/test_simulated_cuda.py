"""The simulated card detects what it is made to detect."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.simulated_cuda import SimulatedCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    with SimulatedCuda(capacity=4096).in_place_of_cuda(monkeypatch) as device, torch.inference_mode():
        yield device


def on_card(*values: float) -> Tensor:
    return torch.tensor(values, device="cuda")


def pinned(size: int) -> Tensor:
    return torch.zeros(size, pin_memory=True)


READS: list[Callable[[Tensor], object]] = [
    lambda x: x[0].item(),
    lambda x: x.tolist(),
    lambda x: bool((x > 1).any()),
    lambda x: x[x > 1],
    lambda x: (x > 1).nonzero(),
    lambda x: x.cpu(),
    lambda x: x[[0, 1]],
    lambda x: torch.zeros(2).copy_(x, non_blocking=True),
    lambda x: x.copy_(torch.ones(2), non_blocking=True),
    lambda x: x.copy_(pinned(2)),
]


@pytest.mark.parametrize("read", READS)
def test_what_makes_the_host_wait_is_noted_and_can_be_an_error(
    read: Callable[[Tensor], object], cuda: SimulatedCuda
) -> None:
    x = on_card(1.0, 2.0)
    before = len(cuda.waits)
    read(x)
    assert len(cuda.waits) > before
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        read(x)


def test_copies_of_pinned_memory_arithmetic_and_numbers_do_not_make_the_host_wait(cuda: SimulatedCuda) -> None:
    x, there, back = torch.empty(2, device="cuda"), pinned(2), pinned(2)
    there[0], there[1] = 1.0, 2.0
    x.copy_(there, non_blocking=True)
    y = torch.where(x > 1, 2 * x + 1, x.clamp(min=0)).cumsum(0).view(2, 1)
    y[0].fill_(10)
    back.copy_(y[:, 0], non_blocking=True)
    assert not cuda.waits
    torch.cuda.synchronize()
    assert back.tolist() == [10, 6]


def test_what_is_launched_runs_when_the_host_waits(cuda: SimulatedCuda) -> None:
    host, back = pinned(2), pinned(2)
    x = torch.empty(2, device="cuda")
    host.fill_(5)
    x.copy_(host, non_blocking=True)
    back.copy_(x, non_blocking=True)
    assert back.tolist() == [0, 0], "read too early"
    host.fill_(7)  # too early: the copy is under way
    event = torch.cuda.Event()
    event.record()
    x.fill_(9)
    event.synchronize()
    assert back.tolist() == [7, 7]
    assert x.tolist() == [9, 9]


def test_uninitialized_memory_holds_nan_and_is_counted(cuda: SimulatedCuda) -> None:
    x = torch.empty(100, device="cuda")
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() >= 400
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1000, device="cuda")
    del x
    gc.collect()
    assert torch.empty(1000, device="cuda").shape == (1000,)


def test_tensors_of_host_and_card_do_not_mix(cuda: SimulatedCuda) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        on_card(1.0, 2.0) + torch.ones(2)


def test_a_graph_repeats_its_launches_at_the_same_addresses_and_forgets_what_it_computed_on_the_way(
    cuda: SimulatedCuda,
) -> None:
    source, kept = on_card(1.0, 2.0), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = source * 2
        kept.copy_(between + 1)
    assert kept.tolist() == [0, 0], "capturing computes nothing"
    graph.replay()
    assert kept.tolist() == [3, 5]
    source.fill_(10)
    graph.replay()
    assert (kept.tolist(), between.tolist()) == ([21, 21], [20, 20])
    view = between.contents
    del between
    gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert view.isnan().all(), "its memory is anybody's"


@pytest.mark.parametrize("newest_is_early", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_streams_are_ordered_by_events_alone(cuda: SimulatedCuda, newest_is_early: bool, waits: bool) -> None:
    """Work that should wait comes too early on the newest stream, and work that is waited for too late."""
    cuda.newest_is_early = newest_is_early
    x, y = on_card(1.0), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    x.fill_(2)
    with torch.cuda.stream(side):
        if waits:
            side.wait_stream(torch.cuda.default_stream())
        y.copy_(x * 10)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    found = y.tolist()
    assert found == ([20] if waits else [10] if newest_is_early else [0])


def test_an_event_that_is_recorded_again_does_not_move_those_that_wait_for_it(cuda: SimulatedCuda) -> None:
    cuda.newest_is_early = True
    x, y = on_card(1.0), torch.zeros(1, device="cuda")
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    side.wait_event(event)
    x.fill_(2)
    event.record()
    with torch.cuda.stream(side):
        y.copy_(x)
    side.synchronize()
    assert y.cpu().item() == 1


def test_graphs_take_memory_beside_tensors_until_they_are_dropped(cuda: SimulatedCuda) -> None:
    x, graph = on_card(1.0), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    with torch.cuda.graph(graph):
        x.fill_(2)
    assert torch.cuda.mem_get_info()[0] < before
    del graph
    gc.collect()
    assert torch.cuda.mem_get_info()[0] == before


def test_waiting_during_a_capture_is_an_error(cuda: SimulatedCuda) -> None:
    x = on_card(1.0)
    with (
        pytest.raises(AssertionError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x.item()
