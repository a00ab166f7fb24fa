"""The times of a run's tokens, and the figures computed from them."""

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
    """Latency targets that a request must meet to count as goodput (DistServe, Zhong et al., 2024)."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """A request's times, in seconds from the run's start.

    submitted   when the request was due, so that a late driver makes the server look slower, never faster
    arrivals    one entry per token; several tokens may arrive at once
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
    """Use of the KV cache's blocks while sequences ran.

    occupancy  referenced blocks / all blocks, mean of the samples
    peak       the same, maximum of the samples
    waste      empty slots of referenced blocks / slots of referenced blocks
    """

    occupancy: float
    peak: float
    waste: float


@dataclass(frozen=True, slots=True)
class Run:
    """One system's run of a workload. A field is None where the system does not report it.

    steps              forward passes
    peak_memory_bytes  peak resident memory, summed over the system's processes
    """

    times: list[RequestTimes]
    steps: int | None = None
    kv: KVUse | None = None
    peak_memory_bytes: int | None = None

    @classmethod
    def in_sequence(cls, runs: list[Run]) -> Run:
        """Join runs of one request each, as if each began when the one before ended. KV use is left out."""
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
        """Time from the first request's arrival to the last token."""
        return max(times.arrivals[-1] for times in self.times) - min(times.submitted for times in self.times)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens ÷ TTFT, median of the requests. Meaningful only when requests run one at a time."""
        return float(np.median([times.prompt_len / times.ttft_s for times in self.times]))

    def rate(self, name: Rate) -> float:
        return self.prompt_tokens_per_s if name == PROMPT_RATE else self.tokens_per_s

    @property
    def requests_per_s(self) -> float:
        return len(self.times) / self.elapsed_s

    @property
    def mean_batch(self) -> float | None:
        """Output tokens per step. Rows of padding and inner chunks of a prompt do not count."""
        return self.output_tokens / self.steps if self.steps else None

    def ttft_ms(self, percentile: float, kind: str | None = None) -> float:
        values = [1e3 * times.ttft_s for times in self.times if kind is None or times.kind == kind]
        return float(np.percentile(values, percentile))

    def itl_ms(self, percentile: float) -> float:
        """Percentile over the gaps between tokens of one request; NaN if no request has two tokens."""
        gaps = self.itls_ms()
        return float(np.percentile(gaps, percentile)) if len(gaps) else float("nan")

    def itls_ms(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return 1e3 * np.concatenate([np.diff(times.arrivals) for times in self.times])

    def goodput(self, targets: Targets) -> float:
        """Requests per second that met both targets."""
        return sum(times.meets(targets) for times in self.times) / self.elapsed_s

    def kinds(self) -> list[str]:
        """The kinds of request that reports separate, in order of appearance."""
        return [kind for kind in dict.fromkeys(times.kind for times in self.times) if kind]


@dataclass(slots=True)
class Turns:
    """One system's runs of a workload, one per turn, and the versions that it reports."""

    name: str
    command: str
    versions: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    is_peer: bool = False
    rate: Rate = OUTPUT_RATE

    @property
    def rates(self) -> list[float]:
        """The rate by which systems are compared, one figure per turn."""
        return [run.rate(self.rate) for run in self.runs]

    def ratios(self, other: Turns) -> Spread:
        """Our rate ÷ the other's, turn by turn: a disturbance in a turn affects both sides."""
        return Spread.of([mine / its for mine, its in zip(self.rates, other.rates, strict=True)])

    def ratios_to_best(self, peers: list[Turns]) -> Spread:
        """Our rate ÷ that of each turn's best peer, which may differ from turn to turn."""
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
