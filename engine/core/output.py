"""What the scheduler tells of its steps: new tokens, ends and counts. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagoda_server.engine.core.sequence import EndReason, Sequence, State, TokenLogprobs

# Why a sequence does not compute in a step: as many run as may; no blocks are left; others have the step's tokens; it
# can no longer meet its deadline and leaves soon; its last token is being computed.
Hold: TypeAlias = Literal["no place", "no blocks", "no budget", "late", "token pending"]


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence's start (RUNNING) or preemption (WAITING), and how many of its tokens were in the cache then."""

    seq: Sequence
    to: State
    at: float
    num_computed: int


@dataclass(frozen=True, slots=True)
class Ended:
    """One sequence's end.

    matched  the token id of reason STOP
    detail   explains REJECTED and FAILED
    """

    seq: Sequence
    reason: EndReason
    at: float
    matched: int | None = None
    detail: str = ""


@dataclass(slots=True)
class StepOutput:
    """What happened since the last one: sequence ids and their new tokens as parallel lists, moves and ends."""

    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def add(self, id: int, token: int, logprobs: TokenLogprobs | None) -> None:
        self.sequences.append(id)
        self.tokens.append(token)
        self.logprobs.append(logprobs)

    @property
    def is_empty(self) -> bool:
        """There is nothing to tell a router."""
        return not self.tokens and not self.ended


@dataclass(slots=True)
class Counters:
    """Since the engine started, except those of the last step."""

    steps: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # computed tokens that were given up
    recomputed_tokens: int = 0
    dropped_tokens: int = 0  # computed for sequences that had ended by then
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    step_sequences: int = 0
    step_tokens: int = 0

    def count_prompt(self, seq: Sequence, computed_by: Sequence | None, num_cached: int) -> None:
        """Count the prompt of a sequence that starts, once for all that start from it or continue it.

        computed_by  who computed it for this one; None: this one does, but for its `num_cached` first tokens
        """
        if computed_by is not None:
            seq.cached_tokens = computed_by.cached_tokens
            return
        seq.cached_tokens = num_cached
        if seq.output_len:
            return
        self.prompt_tokens += seq.prompt_len
        self.cached_tokens += num_cached
