from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda_server.kernels import Activation, Backend, BankShape, LowRankPart, Recorder, has_native
from pagoda_server.kernels.activate import SWIGLU, activate
from pagoda_server.kernels.backend import NATIVE
from pagoda_server.kernels.low_rank import AddressBank, LowRank, add_low_rank
from tests.kernels.backends import BACKENDS, INSTRUCTION_SETS, using

needs_native = pytest.mark.skipif(not has_native(), reason="there is no compiled code")


def low_rank(in_size: int, *parts: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> LowRank:
    """Random weights; parts are column, size and rank."""
    made = [
        LowRankPart(column, torch.randn(rank, in_size).to(dtype), torch.randn(size, rank).to(dtype))
        for column, size, rank in parts
    ]
    return LowRank(made, dtype)


def bank_of(*held: LowRank | None) -> AddressBank:
    bank = AddressBank(BankShape(len(held), 40, 0, (), torch.float32, torch.device("cpu")))
    for slot, each in enumerate(held):
        bank.put(slot, each)
    return bank


def expected(
    out: Tensor, x: Tensor, slots: Tensor, bank: AddressBank, activation: Activation | None, columns: int
) -> Tensor:
    """The same in float64."""
    result = out.double()
    x = activate(x.double(), activation) if activation else x.double()
    for row, slot in enumerate(slots.tolist()):
        held = bank[slot] if slot >= 0 else None
        for part in held.parts if held else ():
            added = part.up.double() @ (part.down.double() @ x[row])
            result[row, part.column : part.column + len(added)] += added
    return result[:, :columns]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, SWIGLU, Activation("gelu", is_gated=False)], ids=["", "silu", "gelu"])
def test_each_row_gets_what_its_own_adapter_adds(
    backend: Backend, dtype: torch.dtype, activation: Activation | None
) -> None:
    in_size, out_size = 75, 150
    bank = bank_of(
        low_rank(in_size, (0, 70, 3), (70, 33, 16), (103, 47, 1), dtype=dtype),
        low_rank(in_size, (70, 33, 5), dtype=dtype),
        None,
    )
    slots = torch.tensor([0, -1, 1, 0, 2, 0, 0, 1, 0, 0], dtype=torch.int32)
    x = torch.randn(len(slots), in_size * (activation.width if activation else 1)).to(dtype)
    out = torch.randn(len(slots), out_size).to(dtype)
    want = expected(out, x, slots, bank, activation, out_size)
    untouched = out[[1, 4]].clone()
    backend.add_low_rank(out, x, slots, bank, activation)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(
        out.double(), want, atol=100 * tolerance if dtype == torch.bfloat16 else 1e-3, rtol=tolerance
    )
    assert torch.equal(out[[1, 4]], untouched)


@needs_native
@settings(deadline=None)
@given(
    slots=st.lists(st.integers(-1, 2), min_size=1, max_size=40),
    in_size=st.integers(1, 300),
    out_size=st.integers(1, 300),
    ranks=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    instruction_set=st.sampled_from(INSTRUCTION_SETS or [""]),
)
def test_a_row_has_the_same_bits_alone_and_beside_others(
    slots: list[int], in_size: int, out_size: int, ranks: tuple[int, int, int], dtype: torch.dtype, instruction_set: str
) -> None:
    bank = bank_of(*(low_rank(in_size, (0, out_size, rank), dtype=dtype) for rank in ranks))
    of_rows = torch.tensor(slots, dtype=torch.int32)
    x, out = torch.randn(len(slots), in_size).to(dtype), torch.randn(len(slots), out_size).to(dtype)
    reference, together = out.clone(), out.clone()
    add_low_rank(reference, x, of_rows, bank)
    with using(instruction_set):
        NATIVE.add_low_rank(together, x, of_rows, bank)
        for row in range(len(slots)):
            alone = out[row : row + 1].clone()
            NATIVE.add_low_rank(alone, x[row : row + 1].clone(), of_rows[row : row + 1].clone(), bank)
            assert torch.equal(alone[0], together[row])
    scale = 1e-5 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(together.float(), reference.float(), rtol=scale, atol=scale * 40 * in_size**0.5)


@needs_native
def test_a_recording_reads_slots_and_bank_when_it_is_replayed() -> None:
    first, second = low_rank(20, (0, 30, 4)), low_rank(20, (5, 10, 2))
    bank = bank_of(first, None)
    x, out, slots = torch.randn(3, 20), torch.zeros(3, 30), torch.tensor([0, -1, 0], dtype=torch.int32)

    def compute() -> Tensor:
        NATIVE.add_low_rank(out, x, slots, bank)
        return out

    recording = Recorder().record(compute)
    bank.put(1, second)
    slots[:] = torch.tensor([-1, 1, 0])
    out.zero_()
    want = expected(out, x, slots, bank, None, 30)
    recording.replay()
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)


STORED = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["compiled", "plain"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr("pagoda_server.kernels.low_rank.native", None)
    elif not has_native():
        pytest.skip("there is no compiled code")


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("of_up", STORED)
@pytest.mark.parametrize("of_down", STORED)
def test_packed_weights_are_those_of_the_file_scaled_and_rounded_once(
    of_down: torch.dtype, of_up: torch.dtype, dtype: torch.dtype
) -> None:
    parts = [
        LowRankPart(0, torch.randn(3, 70).to(of_down), torch.randn(5, 3).to(of_up), 0.3),
        # A slice of a wider matrix, as a rank of a group has it.
        LowRankPart(64, torch.randn(20, 150).to(of_down)[:, 40:110], torch.randn(130, 20).to(of_up), 17 / 16),
        LowRankPart(200, torch.zeros(1, 70).to(of_down), torch.full((64, 1), -0.0).to(of_up), 1e-9),
    ]
    for made, found in zip(parts, LowRank(parts, dtype).parts, strict=True):
        assert made.column == found.column
        assert torch.equal(found.down, made.down.to(dtype))
        assert torch.equal(found.up, (made.up.float() * made.scale).to(dtype))


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("half", ["down", "up"])
def test_one_value_that_is_not_finite_in_the_models_dtype_is_refused_with_its_name(
    half: str, stored: torch.dtype, dtype: torch.dtype
) -> None:
    down, up = torch.zeros(2, 70, dtype=stored), torch.zeros(66, 2, dtype=stored)
    row = down[1] if half == "down" else up[65]
    row[1] = most = 0.99 * min(torch.finfo(stored).max, torch.finfo(dtype).max)
    LowRank([LowRankPart(0, down, up)], dtype)
    refused = [LowRankPart(0, down, up, 1.05 * torch.finfo(dtype).max / most, "q_proj")] if half == "up" else []
    for value in (torch.inf, torch.nan, -torch.nan):
        changed = [down.clone(), up.clone()]
        changed[half == "up"][0, 0] = value
        refused.append(LowRankPart(0, *changed, name="q_proj"))
    for part in refused:
        with pytest.raises(ValueError, match="q_proj has values that are not finite in"):
            LowRank([part], dtype)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_half_a_step_above_the_greatest_is_not_finite_and_one_below_that_is(sign: int) -> None:
    half_a_step_above = sign * float.fromhex("0x1.ffp127")
    down, up = torch.zeros(1, 1), torch.ones(1, 1)
    (taken,) = LowRank([LowRankPart(0, down, up, half_a_step_above * (1 - 2**-20))], torch.bfloat16).parts
    assert taken.up == sign * torch.finfo(torch.bfloat16).max
    with pytest.raises(ValueError, match="not finite in bfloat16"):
        LowRank([LowRankPart(0, down, up, half_a_step_above)], torch.bfloat16)
