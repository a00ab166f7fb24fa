"""What the card itself can do: the speed of a copy and of a matrix product, on random data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.rows import TERA, Bench, Row

PART = "ceilings"
COPY_BYTES = 4_000_000_000
PRODUCT_SIZE = 8192
COPY, PRODUCT = "copy, device to device", "bfloat16 matrix product"


def rows(bench: Bench) -> Iterator[Row]:
    num_bytes = 1_000_000 if bench.is_small else COPY_BYTES
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    time_us = bench.timer([lambda: target.copy_(source)])
    yield Row(PART, COPY, time_us=time_us, rate=2 * num_bytes / time_us * 1e6 / TERA, unit="TB/s")
    del source, target

    size = 64 if bench.is_small else PRODUCT_SIZE
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    time_us = bench.timer([lambda: left @ right])
    yield Row(PART, PRODUCT, time_us=time_us, rate=2 * size**3 / time_us * 1e6 / TERA, unit="TFLOP/s")
