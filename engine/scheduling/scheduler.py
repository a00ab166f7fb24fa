"""Which sequences run in the next step, and how many tokens each.

Sequences join and leave the batch at every step (iteration-level scheduling: Orca, Yu et al., 2022). There are no
phases: every sequence has computed tokens that chase those that exist, and a decode is a chunk of length one. Running
decodes come first and prefill chunks fill the rest of the token budget (Sarathi-Serve, Agrawal et al., 2024), so a long
prompt stalls no stream. When blocks run out, a sequence gives up its own and is computed again later.

Other files decide which sequence is next in line (policies.py), how a step's tokens are shared (pacing.py), which
sequence is preempted (victims.py), which can no longer meet its deadline (expiry.py), and which blocks a sequence
gets (engine/kv/block_tables.py). The clock is an argument, so tests run in simulated time.

A step may be scheduled before the previous one is committed. It then counts on that step's tokens without knowing them.
If such a token ends its sequence, one row is computed in vain. It writes to blocks that no sequence reads any more, and
does so before another sequence can write to them, because steps are computed in the order in which they were scheduled.

A decode may carry drafts, guesses of the tokens that follow (engine/drafting/). Its step computes them behind the last
token, and how many of them the sequence keeps is known when the step is committed. Until then nothing is scheduled for
the sequence, and only its last token counts as computed; a refused draft's slot is written again by the next step.

A sequence whose token mask is not there when the step's tokens are chosen is postponed: it chooses no token, and the
next step computes its last token again. Its neighbours do not wait for the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from operator import add

from ...settings.engine import PolicyName
from ..core.sequence import EndReason, Sequence, State
from ..core.step import (
    NOT_FINITE,
    Chunk,
    Counters,
    Ended,
    Hold,
    Move,
    Reading,
    Sampled,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from ..drafting import Speculation
from ..kv.arrivals import Peers
from ..kv.block_store import BlockStore
from ..kv.block_tables import BlockTables
from ..kv.blocks import BlockPool
from ..kv.host_blocks import HostBlocks
from ..kv.windows import Windows, longest_held
from ..timing.cost_model import CostModel
from .adapter_slots import AdapterSlots
from .backlog import Backlog
from .expiry import Deadlines
from .pacing import OVERTAKING, Pacing
from .policies import POLICIES
from .policy import Policy, PolicySettings
from .tenants import Tenants
from .victims import choose_victim, num_freed

MOST_CONSIDERED = 131_072  # tokens of sequences that may start in a step: to search the cache for them takes 20 ms


class Scheduler:
    """
    pool           the KV blocks
    max_num_seqs   sequences that run at once
    token_budget   tokens of one step, decodes included; more than max_num_seqs
    max_model_len  prompt + output of one sequence
    windows        of each group of layers (engine/core/layer_groups.py)
    clock          seconds, monotonic
    policy         one of engine/scheduling/policies.py, with its settings: ageing_s and tenant_weights
    target_itl_s   how long a step that holds decodes should take at most; None: no such target
    longest_step_s  how long prompts may make any step
    num_host_blocks  blocks of host memory, in which preempted sequences keep what they have computed
    store        keeps blocks in a file, below those of host memory; None: none are kept
    peers        engines from which blocks are fetched, and to which they are lent; None: there are none
    speculation  chooses tokens that a step drafts; None: it drafts none
    num_adapter_slots  adapters that running sequences can have
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        clock: Callable[[], float],
        windows: Iterable[int | None] = (None,),
        prefix_caching: bool = True,
        policy: PolicyName = "priority",
        ageing_s: float = 60.0,
        tenant_weights: Mapping[str, float] | None = None,
        target_itl_s: float | None = None,
        longest_step_s: float = math.inf,
        num_host_blocks: int = 0,
        store: BlockStore | None = None,
        peers: Peers | None = None,
        speculation: Speculation | None = None,
        num_adapter_slots: int = 0,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.clock = clock
        self.counters = Counters()
        self.tenants = Tenants(clock)
        self.running: list[Sequence] = []  # in the order of admission
        self.hold: Hold | None = None  # why the next in line has not started; None if none waits
        self._speculation = speculation
        self.costs = CostModel(token_budget, clock, most_chosen=1 + speculation.most if speculation else 1)
        self._pacing = Pacing(self.costs, token_budget, target_itl_s, longest_step_s)
        self.waiting: Policy = POLICIES[policy](
            PolicySettings(clock, self._likely_time_s, ageing_s, tenant_weights or {}),
        )
        apart = [window for window in windows if window is not None]
        own_windows = Windows(pool, apart, token_budget)
        self.host = HostBlocks(num_host_blocks, pool, self.costs, prefix_caching, store, peers, clock, own_windows)
        self._capacity = longest_held(pool.num_blocks, [None, *apart], token_budget, pool.block_size)
        self._tables = BlockTables(pool, prefix_caching, self.host, own_windows)
        self._backlog = Backlog(clock, self._tables.num_cached)
        self._deadlines = Deadlines(self.costs, self._tables.num_cached)
        self._adapters = AdapterSlots(num_adapter_slots, clock)
        self._num_planned = 0  # plans made, and those that are committed
        self._num_committed = 0
        self._live: dict[int, Sequence] = {}
        self._prefill_plan: dict[int, int] = {}  # by sequence that has run: the last plan that started it or filled it
        self._protected_len: dict[int, int] = {}  # by sequence that came back: see victims.py
        self._output = StepOutput()

    # -- arrivals and departures ------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, or end it at once as REJECTED if it could never run, even alone."""
        self._live[seq.id] = seq
        self.tenants.arrived(seq)
        seq.max_len = min(seq.request.prompt_len + seq.params.max_tokens, self.max_model_len)
        if seq.num_tokens >= seq.max_len:
            detail = f"prompt of {seq.num_tokens} tokens, the limit is {seq.max_len - 1}"
            self._end(seq, EndReason.REJECTED, detail=detail)
            return
        if seq.max_len > self._capacity:
            detail = f"up to {seq.max_len} tokens, the KV cache holds {self._capacity}"
            self._end(seq, EndReason.REJECTED, detail=detail)
            return
        if not self._tables.prompts.park(seq) and not self._tables.fetch(seq):
            self.waiting.add(seq)
        self._deadlines.add(seq)

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences as ABORTED, whatever their state. Ignore unknown ids: those sequences have just ended."""
        for id in ids:
            if seq := self._live.get(id):
                self._end(seq, EndReason.ABORTED)

    def flush_cache(self) -> int:
        self.host.flush()
        return self.pool.flush()

    def watch_cache(self, *, blocks: bool = False) -> None:
        """Report in each output, from now on, what the prefix cache holds and no longer holds."""
        self._tables.prefixes.watch(blocks=blocks)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens that no cache holds, of all sequences; an estimate that is at most a quarter second old."""
        return self._backlog.tokens(self.running, self.waiting)

    @property
    def next_deadline(self) -> float:
        """Until then no sequence has to leave because of its deadline, or to start without blocks of a file."""
        arrivals = self.host.arrivals
        return self._deadlines.next if arrivals is None else min(self._deadlines.next, arrivals.next_wait_end)

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, with those that wait for a sibling to compute their prompt, or for blocks of a file."""
        num_fetching = self.host.arrivals.num_waiting if self.host.arrivals is not None else 0
        return len(self.waiting) + self._tables.prompts.num_parked + num_fetching

    @property
    def _num_startable(self) -> int:
        """Waiting sequences that would find a place."""
        return min(len(self.waiting), self.max_num_seqs - len(self.running))

    @property
    def num_slots_unused(self) -> int:
        """Slots of running sequences' blocks beyond their tokens, computed or not. Blocks that are shared are full."""
        size = self.pool.block_size
        return sum(
            [
                spare
                for seq in self.running
                for table in (seq.blocks, *seq.blocks.windows)
                if (spare := len(table) * size - len(seq.tokens) - seq.num_pending) > 0
            ]
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. Every plan that is not empty must be committed, in the order in which it was made."""
        self._expire()
        if self.host.arrivals is not None:
            for seq in self.host.arrivals.arrived():
                self.waiting.add(seq)
        self._make_room()
        is_idle = not self.running
        budget = self._pacing.budget(self.running, self._num_startable)
        self.hold = self._admit(budget)
        running, most_loads = self._unfinished(), 0
        if loads := self.host.loads:
            loading = {seq.id for seq in loads}
            # Decodes that wait for a token of the step in flight wait for the next step, too.
            most_loads = self._pacing.most_loads(seq for seq in self.running if seq.id not in loading)
            late = loads.late(most_loads, self.waiting.rank)
            running = [seq for seq in running if seq.id not in late]
        chunks = self._pacing.chunks(running, budget, self.waiting.rank, self._idle_plans)
        if self._speculation is not None:
            chunks = self._draft(chunks, budget, self._speculation)
        plan = self._tables.plan(chunks, most_loads)
        if not plan.is_empty:
            self.costs.scheduled(after_idle=is_idle)
            self._count_on(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: Sampled) -> None:
        """Take in a step's outcome: what is computed, which tokens are new, which sequences end."""
        for at, reading in sampled.readings.items():
            if at not in sampled.faults:
                self._read(plan.chunks[at], reading)
        for at, (chunk, token) in enumerate(zip(plan.chunks, sampled.tokens, strict=True)):
            seq = chunk.seq
            if seq.state is State.FINISHED:
                self.counters.dropped_tokens += chunk.length
                continue
            seq.num_pending -= chunk.samples
            if at in sampled.postponed:
                self._postpone(chunk)
                continue
            goes_on = True
            if at in sampled.faults:
                self._fail(seq, sampled.faults[at])
                continue
            if seq.state is State.RUNNING:
                self._tables.computed(seq, chunk.end - len(chunk.drafts))
            if token >= 0:  # its own, even if it has been preempted since the step was scheduled
                self._append(seq, token, sampled.logprobs[at])
                goes_on = self._follow(seq)
            if chunk.drafts:
                self._accept(chunk, sampled.more.get(at, []) if goes_on else [])
        self.costs.committed(plan, sampled.copied_s, is_first=sampled.is_first)
        self._tables.commit(plan)
        self._num_committed += 1
        self.counters.steps += 1
        self.counters.step_sequences = len(plan.chunks)
        self.counters.step_tokens = plan.num_tokens

    def distrust(self, plan: StepPlan) -> None:
        """Preempt the sequences that started from what this step saved: it failed, and is computed again."""
        for seq in self.host.distrust(plan):
            self._preempt(seq)

    def copy_idly(self) -> bool:
        """Copy blocks that are to go to a file or to other engines; return whether there were any.

        Call this when nothing is to be computed and no step is in flight.
        """
        return self.host.copy_idly()

    def lend(self, addresses: list[bytes], reply: Callable[[list[bytes]], None]) -> None:
        """Give `reply` the contents of the blocks at these addresses, up to the first one that is not cached."""
        if self.host.lent is None:
            reply([])
        else:
            self.host.lent.lend(addresses, reply)

    def take_output(self) -> StepOutput:
        """Return what has happened since the last call."""
        output, self._output = self._output, StepOutput()
        output.cached, output.blocks = self._tables.prefixes.take_changes()
        return output

    # -- the parts of a step ----------------------------------------------------------------------------------------

    def _draft(self, chunks: list[Chunk], budget: int, speculation: Speculation) -> list[Chunk]:
        """Give decodes drafts for which the step has tokens and blocks, without those that running sequences need.

        Where steps overlap, leave out decodes that draft in the next step, once their last token is known.
        """
        pending = [chunk for chunk in chunks if chunk.seq.num_pending]
        if pending and (held := speculation.holds(pending, self.costs, len(self.running))):
            left_out = {chunk.seq.id for chunk in held}
            chunks = [chunk for chunk in chunks if chunk.seq.id not in left_out]
        decodes = [chunk for chunk in chunks if not chunk.seq.num_pending and chunk.is_decode]
        if not decodes:
            return chunks
        room = min(budget, self.token_budget) - sum([chunk.length for chunk in chunks])
        if speculation.max_choices is not None:
            room = min(room, speculation.max_choices - len(chunks))
        started = self.clock()
        proposed = list(speculation.drafts(decodes, room, self.costs, len(self.running)))
        self.costs.drafted(self.clock() - started)
        if len(proposed) == len(chunks) and self._num_planned > self._num_committed:
            return []  # they wait for the step in flight, so that all that draft do so together
        drafted = []
        for chunk, drafts in proposed:
            seq = chunk.seq
            while seq.num_tokens + len(drafts) > len(seq.blocks) * self.pool.block_size:
                if self._tables.spare(len(self.running)) <= 0 or not self._tables.grow(seq):
                    break
            chunk.drafts = tuple(drafts[: len(seq.blocks) * self.pool.block_size - seq.num_tokens])
            chunk.length += len(chunk.drafts)
            if chunk.drafts:
                seq.is_drafted = True
                drafted.append(chunk)
        if not drafted:
            return chunks
        plain = [chunk for chunk in chunks if chunk.is_decode and not chunk.drafts]
        return [*plain, *drafted, *(chunk for chunk in chunks if not chunk.is_decode)]

    def _accept(self, chunk: Chunk, run: list[tuple[int, TokenLogprobs | None]]) -> None:
        """Append the tokens that follow a chunk's first one, as far as they were drafted, until one ends it."""
        seq = chunk.seq
        seq.is_drafted = False
        num_accepted = 0
        for token, logprobs in run:
            if seq.state is State.FINISHED:
                break
            num_accepted += 1
            if seq.state is State.RUNNING:
                seq.num_computed += 1
                self._tables.computed(seq, seq.num_computed)
            self._append(seq, token, logprobs)
            if not self._follow(seq):
                break
        self.counters.drafts += 1
        self.counters.drafted_tokens += len(chunk.drafts)
        self.counters.accepted_tokens += num_accepted
        seq.account.verified(len(chunk.drafts), num_accepted)
        if self._speculation is not None and seq.state is State.RUNNING:
            self._speculation.verified(seq, len(chunk.drafts), num_accepted)

    def _postpone(self, chunk: Chunk) -> None:
        """Have a chunk's last token computed again, with the same noise: no token was chosen behind it."""
        seq = chunk.seq
        seq.is_drafted = False
        if seq.state is State.RUNNING:
            seq.num_computed = chunk.end - len(chunk.drafts) - 1
            self._tables.computed(seq, seq.num_computed)

    def _count_on(self, plan: StepPlan) -> None:
        """Count the plan's tokens as computed from now on, and the tokens that it chooses as existing."""
        self._num_planned = number = self._num_planned + 1
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.num_computed = chunk.end - len(chunk.drafts)
            if chunk.samples:
                seq.num_pending += 1
            else:
                self._prefill_plan[seq.id] = number

    def _idle_plans(self, seq: Sequence) -> int:
        """Count the plans since a running prompt last advanced, the one that is being made included."""
        return self._num_planned + 1 - self._prefill_plan[seq.id]

    def _admit(self, budget: int) -> Hold | None:
        """Start waiting sequences while the step has tokens, places and blocks for them.

        Return what keeps the next in line from starting; None if no sequence waits. What starts costs time even if all
        of it is cached, so a step considers only MOST_CONSIDERED tokens, or one sequence of more.
        """
        if not self.waiting:
            return None
        loading = {seq.id for seq in self.host.loads}  # they compute nothing before the step with their last blocks
        budget -= sum(seq.remaining_len for seq in self._unfinished() if seq.id not in loading)
        considered = 0
        while self.waiting:
            if considered >= MOST_CONSIDERED:
                return "no budget"
            if (first := next(self._in_line(), None)) is None:
                return "no adapter"
            lower = self.waiting.outranked(first, self.running)
            seq = self._pacing.newcomer(self._in_line(), self.running, budget + sum(seq.remaining_len for seq in lower))
            if seq is None:
                return "no budget"
            considered += seq.num_tokens
            if self._deadlines.is_lost(seq, self.clock()):
                if self.running and not self._deadlines.takes_leave():
                    return "late"
                self._end(seq, EndReason.DEADLINE)
                continue
            while not self._start(seq):
                if not self._displace(lower, seq):
                    return "no blocks" if len(self.running) < self.max_num_seqs else "no place"
            budget -= seq.remaining_len
        return None

    def _in_line(self) -> Iterator[Sequence]:
        """Yield the next in line, and those of equal standing behind it, whose adapters have a place."""
        line = enumerate(islice(self.waiting.in_line(), OVERTAKING))
        return (seq for at, seq in line if self._adapters.has_place(seq, is_next=not at))

    def _start(self, seq: Sequence) -> bool:
        """Give a waiting sequence a place and blocks for all its tokens; return False if there are too few."""
        if len(self.running) >= self.max_num_seqs:
            return False
        if seq.num_pending or self._prefill_plan.get(seq.id, 0) > self._num_committed:
            return False  # it was preempted while a step computes it: that step is committed first
        length = seq.num_tokens
        if seq.account.preemptions:  # victims.py
            length = min(length + self.pool.block_size, seq.max_len)
        prefix = self._tables.start(seq, length, len(self.running))
        if prefix is None:
            return False
        self.waiting.remove(seq)
        seq.num_computed = prefix.num_tokens
        seq.adapter_slot = self._adapters.take(seq)
        if seq.account.first_scheduled is None:
            self.counters.count_prompt(seq, prefix.sibling, prefix.num_tokens)
        else:
            self._protected_len[seq.id] = length
        self.tenants.moves(seq, State.RUNNING)
        now = self.clock()
        self.counters.recomputed_tokens += seq.account.starts(now, seq.num_computed)
        self._move(seq, State.RUNNING, now)
        self._prefill_plan[seq.id] = self._num_planned
        self.running.append(seq)
        self.waiting.started(seq)
        self._append_first_forced(seq)
        return True

    def _displace(self, lower: list[Sequence], seq: Sequence) -> bool:
        """Preempt one of the outranked sequences for `seq`, if preempting all of them would let it start."""
        lower[:] = [other for other in lower if other.state is State.RUNNING]
        num_left = len(self.running) - len(lower)
        room = self._tables.spare(num_left) + sum(num_freed(other, self.pool) for other in lower)
        if not lower or self._tables.blocks_for(seq.num_tokens) + 1 > room:
            return False
        self._preempt(choose_victim(lower, self.waiting.rank, self.pool))
        return True

    def _unfinished(self) -> list[Sequence]:
        """Running sequences that have more to compute, as far as that is known."""
        if self._num_planned == self._num_committed:
            return self.running
        return [seq for seq in self.running if not seq.awaits_token]

    def _make_room(self) -> None:
        """Give every running sequence blocks for all its tokens, and preempt others if there are too few."""
        size = self.pool.block_size
        running = self._unfinished()
        for seq in [seq for seq in running if len(seq.tokens) + seq.num_pending > len(seq.blocks) * size]:
            while seq.blocks and len(seq.tokens) + seq.num_pending > len(seq.blocks) * size:
                if not self._tables.grow(seq):
                    self._preempt(self._victim_for(seq))

    def _victim_for(self, seq: Sequence) -> Sequence:
        """Choose the sequence that is preempted so that `seq` can grow; it may be `seq` itself."""
        lower = {other.id for other in self.waiting.outranked(seq, self.running)}
        candidates = [other for other in self.running if other.id in lower or not self._is_protected(other)]
        return choose_victim(candidates, self.waiting.rank, self.pool)

    def _is_protected(self, seq: Sequence) -> bool:
        return seq.num_tokens + seq.num_pending <= self._protected_len.get(seq.id, 0)

    def _preempt(self, seq: Sequence) -> None:
        self.host.keep(seq)
        self._leave(seq)
        self.tenants.moves(seq, State.WAITING)
        now = self.clock()
        seq.account.is_preempted(now, seq.num_computed)
        self.counters.preemptions += 1
        self.counters.preempted_tokens += seq.num_computed
        self._move(seq, State.WAITING, now)
        seq.num_computed = 0
        self.waiting.add(seq)

    def _move(self, seq: Sequence, to: State, now: float) -> None:
        seq.state = to
        self._output.moves.append(Move(seq, to, now, seq.num_computed))

    def _append_first_forced(self, seq: Sequence) -> None:
        """Append the tokens that a new output must begin with, so that the prompt's steps compute them as well.

        At least one token is left to choose: the output ends behind it, if anywhere.
        """
        mask = seq.token_mask
        if mask is None or not mask.depends_on_tokens or seq.output_len or seq.request.readout is not None:
            return
        forced = (mask.follow(seq.tokens) or [])[: seq.max_len - seq.num_tokens - 1]
        stop = next((index for index, token in enumerate(forced) if token in seq.params.stop_token_ids), len(forced))
        del forced[stop:]
        if forced and mask.follow(seq.tokens + forced) is None:
            forced.pop()
        while seq.num_tokens + len(forced) > len(seq.blocks) * self.pool.block_size:
            if self.pool.num_available <= len(self.running) or not self._tables.grow(seq):
                break
        del forced[max(0, len(seq.blocks) * self.pool.block_size - seq.num_tokens) :]
        seq.tokens += forced
        seq.num_unsent = len(forced)

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        if seq.account.first_token is None:
            seq.account.has_first_token(self.clock(), is_running=seq.state is State.RUNNING)
            for sibling in self._tables.prompts.computed(seq):
                self.waiting.add(sibling)
            for forced in seq.tokens[seq.num_tokens - seq.num_unsent :]:
                self._count_forced(seq)
                self._report(seq, forced)
            seq.num_unsent = 0
        seq.tokens.append(token)
        self._report(seq, token, logprobs)
        if token in seq.params.stop_token_ids and seq.output_len > seq.params.min_tokens:
            self._end(seq, EndReason.STOP, matched=token)
        elif len(seq.tokens) >= seq.max_len and not self._ends_by_mask(seq):
            self._end(seq, EndReason.LENGTH)

    def _report(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None = None) -> None:
        self.counters.output_tokens += 1
        self.waiting.token_served(seq)
        self._output.add(seq.id, token, logprobs)

    def _read(self, chunk: Chunk, reading: Reading) -> None:
        """Report what was read from a prompt. A mean is complete with the prompt; no cached token is a part of it."""
        seq, readout = chunk.seq, chunk.seq.request.readout
        if seq.state is State.FINISHED or readout is None:
            return
        if readout.pooling == "mean":
            seq.pooled = list(map(add, seq.pooled, reading.hidden)) if chunk.start else reading.hidden
            is_whole = chunk.end >= seq.request.prompt_len
            mean = [total / seq.request.prompt_len for total in seq.pooled] if is_whole else []
            reading = replace(reading, hidden=mean)
        if reading.logprobs or reading.hidden:
            self._output.readings.append((seq.id, reading))

    def _follow(self, seq: Sequence) -> bool:
        """Append the tokens that must come next (jump-ahead); end the sequence if it is complete.

        Return whether a token is to be chosen next, as if it had no mask.
        """
        mask = seq.token_mask
        if mask is None or not mask.depends_on_tokens:
            return True
        is_as_before = True
        while seq.id in self._live:
            forced = mask.follow(seq.tokens)
            if forced is None:
                self._end(seq, EndReason.STOP, matched_grammar=True)
                return False
            if not forced:
                return is_as_before
            is_as_before = False
            self._append_forced(seq, forced)
        return False

    def _append_forced(self, seq: Sequence, tokens: list[int]) -> None:
        for token in tokens:
            if seq.id not in self._live:
                return
            self._count_forced(seq)
            self._append(seq, token, None)

    def _count_forced(self, seq: Sequence) -> None:
        seq.account.is_forced()
        self.counters.forced_tokens += 1

    def _ends_by_mask(self, seq: Sequence) -> bool:
        """End a sequence that is complete by its token mask; say whether it is."""
        mask = seq.token_mask
        if mask is None or not mask.depends_on_tokens or mask.follow(seq.tokens) is not None:
            return False
        self._end(seq, EndReason.STOP, matched_grammar=True)
        return True

    def _fail(self, seq: Sequence, fault: str) -> None:
        """End a sequence for which no token could be chosen, unless that only means that its output is complete."""
        if self._ends_by_mask(seq):
            return
        mask = seq.token_mask
        if mask is not None and mask.error:
            self._end(seq, EndReason.FAILED, detail=mask.error)
        elif mask is not None and mask.fault:
            self._end(seq, EndReason.REJECTED, detail=mask.fault, field=mask.field)
        elif fault == NOT_FINITE and (cause := _cause_in_request(seq)) is not None:
            field, circumstance = cause
            self._end(seq, EndReason.REJECTED, detail=f"{circumstance} {fault}", field=field)
        else:
            self._end(seq, EndReason.FAILED, detail=fault)

    def _end(
        self,
        seq: Sequence,
        reason: EndReason,
        *,
        matched: int | None = None,
        matched_grammar: bool = False,
        detail: str = "",
        field: str = "",
    ) -> None:
        if seq.state is State.RUNNING:
            self._tables.prefixes.publish_begun(seq)
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        self._adapters.ended(seq)
        now = self.clock()
        seq.account.ends(now, is_running=seq.state is State.RUNNING)
        self.tenants.ends(seq)
        seq.state = State.FINISHED
        for sibling in self._tables.ended(seq):
            self.waiting.add(sibling)
        for by_id in (self._live, self._prefill_plan, self._protected_len):
            by_id.pop(seq.id, None)
        if self._speculation is not None:
            self._speculation.forget(seq)
        self._output.ended.append(Ended(seq, reason, now, matched, detail, matched_grammar, field))

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._tables.leave(seq)
        self._adapters.leave(seq)

    def _expire(self) -> None:
        now = self.clock()
        if self._deadlines.next <= now:
            for seq in [seq for seq in self.running if seq.request.deadline <= now]:
                self._end(seq, EndReason.DEADLINE)
        for seq in self._deadlines.lost(now, is_bounded=bool(self.running)):
            self._end(seq, EndReason.DEADLINE)

    def _likely_time_s(self, seq: Sequence) -> float:
        return self.costs.likely_s(seq.remaining_len - self._tables.num_cached(seq))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block and every sequence is accounted for."""
        self._tables.check_integrity(self.running)
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} running, at most {self.max_num_seqs} may"
        assert all(seq.state is State.RUNNING for seq in self.running)
        assert all(seq.state is State.WAITING and not seq.blocks for seq in self.waiting)
        parked = list(self._tables.prompts.parked())
        if self.host.arrivals is not None:
            parked += self.host.arrivals.waiting()
        assert all(seq.state is State.WAITING and not seq.blocks for seq in parked)
        assert {seq.id for seq in [*self.running, *self.waiting, *parked]} == self._live.keys()
        assert self._prefill_plan.keys() | self._protected_len.keys() <= self._live.keys()
        assert self.num_waiting == len(self._live) - len(self.running)
        self.tenants.check_integrity(self._live.values())
        self._adapters.check_integrity(self.running)
        for seq in self.running:
            assert seq.remaining_len > 0, f"sequence {seq.id} runs with nothing to compute"
            uncommitted = self._num_planned - self._num_committed
            assert seq.num_pending <= uncommitted, f"sequence {seq.id} counts on tokens that no step computes"
            assert len(seq.blocks) >= self.pool.blocks_for(seq.num_computed)


def _cause_in_request(seq: Sequence) -> tuple[str, str] | None:
    """Return what in a request may leave no token or make values overflow: its field, and how an error begins."""
    if seq.request.adapter is not None:
        return "lora_name", "with this adapter"
    if seq.token_mask is not None and seq.token_mask.field != "guided":  # a grammar has its own faults
        return seq.token_mask.field, "with these tokens, and bans on some of them,"
    if seq.params.repetition_penalty < 1:  # logits are divided by it
        return "sampling.repetition_penalty", f"divided by {seq.params.repetition_penalty:g}"
    return None
