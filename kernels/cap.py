"""The soft cap of logits: the reference, and compiled code (kernels/native/elementwise.h)."""

from __future__ import annotations

from torch import Tensor

from .native_module import DTYPES, native, takes


def cap(x: Tensor, softcap: float) -> None:
    """Replace each number of x, of any shape, by softcap * tanh(x / softcap) in float32 (Gemma Team, 2024)."""
    x.copy_((x.float() / softcap).tanh() * softcap)


def cap_native(x: Tensor, softcap: float) -> None:
    """`cap` in one pass."""
    if native is None or not takes(x):
        cap(x, softcap)
        return
    native.cap(DTYPES[x.dtype], x.data_ptr(), x.numel(), softcap)
