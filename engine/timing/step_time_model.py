"""How long a step takes, learned from the steps that were made: a Kalman filter over its parts. Standard library only.

A step's time is a constant, and a part for each decode, each key that decodes read, each chunk of a prompt, each of its
tokens, each key that such a token reads, and each key that a chunk fetches: all those before it, once, whatever its
length. Parts drift, so that the model follows a machine that slows down; but a part drifts only in steps that it has
a share in, and a server that has decoded for an hour still knows what a prompt takes. A part is never negative: one
that would be is taken for 0, and the others for what they then most likely are.

What has not been seen is expected from what has: 1,024 keys double what a prompt token takes, and a chunk fetches a key
in the time in which a decode reads one. The first long context is therefore met with a guess, not with nothing.
"""

from __future__ import annotations

import math
from operator import mul
from typing import NamedTuple

from pagoda_server.engine.core.sequence import StepPlan

DRIFT = 0.02  # of itself that a part changes by from one step to the next
LEAST_PART = 0.1  # of a step's time, in the units of StepLoad: one that is less drifts as if it were this
NOISE = 0.1  # of a step's time, as a part of it
SURE = 0.25  # standard deviation of an expected time, as a part of it: a model that knows less was not exceeded
SPREAD = 30.0  # a part may be this many times the first step's time, in the units of StepLoad
OWN = 0.15  # and what is expected from another part may differ from it by so much of that


class StepLoad(NamedTuple):
    """What a step's time depends on; each in units that make a usual value about 1."""

    constant: float
    decodes: float
    decode_keys: float
    chunks: float
    prompt_tokens: float
    prompt_keys: float
    fetched_keys: float

    @classmethod
    def of(
        cls,
        decodes: int = 0,
        decode_keys: int = 0,
        chunks: int = 0,
        prompt_tokens: int = 0,
        prompt_keys: float = 0.0,
        fetched_keys: int = 0,
    ) -> StepLoad:
        """
        decode_keys   before all decodes together
        chunks        of prompts
        prompt_keys   that all prompt tokens together read
        fetched_keys  before the chunks of prompts, of each chunk once
        """
        return cls(
            1.0,
            decodes / 64,
            decode_keys / 65_536,
            chunks / 64,
            prompt_tokens / 512,
            prompt_keys / 524_288,
            fetched_keys / 65_536,
        )

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepLoad:
        decodes = decode_keys = chunks = prompt_tokens = fetched_keys = 0
        prompt_keys = 0.0
        for chunk in plan.chunks:
            start, length = chunk.start, chunk.length
            if length == 1:
                decodes += 1
                decode_keys += start
            else:
                chunks += 1
                prompt_tokens += length
                prompt_keys += length * (start + length / 2)
                fetched_keys += start
        return cls.of(decodes, decode_keys, chunks, prompt_tokens, prompt_keys, fetched_keys)


_SIZE = len(StepLoad._fields)
_EXPECTED_FROM = {  # a part, and the one that it is expected to equal in these units
    StepLoad._fields.index("prompt_keys"): StepLoad._fields.index("prompt_tokens"),
    StepLoad._fields.index("fetched_keys"): StepLoad._fields.index("decode_keys"),
}


class StepTimeModel:
    """parts  seconds of each unit of StepLoad; all 0 before the first step"""

    def __init__(self) -> None:
        self.parts = [0.0] * _SIZE
        self._most = [0.0] * _SIZE  # that a part's variance can grow to
        self._covariance: list[list[float]] = []

    def observe(self, load: StepLoad, seconds: float) -> float | None:
        """Learn from a step. Returns its time ÷ what was expected; None where too little was known to expect one."""
        if not self._covariance:
            self._expect(seconds)
        expected = self.predict(load)
        shared = [_dot(row, load) for row in self._covariance]
        # Errors are relative. A step that took far longer than was expected has met something else: it tells little.
        unknown = _dot(load, shared)  # the variance of what was expected
        variance = unknown + (NOISE * max(seconds, 1e-9)) ** 2
        error = (seconds - expected) / variance
        for row, share in enumerate(shared):
            self.parts[row] += share * error
            values, told = self._covariance[row], share / variance
            for column in range(row + 1):  # one half, mirrored: rounding that made them differ would grow
                values[column] = self._covariance[column][row] = values[column] - told * shared[column]
        self._drift(load, expected)
        self._leave_out_the_negative()
        return seconds / expected if unknown < (SURE * expected) ** 2 else None

    def predict(self, load: StepLoad) -> float:
        """Seconds; 0 before the first step."""
        return _dot(self.parts, load)

    def tokens_within(self, seconds: float, start: int) -> int:
        """How many tokens of a prompt, from position `start` on, add at most so much to a step."""
        alone = self._adds(StepLoad.of(prompt_tokens=1, prompt_keys=start))
        half_key = self._adds(StepLoad.of(prompt_keys=0.5))
        rest = seconds - self._adds(StepLoad.of(chunks=1, fetched_keys=start))
        if rest <= 0:
            return 0
        # n * alone + n² * half_key = rest, in the form that bears half_key = 0
        return int(min(2 * rest / (alone + math.sqrt(alone**2 + 4 * half_key * rest) or 1e-12), 1e9))

    def _adds(self, load: StepLoad) -> float:
        """Seconds to a step that is made anyhow."""
        return self.predict(load) - self.parts[0]

    def _expect(self, seconds: float) -> None:
        variance = (SPREAD * max(seconds, 1e-6)) ** 2
        self._covariance = [[variance * (row == column) for column in range(_SIZE)] for row in range(_SIZE)]
        self._covariance[0][0] = max(seconds, 1e-6) ** 2  # the constant is in every step, and so within the first
        for part, other in _EXPECTED_FROM.items():
            self._covariance[part][part] += (OWN**2) * variance
            self._covariance[part][other] = self._covariance[other][part] = variance
        self._most = [self._covariance[at][at] for at in range(_SIZE)]

    def _drift(self, load: StepLoad, expected: float) -> None:
        for at, x in enumerate(load):
            if x > 0.0:
                walked = DRIFT * max(self.parts[at], LEAST_PART * expected)
                self._covariance[at][at] = min(self._covariance[at][at] + walked**2, self._most[at])

    def _leave_out_the_negative(self) -> None:
        """Where parts would be below 0: what the others most likely are if those are 0."""
        if min(self.parts) >= 0:
            return
        given = [row[:] for row in self._covariance]
        zero: set[int] = set()
        while min(self.parts) < 0:
            zero.add(worst := min(range(_SIZE), key=self.parts.__getitem__))
            told, variance, below = given[worst][:], given[worst][worst], self.parts[worst]
            for at in range(_SIZE):
                share = told[at] / variance if variance > 0 else 0.0
                self.parts[at] = 0.0 if at in zero else self.parts[at] - share * below
                for column in range(_SIZE):
                    given[at][column] -= share * told[column]


def _dot(one: list[float] | StepLoad, other: list[float] | StepLoad) -> float:
    total: float = sum(map(mul, one, other))
    return total
