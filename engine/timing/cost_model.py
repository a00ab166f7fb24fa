"""What computing costs, learned from the duration of each step.

CostModel observes each step once, and answers every question about time that the scheduler has: how long a step will
take, how many prompt tokens fit into a time, how long a sequence needs at least, how long a prompt will likely take,
and whether copying blocks to and from host memory is faster than computing them again.

A step's time has parts that only a joint fit can separate: most steps hold decodes and prompt chunks at once, and a
prompt token costs more the longer its context is. StepTimeFilter fits them with a Kalman filter, which needs no history
of steps, follows a machine that slows down, and knows how uncertain it is. An average of recent steps has none of this:
it would meet each long prompt with the cost of a short one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from operator import mul
from typing import NamedTuple

from ..core.sequence import Sequence
from ..core.step import Chunk, StepPlan

HELD = 0.99  # the share of steps with decodes that `excess` covers
MEASURED = 256  # how many such steps count
WINDOW = 256  # the fastest step of the last one or two windows bounds the steps to come
SAFETY = 0.5  # no step to come takes less than this part of the fastest: a request is never refused on a high guess
PROMPT_WEIGHT = 0.05  # of the last step in the means that prompts are judged by: about 20 steps count
COPY_WEIGHT = 0.2  # of the last step that copied, in the mean time of a block's copy
WAIT_WEIGHT = 0.1  # of the last step that waited, in the mean of what such steps take longer
COPY_AGEING = 0.98  # applied each time that mean speaks against a copy, so that one slow copy does not count for ever

DRIFT = 0.02  # how much a part changes from one step to the next, relative to itself
LEAST_PART = 0.1  # of a step's time, in the units of StepLoad: a smaller part drifts as if it were this large
NOISE = 0.1  # standard deviation of a step's time, relative to it
SURE = 0.25  # an expected time counts only if its standard deviation is below this part of it
SPREAD = 30.0  # a part may be this many times the first step's time, in the units of StepLoad
OWN = 0.15  # how far a part may differ from the one that it is expected to equal, relative to that one


class CostModel:
    """
    token_budget  tokens that a step holds at most
    clock         seconds, monotonic
    most_chosen   tokens that a sequence gets from one step at most: more than 1 if steps verify drafts
    """

    def __init__(self, token_budget: int, clock: Callable[[], float], most_chosen: int = 1) -> None:
        self._token_budget = token_budget
        self._most_chosen = most_chosen
        self._clock = clock
        self.last_step_s = 0.0  # as long as the last step took, copies included
        self._began = 0.0  # when the step that ends next began: steps are computed one after the other
        self._in_flight: deque[bool] = deque()  # of each scheduled step: it waited for the commit of the one before
        self._wait_s: float | None = None  # mean
        self.overlap = False  # whether steps do, where none waits
        self._steps = StepTimeFilter()
        self._excess = RunningQuantile(HELD, MEASURED)  # measured ÷ expected
        self._least = RecentMinimum()
        self._least_large = RecentMinimum()  # of steps that hold at least half of the token budget
        self._prompt_step_s = 0.0  # mean of steps with prompts
        self._cut_len = float(token_budget)  # mean length of the longest chunk where a prompt had to be cut
        self._block_copy_s: float | None = None  # mean, in either direction; None before the first copy

    # -- what the scheduler reports -----------------------------------------------------------------------------------

    def scheduled(self, *, after_idle: bool) -> None:
        """Note that a step is about to be launched.

        after_idle  no sequence ran before, so the time since the last step is no part of this one
        """
        if after_idle and not self._in_flight:
            self._began = self._clock()
        self.overlap = self.overlap or bool(self._in_flight)
        self._in_flight.append(self.overlap and not self._in_flight and not after_idle)

    def drafted(self, seconds: float) -> None:
        """Note that drafting took so long: it is no part of the step that is about to be launched."""
        if not self._in_flight:
            self._began += seconds

    def committed(self, plan: StepPlan, copied_s: float = 0.0, *, is_first: bool = False) -> None:
        """Learn from the oldest scheduled step, which has ended now.

        copied_s  seconds that its copies to and from host memory took
        is_first  it says nothing, because it prepared later steps of its shape
        """
        now = self._clock()
        self.last_step_s = seconds = now - self._began
        self._began = now
        waited = self._in_flight.popleft()
        if is_first:
            return
        lengths = [chunk.length for chunk in plan.chunks]
        num_tokens = sum(lengths)
        self._least.add(seconds)
        if 2 * num_tokens >= self._token_budget:
            self._least_large.add(seconds)
        load = StepLoad.of_chunks(plan.chunks, num_tokens)
        computed_s = max(0.0, seconds - copied_s)
        if waited:
            computed_s = self._without_wait(load, computed_s)
        excess = self._steps.observe(load, computed_s)
        if load.decodes and excess is not None:
            self._excess.add(excess)
        if not plan.chunks[-1].is_decode:  # decodes come first
            self._prompt_step_s += (PROMPT_WEIGHT if self._prompt_step_s else 1.0) * (seconds - self._prompt_step_s)
            if not plan.chunks[-1].samples:
                self._cut_len += PROMPT_WEIGHT * (max(lengths) - self._cut_len)
        if copied_s > 0:
            mean = copied_s / (len(plan.saves) + len(plan.loads))
            known = mean if self._block_copy_s is None else self._block_copy_s
            self._block_copy_s = known + COPY_WEIGHT * (mean - known)

    def _without_wait(self, load: StepLoad, seconds: float) -> float:
        """Return what a step would have taken that waited for the one before, and learn from it how long it did."""
        expected_s = self._steps.predict_surely(load)
        if expected_s is not None:
            wait_s = max(0.0, seconds - expected_s)
            known_s = wait_s if self._wait_s is None else self._wait_s
            self._wait_s = known_s + WAIT_WEIGHT * (wait_s - known_s)
        return max(seconds - (self._wait_s or 0.0), seconds / 2)

    # -- what its callers ask -----------------------------------------------------------------------------------------

    @property
    def has_measured(self) -> bool:
        """Whether a step has shown what computing costs."""
        return self._steps.has_observed

    def decodes_s(self, count: int, num_keys: int) -> float:
        """Predict a step of `count` decodes that read `num_keys` keys together; 0 before the first step.

        A draft that is verified counts as a decode.
        """
        return self._steps.predict(StepLoad.of(count, num_keys))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens that steps full of them compute in a second; 0 before the first step."""
        seconds = self._steps.predict(StepLoad.of_chunk(0, self._token_budget))
        return self._token_budget / seconds if seconds > 0 else 0.0

    @property
    def wait_s(self) -> float | None:
        """How much longer a step takes that is launched only after the one before is committed, where others overlap.

        That is the host's part of a step. None before the first such step whose time could be predicted.
        """
        return self._wait_s

    @property
    def excess(self) -> float:
        """How far all but the slowest steps exceed their prediction, as a factor of at least 1."""
        return max(1.0, self._excess.value(1.0))

    def tokens_within(self, seconds: float, start: int) -> int:
        """Return how many prompt tokens, from position `start` on, lengthen a step by at most so much."""
        return self._steps.tokens_within(seconds, start)

    def least_s(self, seq: Sequence, num_uncomputed: int) -> float:
        """Bound from below the seconds until the token before which a sequence cannot end.

        That is its first token, or number `min_tokens` of its output. Its prompt tokens that no cache holds need steps
        of at most a token budget each. Steps of at least half a budget bound a full one; any step bounds the others.
        """
        full_steps = (num_uncomputed - 1) // self._token_budget
        other_steps = max(1, -(-(seq.params.min_tokens - seq.output_len) // self._most_chosen))
        least = self._least.value
        return SAFETY * (full_steps * max(least, self._least_large.value) + other_steps * least)

    def likely_s(self, num_uncomputed: int) -> float:
        """Estimate the seconds from a sequence's start to its next token; 0 before the first prompt.

        It needs as many steps as its prompt has chunks of the usual length, each as long as steps with prompts are.
        """
        return self._prompt_step_s * max(1.0, num_uncomputed / self._cut_len)

    def is_worth_saving(self, num_blocks: int, num_tokens: int) -> bool:
        """Say whether to copy leading blocks to host memory and back, rather than compute their tokens again."""
        return self._is_copy_faster(2 * num_blocks, 0, num_tokens)

    def is_worth_loading(self, num_blocks: int, start: int, end: int) -> bool:
        """Say whether to load so many blocks, rather than compute tokens `start` to `end`."""
        return self._is_copy_faster(num_blocks, start, end)

    @property
    def block_copy_s(self) -> float | None:
        """Seconds that a block's copy takes in either direction; None before the first."""
        return self._block_copy_s

    def chunk_s(self, start: int, end: int) -> float:
        """Predict by how much computing these tokens of one sequence lengthens a step."""
        return self._steps.added_s(StepLoad.of_chunk(start, end - start))

    def _is_copy_faster(self, num_copies: int, start: int, end: int) -> bool:
        """Copies are tried before anything is known of them, or of prompts: some engines only decode."""
        if self._block_copy_s is None or not self._prompt_step_s:
            return True
        if num_copies * self._block_copy_s <= self.chunk_s(start, end):
            return True
        self._block_copy_s *= COPY_AGEING
        return False


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
        decode_keys   keys that all decodes together read
        chunks        chunks of prompts
        prompt_keys   keys that all prompt tokens together read
        fetched_keys  keys before the chunks, each fetched once for a chunk whatever its length
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
    def of_chunk(cls, start: int, length: int) -> StepLoad:
        if length == 1:
            return cls.of(1, start)
        return cls.of(0, 0, 1, length, length * (start + length / 2), start)

    @classmethod
    def of_chunks(cls, chunks: list[Chunk], num_tokens: int) -> StepLoad:
        """`num_tokens`: the sum of their lengths."""
        if num_tokens == len(chunks):
            return cls.of(num_tokens, sum([chunk.start for chunk in chunks]))
        longer = [chunk for chunk in chunks if chunk.length > 1 and not chunk.drafts]
        others = [chunk for chunk in chunks if chunk.length == 1 or chunk.drafts]
        decodes = sum([chunk.length for chunk in others])
        return cls.of(
            decodes,
            sum([chunk.length * chunk.start for chunk in others]),
            len(longer),
            num_tokens - decodes,
            sum([chunk.length * (chunk.start + chunk.length / 2) for chunk in longer]),
            sum([chunk.start for chunk in longer]),
        )


_SIZE = len(StepLoad._fields)
_EXPECTED_FROM = {  # a part, and the one that it is expected to equal in these units
    StepLoad._fields.index("prompt_keys"): StepLoad._fields.index("prompt_tokens"),
    StepLoad._fields.index("fetched_keys"): StepLoad._fields.index("decode_keys"),
}


class StepTimeFilter:
    """A Kalman filter over the parts of a step's time, one part for each entry of StepLoad.

    A part drifts only in steps that it has a share in, so a server that has decoded for an hour still knows what a
    prompt takes. A part is never negative: one that would be is taken as 0, and the others as what is then most likely.
    A part that was never seen is expected from another: 1,024 keys double the time of a prompt token, and a chunk
    fetches a key in the time in which a decode reads one.

    parts  seconds for each unit of StepLoad; all 0 before the first step
    """

    def __init__(self) -> None:
        self.parts = [0.0] * _SIZE
        self._most = [0.0] * _SIZE  # the variance that a part can grow to
        self._covariance: list[list[float]] = []

    @property
    def has_observed(self) -> bool:
        return bool(self._covariance)

    def observe(self, load: StepLoad, seconds: float) -> float | None:
        """Learn from a step. Return its time ÷ the predicted one; None if too little was known to predict it."""
        if not self.has_observed:
            self._expect(seconds)
        expected = self.predict(load)
        shared = [_dot(row, load) for row in self._covariance]
        # Errors are relative. A step that took far longer than predicted met something else: it says little.
        unknown = _dot(load, shared)  # the variance of the prediction
        variance = unknown + (NOISE * max(seconds, 1e-9)) ** 2
        error = (seconds - expected) / variance
        for row, share in enumerate(shared):
            self.parts[row] += share * error
            values, gain = self._covariance[row], share / variance
            for column in range(row + 1):  # one half, mirrored: rounding that made them differ would grow
                values[column] = self._covariance[column][row] = values[column] - gain * shared[column]
        self._drift(load, expected)
        self._leave_out_the_negative()
        # Rounding can make the variance of a prediction of 0 negative.
        return seconds / expected if expected and unknown < (SURE * expected) ** 2 else None

    def predict(self, load: StepLoad) -> float:
        """Return seconds; 0 before the first step."""
        return _dot(self.parts, load)

    def predict_surely(self, load: StepLoad) -> float | None:
        """Return seconds; None if too little is known."""
        expected = self.predict(load)
        unknown = _dot(load, [_dot(row, load) for row in self._covariance])
        return expected if self.has_observed and unknown < (SURE * expected) ** 2 else None

    def added_s(self, load: StepLoad) -> float:
        """Predict how much a load adds to a step that is made anyway."""
        return self.predict(load) - self.parts[0]

    def tokens_within(self, seconds: float, start: int) -> int:
        """Return how many prompt tokens, from position `start` on, lengthen a step by at most so much."""
        alone = self.added_s(StepLoad.of(prompt_tokens=1, prompt_keys=start))
        half_key = self.added_s(StepLoad.of(prompt_keys=0.5))
        rest = seconds - self.added_s(StepLoad.of(chunks=1, fetched_keys=start))
        if rest <= 0:
            return 0
        # Solve n * alone + n² * half_key = rest in the form that allows half_key = 0.
        return int(min(2 * rest / (alone + math.sqrt(alone**2 + 4 * half_key * rest) or 1e-12), 1e9))

    def _expect(self, seconds: float) -> None:
        variance = (SPREAD * max(seconds, 1e-6)) ** 2
        self._covariance = [[variance * (row == column) for column in range(_SIZE)] for row in range(_SIZE)]
        self._covariance[0][0] = max(seconds, 1e-6) ** 2  # every step holds the constant, so it is below the first
        for part, other in _EXPECTED_FROM.items():
            self._covariance[part][part] += (OWN**2) * variance
            self._covariance[part][other] = self._covariance[other][part] = variance
        self._most = [self._covariance[index][index] for index in range(_SIZE)]

    def _drift(self, load: StepLoad, expected: float) -> None:
        for index, x in enumerate(load):
            if x > 0.0:
                walked = DRIFT * max(self.parts[index], LEAST_PART * expected)
                self._covariance[index][index] = min(self._covariance[index][index] + walked**2, self._most[index])

    def _leave_out_the_negative(self) -> None:
        """Set negative parts to 0, and the others to what is most likely given that."""
        if min(self.parts) >= 0:
            return
        given = [row[:] for row in self._covariance]
        zero: set[int] = set()
        while min(self.parts) < 0:
            zero.add(worst := min(range(_SIZE), key=self.parts.__getitem__))
            row, variance, below = given[worst][:], given[worst][worst], self.parts[worst]
            for index in range(_SIZE):
                share = row[index] / variance if variance > 0 else 0.0
                self.parts[index] = 0.0 if index in zero else self.parts[index] - share * below
                for column in range(_SIZE):
                    given[index][column] -= share * row[column]


def _dot(one: list[float] | StepLoad, other: list[float] | StepLoad) -> float:
    total: float = sum(map(mul, one, other))
    return total


class RecentMinimum:
    """The least of the last 256 to 512 values."""

    def __init__(self) -> None:
        self._previous = self._current = math.inf
        self._count = 0

    def add(self, value: float) -> None:
        self._current = min(self._current, value)
        self._count += 1
        if self._count == WINDOW:
            self._previous, self._current, self._count = self._current, math.inf, 0

    @property
    def value(self) -> float:
        """0 before the first value: a bound that claims nothing."""
        least = min(self._previous, self._current)
        return least if least < math.inf else 0.0


class RunningQuantile:
    """A quantile of the last values.

    quantile  0 to 1: 0.99 leaves one value of a hundred above it
    window    how many values count
    """

    def __init__(self, quantile: float, window: int) -> None:
        self._quantile = quantile
        self._window = window
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(value)
        insort(self._ordered, value)
        if len(self._values) > self._window:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]

    def value(self, default: float) -> float:
        """Return the quantile, or `default` before the first value."""
        if not self._ordered:
            return default
        return self._ordered[min(len(self._ordered) - 1, int(self._quantile * len(self._ordered)))]
