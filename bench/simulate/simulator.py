"""The engine's loop in simulated time: its own scheduler and blocks, and a model of the step time."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.measure import Targets
from bench.simulate.arrivals import Arrivals
from pagoda_server.engine.core.sequence import EndReason, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Sampled, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import PolicyName

REFUSED = "refused"  # by admission, before the scheduler sees it
FLUSH_AT = 1 << 16  # number of gaps that are binned together
_BINS_PER_DECADE = 50
_LEAST_S, _DECADES = 1e-4, 7


@dataclass(frozen=True, slots=True)
class System:
    """A way to serve. With token_budget None no prompt is cut."""

    name: str
    policy: PolicyName = "fcfs"
    token_budget: int | None = 512
    target_itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """Settings of all systems. Beyond max_requests, requests are refused, as in `pagoda serve`."""

    step_time: StepTime
    max_num_seqs: int = 64
    num_blocks: int = 16_384
    block_size: int = 16
    max_requests: int = 1024
    timeout_s: float = 60.0


class Gaps:
    """Histogram of the times between tokens of a sequence; bin edges are 4.7 % apart."""

    def __init__(self) -> None:
        self.edges: NDArray[np.float64] = _LEAST_S * 10 ** (
            np.arange(_DECADES * _BINS_PER_DECADE + 1) / _BINS_PER_DECADE
        )
        self.counts: NDArray[np.int64] = np.zeros(len(self.edges) + 1, dtype=np.int64)
        self.pending = array("d")

    def flush(self) -> None:
        bins = np.searchsorted(self.edges, np.frombuffer(self.pending)) if self.pending else np.zeros(0, dtype=int)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.pending = array("d")

    def percentile_s(self, percent: float) -> float:
        """Return the upper edge of the percentile's bin; NaN if there are no gaps."""
        total = self.counts.sum()
        if not total:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self.counts), max(1.0, percent / 100 * total)))
        return float(self.edges[min(at, len(self.edges) - 1)])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results. ttft_s, tpot_s: one entry per request, NaN if it did not finish. ends: number of requests by reason."""

    system: System
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    gaps: Gaps
    ends: Counter[str]
    output_tokens: int
    steps: int
    preemptions: int
    recomputed_tokens: int
    span_s: float  # from the first arrival to the last end
    wall_s: float

    def goodput(self, targets: Targets) -> float:
        """Requests per second that met both targets."""
        return float(self.meets(targets).sum()) / self.span_s

    def meets(self, targets: Targets) -> NDArray[np.bool_]:
        return (1e3 * self.ttft_s <= targets.ttft_ms) & (1e3 * self.tpot_s <= targets.tpot_ms)


def simulate(
    system: System,
    server: Server,
    arrivals: Arrivals,
    targets: Targets,
    on_progress: Callable[[int], None] = lambda ended: None,
) -> Outcome:
    """Run until every request is refused, rejected, expired or finished. Equal arguments give equal outcomes."""
    started = time.perf_counter()
    run = _Run(system, server, arrivals, targets)
    run.until_idle(on_progress)
    return run.outcome(time.perf_counter() - started)


class _Run:
    def __init__(self, system: System, server: Server, arrivals: Arrivals, targets: Targets) -> None:
        self._system = system
        self._server = server
        self._arrivals = arrivals
        self._targets = targets
        self._now = 0.0
        self._last_event = 0.0
        budget = system.token_budget or arrivals.longest + server.max_num_seqs
        self._scheduler = Scheduler(
            BlockPool(server.num_blocks, server.block_size),
            max_num_seqs=server.max_num_seqs,
            token_budget=budget,
            max_model_len=arrivals.longest + 1,
            clock=lambda: self._now,
            prefix_caching=False,  # prompts have no content
            policy=system.policy,
            target_itl_s=system.target_itl_ms / 1e3 if system.target_itl_ms else None,
        )
        self._params = {length: SamplingParams(max_tokens=length) for length in set(arrivals.output_len)}
        self._of_decodes: dict[int, Sampled] = {}  # by the number of decodes
        self._next = 0  # index of the next request to arrive
        self._live = 0
        self._last_token = array("d", bytes(8 * len(arrivals)))
        self._ttft_s = np.full(len(arrivals), np.nan)
        self._tpot_s = np.full(len(arrivals), np.nan)
        self._gaps = Gaps()
        self._ends: Counter[str] = Counter()

    def until_idle(self, on_progress: Callable[[int], None]) -> None:
        scheduler, step_time = self._scheduler, self._server.step_time
        num_ended = 0
        while True:
            self._arrive()
            plan = scheduler.schedule()
            if not plan.is_empty:
                self._now += step_time.of(plan)
                scheduler.commit(plan, self._sampled_by(plan))
            self._take_output()
            if plan.is_empty and not self._skip_idle_time():
                break
            if (ended := self._ends.total()) - num_ended >= 1000:
                on_progress(ended - num_ended)
                num_ended = ended
        self._gaps.flush()

    def outcome(self, wall_s: float) -> Outcome:
        counters = self._scheduler.counters
        return Outcome(
            system=self._system,
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            gaps=self._gaps,
            ends=self._ends,
            output_tokens=counters.output_tokens,
            steps=counters.steps,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            span_s=self._last_event - self._arrivals.at[0],
            wall_s=wall_s,
        )

    def _arrive(self) -> None:
        """Add the requests that have arrived by now, each with its own arrival time."""
        arrivals = self._arrivals
        while self._next < len(arrivals) and arrivals.at[self._next] <= self._now:
            id, self._next = self._next, self._next + 1
            if self._live >= self._server.max_requests:
                self._ends[REFUSED] += 1
                continue
            self._live += 1
            prompt_len, at = arrivals.prompt_len[id], arrivals.at[id]
            self._scheduler.add(
                Sequence(
                    id,
                    [0] * prompt_len,
                    Request(
                        prompt_len,
                        arrived=at,
                        deadline=at + self._server.timeout_s,
                        priority=arrivals.priority[id],
                        tenant=arrivals.tenant[id],
                        ttft_s=self._targets.ttft_ms / 1e3,
                        tpot_s=self._targets.tpot_ms / 1e3,
                    ),
                    self._params[arrivals.output_len[id]],
                )
            )

    def _sampled_by(self, plan: StepPlan) -> Sampled:
        """Return the same token for every sequence."""
        chunks = plan.chunks
        count = len(chunks)
        if chunks[-1].length > 1 or not chunks[-1].samples:
            return Sampled([0 if chunk.samples else -1 for chunk in chunks], [None] * count)
        if count not in self._of_decodes:
            self._of_decodes[count] = Sampled([0] * count, [None] * count)
        return self._of_decodes[count]

    def _take_output(self) -> None:
        output, now = self._scheduler.take_output(), self._now
        last_token, gaps = self._last_token, self._gaps.pending
        for id in output.sequences:
            if last := last_token[id]:
                gaps.append(now - last)
            last_token[id] = now
        if len(gaps) > FLUSH_AT:
            self._gaps.flush()
        for ended in output.ended:
            seq, self._last_event = ended.seq, now
            self._live -= 1
            self._ends[ended.reason.value] += 1
            if ended.reason is EndReason.LENGTH and seq.account.first_token is not None:
                self._ttft_s[seq.id] = seq.account.first_token - seq.request.arrived
                self._tpot_s[seq.id] = (ended.at - seq.account.first_token) / max(1, seq.output_len - 1)

    def _skip_idle_time(self) -> bool:
        """Move the clock to the next arrival or deadline; return False if there is none."""
        arrives = self._arrivals.at[self._next] if self._next < len(self._arrivals) else math.inf
        until = min(arrives, self._scheduler.next_deadline)
        if until == math.inf:
            return False
        self._now = until
        return True
