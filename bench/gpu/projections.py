"""Products with few rows, which read a weight and do little else: the backends' own, beside torch's library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.attention import TINY
from bench.gpu.rows import Bar, Bench, Row, Work, measure, relative_error
from pagoda_server.kernels.linear import Linear
from pagoda_server.kernels.triton.inputs import LLAMA_8B, normal
from pagoda_server.kernels.triton.linear import linear_triton
from pagoda_server.kernels.triton.linear_quantized import linear_fp8_weight_triton, linear_int8_weight_triton
from pagoda_server.kernels.triton.timing import num_copies

FAST = Bar(fraction=0.85)
ROWS = (1, 16, 64)


def rows(bench: Bench) -> Iterator[Row]:
    model = TINY if bench.is_small else LLAMA_8B
    for name, size in model.projections.items():
        for kind, prepare, weight_bytes, tolerance in (
            ("bfloat16", linear_triton, 2.0, 1e-2),
            ("int8", linear_int8_weight_triton, 1.0, 2e-2),
            ("float8", linear_fp8_weight_triton, 1.0, 5e-2),
        ):
            for count in (3,) if bench.is_small else ROWS:
                case = f"{model.name} {name}, {kind}, {count} rows"
                yield measure(_work(case, size, count, prepare, weight_bytes, tolerance, bench), bench)


def _work(
    case: str,
    size: tuple[int, int],
    count: int,
    prepare: Callable[[Tensor, Tensor | None], Linear],
    weight_bytes: float,
    tolerance: float,
    bench: Bench,
) -> Work:
    num_bytes = weight_bytes * size[0] * size[1]
    copies = 2 if bench.is_small else num_copies(int(num_bytes))
    weights = [normal(*size, dtype=torch.bfloat16, device=bench.device) for _ in range(copies)]
    x = normal(count, size[1], dtype=torch.bfloat16, device=bench.device)

    def prepared() -> Sequence[Callable[[], object]]:
        return [partial(prepare(weight, None), x) for weight in weights]

    return Work(
        "projections",
        case,
        num_bytes=num_bytes + x.nbytes + 2 * count * size[0],
        flops=2.0 * count * size[0] * size[1],
        calls=prepared,
        error=lambda: relative_error(prepare(weights[0], None)(x), x.float() @ weights[0].float().T),
        tolerance=tolerance,
        others={"torch bfloat16": lambda: [partial(functional.linear, x, weight) for weight in weights]},
        bar=FAST,
    )
