"""A sequence: tokens that exist, of which some are computed, and what belongs to it.

Prefill, decode and resumption are one quantity that chases another. Where a step is launched before the tokens of the
last one are read, a token may exist whose value is not known yet: it is pending.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from ...settings.sampling import Sampling
from .adapter import Adapter

Pooling: TypeAlias = Literal["last", "mean", "cls"]


class TokenMask(Protocol):
    """Decides which tokens a sequence may choose next: a fixed set, or a grammar that follows the sequence.

    depends_on_tokens  the mask changes with the sequence's tokens. The sequence then waits for its last token before
                       its next step is launched, even where steps overlap.
    field              of the request, which the mask comes from
    fault              why the last mask allows nothing; empty: it allows something
    error              why the mask cannot be computed any more, which is not the client's mistake; empty: it can
    is_slow            masks may take long: a step with other sequences does not wait for the next one, and nothing is
                       drafted, as each draft would need a mask
    """

    @property
    def depends_on_tokens(self) -> bool: ...

    @property
    def field(self) -> str: ...

    @property
    def fault(self) -> str: ...

    @property
    def error(self) -> str: ...

    @property
    def is_slow(self) -> bool: ...

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        """Say whether `fill` returns soon for these tokens; wait for at most so long until it does.

        Always true where the mask does not depend on tokens. False starts the computation of the mask.
        """

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        """Say whether `fill` would allow a token after `tokens`, if that takes less time than `fill`; False: perhaps.

        Sampling asks for the token that it would choose without a mask. If that is allowed, it needs no mask.
        """

    def fill(self, tokens: list[int], words: memoryview) -> None:
        """Write the mask of the token that follows `tokens`. The same tokens always give the same mask.

        words  uint32, all zero, one bit for each token id of the vocabulary: bit i of word w allows token 32 * w + i
        """

    def follow(self, tokens: list[int]) -> list[int] | None:
        """Note a sequence's new tokens. Return those that must come next, or None if the output must end here.

        Called only where the mask depends on tokens. It may start to compute the mask that `fill` is asked for next.
        """


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """How one sequence's tokens are chosen, and when it ends.

    stop_token_ids    end the sequence; they cannot be chosen before min_tokens tokens exist
    logprobs          None: none; 0: of the chosen token; N: also of the N most likely
    max_draft_tokens  of one step; None: as many as pay
    """

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    max_draft_tokens: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Readout:
    """What a client wants to know of a prompt, beside the tokens that follow it.

    logprobs_from  the first token, by position from 1 on, whose log-probability is wanted, with all that follow it in
                   the prompt; None: none. The row before a token, which the model computes there, gives it
    num_top        also of the N most likely tokens in its place
    pooling        which rows' hidden states become a vector: the last one's, the mean of all, or the first one's
    """

    logprobs_from: int | None = None
    num_top: int = 0
    pooling: Pooling | None = None

    def first_row(self, prompt_len: int) -> int:
        """Return the first row that must be computed: the prefix cache may serve all before it."""
        rows = [self.scored_rows(0, prompt_len, prompt_len), self.pooled_rows(0, prompt_len, prompt_len)]
        return min((each.start for each in rows if each), default=prompt_len)

    def scored_rows(self, start: int, end: int, prompt_len: int) -> range:
        """Return those of the rows from `start` to `end` that give a wanted log-probability."""
        first = prompt_len if self.logprobs_from is None else self.logprobs_from - 1
        return range(max(start, first), min(end, prompt_len - 1))

    def pooled_rows(self, start: int, end: int, prompt_len: int) -> range:
        """Return those of the rows from `start` to `end` whose hidden states are a part of the vector."""
        first, behind = {None: (0, 0), "last": (prompt_len - 1, prompt_len), "mean": (0, prompt_len), "cls": (0, 1)}[
            self.pooling
        ]
        return range(max(start, first), min(end, behind))


@dataclass(frozen=True, slots=True)
class Lender:
    """Another engine, by its address, and how many of a prompt's tokens it is expected to have cached."""

    address: str
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a client asked for, as far as its sequences have it in common. Requests are compared by identity.

    arrived        on the engine's clock, like `deadline`, which is math.inf for none
    age_s          its client's request is older than it by this: one that is resumed keeps its place in line
    tenant         the client on whose behalf it is computed; "" is a tenant like any other
    ttft_s         target for the time from arrival to the first token; math.inf for none
    tpot_s         target for the mean time of each token after the first; math.inf for none
    cache_root     where the addresses of its blocks start (channel/strides.py: chain_root)
    request_id     the client's name for it
    shares_prompt  it has several sequences: the first computes the prompt for all
    readout        what else is wanted of the prompt; None: nothing
    lender         an engine that has the first tokens of the prompt cached; None: none is known
    adapter        what changes the model's products for it; None: nothing does
    """

    prompt_len: int
    arrived: float = 0.0
    deadline: float = math.inf
    age_s: float = 0.0
    priority: int = 0
    tenant: str = ""
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    cache_root: bytes = b""
    bypass_cache: bool = False
    request_id: str = ""
    shares_prompt: bool = False
    readout: Readout | None = None
    lender: Lender | None = None
    adapter: Adapter | None = None

    @property
    def in_line_since(self) -> float:
        """The time that decides its place among waiting requests."""
        return self.arrived - self.age_s


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
    OVERLOADED = "overloaded"


class WindowTable(list[int]):
    """The blocks of a group of layers with a sliding window. It reaches as far as the scheduled steps compute.

    first  entries before this one are numbers of no block: nothing reads them
    """

    __slots__ = ("first",)

    def __init__(self, blocks: Iterable[int] = (), first: int = 0) -> None:
        super().__init__(blocks)
        self.first = first

    @property
    def held(self) -> list[int]:
        """The blocks that it holds, in order."""
        return self[self.first :]


class BlockTable(list[int]):
    """A sequence's KV blocks: block i holds tokens [i * block_size, (i + 1) * block_size).

    A table only grows, so runners may extend their copies of it. A sequence that starts or gives up its blocks gets a
    new one. It is a list because every step reads the blocks of every running sequence.

    windows        tables of the layers with sliding windows, if they have their own: one for each group of layers
    quota          blocks that all of `windows` may hold at once
    hashes         addresses of the full blocks that were hashed so far; kept while the sequence holds no blocks
    num_published  leading blocks that are shared or can be found by other sequences; they are never written to
    strides        stride keys of leading tokens (engine/kv/cached_strides.py), as far as they were computed
    num_committed  leading tokens that committed steps computed; 0 until the first one since the sequence started
    """

    __slots__ = ("hashes", "num_committed", "num_published", "quota", "strides", "windows")

    def __init__(
        self,
        blocks: Iterable[int] = (),
        hashes: list[bytes] | None = None,
        num_published: int = 0,
        windows: Iterable[WindowTable] = (),
        quota: int = 0,
    ) -> None:
        super().__init__(blocks)
        self.windows = tuple(windows)
        self.quota = quota
        self.hashes = [] if hashes is None else hashes
        self.num_published = num_published
        self.strides: list[int] = []
        self.num_committed = 0


@dataclass(slots=True)
class Account:
    """What a client gets to know about a sequence's time and tokens. Its methods alone change it.

    booked_until      every second from arrival to this time is in one of the four sums that follow
    lost_tokens       computed tokens that it gave up when it was last preempted, or left at another engine
    preempted_tokens  their sum over all preemptions
    recomputed_tokens those of them that were neither cached nor kept when it started again
    saved_tokens      copied to host memory while it was preempted; loaded_tokens were copied back
    pulled_tokens     whose blocks came from another engine before it started
    drafted_tokens    guessed and verified; accepted_tokens of them became output
    forced_tokens     of its output that no step chose, because its token mask allowed no others
    """

    booked_until: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0
    preempted_tokens: int = 0
    recomputed_tokens: int = 0
    saved_tokens: int = 0
    loaded_tokens: int = 0
    pulled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    adapter_s: float = 0.0
    adapter_missing_since: float | None = None

    def waits_for_adapter(self, now: float) -> float:
        """Note that it waits for a place of its adapter; return since when it has."""
        if self.adapter_missing_since is None:
            self.adapter_missing_since = now
        return self.adapter_missing_since

    def starts(self, now: float, num_computed: int) -> int:
        """Note that a waiting sequence runs from now on; return how many lost tokens it computes again."""
        self._book(now, is_running=False)
        self._has_adapter(now)
        if self.first_scheduled is None:
            self.first_scheduled = now
        recomputed = max(0, self.lost_tokens - num_computed)
        self.recomputed_tokens += recomputed
        return recomputed

    def is_preempted(self, now: float, num_computed: int) -> None:
        self._book(now, is_running=True)
        self.preemptions += 1
        self.lost_tokens = num_computed
        self.preempted_tokens += num_computed

    def has_first_token(self, now: float, *, is_running: bool) -> None:
        self._book(now, is_running)
        self.first_token = now

    def ends(self, now: float, *, is_running: bool) -> None:
        self._book(now, is_running)
        self._has_adapter(now)

    def found(self, cached_tokens: int) -> None:
        """Note how many of its first tokens were cached when it first started."""
        self.cached_tokens = cached_tokens

    def saves(self, num_tokens: int) -> None:
        self.saved_tokens += num_tokens

    def loads(self, num_tokens: int) -> None:
        self.loaded_tokens += num_tokens

    def pulls(self, num_tokens: int) -> None:
        self.pulled_tokens += num_tokens

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_accepted

    def is_forced(self) -> None:
        """Note that its mask decided its next token."""
        self.forced_tokens += 1

    def _has_adapter(self, now: float) -> None:
        if self.adapter_missing_since is not None:
            self.adapter_s += now - self.adapter_missing_since
            self.adapter_missing_since = None

    def _book(self, now: float, is_running: bool) -> None:
        spent, self.booked_until = now - self.booked_until, now
        if is_running and self.first_token is None:
            self.prefill_s += spent
        elif is_running:
            self.decode_s += spent
        elif self.first_scheduled is None:
            self.queue_s += spent
        else:
            self.preempted_s += spent


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens, from its prompt to its end.

    What was asked never changes: `id`, `request`, `params` and `token_mask`. Only engine/kv changes or replaces
    `blocks`, `account` changes through its own methods, and the scheduler alone writes the rest.

    tokens        prompt, then output, which only grows; a sequence that continues another one arrives
                  with output
    params        siblings differ in their seeds alone
    token_mask    restricts which tokens it may choose; None: all are allowed
    max_len       tokens, prompt included, at which it ends with LENGTH; set on arrival
    num_unsent    of its output's first tokens, which its token mask forced when it started; its client gets them
                  with the first token that a step chooses
    num_pending   tokens after those in `tokens` that scheduled steps choose and that are not known yet
    is_drafted    a scheduled step verifies drafts of it, and may choose more tokens than are counted as pending
    num_computed  leading tokens whose keys and values are in the cache once all scheduled steps are done
    adapter_slot  where the runner has its adapter while it runs; -1: it has none
    pooled        the sum of the hidden states so far, where their mean is wanted
    """

    id: int
    tokens: list[int]
    request: Request
    params: SamplingParams
    token_mask: TokenMask | None = None

    state: State = State.WAITING
    max_len: int = 0
    num_unsent: int = 0
    num_pending: int = 0
    is_drafted: bool = False
    num_computed: int = 0
    adapter_slot: int = -1
    blocks: BlockTable = field(default_factory=BlockTable)
    pooled: list[float] = field(default_factory=list)
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        has_run = self.output_len > 0  # on another engine, which had computed all tokens but the last
        self.account = Account(self.request.arrived, lost_tokens=self.num_tokens - 1 if has_run else 0)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def remaining_len(self) -> int:
        """Tokens that exist but are not computed: 1 for a decode."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def cacheable_len(self) -> int:
        """Leading tokens that need not be computed if they are cached. The last one's logits are always needed."""
        longest = len(self.tokens) - 1
        if self.request.readout is None or self.output_len:
            return longest
        return min(longest, self.request.readout.first_row(self.request.prompt_len))

    def reads(self, start: int, end: int) -> bool:
        """Say whether something is to be read from these rows of its prompt; not once it has output."""
        readout, prompt_len = self.request.readout, self.request.prompt_len
        if readout is None or len(self.tokens) > prompt_len:
            return False
        return bool(readout.scored_rows(start, end, prompt_len) or readout.pooled_rows(start, end, prompt_len))

    @property
    def awaits_token(self) -> bool:
        """Whether nothing can be computed because the next step, or the end, depends on a token that is pending."""
        if self.is_drafted:
            return True
        if self.num_pending and self.token_mask is not None and self.token_mask.depends_on_tokens:
            return True
        return len(self.tokens) + self.num_pending >= self.max_len
