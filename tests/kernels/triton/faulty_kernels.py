"""`python -m tests.kernels.triton.faulty_kernels TABLE NAME…` runs the compile gate on kernels that it must reject."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from pagoda_server.kernels.triton.dependent_launch import await_previous, dependent_launch
from tests.kernels.triton.cases import Case
from tests.kernels.triton.compile_gate import main


@triton.jit
def _centre(x_ptr, out_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * STRIDE)
    tl.store(out_ptr + at, x - tl.sum(x, axis=0) / BLOCK)


@triton.jit
def _hoard(x_ptr, out_ptr, steps, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply by the transpose, with more stages in flight than shared memory holds."""
    rows, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    product = tl.zeros([ROWS, ROWS], tl.float32)
    for step in range(steps):
        at = x_ptr + step * DEPTH
        left = tl.load(at + rows[:, None] * 4096 + depth[None, :])
        right = tl.load(at + 65536 + rows[None, :] * 4096 + depth[:, None])
        product = tl.dot(left, right, product)
    tl.store(out_ptr + rows[:, None] * ROWS + rows[None, :], product)


@triton.jit
def _copy(
    x_ptr,
    weight_ptr,
    out_ptr,
    count,
    READS_EARLY: tl.constexpr,
    STORES_EARLY: tl.constexpr,
    RETURNS_EARLY: tl.constexpr,
    WAITS: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.arange(0, 1024)
    weight = tl.load(weight_ptr + at)
    x = weight
    if READS_EARLY:
        x = tl.load(x_ptr + at)
    if STORES_EARLY:
        tl.store(out_ptr + at, weight)
    if RETURNS_EARLY and tl.program_id(0) >= count:
        return
    if WAITS:
        await_previous(PDL)
    if not READS_EARLY:
        x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x * weight)


def centre(block: int, stride: int) -> None:
    x = torch.empty(block * stride, device="meta")
    _centre[(1,)](x, torch.empty(block, device="meta"), STRIDE=stride, BLOCK=block, num_warps=1)


def hoard() -> None:
    x, out = torch.empty(128, 4096, device="meta", dtype=torch.float16), torch.empty(64, 64, device="meta")
    _hoard[(1,)](x, out, 32, ROWS=64, DEPTH=128, num_warps=4, num_stages=9)


def copy(reads: bool = False, stores: bool = False, returns: bool = False, waits: bool = True) -> None:
    x, weight, out = (torch.empty(1024, device="meta") for _ in range(3))
    faults = {"READS_EARLY": reads, "STORES_EARLY": stores, "RETURNS_EARLY": returns, "WAITS": waits}
    _copy[(7,)](x, weight, out, 5, **faults, **dependent_launch(), num_warps=4)


def broken() -> None:
    _centre[(1,)](torch.empty(96, device="meta"), torch.empty(96, device="meta"), STRIDE=1, BLOCK=96)


CASES = [
    Case("sound", lambda: centre(block=1024, stride=1)),
    Case("spills", lambda: centre(block=32768, stride=1)),
    Case("narrow", lambda: centre(block=1024, stride=3)),
    Case("meant-narrow", lambda: centre(block=1024, stride=5), narrow=frozenset({"_centre"})),
    Case("hoards", hoard),
    Case("broken", broken),
    Case("dependent", copy),
    Case("reads-early", lambda: copy(reads=True)),
    Case("stores-early", lambda: copy(stores=True)),
    Case("returns-early", lambda: copy(returns=True)),
    Case("never-waits", lambda: copy(waits=False)),
]

if __name__ == "__main__":
    table, *given = sys.argv[1:]
    options = [each for each in given if each.startswith("--")]
    sys.exit(main(options, [case for case in CASES if case.name in given], Path(table)))
