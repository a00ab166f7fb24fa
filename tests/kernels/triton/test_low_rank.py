from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagoda_server.kernels import Activation, BankShape, LowRankPart
from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.triton.low_rank import TritonBank, add_low_rank_triton
from tests.kernels.triton.device import DEVICE, compute_each_element_alone

pytestmark = pytest.mark.simulated

SHAPE = BankShape(4, 40, 75, (70, 33, 47), torch.float32, torch.device(DEVICE))
# Of each slot, the rank of each part; 0: the adapter does not change it.
RANKS = [(3, 16, 1), (0, 5, 0), (0, 0, 0), (40, 17, 33)]
SLOTS = [0, -1, 1, 0, 2, 0, 3, 1, 0, 0, 3, -1, 1, 1, 3, 0, 0, 2, 3]


def parts_of(shape: BankShape, ranks: tuple[int, ...]) -> list[LowRankPart]:
    """Random weights."""
    parts, column = [], 0
    for size, rank in zip(shape.sizes, ranks, strict=True):
        if rank:
            down, up = torch.randn(rank, shape.in_size), torch.randn(size, rank) / rank**0.5
            parts.append(LowRankPart(column, down.to(shape.dtype), up.to(shape.dtype)))
        column += size
    return parts


def bank_of(shape: BankShape, adapters: list[list[LowRankPart]]) -> TritonBank:
    bank = TritonBank(shape)
    for slot, parts in enumerate(adapters):
        bank.put(slot, bank.pack(parts) if parts else None)
    return bank


def expected(
    out: Tensor, x: Tensor, slots: list[int], adapters: list[list[LowRankPart]], activation: Activation | None
) -> Tensor:
    """The same in float64, but for an activation's result, which is rounded to the dtype of x."""
    inputs = activate(x.double().cpu(), activation).to(x.dtype).double() if activation else x.double().cpu()
    result = out.double().cpu()
    for row, slot in enumerate(slots):
        for part in adapters[slot] if slot >= 0 else ():
            added = part.up.double() @ (part.down.double() @ inputs[row])
            result[row, part.column : part.column + len(added)] += added
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, SWIGLU, Activation("gelu", is_gated=False)], ids=["", "silu", "gelu"])
def test_each_row_gets_what_its_own_adapter_adds(dtype: torch.dtype, activation: Activation | None) -> None:
    shape = replace(SHAPE, dtype=dtype)
    adapters = [parts_of(shape, ranks) for ranks in RANKS]
    x = torch.randn(len(SLOTS), 75 * (activation.width if activation else 1)).to(DEVICE, dtype)
    out = torch.randn(len(SLOTS), 150).to(DEVICE, dtype)
    want, before = expected(out, x, SLOTS, adapters, activation), out.clone()
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    add_low_rank_triton(out, x, slots, bank_of(shape, adapters), activation)
    tolerance = 1e-4 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(out.double().cpu(), want, rtol=tolerance, atol=30 * tolerance)
    assert torch.equal(out[slots < 0].view(torch.uint8), before[slots < 0].view(torch.uint8))


def test_inputs_of_several_splits_and_rows_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_server.kernels.triton.low_rank.INPUTS_OF_A_SPLIT", 100)
    shape = replace(SHAPE, in_size=300, sizes=(80,))
    adapters = [parts_of(shape, (rank,)) for rank in (4, 20, 16, 1)]
    slots = [at % 5 - 1 for at in range(35)]
    x, out = torch.randn(35, 300, device=DEVICE), torch.randn(35, 80, device=DEVICE)
    want = expected(out, x, slots, adapters, None)
    of_rows = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    add_low_rank_triton(out, x, of_rows, bank_of(shape, adapters))
    torch.testing.assert_close(out.double().cpu(), want, rtol=1e-4, atol=1e-3)


def test_a_row_has_the_same_bits_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_each_element_alone(monkeypatch)
    bank = bank_of(SHAPE, [parts_of(SHAPE, ranks) for ranks in RANKS])
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    x, out = torch.randn(len(SLOTS), 75, device=DEVICE), torch.randn(len(SLOTS), 150, device=DEVICE)
    together = out.clone()
    add_low_rank_triton(together, x, slots, bank)
    for row in range(0, len(SLOTS), 3):
        alone = out[row : row + 1].clone()
        add_low_rank_triton(alone, x[row : row + 1], slots[row : row + 1].clone(), bank)
        assert torch.equal(alone[0], together[row])


def test_a_slot_that_changes_leaves_nothing_of_its_adapter_behind() -> None:
    first, second = parts_of(SHAPE, RANKS[3]), parts_of(SHAPE, RANKS[0])
    bank = bank_of(SHAPE, [first])
    x, out = torch.randn(1, 75, device=DEVICE), torch.randn(1, 150, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    bank.put(0, bank.pack(second))
    changed, alone = out.clone(), out.clone()
    add_low_rank_triton(changed, x, slots, bank)
    add_low_rank_triton(alone, x, slots, bank_of(SHAPE, [second]))
    assert torch.equal(changed, alone)
    bank.put(0, None)
    unchanged = out.clone()
    add_low_rank_triton(unchanged, x, slots, bank)
    assert torch.equal(unchanged, out)


def test_no_rows_are_no_launch() -> None:
    x, out = torch.empty(0, 75, device=DEVICE), torch.empty(0, 150, device=DEVICE)
    add_low_rank_triton(out, x, torch.empty(0, dtype=torch.int32, device=DEVICE), TritonBank(SHAPE))
