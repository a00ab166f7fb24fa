"""What the card itself can do: the speed of a copy and of a matrix product, on random data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.rows import TERA, Bench, Ceilings, Row

PART = "ceilings"
COPY_BYTES = 4_000_000_000
PRODUCT_SIZE = 8192
COPY, PRODUCT = "copy, device to device", "bfloat16 matrix product"


def rows(bench: Bench) -> Iterator[Row]:
    num_bytes = 1_000_000 if bench.is_small else COPY_BYTES
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    time_us = bench.timer([partial(target.copy_, source)])
    yield Row(PART, COPY, time_us=time_us, rate=2 * num_bytes / time_us * 1e6 / TERA, unit="TB/s")

    size = 64 if bench.is_small else PRODUCT_SIZE
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    time_us = bench.timer([partial(torch.matmul, left, right)])
    yield Row(PART, PRODUCT, time_us=time_us, rate=2 * size**3 / time_us * 1e6 / TERA, unit="TFLOP/s")


def of(found: Sequence[Row]) -> Ceilings:
    """From this part's rows; NaN, which no fraction survives, for what is missing."""
    rates = {row.case: row.rate for row in found if row.rate is not None}
    return Ceilings(TERA * rates.get(COPY, math.nan), TERA * rates.get(PRODUCT, math.nan))
