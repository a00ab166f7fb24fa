"""The time that a sequence's prompt will likely take, from what prompts took of late. Standard library only."""

from __future__ import annotations

from pagoda_server.engine.core.sequence import StepPlan

WEIGHT = 0.05  # of the last value in a mean: the last twenty or so count


class LikelyTime:
    """The steps that it takes, by the tokens that prompts had of a step where they had to be cut, times such a step."""

    def __init__(self, token_budget: int) -> None:
        self._step_s = 0.0  # of steps with prompts
        self._cut_len = float(token_budget)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        last = plan.chunks[-1]  # decodes come first
        if last.is_decode:
            return
        self._step_s += (WEIGHT if self._step_s else 1.0) * (seconds - self._step_s)
        if not last.samples:
            longest = max(chunk.length for chunk in plan.chunks)
            self._cut_len += WEIGHT * (longest - self._cut_len)

    def of(self, num_uncomputed: int) -> float:
        """Seconds from its start to its next token; 0 as long as no prompt has been computed."""
        return self._step_s * max(1.0, num_uncomputed / self._cut_len)
