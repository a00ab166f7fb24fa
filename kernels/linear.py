"""Matrix products with the weights of a model, unquantized: by torch, by oneDNN, and by compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .activate import NO_ACTIVATION, SWIGLU, Activation, activate, activate_cpu, activate_native
from .native_module import DTYPES, native, takes
from .recording import empty

PANEL = 32  # packed weights have room for a multiple of this many outputs: the widest panel of any instruction set
_TORCH_IS_FAST = ("amx", "avx512")  # oneDNN multiplies in bfloat16 there


class Linear(Protocol):
    """Maps x [rows, in] to x · weightᵀ + bias [rows, out]."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Use:
    """What a product is for.

    activation        it multiplies `activate` of its rows, which are [width * in]; None: the rows
    is_head           it computes logits, which may be float32 whatever the dtype of x
    is_router         it computes a router's logits, which are float32 whatever the dtype of x
    is_deterministic  the order of a row's sums must not depend on the number of rows
    """

    activation: Activation | None = None
    is_head: bool = False
    is_router: bool = False
    is_deterministic: bool = False


PLAIN, GATED, HEAD, ROUTER = Use(), Use(SWIGLU), Use(is_head=True), Use(is_router=True)


class LinearMaker(Protocol):
    """Makes a product with a fixed weight in one format. Its reference is the function of that format in kernels/.

    weight  [out, in]: a Tensor, or a GroupedWeight of a format that the backend keeps; the caller keeps no reference to
            it, so that another layout may replace it
    bias    [out] or None
    """

    def __call__(self, weight: Any, bias: Tensor | None, use: Use = PLAIN, /) -> Linear: ...


@dataclass(frozen=True, slots=True)
class _Plain:
    weight: Tensor
    bias: Tensor | None
    activation: Activation | None

    def __call__(self, x: Tensor, /) -> Tensor:
        x = activate(x, self.activation) if self.activation else x
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Packed:
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    activate: Callable[[Tensor, Activation], Tensor]
    activation: Activation | None

    def __call__(self, x: Tensor, /) -> Tensor:
        x = self.activate(x, self.activation) if self.activation else x
        spare = _padded(len(x)) - len(x)
        rows = functional.pad(x, (0, 0, 0, spare)) if spare else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self.weight, self.bias, "none", [], ""
        )
        return product[: len(x)].to(x.dtype)


def _padded(rows: int) -> int:
    """The number of rows that oneDNN multiplies for so many: at most an eighth more.

    oneDNN compiles code for each number of rows, about half a megabyte for each shape of weight, and keeps it. It sums
    a single row in a different order from a batch's, but a row's result must not depend on its batch.
    """
    step = 1 << max(1, rows.bit_length() - 4)
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class _Router:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, /) -> Tensor:
        return functional.linear(x.float(), self.weight, self.bias)


