"""Steps that are launched and not yet read, and how a failed step is computed again."""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..core.errors import EngineError
from ..core.sequence import State
from ..core.step import Chunk, Reading, Sampled, StepPlan, TokenLogprobs
from ..scheduling.scheduler import Scheduler
from .step_trace import Sketch, StepTrace

log = logging.getLogger("pagoda.engine")


class Launched(Protocol):
    """A step that a runner is computing."""

    def result(self) -> Sampled:
        """Wait for the outcome. Raises what the step raised."""


class Runner(Protocol):
    """Computes plans in the order in which they are launched.

    A sequence's last token may be pending when a plan is launched; the runner then takes it from the step before. A
    chunk with drafts starts at a known token, and no later step computes its sequence before it is committed.
    A chunk may be computed twice, so a failed step may be run again: it writes the same slots, and chooses a token with
    the same noise. docs/architecture.md, "When the same tokens come again", says where that is the same token.

    lookahead  how many steps can be launched before the first of them is read; 0: `launch` computes the step at once
    """

    @property
    def lookahead(self) -> int: ...

    def launch(self, plan: StepPlan) -> Launched: ...

    def recover(self) -> None:
        """Prepare to compute again after a failure. No step is in flight, and the next chunks' tokens are all known.

        Raises if nothing can be computed any more: the engine must be restarted.
        """


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that was computed while it was launched."""

    sampled: Sampled

    def result(self) -> Sampled:
        return self.sampled


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    launched: Launched
    sketch: Sketch
    started: float


class StepsInFlight:
    """A queue of launched steps, which are committed to the scheduler in order."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.step_s = 0.0  # the last step's, from its launch or from the end of the one before, whichever is later
        self.trace = StepTrace(scheduler)
        self._clock = scheduler.clock
        self._scheduler = scheduler
        self._runner = runner
        self._steps: deque[_Step] = deque()
        self._last_end = -math.inf

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, plan: StepPlan) -> None:
        started = self._clock()
        try:
            launched = self._runner.launch(plan)
        except Exception:
            launched = None
            log.exception("a step of %d sequences could not be launched", len(plan.chunks))
        if launched is not None:
            self._steps.append(_Step(plan, launched, self.trace.sketch(plan), started))
            return
        # Outside the except clause, because an exception that is being handled keeps the step's memory allocated.
        while self._steps:
            self.commit_oldest()
        self._compute_again([plan])

    def commit_oldest(self) -> None:
        """Wait for the oldest step and commit it. If it fails, compute it and all later ones again, chunk by chunk."""
        step = self._steps.popleft()
        try:
            sampled = step.launched.result()
        except Exception:
            sampled = None
            log.exception("a step of %d sequences failed", len(step.plan.chunks))
        if sampled is not None:
            self._scheduler.commit(step.plan, sampled)
        else:
            self._compute_again([step.plan, *self._abandon_all()])
        started, self._last_end = max(step.started, self._last_end), self._clock()
        self.step_s = self._last_end - started
        self.trace.add(step.sketch, started, self._last_end)

    def _abandon_all(self) -> list[StepPlan]:
        """Wait for all steps and return their plans. They used a failed step's tokens, so their outcomes are void."""
        plans = []
        while self._steps:
            step = self._steps.popleft()
            plans.append(step.plan)
            with suppress(Exception):
                step.launched.result()
        return plans

    def _compute_again(self, plans: list[StepPlan]) -> None:
        for plan in plans:
            self._runner.recover()
            self._scheduler.distrust(plan)
            self._scheduler.commit(plan, compute_one_by_one(self._runner, plan))


def compute_one_by_one(runner: Runner, plan: StepPlan) -> Sampled:
    """Compute each chunk of a failed step alone, so that only the chunks at fault fail.

    Raises what the runner raised if no chunk can be computed, because that is not one request's fault.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    faults: dict[int, str] = {}
    readings: dict[int, Reading] = {}
    more: dict[int, list[tuple[int, TokenLogprobs | None]]] = {}
    postponed: set[int] = set()
    failed: list[Exception] = []
    for index, chunk in enumerate(plan.chunks):
        try:
            alone = _compute_alone(runner, chunk, plan)
        except Exception as error:
            log.exception("sequence %d fails alone", chunk.seq.id)
            reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__} while computing"
            alone = Sampled([-1], [None], {0: reason})
            failed.append(_without_frames(error))
        tokens += alone.tokens
        logprobs += alone.logprobs
        if alone.faults:
            faults[index] = alone.faults[0]
        if alone.readings:
            readings[index] = alone.readings[0]
        if alone.more:
            more[index] = alone.more[0]
        if alone.postponed:
            postponed.add(index)
    if len(failed) == len(plan.chunks) > 1:
        raise failed[0]
    return Sampled(tokens, logprobs, faults, readings=readings, more=more, postponed=postponed)


def _without_frames(error: Exception) -> Exception:
    """Drop the frames that an error and its causes hold, and with them the memory that the step allocated."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _compute_alone(runner: Runner, chunk: Chunk, plan: StepPlan) -> Sampled:
    """Compute one chunk with its own copies and loads. Saves are not repeated, as their blocks may have changed."""
    if chunk.seq.state is not State.RUNNING:  # it ended, or gave up its blocks, after the step was scheduled
        return Sampled([-1], [None])
    own = set(chunk.seq.blocks).union(*chunk.seq.blocks.windows) if plan.copies or plan.loads else set()
    copies = [pair for pair in plan.copies if pair[1] in own]
    return runner.launch(StepPlan([chunk], copies, loads=[pair for pair in plan.loads if pair[1] in own])).result()
