"""How long a step takes, learned from the steps that were made: least squares that forget. Standard library only.

A step's time is a constant, and a part for each decode, each key that decodes read, each prompt token and each key that
prompt tokens read. Old steps count less by `FORGETTING` with each new one, so that the model follows a machine that
slows down. A part is never negative: where the fit says so, it is left out and the others are fitted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.sequence import StepPlan

FORGETTING = 0.995  # half of what is known stems from the last 140 steps
RIDGE = 1e-6  # keeps apart what has not varied yet
OUTLIER = 4.0  # a step that takes this many times what was predicted has met something else


class StepLoad(NamedTuple):
    """What a step's time depends on; each in units that make a usual value about 1."""

    constant: float
    decodes: float
    decode_keys: float
    prompt_tokens: float
    prompt_keys: float

    @classmethod
    def of(cls, decodes: int, decode_keys: int, prompt_tokens: int, prompt_keys: int) -> StepLoad:
        return cls(1.0, decodes / 64, decode_keys / 65_536, prompt_tokens / 512, prompt_keys / 524_288)

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepLoad:
        decodes = decode_keys = prompt_tokens = prompt_keys = 0
        for chunk in plan.chunks:
            if chunk.length == 1:
                decodes += 1
                decode_keys += chunk.start
            else:
                prompt_tokens += chunk.length
                prompt_keys += chunk.length * (chunk.start + chunk.length // 2)
        return cls.of(decodes, decode_keys, prompt_tokens, prompt_keys)


class StepTimeModel:
    def __init__(self) -> None:
        size = len(StepLoad._fields)
        self._products = [[0.0] * size for _ in range(size)]  # the normal equations: sums of x·xᵀ and of x·seconds
        self._targets = [0.0] * size
        self._parts: list[float] | None = None  # of a step's time, in StepLoad's order; None: to be solved for

    def observe(self, load: StepLoad, seconds: float) -> None:
        if self._targets[0]:
            seconds = min(seconds, OUTLIER * self.predict(load))
        for row, (products, x) in enumerate(zip(self._products, load, strict=True)):
            for column, y in enumerate(load):
                products[column] = FORGETTING * products[column] + x * y
            self._targets[row] = FORGETTING * self._targets[row] + x * seconds
        self._parts = None

    def predict(self, load: StepLoad) -> float:
        """Seconds; 0 before the first step."""
        return sum(part * x for part, x in zip(self.parts, load, strict=True))

    @property
    def parts(self) -> Sequence[float]:
        if self._parts is None:
            self._parts = self._solve()
        return self._parts

    def _solve(self) -> list[float]:
        used = [row for row, products in enumerate(self._products) if products[row] > 0]
        while True:
            parts = _solve_ridge(
                [[self._products[row][column] for column in used] for row in used], [self._targets[row] for row in used]
            )
            negative = {row for row, part in zip(used, parts, strict=True) if part < 0}
            if not negative:
                found = dict(zip(used, parts, strict=True))
                return [found.get(row, 0.0) for row in range(len(self._targets))]
            used = [row for row in used if row not in negative]


def _solve_ridge(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is symmetric and, with the ridge, positive definite: no pivot is needed."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        rows[at][at] += RIDGE * (1.0 + rows[at][at])
    for at in range(size):
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            for column in range(at, size + 1):
                rows[below][column] -= factor * rows[at][column]
    solution = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * solution[column] for column in range(at + 1, size))
        solution[at] = (rows[at][size] - known) / rows[at][at]
    return solution
