"""Who runs in the next step, and how many tokens each.

There are no phases: every sequence has `num_computed` tokens chasing `num_tokens`, and a decode is a chunk of length
one. Running decodes come first and prefill chunks fill the rest of the token budget (Sarathi-Serve, Agrawal et al.,
2024), so that a long prompt stalls no stream. When blocks run out, the last admitted of the lowest priority gives up
its own and is computed again later. Standard library only; the clock is an argument, so that tests run in simulated
time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.blocks import BlockPool, chain_hash
from engine.sequence import Chunk, EndReason, Sampled, Sequence, State, StepPlan, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Ended:
    """One sequence's end. `matched` is the token id of reason STOP; `detail` explains REJECTED and FAILED."""

    seq: Sequence
    reason: EndReason
    at: float
    matched: int | None = None
    detail: str = ""


@dataclass(slots=True)
class StepOutput:
    """What happened since the last one: sequence ids and their new tokens as parallel lists, and ends."""

    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.tokens and not self.ended


@dataclass(slots=True)
class Counters:
    """Since the engine started, except those of the last step."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    step_sequences: int = 0
    step_tokens: int = 0


def admission_order(seq: Sequence) -> tuple[int, int]:
    """Sorts the waiting list: the next to admit is last. Higher priority, then earlier arrival."""
    return seq.priority, -seq.id


class Scheduler:
    """
    pool           the KV blocks
    max_num_seqs   sequences that run at once
    token_budget   tokens of one step, decodes included; more than max_num_seqs
    max_model_len  prompt + output of one sequence
    clock          seconds, monotonic
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
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        self.clock = clock
        self.counters = Counters()
        self.running: list[Sequence] = []  # in the order of admission
        self.waiting: list[Sequence] = []  # sorted by admission_order
        self._live: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, id); ended sequences linger until their time
        self._output = StepOutput()

    # -- arrivals and departures ------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queues a sequence, or ends it at once as REJECTED if it could never run, even alone."""
        self._live[seq.id] = seq
        most = min(seq.prompt_len + seq.params.max_tokens, self.max_model_len)
        if seq.prompt_len >= self.max_model_len:
            limit = self.max_model_len - 1
            self._end(seq, EndReason.REJECTED, detail=f"prompt of {seq.prompt_len} tokens, the limit is {limit}")
            return
        if self.pool.blocks_for(most) > self.pool.num_blocks:
            capacity = self.pool.num_blocks * self.pool.block_size
            self._end(seq, EndReason.REJECTED, detail=f"up to {most} tokens, the KV cache holds {capacity}")
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
        self._expire()
        self._make_room()
        chunks: list[Chunk] = []
        budget = self.token_budget
        for seq in sorted(self.running, key=lambda seq: seq.remaining_len > 1):  # stable: decodes, then prefills
            if budget == 0:
                break
            chunks.append(Chunk(seq, seq.num_computed, min(seq.remaining_len, budget)))
            budget -= chunks[-1].length
        while budget > 0 and (admitted := self._admit()):
            chunks.append(Chunk(admitted, admitted.num_computed, min(admitted.remaining_len, budget)))
            budget -= chunks[-1].length
        return StepPlan(chunks)

    def commit(self, plan: StepPlan, sampled: Sampled) -> None:
        """Takes in a step's outcome: what is computed, which tokens are new, who is finished."""
        for at, chunk in enumerate(plan.chunks):
            seq = chunk.seq
            if seq.state is not State.RUNNING:
                continue
            if fault := sampled.faults.get(at):
                self._end(seq, EndReason.FAILED, detail=fault)
                continue
            seq.num_computed = chunk.end
            self._publish(seq)
            if chunk.samples:
                self._append(seq, sampled.tokens[at], sampled.logprobs[at])
        self.counters.steps += 1
        self.counters.step_sequences = len(plan.chunks)
        self.counters.step_tokens = plan.num_tokens

    def take_output(self) -> StepOutput:
        """What there is to tell since the last call."""
        output, self._output = self._output, StepOutput()
        return output

    # -- the parts of a step ----------------------------------------------------------------------------------------

    def _admit(self) -> Sequence | None:
        """Starts the next waiting sequence if it has a place and blocks for every token that it has."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        seq = self.waiting[-1]
        hits = self._cached_prefix(seq)
        needed = self.pool.blocks_for(seq.num_tokens) - len(hits)
        # One block each is left for those who run: else a newcomer would be preempted as soon as they grow. It also
        # keeps out who has just been preempted: what it gave up, less the block it was given up for, is too little.
        reserve = len(self.running)
        if needed + reserve > self.pool.num_available - self.pool.num_unreferenced(hits):
            return None
        self.waiting.pop()
        self.pool.share(hits)
        seq.blocks = hits + self.pool.allocate(needed)
        seq.num_published = len(hits)
        seq.num_computed = len(hits) * self.pool.block_size
        seq.state = State.RUNNING
        self.running.append(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = self.clock()
            seq.cached_tokens = seq.num_computed
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_tokens += seq.cached_tokens
        seq.recomputed_tokens += max(0, seq.num_lost - seq.num_computed)
        return seq

    def _make_room(self) -> None:
        """Gives every running sequence blocks for all its tokens, at the cost of others if need be."""
        for seq in list(self.running):
            while seq.state is State.RUNNING:
                missing = self.pool.blocks_for(seq.num_tokens) - len(seq.blocks)
                if missing <= self.pool.num_available:
                    seq.blocks.extend(self.pool.allocate(missing))
                    break
                self._preempt(min(reversed(self.running), key=lambda seq: seq.priority))

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.num_lost, seq.num_computed = seq.num_computed, 0
        seq.state = State.WAITING
        seq.preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, seq, key=admission_order)

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        seq.tokens.append(token)
        if seq.first_token is None:
            seq.first_token = self.clock()
        self.counters.output_tokens += 1
        self._output.sequences.append(seq.id)
        self._output.tokens.append(token)
        self._output.logprobs.append(logprobs)
        params = seq.params
        if token in params.stop_token_ids and seq.output_len > params.min_tokens:
            self._end(seq, EndReason.STOP, matched=token)
        elif seq.output_len >= params.max_tokens or seq.num_tokens >= self.max_model_len:
            self._end(seq, EndReason.LENGTH)

    def _end(self, seq: Sequence, reason: EndReason, *, matched: int | None = None, detail: str = "") -> None:
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            at = bisect_left(self.waiting, admission_order(seq), key=admission_order)
            if at < len(self.waiting) and self.waiting[at] is seq:
                del self.waiting[at]
        seq.state = State.FINISHED
        del self._live[seq.id]
        self._output.ended.append(Ended(seq, reason, self.clock(), matched, detail))

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []

    def _expire(self) -> None:
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heapq.heappop(self._deadlines)
            if seq := self._live.get(id):
                self._end(seq, EndReason.DEADLINE)

    # -- prefix cache -----------------------------------------------------------------------------------------------

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks that the sequence can start from. Its last token is always computed: its logits are needed."""
        if not self._uses_cache(seq):
            return []
        usable = (seq.num_tokens - 1) // self.pool.block_size
        self._extend_hashes(seq, usable)
        return self.pool.match(seq.block_hashes[:usable])

    def _publish(self, seq: Sequence) -> None:
        """Lets others find the blocks that are full now."""
        if not self._uses_cache(seq):
            return
        full = seq.num_computed // self.pool.block_size
        for index in range(seq.num_published, full):
            self._extend_hashes(seq, index + 1)
            self.pool.publish(seq.blocks[index], seq.block_hashes[index])
        seq.num_published = full

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        size = self.pool.block_size
        for index in range(len(seq.block_hashes), count):
            previous = seq.block_hashes[-1] if index else seq.cache_root
            seq.block_hashes.append(chain_hash(previous, seq.tokens[index * size : (index + 1) * size]))

    def _uses_cache(self, seq: Sequence) -> bool:
        return self.prefix_caching and not seq.bypass_cache

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block and every sequence is accounted for."""
        self.pool.check_integrity(seq.blocks for seq in self.running)
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} running, at most {self.max_num_seqs} may"
        assert all(seq.state is State.RUNNING for seq in self.running)
        assert all(seq.state is State.WAITING and not seq.blocks for seq in self.waiting)
        assert {seq.id for seq in self.running + self.waiting} == self._live.keys()
        assert self.waiting == sorted(self.waiting, key=admission_order)
        for seq in self.running:
            assert seq.num_computed < seq.num_tokens, f"sequence {seq.id} runs with nothing to compute"
            assert len(seq.blocks) >= self.pool.blocks_for(seq.num_computed)