def linear(weight: Tensor, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """Make a product with an unquantized weight. A router's is computed in float32."""
    if use.is_router:
        return _Router(weight.float(), None if bias is None else bias.float())
    return _Plain(weight, bias, use.activation)


def linear_cpu(weight: Tensor, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` with the weight laid out in oneDNN's blocks once, instead of at every call.

    In float32 if oneDNN has no fast product in the weight's dtype: torch's own takes up to forty times as long. A row's
    result is the same to the last bit in any batch.
    """
    return linear(weight, bias, use) if use.is_router else _packed(weight, bias, activate_cpu, use)


def _packed(weight: Tensor, bias: Tensor | None, activate: Callable[[Tensor, Activation], Tensor], use: Use) -> Linear:
    is_fast = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if is_fast else torch.float32
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
    return _Packed(packed, None if bias is None else bias.to(dtype), dtype, activate, use.activation)


class NativeLinear:
    """A product by compiled code, with a packed weight. A row's result is the same to the last bit in any batch.

    multiply  takes the addresses of x, of the packed weight's parts, of the bias and of the output
    use       the products of heads and routers are float32, every other one has x's dtype
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        packed: tuple[Tensor, ...],
        bias: Tensor | None,
        use: Use,
        multiply: Callable[..., None],
    ) -> None:
        self.in_size, self.out_size, self.packed = in_size, out_size, packed
        self._bias = bias
        self._addresses = *(part.data_ptr() for part in packed), 0 if bias is None else bias.data_ptr()
        self._use, self._is_wide = use, use.is_head or use.is_router
        self._width = in_size * (use.activation.width if use.activation else 1)
        self._activation = use.activation.numbers if use.activation else NO_ACTIVATION
        self._multiply = multiply

    def __call__(self, x: Tensor, /) -> Tensor:
        out = empty(len(x), self.out_size, dtype=self._dtype_of(x))
        self.multiply(x, out)
        return out

    def _dtype_of(self, x: Tensor) -> torch.dtype:
        return torch.float32 if self._is_wide else x.dtype

    def multiply(self, x: Tensor, out: Tensor, column: int = 0, of_experts: tuple[int, ...] = ()) -> None:
        """Write the product to the columns of `out` [rows, …] from `column` on."""
        assert takes(x)
        assert x.shape[1] == self._width
        addresses = x.data_ptr(), *self._addresses, out.data_ptr() + column * out.itemsize
        sizes = len(out), self.in_size, self.out_size, out.shape[1]
        self._multiply(DTYPES[x.dtype], *addresses, DTYPES[out.dtype], *sizes, *self._activation, *of_experts)


def stacked(parts: Sequence[Linear]) -> Linear:
    """One product of several with the same input, whose outputs follow one another. They are not heads."""
    natives = [part for part in parts if isinstance(part, NativeLinear)]
    if len(parts) == 1:
        return parts[0]
    if len(natives) < len(parts):
        return lambda x: torch.cat([part(x) for part in parts], dim=1)

    def multiply(x: Tensor, /) -> Tensor:
        out, column = empty(len(x), sum(part.out_size for part in natives), dtype=x.dtype), 0
        for part in natives:
            part.multiply(x, out, column)
            column += part.out_size
        return out

    return multiply


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows that several weights multiply: first the rows of expert 0, then those of expert 1, …

    starts   [experts + 1] int32, rows starts[e] to starts[e + 1] (exclusive) are those of expert e
    sources  [rows] int32, which row of x each is; None: its own
    """

    starts: Tensor
    sources: Tensor | None = None


class NativeLinears(NativeLinear):
    """Products with several weights of one size and format, each with rows of its own.

    like  a product with one such weight
    """

    def __init__(self, like: NativeLinear, count: int) -> None:
        packed = tuple(torch.empty(count, *part.shape, dtype=part.dtype) for part in like.packed)
        bias = None if like._bias is None else torch.empty(count, *like._bias.shape, dtype=like._bias.dtype)
        super().__init__(like.in_size, like.out_size, packed, bias, like._use, like._multiply)
        self._sizes = count, packed[0][0].nbytes, sum(part[0].numel() for part in packed[1:])

    def put(self, number: int, product: NativeLinear) -> None:
        """Copy the weight of a product."""
        for parts, part in zip(self.packed, product.packed, strict=True):
            parts[number] = part
        if self._bias is not None:
            assert product._bias is not None
            self._bias[number] = product._bias

    def of_rows(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """[rows, out], in the order of `rows`, which is read when this is computed: a recording may replay it."""
        sources = rows.sources
        count, address = (len(x), 0) if sources is None else (len(sources), sources.data_ptr())
        out = empty(count, self.out_size, dtype=self._dtype_of(x))
        self.multiply(x, out, of_experts=(rows.starts.data_ptr(), address, *self._sizes))
        return out


def is_compiled_whole(use: Use = PLAIN) -> bool:
    """Whether `linear_native` multiplies by compiled code: where torch is slow, or the order of its sums varies."""
    return native is not None and (use.is_deterministic or native.instruction_set() not in _TORCH_IS_FAST)


def linear_native(weight: Tensor, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` by compiled code, summed in float32, or by oneDNN where that is faster."""
    # A step that is recorded has a router's product too.
    if weight.dtype in DTYPES and (use.is_router or is_compiled_whole(use)):
        return linear_whole_native(weight, bias, use)
    return linear(weight, bias, use) if use.is_router else _packed(weight, bias, activate_native, use)


def linear_whole_native(weight: Tensor, bias: Tensor | None, use: Use = PLAIN) -> Linear:
    """`linear` by compiled code, of a weight in float32 or bfloat16."""
    assert native is not None
    assert takes(weight)
    out_size, in_size = weight.shape
    packed = torch.empty(-(-out_size // PANEL) * PANEL * in_size, dtype=weight.dtype)
    native.pack_whole(DTYPES[weight.dtype], weight.data_ptr(), packed.data_ptr(), in_size, out_size)
    return NativeLinear(in_size, out_size, (packed,), bias, use, native.linear_whole)
