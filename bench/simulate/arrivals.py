"""Requests of a simulation and their arrivals: bursts, heavy tails, one hostile tenant, a few huge prompts.

A request is only its lengths, since nothing reads the tokens. They are columns instead of objects, since there may be
a million of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagoda_server.engine.runners.synthetic import StepTime

CALM_S, BURST_S = 40.0, 8.0  # mean lengths; a burst's rate is BURST times that of a calm period
BURST = 4.0
TENANTS = 20
HOSTILE = "hostile"
HOSTILE_SHARE = 0.6  # of the middle third's requests, in addition to those of the others
URGENT, URGENT_SHARE = 10, 0.1  # priority of a tenth of all requests; the others have 0
HUGE_PROMPT = 100_000
ONE_IN = 20_000  # one in so many requests has a huge prompt
MAX_PROMPT, MAX_OUTPUT = 8192, 512


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Columns with one entry per request, in order of arrival. `at` is in seconds, lengths in tokens."""

    at: list[float]
    prompt_len: list[int]
    output_len: list[int]
    tenant: list[str]
    priority: list[int]

    def __len__(self) -> int:
        return len(self.at)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(sum, zip(self.prompt_len, self.output_len, strict=True)))


def draw(count: int, load: float, step_time: StepTime, batch: int, seed: int) -> Arrivals:
    """Draw arrivals. `load` is the work of all tenants but the hostile one ÷ what a full batch computes."""
    random = np.random.default_rng(seed)
    prompts = np.clip(random.lognormal(5.0, 1.1, count), 4, MAX_PROMPT).astype(int)
    outputs = np.clip(random.lognormal(3.6, 0.9, count), 1, MAX_OUTPUT).astype(int)
    rate = load / _work_s(float(prompts.mean()), float(outputs.mean()), step_time, batch)
    prompts[random.random(count) < 1 / ONE_IN] = HUGE_PROMPT
    gaps = np.diff(_bursty(count, rate, random), prepend=0.0)
    gaps[count // 3 : 2 * (count // 3)] *= 1 - HOSTILE_SHARE
    at = np.cumsum(gaps)
    popularity = 1 / np.arange(1, TENANTS + 1)
    tenants = [f"tenant-{k}" for k in random.choice(TENANTS, count, p=popularity / popularity.sum())]
    third = count // 3
    for index in np.flatnonzero(random.random(third) < HOSTILE_SHARE):
        tenants[third + int(index)] = HOSTILE
    priorities = np.where(random.random(count) < URGENT_SHARE, URGENT, 0)
    return Arrivals(at.tolist(), prompts.tolist(), outputs.tolist(), tenants, priorities.tolist())


def _work_s(prompt_len: float, output_len: float, step_time: StepTime, batch: int) -> float:
    """Server time of one request, whose decodes share the steps of a full batch."""
    decode_s = step_time.base_s / batch + step_time.per_sequence_s + step_time.per_token_s
    return prompt_len * step_time.per_token_s + output_len * decode_s


def _bursty(count: int, rate: float, random: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A Poisson process whose rate has two states (Markov-modulated), `rate` on average."""
    calm_rate = rate * (CALM_S + BURST_S) / (CALM_S + BURST * BURST_S)
    pieces: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    now, drawn, is_burst = 0.0, 0, False
    while drawn < count:
        length = random.exponential(BURST_S if is_burst else CALM_S)
        arrivals = random.poisson(calm_rate * (BURST if is_burst else 1.0) * length)
        pieces.append(now + np.sort(random.random(arrivals)) * length)
        now, drawn, is_burst = now + length, drawn + arrivals, not is_burst
    return np.concatenate(pieces)[:count]
