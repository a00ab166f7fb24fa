"""A step: what it is to compute, its outcome, and what the scheduler reports about it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from .sequence import EndReason, Sequence, State

# The fault of a sequence whose values were not finite.
NOT_FINITE = "the model's hidden states or logits hold NaN or infinity, or leave no token to choose"


@dataclass(slots=True)  # not frozen: one is made for every sequence in every step, and would take five times as long
class Chunk:
    """Compute `length` tokens of a sequence from position `start` on; its blocks are allocated.

    samples  it reaches the last token that exists, so that its last row's logits choose the next one
    drafts   guesses of the tokens that follow the last one that exists. They are counted in `length` and verified in
             this step: each row of them chooses a token too. Only a chunk that samples, and starts at the last token,
             has any
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """Whether it computes a sequence's last token, with or without drafts behind it."""
        return self.samples and self.length == 1 + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """The ids that it computes. None of them may be pending."""
        return [*self.seq.tokens[self.start : self.end - len(self.drafts)], *self.drafts]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: chunks of different sequences, decodes first, after the copies of blocks that they need.

    Decodes without drafts come before those with drafts.

    saves   (block, host block), made first: no host block twice, and a host block that is also loaded from is loaded
            with what was saved
    loads   (host block, block), made after the saves: no block twice
    copies  (source, target), made last: no block twice among the targets, and no target among the sources
    """

    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.chunks

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of the model's own distribution, before temperature, penalties and truncation; natural logarithm."""

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a chunk reads from its prompt.

    logprobs  of tokens that follow each other, the first at position `start`
    hidden    the hidden state that was asked for, in float32; where the mean is: the sum of those in the chunk
    """

    start: int
    logprobs: list[TokenLogprobs]
    hidden: list[float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's outcome, one entry a chunk of its plan.

    tokens     the chosen id, or -1 where the chunk does not sample
    logprobs   None where not asked for
    faults     chunk position → what went wrong with that sequence alone; its token is not to be used
    copied_s   seconds that copies to and from host memory took
    readings   chunk position → what was read from its prompt
    more       chunk position → the tokens that follow the chosen one, because that was drafted: the token after each
               draft as long as the one before it equals its draft, and its token mask is there
    postponed  positions of chunks that chose no token, because the token mask was not there in time. Only a mask that
               depends on tokens may be late, so that no later step counts on the token
    is_first   of its shape: its time says nothing about those to come
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    faults: dict[int, str] = field(default_factory=dict)
    copied_s: float = 0.0
    readings: dict[int, Reading] = field(default_factory=dict)
    more: dict[int, list[tuple[int, TokenLogprobs | None]]] = field(default_factory=dict)
    postponed: set[int] = field(default_factory=set)
    is_first: bool = False


# Why a sequence does not compute in a step: the batch is full; no blocks are left; other sequences have the step's
# tokens; it can no longer meet its deadline and leaves soon; its last token is being computed; all slots have adapters
# of running sequences.
Hold: TypeAlias = Literal["no place", "no blocks", "no budget", "late", "token pending", "no adapter"]


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

    matched          the token id of reason STOP
    matched_grammar  reason STOP: the output is complete by its token mask
    detail           explains REJECTED and FAILED
    field            of the request, which `detail` is about; empty: it is about its length, or the engine
    """

    seq: Sequence
    reason: EndReason
    at: float
    matched: int | None = None
    detail: str = ""
    matched_grammar: bool = False
    field: str = ""


class CachedBlock(NamedTuple):
    """A full block of the prefix cache.

    parent  the hash of the block before it; None for the first block of a prompt
    tokens  as many as a block has
    """

    parent: int | None
    tokens: Tokens[int]


@dataclass(slots=True)
class StepOutput:
    """What happened since the last one: sequence ids and their new tokens as parallel lists, moves and ends.

    readings  sequence id and what was read from its prompt; `hidden` is the whole vector here
    cached    stride keys, with whether the prefix cache holds them now; empty while no router follows it
    blocks    the same of blocks, by hash (engine/kv/cached_blocks.py); None: it is no longer cached
    """

    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    readings: list[tuple[int, Reading]] = field(default_factory=list)
    cached: dict[int, bool] = field(default_factory=dict)
    blocks: dict[int, CachedBlock | None] = field(default_factory=dict)

    def add(self, id: int, token: int, logprobs: TokenLogprobs | None) -> None:
        self.sequences.append(id)
        self.tokens.append(token)
        self.logprobs.append(logprobs)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send to a router."""
        return not self.tokens and not self.ended and not self.readings and not self.cached and not self.blocks


@dataclass(slots=True)
class Counters:
    """Sums since the engine started; the fields of a step hold the last step's."""

    steps: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # computed tokens that were given up
    recomputed_tokens: int = 0
    dropped_tokens: int = 0  # computed for sequences that had ended by then
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafts: int = 0  # chunks whose drafted tokens were verified
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens that became output
    forced_tokens: int = 0  # of the output, that no step chose
    step_sequences: int = 0
    step_tokens: int = 0

    def count_prompt(self, seq: Sequence, computed_by: Sequence | None, num_cached: int) -> None:
        """Count the prompt of a sequence that starts, once for all sequences that start from it or continue it.

        computed_by  the sibling that computed it; None: this sequence does, but for its `num_cached` first tokens
        """
        if computed_by is not None:
            seq.account.found(computed_by.account.cached_tokens)
            return
        seq.account.found(num_cached)
        if seq.output_len:
            return
        self.prompt_tokens += seq.request.prompt_len
        self.cached_tokens += num_cached
