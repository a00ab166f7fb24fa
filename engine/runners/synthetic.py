"""A model without weights, through the same scheduler, blocks, loop and channel.

Its cache holds one number a slot, a checksum of the sequence up to there: each is computed from the one before it, read
through the block table. The next token follows from the last checksum, so a single wrong block, slot or position
changes every token after it, and the right ones can be computed by hand: see `expected_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import Chunk, Sampled, StepPlan, TokenLogprobs
from pagoda_server.engine.runners.runner_info import RunnerInfo

_MODULUS = (1 << 61) - 1
_POISON = -1


def advance(checksum: int, token: int) -> int:
    return (checksum * 1_000_003 + token + 1) % _MODULUS


def expected_tokens(prompt: Iterable[int], count: int, vocab_size: int) -> list[int]:
    """What the synthetic model generates after `prompt`."""
    checksum = 0
    for token in prompt:
        checksum = advance(checksum, token)
    tokens = []
    for _ in range(count):
        tokens.append(checksum % vocab_size)
        checksum = advance(checksum, tokens[-1])
    return tokens


def expected_logprobs(checksum: int, count: int, vocab_size: int) -> TokenLogprobs:
    """Of the tokens that follow a checksum: the most likely is its own, each one after that is less likely.

    They look like logarithms and are no distribution: how likely the first is, and by how much less each other, follows
    from the checksum too.
    """
    rest = checksum // vocab_size
    first, fall = rest % 61 / 64, (1 + rest // 61 % 40) / 64
    ids = [(checksum + at) % vocab_size for at in range(count)]
    return TokenLogprobs(-first, ids, [-first - at * fall for at in range(count)])


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds that a step takes: a constant, and a part for each sequence and each token."""

    base_s: float = 0.0
    per_sequence_s: float = 0.0
    per_token_s: float = 0.0

    @classmethod
    def parse(cls, milliseconds: str) -> StepTime:
        """From "BASE[,PER_SEQUENCE[,PER_TOKEN]]". Raises ConfigError."""
        try:
            parts = [float(part) / 1e3 for part in milliseconds.split(",")]
            if not 1 <= len(parts) <= 3 or not all(0 <= part < 3600 for part in parts):
                raise ValueError
        except ValueError:
            raise ConfigError(f"--step-ms takes one to three numbers of milliseconds, not {milliseconds!r}") from None
        return cls(*parts)

    def of(self, plan: StepPlan) -> float:
        return self.base_s + self.per_sequence_s * len(plan.chunks) + self.per_token_s * plan.num_tokens


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """An outcome that may be read from a time on, as if a device computed it until then."""

    sampled: Sampled
    ready_at: float

    def result(self) -> Sampled:
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        return self.sampled


class SyntheticRunner:
    """Computes as fast as it can, or takes a simulated time for each step.

    lookahead  1: like a device, takes a step while it computes another, and the next chunk may start from a token that
               the host has not read
    """

    def __init__(self, info: RunnerInfo, step_time: StepTime | None = None, lookahead: int = 0) -> None:
        self.info = info
        self.lookahead = lookahead
        self._block_size = info.kv_cache.block_size
        self._cache = [_POISON] * info.token_capacity
        self._host = [_POISON] * (info.num_host_blocks * self._block_size)
        self._step_time = step_time
        self._chosen: dict[int, int] = {}  # in the last step, by sequence
        self._busy_until = 0.0

    def launch(self, plan: StepPlan) -> SyntheticStep:
        started = max(time.monotonic(), self._busy_until)
        sampled = self._compute(plan)
        self._busy_until = started + (self._step_time.of(plan) if self._step_time else 0.0)
        return SyntheticStep(sampled, self._busy_until)

    def recover(self) -> None:
        self._chosen.clear()

    def _compute(self, plan: StepPlan) -> Sampled:
        chosen: dict[int, int] = {}
        tokens = [-1] * len(plan.chunks)
        logprobs: list[TokenLogprobs | None] = [None] * len(plan.chunks)
        self._copy_blocks(plan)
        for at, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            checksum = self._cache[self._slot(seq.blocks, chunk.start - 1)] if chunk.start else 0
            if checksum == _POISON:
                raise AssertionError(f"sequence {seq.id} reads a slot that was never written")
            for position in range(chunk.start, chunk.end):
                checksum = advance(checksum, self._token(chunk, position))
                self._cache[self._slot(seq.blocks, position)] = checksum
            if chunk.samples:
                tokens[at] = chosen[seq.id] = checksum % self.info.vocab_size
                if seq.params.logprobs is not None:
                    logprobs[at] = expected_logprobs(checksum, seq.params.logprobs, self.info.vocab_size)
        self._chosen = chosen
        return Sampled(tokens, logprobs)

    def _copy_blocks(self, plan: StepPlan) -> None:
        size, cache, host = self._block_size, self._cache, self._host
        for source, target in plan.saves:
            host[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]
        for source, target in plan.loads:
            cache[target * size : (target + 1) * size] = host[source * size : (source + 1) * size]
        for source, target in plan.copies:
            cache[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]

    def _token(self, chunk: Chunk, position: int) -> int:
        tokens = chunk.seq.tokens
        return tokens[position] if position < len(tokens) else self._chosen[chunk.seq.id]

    def _slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + position % self._block_size
