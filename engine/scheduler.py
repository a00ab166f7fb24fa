"""Who runs in the next step, and how many tokens each.

There are no phases: every sequence has computed tokens that chase those that exist, and a decode is a chunk of length
one. Running decodes come first and prefill chunks fill the rest of the token budget (Sarathi-Serve, Agrawal et al.,
2024), so that a long prompt stalls no stream. When blocks run out, the last admitted of the lowest priority gives up
its own and is computed again later. A schedule (engine/schedules.py) says who may start and who computes. Standard
library only; the clock is an argument, so that tests run in simulated time.

A step may be scheduled before the one before it is committed. It then counts on that one's tokens without knowing them:
who ends with such a token has one row computed for nothing, which writes to blocks that nobody reads any more, and
before anybody else writes to them, since steps are computed in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache
from engine.schedules import SCHEDULES, ScheduleName
from engine.sequence import Chunk, EndReason, Sampled, Sequence, State, StepPlan, TokenLogprobs
from engine.step_output import Counters, Ended, Hold, Move, StepOutput


def admission_order(seq: Sequence) -> tuple[int, int]:
    """Sorts the waiting list: the next to admit is last. Higher priority, then earlier arrival."""
    return seq.priority, -seq.id


def preemption_order(seq: Sequence) -> tuple[bool, int]:
    """The first to give up its blocks: one that is finished and merely keeps its place, then the lowest priority."""
    return seq.state is State.RUNNING, seq.priority


class Scheduler:
    """
    pool           the KV blocks
    max_num_seqs   sequences that run at once
    token_budget   tokens of one step, decodes included; more than max_num_seqs
    max_model_len  prompt + output of one sequence
    clock          seconds, monotonic
    schedule       one of engine/schedules.py
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
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.clock = clock
        self.counters = Counters()
        self.running: list[Sequence] = []  # in the order of admission
        self.waiting: list[Sequence] = []  # sorted by admission_order
        self.hold: Hold | None = None  # why the next in line has not started; None if nobody waits
        self._prefixes = PrefixCache(pool, prefix_caching)
        self._schedule = SCHEDULES[schedule](token_budget)
        self._num_planned = 0  # plans made, and those that are committed
        self._num_committed = 0
        self._live: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, id); ended sequences linger until their time
        self._output = StepOutput()

    # -- arrivals and departures ------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queues a sequence, or ends it at once as REJECTED if it could never run, even alone."""
        self._live[seq.id] = seq
        seq.max_len = min(seq.prompt_len + seq.params.max_tokens, self.max_model_len)
        if seq.prompt_len >= self.max_model_len:
            limit = self.max_model_len - 1
            self._end(seq, EndReason.REJECTED, detail=f"prompt of {seq.prompt_len} tokens, the limit is {limit}")
            return
        if self.pool.blocks_for(seq.max_len) > self.pool.num_blocks:
            capacity = self.pool.num_blocks * self.pool.block_size
            self._end(seq, EndReason.REJECTED, detail=f"up to {seq.max_len} tokens, the KV cache holds {capacity}")
            return
        insort(self.waiting, seq, key=admission_order)
        if seq.deadline < math.inf:
            if len(self._deadlines) > 2 * len(self._live) + 64:  # far deadlines of what has long ended
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (seq.deadline, seq.id))

    def abort(self, ids: Iterable[int]) -> None:
        """Ends sequences as ABORTED, whatever their state. Unknown ids crossed an end on the way and mean nothing."""
        for id in ids:
            if seq := self._live.get(id):
                self._end(seq, EndReason.ABORTED)

    def flush_cache(self) -> int:
        return self.pool.flush()

    @property
    def next_deadline(self) -> float:
        return self._deadlines[0][0] if self._deadlines else math.inf

    @property
    def num_slots_unused(self) -> int:
        """Slots of running sequences' blocks that hold no token yet. Blocks that are shared are full."""
        return sum(len(seq.blocks) * self.pool.block_size - seq.num_computed for seq in self.running)

    # -- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """What to compute next. A plan that is not empty is to be committed, in the order in which it was made."""
        self._expire()
        self._make_room()
        self.hold = self._admit()
        plan = self._cut(self._schedule.turn(self._unfinished(), self.token_budget))
        if not plan.is_empty:
            self._count_on(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: Sampled) -> None:
        """Takes in a step's outcome: what is computed, which tokens are new, who is finished."""
        block_size = self.pool.block_size
        for at, (chunk, token) in enumerate(zip(plan.chunks, sampled.tokens, strict=True)):
            seq = chunk.seq
            if seq.state is State.FINISHED:  # or padding: its outcome is dropped
                continue
            seq.num_pending -= chunk.samples
            if at in sampled.faults:
                self._end(seq, EndReason.FAILED, detail=sampled.faults[at])
                continue
            if seq.state is State.RUNNING and chunk.end // block_size > seq.num_published:
                self._prefixes.publish(seq, chunk.end)
            if token >= 0:  # its own, even if it has been preempted since the step was scheduled
                self._append(seq, token, sampled.logprobs[at])
        self._num_committed += 1
        self.counters.steps += 1
        self.counters.step_sequences = len(plan.chunks)
        self.counters.step_tokens = plan.num_tokens

    def take_output(self) -> StepOutput:
        """What there is to tell since the last call."""
        output, self._output = self._output, StepOutput()
        return output

    # -- the parts of a step ----------------------------------------------------------------------------------------

    def _cut(self, turn: list[Sequence]) -> StepPlan:
        """Chunks of these sequences within the token budget, which decodes alone cannot exceed."""
        chunks: list[Chunk] = []
        prefills: list[Sequence] = []
        for seq in turn:
            start = seq.num_computed
            if len(seq.tokens) + seq.num_pending - start == 1:
                chunks.append(Chunk(seq, start, 1, True))
            else:
                prefills.append(seq)
        budget = self.token_budget - len(chunks)
        for seq in prefills:
            if budget == 0:
                break
            length = min(seq.remaining_len, budget)
            chunks.append(Chunk(seq, seq.num_computed, length, length == seq.remaining_len))
            budget -= length
        return StepPlan(chunks)

    def _count_on(self, plan: StepPlan) -> None:
        """From now on the plan's tokens count as computed, and those that it chooses as existing."""
        self._num_planned = number = self._num_planned + 1
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.state is State.RUNNING:  # else it is padding
                seq.num_computed = chunk.start + chunk.length
                seq.num_pending += chunk.samples
                seq.last_plan = number

    def _admit(self) -> Hold | None:
        """Starts waiting sequences while there are places, the schedule picks one and its blocks exist.

        Returns what keeps the next in line from starting; None if nobody waits.
        """
        if not self.waiting:
            return None
        if len(self.running) >= self.max_num_seqs:
            return "no place"
        budget = self.token_budget - sum(seq.remaining_len for seq in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self._schedule.pick(self.waiting, self.running, budget)
            if seq is None:
                return "no budget" if budget <= 0 else "not its turn"
            if not self._start(seq):
                return "no blocks"
            budget -= seq.remaining_len
        return "no place" if self.waiting else None

    def _start(self, seq: Sequence) -> bool:
        """Gives a waiting sequence blocks for every token that it has, if there are as many."""
        # One block each is left for those who run: else a newcomer would be preempted as soon as they grow. It also
        # keeps out who has just been preempted: what it gave up, less the block it was given up for, is too little.
        spare = self.pool.num_available - len(self.running)
        if spare < 1 or seq.last_plan > self._num_committed:  # preempted while a step computes it: that comes first
            return False
        hits = self._prefixes.match(seq)
        needed = self.pool.blocks_for(seq.num_tokens) - len(hits)
        if needed > spare - self.pool.num_unreferenced(hits):
            return False
        self._unqueue(seq)
        self.pool.share(hits)
        seq.blocks = hits + self.pool.allocate(needed)
        seq.num_published = len(hits)
        seq.num_computed = len(hits) * self.pool.block_size
        self._move(seq, State.RUNNING)
        self.running.append(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = seq.accounted_until
            seq.cached_tokens = seq.num_computed
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_tokens += seq.cached_tokens
        recomputed = max(0, seq.num_lost - seq.num_computed)
        seq.recomputed_tokens += recomputed
        self.counters.recomputed_tokens += recomputed
        return True

    def _unfinished(self) -> list[Sequence]:
        """Who runs and has more to compute, as far as that is known."""
        if self._num_planned == self._num_committed:
            return self.running
        return [seq for seq in self.running if not seq.awaits_end]

    def _make_room(self) -> None:
        """Gives every running sequence blocks for all its tokens, at the cost of others if need be."""
        size = self.pool.block_size
        running = self._unfinished()
        for seq in [seq for seq in running if len(seq.tokens) + seq.num_pending > len(seq.blocks) * size]:
            while seq.blocks and len(seq.tokens) + seq.num_pending > len(seq.blocks) * size:
                if self.pool.num_available:
                    seq.blocks += self.pool.allocate(1)
                else:
                    self._preempt(min(reversed(self.running), key=preemption_order))

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        if seq.state is State.FINISHED:  # it only kept its row in a static batch
            return
        self._move(seq, State.WAITING)
        seq.num_lost, seq.num_computed = seq.num_computed, 0
        seq.preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, seq, key=admission_order)

    def _move(self, seq: Sequence, to: State) -> None:
        seq.account(now := self.clock())
        seq.state = to
        self._output.moves.append(Move(seq, to, now, seq.num_computed))

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        seq.tokens.append(token)
        if seq.first_token is None:
            seq.account(now := self.clock())
            seq.first_token = now
        output = self._output
        output.sequences.append(seq.id)
        output.tokens.append(token)
        output.logprobs.append(logprobs)
        self.counters.output_tokens += 1
        if token in seq.params.stop_token_ids and seq.output_len > seq.params.min_tokens:
            self._end(seq, EndReason.STOP, matched=token)
        elif len(seq.tokens) >= seq.max_len:
            self._end(seq, EndReason.LENGTH)

    def _end(self, seq: Sequence, reason: EndReason, *, matched: int | None = None, detail: str = "") -> None:
        if seq.state is State.RUNNING:
            for gone in self._schedule.leaving(seq, reason, self.running):
                self._leave(gone)
        else:
            self._unqueue(seq)
        seq.account(now := self.clock())
        seq.state = State.FINISHED
        del self._live[seq.id]
        self._output.ended.append(Ended(seq, reason, now, matched, detail))

    def _unqueue(self, seq: Sequence) -> None:
        at = bisect_left(self.waiting, admission_order(seq), key=admission_order)
        if at < len(self.waiting) and self.waiting[at] is seq:  # who was rejected has never been in it
            del self.waiting[at]

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []

    def _expire(self) -> None:
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            if seq := self._live.get(id):
                self._end(seq, EndReason.DEADLINE)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and every sequence is accounted for."""
        self.pool.check_integrity(seq.blocks for seq in self.running)
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} running, at most {self.max_num_seqs} may"
        going = [
            seq for seq in self.running if seq.state is not State.FINISHED
        ]  # the others keep a static batch's rows
        assert all(seq.state is State.RUNNING for seq in going)
        assert bool(going) == bool(self.running), "a batch of finished sequences alone"
        assert all(seq.state is State.WAITING and not seq.blocks for seq in self.waiting)
        assert {seq.id for seq in going + self.waiting} == self._live.keys()
        assert self.waiting == sorted(self.waiting, key=admission_order)
        for seq in self.running:
            assert seq.remaining_len > 0, f"sequence {seq.id} runs with nothing to compute"
            uncommitted = self._num_planned - self._num_committed
            assert seq.num_pending <= uncommitted, f"sequence {seq.id} counts on tokens that nobody computes"
            assert len(seq.blocks) >= self.pool.blocks_for(seq.num_computed)
