"""`python -m pagoda_server.kernels.triton.tune [FILE]` tunes launch configurations on a GPU.

It starts with an op's default, halves and doubles one field after another, and keeps what is faster, until nothing is.
It skips configurations that do not compile or that change the result.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from pagoda_server.kernels.triton.configs import table_path, trying
from pagoda_server.kernels.triton.timing import Timer, cuda_timer
from pagoda_server.kernels.triton.tuning_spaces import Call, Space, spaces

LIMIT_S = 330.0
WORTH_IT = 0.97  # of the time before: a smaller gain may be noise
MAX_ROUNDS = 2
TOLERANCE = 2e-2  # relative: configurations sum in different orders

Fields = dict[str, int]


@dataclass(frozen=True, slots=True)
class Found:
    """The best configuration; `fields` is None if the default is. Times are summed over the workloads."""

    op: str
    key: str
    fields: Fields | None
    default_us: float
    best_us: float

    def __str__(self) -> str:
        told = "default" if self.fields is None else " ".join(f"{name} {value}" for name, value in self.fields.items())
        return f"{self.op} {self.key}: {self.default_us:.1f} µs, best {self.best_us:.1f} µs: {told}"


def tune(space: Space, timer: Timer) -> Found:
    workloads = space.workloads()
    with trying(space.op) as configs:
        expected = space.result()
    ((key, default),) = configs.items()
    default_us = _time(space, workloads, default, timer)
    seen = [default]

    def attempt(fields: Fields) -> float:
        if fields in seen:
            return math.inf
        seen.append(fields)
        try:
            with trying(space.op, **fields):
                result = space.result()
            return _time(space, workloads, fields, timer) if _is_same(result, expected) else math.inf
        except Exception:  # of any kind: this configuration cannot be launched
            return math.inf

    launches_none = not any(default.values())
    best, best_us = (space.start, attempt(space.start)) if launches_none else (default, default_us)
    for _ in range(MAX_ROUNDS):
        before = best
        for name in best:
            for fields in neighbours(best, name):
                if (time_us := attempt(fields)) < WORTH_IT * best_us:
                    best, best_us = fields, time_us
        if best == before:
            break
    is_better = best != default and best_us < WORTH_IT * default_us
    return Found(space.op, key, best if is_better else None, default_us, min(best_us, default_us))


def neighbours(fields: Fields, name: str) -> Iterator[Fields]:
    """Yield configurations with one field changed. Sizes are powers of two; pipeline stages change by one."""
    value = fields[name]
    steps = (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2)
    return ({**fields, name: step} for step in steps if step > 0)


def tune_all(every: Iterable[Space], timer: Timer, limit_s: float) -> Iterator[Found]:
    """Tune spaces in order until the time is used up."""
    started = time.monotonic()
    for space in every:
        if time.monotonic() - started > limit_s:
            print(f"no time is left for {space.op}", file=sys.stderr)
            return
        try:
            yield tune(space, timer)
        except Exception as failure:  # of one op; go on with the others
            print(f"{space.op} cannot be tuned: {type(failure).__name__}: {failure}", file=sys.stderr)


def table(found: Sequence[Found], gpu: str) -> dict[str, object]:
    configs: dict[str, dict[str, Fields]] = {}
    for one in found:
        if one.fields is not None:
            configs.setdefault(one.op, {})[one.key] = one.fields
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__, "date": date, "configs": configs}


def _time(space: Space, workloads: Sequence[Sequence[Call]], fields: Fields, timer: Timer) -> float:
    with trying(space.op, **fields):
        return sum(timer(calls) for calls in workloads)


def _is_same(result: Tensor, expected: Tensor) -> bool:
    difference = (result.double() - expected.double()).norm()
    return bool(difference <= TOLERANCE * expected.double().norm())


def main(arguments: Sequence[str]) -> None:
    gpu = torch.cuda.get_device_name()
    path = Path(arguments[0]) if arguments else table_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    found: list[Found] = []
    for one in tune_all(spaces(torch.device("cuda")), cuda_timer, LIMIT_S):
        found.append(one)
        print(one, flush=True)
        path.write_text(
            json.dumps(table(found, gpu), indent=1) + "\n"
        )  # every time, since a GPU fault ends the process


if __name__ == "__main__":
    main(sys.argv[1:])
