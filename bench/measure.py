"""What a run of a workload gave: times of each request's tokens, and what is computed from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds from the run's start. `arrivals` holds one entry a token; several tokens may arrive at once."""

    submitted: float
    arrivals: list[float]

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.submitted

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1)


@dataclass(frozen=True, slots=True)
class Result:
    """One system's run. `times` is empty where a system gives no token before its last."""

    system: str
    output_tokens: int
    elapsed_s: float
    times: list[RequestTimes]

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s

    def ttft_ms(self, percentile: float) -> float:
        return float(np.percentile([1e3 * times.ttft_s for times in self.times], percentile))

    def itl_ms(self, percentile: float) -> float:
        gaps = np.concatenate([np.diff(times.arrivals) for times in self.times])
        return float(np.percentile(1e3 * gaps, percentile))
