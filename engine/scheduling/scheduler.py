"""Who runs in the next step, and how many tokens each.

There are no phases: every sequence has computed tokens that chase those that exist, and a decode is a chunk of length
one. Running decodes come first and prefill chunks fill the rest of the token budget (Sarathi-Serve, Agrawal et al.,
2024), so that a long prompt stalls no stream. When blocks run out, somebody gives up its own and is computed again
later. What is decided elsewhere: who is next in line (engine/scheduling/policies/), who may start and who computes
(engine/scheduling/schedules.py), which blocks it gets (engine/kv/block_tables.py), how much of a step is prefill
(engine/scheduling/pacing.py), who gives up its blocks (engine/scheduling/victims.py) and whose deadline cannot be met
(engine/scheduling/deadlines.py). Standard library only; the clock is an argument, so that tests run in simulated time.

A step may be scheduled before the one before it is committed. It then counts on that one's tokens without knowing them:
who ends with such a token has one row computed for nothing, which writes to blocks that nobody reads any more, and
before anybody else writes to them, since steps are computed in the order in which they were scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pagoda_server.engine.core.output import Counters, Ended, Hold, Move, StepOutput
from pagoda_server.engine.core.sequence import EndReason, Sampled, Sequence, State, StepPlan, TokenLogprobs
from pagoda_server.engine.kv.block_tables import BlockTables
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.kv.host_blocks import HostBlocks
from pagoda_server.engine.scheduling.deadlines import Deadlines
from pagoda_server.engine.scheduling.pacing import Pacing
from pagoda_server.engine.scheduling.policies import POLICIES, Policy, PolicyName, PolicySettings
from pagoda_server.engine.scheduling.schedules import SCHEDULES, ScheduleName
from pagoda_server.engine.scheduling.tenants import Tenants
from pagoda_server.engine.scheduling.victims import choose_victim, is_protected, num_freed


class Scheduler:
    """
    pool           the KV blocks
    max_num_seqs   sequences that run at once
    token_budget   tokens of one step, decodes included; more than max_num_seqs
    max_model_len  prompt + output of one sequence
    clock          seconds, monotonic
    schedule       one of engine/scheduling/schedules.py
    policy         one of engine/scheduling/policies/, with its settings: ageing_s and tenant_weights
    target_itl_s   a step that holds decodes is to take so long at most; None: no such target
    max_itl_growth  of a step by prompts beside its decodes, as a factor; None: no such limit
    host           where preempted sequences keep what they have computed; None: nowhere
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        clock: Callable[[], float],
        prefix_caching: bool = True,
        schedule: ScheduleName = "continuous",
        policy: PolicyName = "priority",
        ageing_s: float = 60.0,
        tenant_weights: Mapping[str, float] | None = None,
        target_itl_s: float | None = None,
        max_itl_growth: float | None = None,
        host: HostBlocks | None = None,
    ) -> None:
        self.pool = pool
        self.host = host or HostBlocks(0, pool.block_size, clock)
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.clock = clock
        self.counters = Counters()
        self.tenants = Tenants(clock)
        self.running: list[Sequence] = []  # in the order of admission
        self.hold: Hold | None = None  # why the next in line has not started; None if nobody waits
        self.step_budget = token_budget  # of the last step that was scheduled
        self._pacing = Pacing(token_budget, target_itl_s, max_itl_growth)
        self.waiting: Policy = POLICIES[policy](
            PolicySettings(clock, self._likely_time_s, ageing_s, tenant_weights or {}),
        )
        self._tables = BlockTables(pool, prefix_caching, self.host)
        self._deadlines = Deadlines(self._pacing.least_time, self._tables.num_cached)
        self._schedule = SCHEDULES[schedule](token_budget)
        self._num_planned = 0  # plans made, and those that are committed
        self._num_committed = 0
        self._live: dict[int, Sequence] = {}
        self._output = StepOutput()

    # -- arrivals and departures ------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queues a sequence, or ends it at once as REJECTED if it could never run, even alone."""
        self._live[seq.id] = seq
        self.tenants.arrived(seq)
        seq.max_len = min(seq.prompt_len + seq.params.max_tokens, self.max_model_len)
        if seq.num_tokens >= seq.max_len:
            detail = f"prompt of {seq.num_tokens} tokens, the limit is {seq.max_len - 1}"
            self._end(seq, EndReason.REJECTED, detail=detail)
            return
        capacity = self.pool.num_blocks * self.pool.block_size
        if seq.max_len > capacity:
            detail = f"up to {seq.max_len} tokens, the KV cache holds {capacity}"
            self._end(seq, EndReason.REJECTED, detail=detail)
            return
        if not self._tables.park(seq):
            self.waiting.add(seq)
        self._deadlines.add(seq)

    def abort(self, ids: Iterable[int]) -> None:
        """Ends sequences as ABORTED, whatever their state. Unknown ids crossed an end on the way and mean nothing."""
        for id in ids:
            if seq := self._live.get(id):
                self._end(seq, EndReason.ABORTED)

    def flush_cache(self) -> int:
        return self.pool.flush()

    @property
    def next_deadline(self) -> float:
        """Until then nobody has to leave because of a deadline."""
        return self._deadlines.next

    @property
    def num_waiting(self) -> int:
        """Those included that wait for another sequence to compute their prompt."""
        return len(self.waiting) + self._tables.num_parked

    @property
    def _num_startable(self) -> int:
        """Sequences that wait and would find a place."""
        return min(len(self.waiting), self.max_num_seqs - len(self.running))

    @property
    def num_slots_unused(self) -> int:
        """Slots of running sequences' blocks beyond their tokens, computed or not. Blocks that are shared are full."""
        size = self.pool.block_size
        return sum(
            [spare for seq in self.running if (spare := len(seq.blocks) * size - len(seq.tokens) - seq.num_pending) > 0]
        )

    # -- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """What to compute next. A plan that is not empty is to be committed, in the order in which it was made."""
        self._expire()
        self._make_room()
        self.step_budget = budget = self._pacing.budget(self.running, self._num_startable)
        self.hold = self._admit(budget)
        turn = self._schedule.turn(self._unfinished(), budget, self.waiting.rank)
        plan = self._tables.plan(self._pacing.cut(turn, budget, self._num_planned + 1))
        if not plan.is_empty:
            self._count_on(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: Sampled) -> None:
        """Takes in a step's outcome: what is computed, which tokens are new, who is finished."""
        for at, (chunk, token) in enumerate(zip(plan.chunks, sampled.tokens, strict=True)):
            seq = chunk.seq
            if seq.state is State.FINISHED:  # or padding: its outcome is dropped
                self.counters.dropped_tokens += chunk.length
                continue
            seq.num_pending -= chunk.samples
            if at in sampled.faults:
                self._end(seq, EndReason.FAILED, detail=sampled.faults[at])
                continue
            if seq.state is State.RUNNING:
                self._tables.computed(seq, chunk.end)
            if token >= 0:  # its own, even if it has been preempted since the step was scheduled
                self._append(seq, token, sampled.logprobs[at])
        self._pacing.committed(plan, self.clock())
        self._tables.commit(plan, sampled.copied_s)
        self._num_committed += 1
        self.counters.steps += 1
        self.counters.step_sequences = len(plan.chunks)
        self.counters.step_tokens = plan.num_tokens

    def distrust(self, plan: StepPlan) -> None:
        """Its step failed and is to be computed again: who has started from what it saved cannot go on from that."""
        for seq in self.host.distrust(plan):
            self._preempt(seq)

    def take_output(self) -> StepOutput:
        """What there is to tell since the last call."""
        output, self._output = self._output, StepOutput()
        return output

    # -- the parts of a step ----------------------------------------------------------------------------------------

    def _count_on(self, plan: StepPlan) -> None:
        """From now on the plan's tokens count as computed, and those that it chooses as existing."""
        self._num_planned = number = self._num_planned + 1
        self._pacing.scheduled(self.clock())
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.state is State.RUNNING:  # else it is padding
                seq.num_computed = chunk.start + chunk.length
                seq.num_pending += chunk.samples
                seq.last_plan = number

    def _admit(self, budget: int) -> Hold | None:
        """Starts waiting sequences while there are places, the schedule picks one and its blocks exist.

        Returns what keeps the next in line from starting; None if nobody waits.
        """
        if not self.waiting:
            return None
        budget -= sum(seq.remaining_len for seq in self._unfinished())
        while self.waiting:
            lower = self.waiting.outranked(next(self.waiting.in_line()), self.running)
            seq = self._schedule.pick(self.waiting, self.running, budget + sum(seq.remaining_len for seq in lower))
            if seq is None:
                return "no budget" if budget <= 0 else "not its turn"
            if self._deadlines.is_lost(seq, self.clock()):
                if self.running and not self._deadlines.takes_leave():
                    return "not its turn"
                self._end(seq, EndReason.DEADLINE)
                continue
            while not self._start(seq):
                if not self._displace(lower, seq):
                    return "no blocks" if len(self.running) < self.max_num_seqs else "no place"
            budget -= seq.remaining_len
        return None

    def _start(self, seq: Sequence) -> bool:
        """Gives a waiting sequence a place and blocks for every token that it has, if there are as many."""
        if len(self.running) >= self.max_num_seqs:
            return False
        if seq.last_plan > self._num_committed:  # preempted while a step computes it: that first
            return False
        length = seq.num_tokens
        if seq.preemptions:  # engine/scheduling/victims.py
            length = min(length + self.pool.block_size, seq.max_len)
        prefix = self._tables.start(seq, length, len(self.running))
        if prefix is None:
            return False
        self.waiting.remove(seq)
        self._move(seq, State.RUNNING)
        seq.last_plan = self._num_planned
        self.running.append(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = seq.accounted_until
            self.counters.count_prompt(seq, prefix.sibling, prefix.num_tokens)
        if seq.preemptions:
            seq.protected_len = length
            recomputed = max(0, seq.num_lost - seq.num_computed)
            seq.recomputed_tokens += recomputed
            self.counters.recomputed_tokens += recomputed
        self.waiting.started(seq)
        return True

    def _displace(self, lower: list[Sequence], seq: Sequence) -> bool:
        """Has one of the running make room for a sequence that outranks them, if it starts once all of them have."""
        lower[:] = [other for other in lower if other.state is State.RUNNING]
        num_left = len(self.running) - len(lower)
        room = self.pool.num_available - num_left + sum(num_freed(other, self.pool) for other in lower)
        if not lower or self.pool.blocks_for(seq.num_tokens) + 1 > room:
            return False
        self._preempt(choose_victim(lower, self.waiting.rank, self.pool))
        return True

    def _unfinished(self) -> list[Sequence]:
        """Who runs and has more to compute, as far as that is known."""
        if self._num_planned == self._num_committed:
            return self.running
        return [seq for seq in self.running if not seq.awaits_token]

    def _make_room(self) -> None:
        """Gives every running sequence blocks for all its tokens, at the cost of others if need be."""
        size = self.pool.block_size
        running = self._unfinished()
        for seq in [seq for seq in running if len(seq.tokens) + seq.num_pending > len(seq.blocks) * size]:
            while seq.blocks and len(seq.tokens) + seq.num_pending > len(seq.blocks) * size:
                if not self._tables.grow(seq):
                    self._preempt(self._victim_for(seq))

    def _victim_for(self, seq: Sequence) -> Sequence:
        """Who gives up its blocks for one more of this sequence; it may be itself, which is not protected now."""
        lower = {other.id for other in self.waiting.outranked(seq, self.running)}
        candidates = [other for other in self.running if other.id in lower or not is_protected(other)]
        return choose_victim(candidates, self.waiting.rank, self.pool)

    def _preempt(self, seq: Sequence) -> None:
        if seq.state is State.RUNNING:
            self._tables.keep(seq)
        self._leave(seq)
        if seq.state is State.FINISHED:  # it only kept its row in a static batch
            return
        self._move(seq, State.WAITING)
        seq.num_lost, seq.num_computed = seq.num_computed, 0
        seq.preemptions += 1
        seq.preempted_tokens += seq.num_lost
        self.counters.preemptions += 1
        self.counters.preempted_tokens += seq.num_lost
        self.waiting.add(seq)

    def _move(self, seq: Sequence, to: State) -> None:
        seq.account(now := self.clock())
        self.tenants.moves(seq, to)
        seq.state = to
        self._output.moves.append(Move(seq, to, now, seq.num_computed))

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        seq.tokens.append(token)
        if seq.first_token is None:
            seq.account(now := self.clock())
            seq.first_token = now
            for sibling in self._tables.prompt_computed(seq):
                self.waiting.add(sibling)
        self.counters.output_tokens += 1
        self.waiting.token_served(seq)
        self._output.add(seq.id, token, logprobs)
        if token in seq.params.stop_token_ids and seq.output_len > seq.params.min_tokens:
            self._end(seq, EndReason.STOP, matched=token)
        elif len(seq.tokens) >= seq.max_len:
            self._end(seq, EndReason.LENGTH)

    def _end(self, seq: Sequence, reason: EndReason, *, matched: int | None = None, detail: str = "") -> None:
        if seq.state is State.RUNNING:
            self._tables.publish_begun(seq)
            for gone in self._schedule.leaving(seq, reason, self.running):
                self._leave(gone)
        else:
            self.waiting.remove(seq)
        seq.account(now := self.clock())
        self.tenants.ends(seq)
        seq.state = State.FINISHED
        for sibling in self._tables.ended(seq):
            self.waiting.add(sibling)
        del self._live[seq.id]
        self._output.ended.append(Ended(seq, reason, now, matched, detail))

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._tables.leave(seq)

    def _expire(self) -> None:
        now = self.clock()
        for seq in [seq for seq in self.running if seq.deadline <= now and seq.state is State.RUNNING]:
            self._end(seq, EndReason.DEADLINE)
        for seq in self._deadlines.lost(now, is_bounded=bool(self.running)):
            self._end(seq, EndReason.DEADLINE)

    def _likely_time_s(self, seq: Sequence) -> float:
        return self._pacing.likely_time.of(seq.remaining_len - self._tables.num_cached(seq))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and every sequence is accounted for."""
        self._tables.check_integrity(self.running)
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} running, at most {self.max_num_seqs} may"
        going = [seq for seq in self.running if seq.state is not State.FINISHED]  # others keep a static batch's rows
        assert all(seq.state is State.RUNNING for seq in going)
        assert bool(going) == bool(self.running), "a batch of finished sequences alone"
        assert all(seq.state is State.WAITING and not seq.blocks for seq in self.waiting)
        parked = list(self._tables.parked())
        assert all(seq.state is State.WAITING and not seq.blocks for seq in parked)
        assert {seq.id for seq in [*going, *self.waiting, *parked]} == self._live.keys()
        assert self.num_waiting == len(self._live) - len(going)
        self.tenants.check_integrity(self._live.values())
        for seq in self.running:
            assert seq.remaining_len > 0, f"sequence {seq.id} runs with nothing to compute"
            uncommitted = self._num_planned - self._num_committed
            assert seq.num_pending <= uncommitted, f"sequence {seq.id} counts on tokens that nobody computes"
            assert len(seq.blocks) >= self.pool.blocks_for(seq.num_computed)
