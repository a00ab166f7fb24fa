"""What a run of a workload gave: times of each request's tokens, and what is computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

PERCENTILES = (50, 90, 99)
Rate = Literal["output tok/s", "prompt tok/s"]
OUTPUT_RATE: Rate = "output tok/s"
PROMPT_RATE: Rate = "prompt tok/s"


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as goodput (DistServe, Zhong et al., 2024)."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from the run's start.

    submitted   when the request was due: a driver that falls behind makes the server look slower, never faster
    arrivals    one entry a token; several tokens may arrive at once
    prompt_len  tokens
    """

    submitted: float
    arrivals: list[float]
    kind: str = ""
    prompt_len: int = 0

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.submitted

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1)

    def meets(self, targets: Targets) -> bool:
        return 1e3 * self.ttft_s <= targets.ttft_ms and 1e3 * self.tpot_s <= targets.tpot_ms


@dataclass(frozen=True, slots=True)
class KVUse:
    """Of the blocks of the KV cache, while sequences ran.

    occupancy  referenced blocks / all blocks, mean over the samples
    peak       and at most
    waste      slots of referenced blocks that hold no token / slots of referenced blocks
    """

    occupancy: float
    peak: float
    waste: float


@dataclass(frozen=True, slots=True)
class Run:
    """One system's run of a workload. None: the system does not tell.

    steps              forward passes
    peak_memory_bytes  resident, of all the system's processes, each since its start
    """

    times: list[RequestTimes]
    steps: int | None = None
    kv: KVUse | None = None
    peak_memory_bytes: int | None = None

    @classmethod
    def in_sequence(cls, runs: list[Run]) -> Run:
        """Runs of one request each as one, each from the moment when the one before ended. KV use is not told."""
        times: list[RequestTimes] = []
        at = 0.0
        for run in runs:
            for request in run.times:
                arrivals = [at + arrival - request.submitted for arrival in request.arrivals]
                times.append(replace(request, submitted=at, arrivals=arrivals))
            at = times[-1].arrivals[-1]
        steps = [run.steps for run in runs if run.steps is not None]
        peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
        return cls(times, sum(steps) or None, None, max(peaks, default=None))

    @property
    def output_tokens(self) -> int:
        return sum(len(times.arrivals) for times in self.times)

    @property
    def elapsed_s(self) -> float:
        """From the first request's arrival to the last token."""
        return max(times.arrivals[-1] for times in self.times) - min(times.submitted for times in self.times)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens divided by TTFT, for the median request; requests run one at a time."""
        return float(np.median([times.prompt_len / times.ttft_s for times in self.times]))

    def rate(self, name: Rate) -> float:
        return self.prompt_tokens_per_s if name == PROMPT_RATE else self.tokens_per_s

    @property
    def requests_per_s(self) -> float:
        return len(self.times) / self.elapsed_s

    @property
    def mean_batch(self) -> float | None:
        """Output tokens a step: rows that compute padding, or a prompt's inner chunks, do not count."""
        return self.output_tokens / self.steps if self.steps else None

    def ttft_ms(self, percentile: float, kind: str | None = None) -> float:
        values = [1e3 * times.ttft_s for times in self.times if kind is None or times.kind == kind]
        return float(np.percentile(values, percentile))

    def itl_ms(self, percentile: float) -> float:
        """Over every gap between two tokens of one request; NaN if no request has two."""
        gaps = self.itls_ms()
        return float(np.percentile(gaps, percentile)) if len(gaps) else float("nan")

    def itls_ms(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return 1e3 * np.concatenate([np.diff(times.arrivals) for times in self.times])

    def goodput(self, targets: Targets) -> float:
        """Requests a second that met both targets."""
        return sum(times.meets(targets) for times in self.times) / self.elapsed_s

    def kinds(self) -> list[str]:
        """Those that reports tell apart, in the order of appearance."""
        return [kind for kind in dict.fromkeys(times.kind for times in self.times) if kind]


@dataclass(slots=True)
class Turns:
    """One system's runs of the same workload, one a turn, and what it says of itself."""

    name: str
    command: str
    versions: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    is_peer: bool = False
    rate: Rate = OUTPUT_RATE

    @property
    def rates(self) -> list[float]:
        """What systems are compared by, one figure a turn."""
        return [run.rate(self.rate) for run in self.runs]

    def ratios(self, other: Turns) -> Spread:
        """How many times the other's rate ours is, turn by turn: what disturbs one turn disturbs both sides."""
        return Spread.of([mine / its for mine, its in zip(self.rates, other.rates, strict=True)])

    def ratios_to_best(self, peers: list[Turns]) -> Spread:
        """How many times the rate of the turn's best peer ours is. Another peer may be the best in another turn."""
        best = [max(rates) for rates in zip(*(peer.rates for peer in peers), strict=True)]
        return Spread.of([mine / its for mine, its in zip(self.rates, best, strict=True)])


@dataclass(frozen=True, slots=True)
class Spread:
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(min(values), float(np.median(values)), max(values))
