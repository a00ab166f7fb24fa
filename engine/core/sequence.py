"""A sequence: tokens that exist, of which some are computed.

Prefill, decode and resumption are one quantity chasing another. Where steps are launched before the last one's tokens
are read, a token may exist that nobody knows yet: it is pending.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pagoda_server.settings.sampling import Sampling


class TokenMask(Protocol):
    """Decides which tokens a sequence may choose next: a fixed set, or a grammar that follows the sequence.

    depends_on_tokens  the mask changes with the sequence's tokens. The sequence then waits for its last token before
                       its next step is launched, even where steps overlap.
    """

    @property
    def depends_on_tokens(self) -> bool: ...

    def fill(self, tokens: list[int], words: memoryview) -> None:
        """Writes the mask of the token that follows `tokens`, the same whenever it is asked for the same tokens.

        words  uint32, all zero, one bit for each token id of the vocabulary: bit i of word w allows token 32 * w + i
        """


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """How one sequence's tokens are chosen, and when it ends.

    stop_token_ids  end the sequence; they cannot be chosen before min_tokens tokens exist
    logprobs        None: none; 0: of the chosen token; N: also of the N most likely
    """

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class State(Enum):
    WAITING = "waiting"  # new or preempted: holds no blocks
    RUNNING = "running"
    FINISHED = "finished"


class EndReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens, from its prompt to its end.

    tokens        prompt, then output; grows by one each time that `num_computed` has caught up; a sequence
                  that continues another one arrives with output
    num_pending   tokens after those that scheduled steps choose and that are not known yet
    num_computed  leading tokens whose keys and values are in the cache once all scheduled steps are done
    blocks        the block table: block i holds tokens [i * block_size, (i + 1) * block_size)
    deadline      on the engine's clock; math.inf for none
    tenant        who it is computed for; "" is one of them
    ttft_s        target for the time from arrival to the first token; math.inf for none
    tpot_s        target for the mean time of each token after the first; math.inf for none
    age_s         by so many seconds its request is older than it: the steps of a beam search keep one place in line
    request_id    the client's name for what it is part of
    token_mask    restricts which tokens it may choose; None: nothing does
    max_len       tokens, prompt included, at which it ends with LENGTH; the scheduler sets it on arrival
    request       names the request whose prompt it shares with others; None: it has its own
    """

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    arrived: float
    deadline: float
    priority: int = 0
    tenant: str = ""
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    cache_root: bytes = b""  # of blocks.chain_root
    bypass_cache: bool = False
    request: int | None = None
    request_id: str = ""
    token_mask: TokenMask | None = None
    age_s: float = 0.0

    state: State = State.WAITING
    max_len: int = 0
    num_pending: int = 0
    num_computed: int = 0
    num_committed: int = 0  # of them, those of steps whose outcome is known; 0 until the first since it started
    num_lost: int = 0  # what num_computed was when last preempted
    protected_len: int = 0  # with this many tokens or fewer it gives up its blocks only to those who outrank it
    num_charged: int = 0  # tokens of output that its tenant's service holds
    last_plan: int = 0  # the scheduler's number of the last plan that computes it
    num_published: int = 0  # leading blocks that others may find or that were taken over from them: never written to
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one for each full block hashed so far

    first_scheduled: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # computed tokens that it gave up
    recomputed_tokens: int = 0  # and those of them that it could not find again in the prefix cache
    saved_tokens: int = 0  # copied to host memory while it was preempted, and from there
    loaded_tokens: int = 0

    accounted_until: float = field(init=False)  # every second since `arrived` is in one of these:
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0

    def __post_init__(self) -> None:
        self.accounted_until = self.arrived
        self.num_charged = self.output_len

    def account(self, now: float) -> None:
        """Books the time since the last call under what the sequence has been doing; called before that changes."""
        spent, self.accounted_until = now - self.accounted_until, now
        if self.state is State.RUNNING:
            if self.first_token is None:
                self.prefill_s += spent
            else:
                self.decode_s += spent
        elif self.first_scheduled is None:
            self.queue_s += spent
        else:
            self.preempted_s += spent

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def remaining_len(self) -> int:
        """Tokens that exist but are not computed: 1 for a decode."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def in_line_since(self) -> float:
        """The time that decides its place among those that wait."""
        return self.arrived - self.age_s

    @property
    def awaits_token(self) -> bool:
        """There is nothing to compute: its next step or its end depends on a token that is pending."""
        if self.num_pending and self.token_mask is not None and self.token_mask.depends_on_tokens:
            return True
        return len(self.tokens) + self.num_pending >= self.max_len

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)  # not frozen: one is made for every sequence in every step, and would take five times as long
class Chunk:
    """Compute `length` tokens of a sequence from position `start` on; its blocks are allocated.

    samples  it reaches the last token that exists, so that its last row's logits choose the next one
    """

    seq: Sequence
    start: int
    length: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        return self.length == 1 and self.samples


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: chunks of different sequences, decodes first.

    copies  (source, target), blocks whose content is copied before that: no block twice among the targets, and none of
            them among the sources
    saves   (block, host block), made before anything else: no host block twice, nor among those of `loads` unless it
            is to be loaded with what was saved
    loads   (host block, block), made after the saves and before the copies: no block twice
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
    """Of the model's own distribution, before temperature, penalties and truncation; natural logarithm."""

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's outcome, one entry a chunk of its plan.

    tokens    the chosen id, or -1 where the chunk does not sample
    logprobs  None where not asked for
    faults    chunk position → what went wrong with that sequence alone; its token is not to be used
    copied_s  seconds that copies to and from host memory took
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    faults: dict[int, str] = field(default_factory=dict)
    copied_s: float = 0.0
