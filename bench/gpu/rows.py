"""Rows of the GPU benchmark, one per measurement, passed between processes as lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import torch

from pagoda_server.kernels.triton.timing import Timer

TERA = 1e12
CEILINGS = "ceilings"  # the part that all fractions refer to
COPY_BYTES = 4_000_000_000
PRODUCT_SIZE = 8192
COPY, PRODUCT = "copy, device to device", "bfloat16 matrix product"
RPC_ERRORS = (grpc.Call, grpc.aio.AioRpcError)  # errors that have a status


@dataclass(frozen=True, slots=True)
class Bar:
    """What a measurement should reach: a fraction of its limit, a maximum time, or a minimum of TFLOP/s."""

    fraction: float | None = None
    time_us: float | None = None
    tflops: float | None = None

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"≥ {100 * self.fraction:.0f} %"
        return f"≤ {self.time_us:g} µs" if self.time_us is not None else f"≥ {self.tflops:g} TFLOP/s"


@dataclass(frozen=True, slots=True)
class Row:
    """
    time_us   time of one call or step
    rate      rate in `unit`
    fraction  share of what the card could do, by its measured ceilings
    met       whether the bar is reached; None if there is no bar
    others    time of other implementations for the same work, µs
    figures   other measurements, by name and unit
    error     why there is no measurement, or what is wrong with the result
    """

    part: str
    case: str
    time_us: float | None = None
    rate: float | None = None
    unit: str = ""
    fraction: float | None = None
    bar: str = ""
    met: bool | None = None
    others: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: str) -> Row:
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured bytes per second of a copy, reads plus writes, and operations per second of a bfloat16 product."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        """Least time for work that moves `num_bytes` and computes `flops`."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Bench:
    """
    is_small  rehearse with tiny shapes, on a simulated card with interpreted kernels
    evidence  folder for logs and artefacts; what a part writes into it is in the archive of logs under the same name
    limit_s   time limit of this process
    done      part and case of what an earlier process has measured: it is not measured again
    """

    device: torch.device
    timer: Timer
    ceilings: Ceilings
    is_small: bool
    evidence: Path
    limit_s: float = math.inf
    done: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Work:
    """A call, and the least that it must move and compute.

    calls      equal calls, each on its own buffers
    error      relative error of the result against a reference; NaN always fails
    others     name → other implementations of the same work, made only when timed, since they may be missing
    """

    part: str
    case: str
    num_bytes: float
    flops: float
    calls: Callable[[], Sequence[Callable[[], object]]]
    error: Callable[[], float]
    tolerance: float
    others: dict[str, Callable[[], Sequence[Callable[[], object]]]] = field(default_factory=dict)
    bar: Bar | None = None


def ceiling_rows(bench: Bench) -> Iterator[Row]:
    num_bytes = 1_000_000 if bench.is_small else COPY_BYTES
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    time_us = bench.timer([partial(target.copy_, source)])
    yield Row(CEILINGS, COPY, time_us=time_us, rate=2 * num_bytes / time_us * 1e6 / TERA, unit="TB/s")

    size = 64 if bench.is_small else PRODUCT_SIZE
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    time_us = bench.timer([partial(torch.matmul, left, right)])
    yield Row(CEILINGS, PRODUCT, time_us=time_us, rate=2 * size**3 / time_us * 1e6 / TERA, unit="TFLOP/s")


def ceilings_of(found: Sequence[Row]) -> Ceilings:
    """Read the ceilings from their rows. A missing one is NaN, and so is every fraction of it."""
    rates = {row.case: row.rate for row in found if row.rate is not None}
    return Ceilings(TERA * rates.get(COPY, math.nan), TERA * rates.get(PRODUCT, math.nan))


def measure(work: Work, bench: Bench) -> Row:
    """Check the result, then time the call and its rivals. The row reports what failed; the log has the traceback."""
    if (work.part, work.case) in bench.done:
        return Row(work.part, work.case)
    try:
        error = work.error()
        if not error <= work.tolerance:
            return Row(work.part, work.case, error=f"wrong by {error:.2g}, more than {work.tolerance:g}")
        time_us = bench.timer(work.calls())
    except Exception as failure:  # any failure: the other kernels can still be measured
        return failed(work.part, work.case, failure)
    others: dict[str, float] = {}
    missing: list[str] = []
    for name, calls in work.others.items():
        try:
            others[name] = bench.timer(calls())
        except Exception as failure:
            missing.append(f"{name}: {logged(failure, f'{work.part}, {work.case}, {name}')}")
    fraction = bench.ceilings.seconds(work.num_bytes, work.flops) / (time_us / 1e6)
    is_product = work.flops / bench.ceilings.flops_per_s > work.num_bytes / bench.ceilings.bytes_per_s
    rate = (work.flops if is_product else work.num_bytes) / (time_us / 1e6) / TERA
    return Row(
        work.part,
        work.case,
        time_us=time_us,
        rate=rate,
        unit="TFLOP/s" if is_product else "TB/s",
        fraction=fraction,
        bar=str(work.bar or ""),
        met=_met(work.bar, time_us, fraction, work.flops),
        others=others,
        error="; ".join(missing),
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the whole tensor by the Euclidean norm; NaN if any element is NaN."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def explain(failure: BaseException) -> str:
    """Return the first sentence of an error, since some messages are a page long."""
    message = f"{failure.code().name}: {failure.details()}" if isinstance(failure, RPC_ERRORS) else str(failure).strip()
    first = (message or "no message").splitlines()[0].split(". ")[0]
    return f"{type(failure).__name__}: {first[:120]}"


def logged(failure: BaseException, what: str) -> str:
    """Print the traceback, which goes to the part's log, and return the first sentence of the error for a row."""
    print(f"== {what} ==", file=sys.stderr)
    traceback.print_exception(failure)
    return explain(failure)


def failed(part: str, case: str, failure: BaseException) -> Row:
    return Row(part, case, error=logged(failure, f"{part}, {case}"))


def _met(bar: Bar | None, time_us: float, fraction: float, flops: float) -> bool | None:
    if bar is None:
        return None
    if bar.fraction is not None:
        return fraction >= bar.fraction
    if bar.time_us is not None:
        return time_us <= bar.time_us
    return bar.tflops is not None and flops / (time_us / 1e6) >= bar.tflops * TERA
