"""What a run of a workload gave: times of each request's tokens, and what is computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to count as goodput (DistServe, Zhong et al., 2024)."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from the run's start.

    submitted  when the request was due: a driver that falls behind makes the server look slower, never faster
    arrivals   one entry a token; several tokens may arrive at once
    """

    submitted: float
    arrivals: list[float]
    kind: str = ""

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

    def ratios(self, other: Turns) -> Spread:
        """How many times the other's throughput ours is, turn by turn: what disturbs one turn disturbs both sides."""
        pairs = zip(self.runs, other.runs, strict=True)
        return Spread.of([mine.tokens_per_s / its.tokens_per_s for mine, its in pairs])


@dataclass(frozen=True, slots=True)
class Spread:
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(min(values), float(np.median(values)), max(values))
