"""Scheduler and blocks under random operations in simulated time. Every invariant is checked after every step."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagoda_server.engine.core.sequence import EndReason, Lender, State
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.synthetic import StepTime, expected_tokens, identity_of
from pagoda_server.engine.scheduling.expiry import LEAVING
from pagoda_server.settings.engine import PolicyName
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.late_mask import LateMask
from tests.engine.unreliable import UnreliableRunner

MAX_MODEL_LEN = 60
# Few different prompts, sharing prefixes, so that the cache is hit often.
prompts = st.builds(
    lambda head, length: [(head * 13 + at // 2) % 256 for at in range(length)],
    st.integers(0, 2),
    st.integers(1, MAX_MODEL_LEN - 1),
)


class AnyToken:
    """A TokenMask that depends on tokens, and allows all."""

    depends_on_tokens = True
    field = "guided"
    fault = ""
    is_slow = False

    def is_ready(self, tokens, timeout_s):
        return True

    def surely_allows(self, tokens, token):
        return True

    def fill(self, tokens, words):
        for at in range(len(words)):
            words[at] = 0xFFFF_FFFF

    def follow(self, tokens):
        return []


class SchedulerMachine(RuleBasedStateMachine):
    policy: PolicyName = "priority"
    target_itl_s: float | None = None
    lookahead = 0
    prefix_caching = True
    block_size = 4  # from 8 on, blocks are also found by their first tokens, and copied
    host_blocks = 0
    copy_s = 0.01
    windows: tuple[int | None, ...] = (None,)
    num_blocks = 0  # of the pool; 0: 80 tokens
    store_path = None
    lenders = None
    adapter_slots = 0
    num_extra = 0  # preemptions that no bound speaks of

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(
            lambda seq, count: expected_tokens(seq.tokens, count, VOCAB_SIZE, identity_of(seq)), 0.0, VOCAB_SIZE
        )
        self.speculation = AlwaysDrafts(self.oracle, most=5, vocab_size=VOCAB_SIZE)
        self.speculation.is_on = False
        self.engine = self.new_engine()
        self.seqs = []
        self.gate, self.dice, self.late_chance = threading.Event(), Random(0), 0.0
        self.gate.set()

    def new_engine(self):
        # Small enough that sequences are preempted, large enough for any one of them.
        return SteppedEngine(
            num_blocks=self.num_blocks or 80 // self.block_size,
            block_size=self.block_size,
            max_num_seqs=6,
            token_budget=11,
            max_model_len=MAX_MODEL_LEN,
            policy=self.policy,
            ageing_s=10.0,
            tenant_weights={"b": 2.0},
            target_itl_s=self.target_itl_s,
            step_time=StepTime(0.5, 0.1, 0.1),
            lookahead=self.lookahead,
            prefix_caching=self.prefix_caching,
            host_blocks=self.host_blocks,
            copy_s=self.copy_s,
            speculation=self.speculation,
            windows=self.windows,
            store_path=self.store_path,
            store_blocks=25,
            lenders=self.lenders,
            adapter_slots=self.adapter_slots,
        )

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from([float("inf"), 1.0, 20.0]),
        tenant=st.sampled_from(["", "a", "b"]),
        slo=st.sampled_from([{}, {"ttft_s": 2.0}, {"ttft_s": 15.0, "tpot_s": 1.0}]),
        salt=st.sampled_from(["", "a"]),
        bypass=st.booleans(),
        stops=st.sampled_from([frozenset(), frozenset(range(0, 258, 9))]),
        count=st.sampled_from([1, 1, 2, 4]),
        has_mask=st.booleans(),
    )
    def add(self, prompt, max_tokens, priority, timeout_s, tenant, slo, salt, bypass, stops, count, has_mask):
        rules = {"priority": priority, "timeout_s": timeout_s, "tenant": tenant, "salt": salt, "bypass": bypass, **slo}
        if has_mask:
            rules["make_mask"] = self.make_mask
        self.seqs += self.engine.add_siblings(count, prompt, max_tokens, stop_token_ids=stops, **rules)

    @rule(
        prompt=prompts,
        output=st.integers(1, 9),
        more=st.integers(0, 3),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a"]),
        bypass=st.booleans(),
        age_s=st.sampled_from([0.0, 5.0]),
        siblings=st.integers(1, 4),
    )
    def continue_others(self, prompt, output, more, priority, tenant, bypass, age_s, siblings):
        """Add sequences that arrive with output, as resumed ones do; without `more`, some need no more tokens."""
        rules = {"priority": priority, "tenant": tenant, "bypass": bypass, "age_s": age_s}
        for at in range(siblings):
            self.seqs.append(self.engine.add(prompt, output + more, output=list(range(at, at + output)), **rules))

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            was_busy = len(self.engine.steps) > 0
            plan = self.engine.step()
            assert plan.num_tokens <= 11
            assert len(plan.chunks) <= 6
            scheduler = self.engine.scheduler
            num_fetching = scheduler.host.arrivals.num_waiting if scheduler.host.arrivals else 0
            assert plan.chunks or was_busy or not (scheduler.running or scheduler.num_waiting - num_fetching), (
                "sequences wait, and the engine is idle"
            )

    @rule(prompt=prompts, count=st.integers(LEAVING + 1, LEAVING + 3), seconds=st.sampled_from([1.0, 3.0, 30.0]))
    def a_crowd_waits_in_vain(self, prompt, count, seconds):
        """Add more hopeless sequences than may leave in a step while others run."""
        for _ in range(count):
            self.seqs.append(self.engine.add(prompt, 5, timeout_s=0.5))
        self.engine.now += seconds

    @rule(data=st.data())
    def abort(self, data):
        if self.seqs:
            self.engine.abort(data.draw(st.sampled_from(self.seqs)).id)

    @rule(is_on=st.booleans(), accuracy=st.sampled_from([0.0, 0.7, 1.0]))
    def draft(self, is_on, accuracy):
        """From now on, guess so many tokens rightly, or guess none."""
        self.speculation.is_on, self.oracle.accuracy = is_on, accuracy

    @rule(chance=st.sampled_from([0.0, 0.3, 1.0]))
    def masks_are_late(self, chance):
        self.late_chance = chance

    def make_mask(self, **options):
        return LateMask(AnyToken(), self.gate, lambda tokens: self.dice.random() < self.late_chance)

    @rule()
    def flush_cache(self):
        self.engine.scheduler.flush_cache()

    @invariant()
    def everything_is_accounted_for(self):
        self.engine.scheduler.check_integrity()

    @invariant()
    def no_token_is_wrong(self):
        for seq in self.seqs:
            got = self.engine.outputs[seq.id]
            assert got == self.engine.expected(seq)[: len(got)]

    def most_preemptions(self, seq):
        """Its equals preempt it once before its first token and once a block of output. Under priority, each higher
        sequence also does, whenever it starts or takes a block."""
        size, by_higher = self.engine.pool.block_size, 0
        if self.policy == "priority":
            higher = [other for other in self.seqs if other.request.priority > seq.request.priority]
            by_higher = sum((1 + other.account.preemptions) * (1 + -(-len(other.tokens) // size)) for other in higher)
        return 1 + seq.output_len // size + by_higher + self.num_extra

    def teardown(self):
        self.late_chance = 0.0
        self.engine.run()
        for seq in self.seqs:
            assert seq.account.preemptions <= self.most_preemptions(seq), "they chase each other"
        assert self.engine.pool.num_referenced == 0
        assert self.engine.scheduler.host.load().blocks_used == 0
        for seq in self.seqs:
            ended = self.engine.ended[seq.id]
            expected = self.engine.expected(seq)[: MAX_MODEL_LEN - self.engine.arrived_with[seq.id]]
            if stop := next((at for at, token in enumerate(expected, 1) if token in seq.params.stop_token_ids), None):
                expected = expected[:stop]
            if ended.reason in (EndReason.LENGTH, EndReason.STOP):
                assert self.engine.outputs[seq.id] == expected
            assert seq.account.accepted_tokens <= seq.account.drafted_tokens


class UncachedMachine(SchedulerMachine):
    """Without prefix caching, only the sequences of one request share blocks."""

    prefix_caching = False


class FcfsMachine(SchedulerMachine):
    policy = "fcfs"
    target_itl_s = 1.5
    block_size = 8


class FairMachine(SchedulerMachine):
    policy = "fair"
    lookahead = 1


class DeadlineMachine(SchedulerMachine):
    policy = "deadline"
    target_itl_s = 1.2
    lookahead = 1


class OverlapMachine(SchedulerMachine):
    """Each step is launched before the previous one is read."""

    lookahead = 1
    block_size = 8


class UnreliableMachine(SchedulerMachine):
    """Steps fail once, whatever else is in flight; computed again, they give the same tokens."""

    lookahead = 1
    block_size = 8

    def new_engine(self):
        engine = super().new_engine()
        engine.runner = self.unreliable = UnreliableRunner(engine.runner)
        engine.steps = StepsInFlight(engine.scheduler, self.unreliable)
        return engine

    @rule(failure=st.sampled_from(["at launch", "when read", "computed"]))
    def break_the_next_step(self, failure):
        self.unreliable.failures = [failure]
        self.num_extra += self.host_blocks > 0  # a sequence that started from what this step saved starts again


class Host:
    """Preempted sequences keep their blocks, in host memory if other sequences overwrite them."""

    host_blocks = 40

    @rule(data=st.data())
    def preempt(self, data):
        """Preempt a sequence at any time, whatever it has computed."""
        scheduler = self.engine.scheduler
        if running := [seq for seq in scheduler.running if seq.state is State.RUNNING]:
            scheduler._preempt(data.draw(st.sampled_from(running)))
            self.num_extra += 1


class HostMachine(Host, SchedulerMachine):
    pass


class HostOverlapMachine(HostMachine):
    """As above, with each step launched before the previous one is read. Host memory is sometimes too small."""

    lookahead = 1
    host_blocks = 6


class HostUncachedMachine(HostOverlapMachine):
    prefix_caching = False
    host_blocks = 40


class HostUnreliableMachine(Host, UnreliableMachine):
    """What a failed step saved is not trusted, and what it loaded is loaded again."""

    host_blocks = 12


class HostUnreliableUncachedMachine(HostUnreliableMachine):
    prefix_caching = False


class HostCache(Host):
    """Few prompts come again and again, more than the device holds at once."""

    host_blocks = 30  # of four prompts with ten each
    copy_s = 0.05  # beside decodes a step loads two blocks or three

    @rule(prompts=st.lists(st.integers(0, 3), min_size=1, max_size=4), count=st.integers(1, 12))
    def ask_again(self, prompts, count):
        for which in prompts:
            self.seqs.append(self.engine.add([which, *range(40)], max_tokens=2))
            self.steps(count=count)


class HostCacheMachine(HostCache, SchedulerMachine):
    pass


class HostCacheUnreliableMachine(HostCache, UnreliableMachine):
    block_size = 4


class Lending(HostCache):
    """Two engines lend each other what they have cached, over a link that may be late or break off."""

    def __init__(self):
        self.lenders = {}
        super().__init__()
        self.other, self.other_seqs = self.new_engine(), []
        self.lenders.update(a=self.engine, b=self.other)
        self.names = ["b", "a"]  # of the lender of each
        self.engine.peers.steps = self.other.peers.steps = False

    @rule(prompts=st.lists(st.integers(0, 3), min_size=1, max_size=4), count=st.integers(0, 12), num=st.integers(1, 50))
    def ask_for_lent(self, prompts, count, num):
        for which in prompts:
            lender = Lender(self.names[0], num)
            self.seqs.append(self.engine.add([which, *range(40)], max_tokens=2, lender=lender))
            self.steps(count=count)

    @rule(stays=st.booleans(), count=st.integers(0, 12))
    def take_over(self, stays, count):
        """A sequence of the other engine goes on here as it is there, and may end there."""
        lasting = [seq for seq in self.other_seqs if seq.state is not State.FINISHED and seq.num_tokens < seq.max_len]
        if not lasting or lasting[-1].request.readout is not None:
            return
        seq = lasting[-1]
        prompt, output = seq.tokens[: seq.request.prompt_len], seq.tokens[seq.request.prompt_len :]
        lender = Lender(self.names[0], seq.num_tokens)
        self.seqs.append(self.engine.add(prompt, seq.params.max_tokens, output=output, lender=lender))
        if not stays:
            self.other.abort(seq.id)
        self.steps(count=count)

    @rule(count=st.integers(1, 12))
    def turn_to_the_other(self, count):
        self.engine, self.other = self.other, self.engine
        self.seqs, self.other_seqs = self.other_seqs, self.seqs
        self.names.reverse()
        self.steps(count=count)

    @rule(is_stuck=st.booleans(), most=st.integers(0, 12))
    def the_link_is_bad(self, is_stuck, most):
        """It brings nothing for now, or not more than so many blocks of a call."""
        self.engine.peers.is_stuck = is_stuck
        self.engine.peers.corrupt = lambda contents: contents[:most]

    @rule()
    def empty_device(self):
        self.engine.pool.flush()

    @rule()
    def flush(self):
        self.engine.scheduler.flush_cache()

    def teardown(self):
        for each in (self.engine, self.other):
            each.peers.is_stuck, each.peers.corrupt = False, lambda contents: contents
        for _ in range(2000):
            engines = (self.engine, self.other)
            if not any(each.scheduler.num_waiting or each.scheduler.running or each.peers._asked for each in engines):
                break
            for each in engines:
                each.step()
        for _ in range(2):
            super().teardown()
            self.turn_to_the_other(count=1)
        for each in (self.engine, self.other):
            host = each.scheduler.host
            assert not host.lent.hosts() | host.arrivals.hosts()
            assert not host._cache._pins


class LendingMachine(Lending, SchedulerMachine):
    pass


class LendingOverlapMachine(Lending, OverlapMachine):
    pass


class Stored(HostCache):
    """Blocks also go to a file, which is smaller than what comes; the engine is killed, and the file damaged."""

    def __init__(self):
        self.folder = TemporaryDirectory()
        self.store_path = Path(self.folder.name) / "blocks"
        super().__init__()

    @rule(jobs=st.integers(0, 2))
    def the_disk_is_slow(self, jobs):
        self.engine.jobs_a_step = jobs

    @rule()
    def empty_memory(self):
        """Leave the file alone with what was cached."""
        self.engine.pool.flush()
        self.engine.scheduler.host._cache.flush()

    @rule()
    def kill(self):
        """Start another engine in the place of this one."""
        self.engine.store._file.close()
        self.engine, self.seqs = self.new_engine(), []

    @rule(data=st.data())
    def damage(self, data):
        with self.store_path.open("r+b") as file:
            at = data.draw(st.integers(4096, self.store_path.stat().st_size - 1))
            file.seek(at)
            file.write(data.draw(st.binary(min_size=1, max_size=40)))

    def teardown(self):
        self.engine.jobs_a_step = 100
        super().teardown()
        assert not self.engine.scheduler.host.stored.hosts() | self.engine.scheduler.host.arrivals.hosts()
        self.engine.store._file.close()
        self.folder.cleanup()


class StoredMachine(Stored, SchedulerMachine):
    pass


class StoredOverlapMachine(Stored, OverlapMachine):
    block_size = 4
    host_blocks = 9


class StoredUnreliableMachine(Stored, UnreliableMachine):
    block_size = 4


class Windows:
    """Most layers have a sliding window, and block tables of their own."""

    windows = (None, 9, 9)
    num_blocks = 15 + 2 * 11 + 12  # for the longest sequence, and a little more


class WindowMachine(Windows, SchedulerMachine):
    pass


class WindowOverlapMachine(Windows, OverlapMachine):
    windows = (None, 5, 17)
    block_size = 4


class WindowUncachedMachine(Windows, UncachedMachine):
    lookahead = 1


class WindowUnreliableMachine(Windows, UnreliableMachine):
    block_size = 4


class WindowHostMachine(Windows, HostOverlapMachine):
    host_blocks = 40


class WindowHostUnreliableMachine(Windows, HostUnreliableMachine):
    block_size = 4


class WindowHostCacheMachine(Windows, HostCache, SchedulerMachine):
    host_blocks = 90  # of four prompts with thirty each


class WindowHostCacheOverlapMachine(Windows, HostCache, OverlapMachine):
    windows = (None, 5, 17)
    block_size = 4
    host_blocks = 20


class WindowHostCacheUnreliableMachine(Windows, HostCache, UnreliableMachine):
    block_size = 4


class Adapters:
    """More adapters than slots. A wrong adapter, or a block that was computed with another, changes tokens."""

    adapter_slots = 2

    @rule(
        prompt=prompts,
        number=st.integers(1, 5),
        is_pinned=st.booleans(),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        count=st.sampled_from([1, 1, 3]),
        timeout_s=st.sampled_from([float("inf"), 20.0]),
    )
    def add_adapted(self, prompt, number, is_pinned, max_tokens, priority, count, timeout_s):
        rules = {"priority": priority, "timeout_s": timeout_s, "adapter": bytes([number]) * 32}
        seqs = self.engine.add_siblings(count, prompt, max_tokens, **rules)
        seqs[0].request.adapter.is_pinned = is_pinned and number == 1  # the engine leaves one slot to the others
        self.seqs += seqs


class AdaptersMachine(Adapters, SchedulerMachine):
    pass


class AdaptersUnreliableMachine(Adapters, UnreliableMachine):
    pass


class AdaptersHostOverlapMachine(Adapters, HostOverlapMachine):
    pass


TestContinuous = SchedulerMachine.TestCase
TestOverlap = OverlapMachine.TestCase
TestUnreliable = UnreliableMachine.TestCase
TestFcfs = FcfsMachine.TestCase
TestFair = FairMachine.TestCase
TestDeadline = DeadlineMachine.TestCase
TestUncached = UncachedMachine.TestCase
TestHost = HostMachine.TestCase
TestHostOverlap = HostOverlapMachine.TestCase
TestHostUncached = HostUncachedMachine.TestCase
TestHostUnreliable = HostUnreliableMachine.TestCase
TestHostUnreliableUncached = HostUnreliableUncachedMachine.TestCase
TestHostCache = HostCacheMachine.TestCase
TestHostCacheUnreliable = HostCacheUnreliableMachine.TestCase
TestLending = LendingMachine.TestCase
TestLendingOverlap = LendingOverlapMachine.TestCase
TestStored = StoredMachine.TestCase
TestStoredOverlap = StoredOverlapMachine.TestCase
TestStoredUnreliable = StoredUnreliableMachine.TestCase
TestWindow = WindowMachine.TestCase
TestWindowOverlap = WindowOverlapMachine.TestCase
TestWindowUncached = WindowUncachedMachine.TestCase
TestWindowUnreliable = WindowUnreliableMachine.TestCase
TestWindowHost = WindowHostMachine.TestCase
TestWindowHostUnreliable = WindowHostUnreliableMachine.TestCase
TestWindowHostCache = WindowHostCacheMachine.TestCase
TestWindowHostCacheOverlap = WindowHostCacheOverlapMachine.TestCase
TestWindowHostCacheUnreliable = WindowHostCacheUnreliableMachine.TestCase
TestAdapters = AdaptersMachine.TestCase
TestAdaptersUnreliable = AdaptersUnreliableMachine.TestCase
TestAdaptersHostOverlap = AdaptersHostOverlapMachine.TestCase
EXAMPLES = int(os.environ.get("PAGODA_TEST_EXAMPLES", "1"))


def examples(count: int) -> settings:
    return settings(max_examples=count * EXAMPLES, stateful_step_count=40, deadline=None)


TestContinuous.settings = TestOverlap.settings = examples(20)
TestWindow.settings = TestWindowOverlap.settings = examples(14)
TestWindowUncached.settings = TestWindowUnreliable.settings = examples(8)
TestWindowHost.settings = TestWindowHostUnreliable.settings = examples(8)
TestFcfs.settings = TestFair.settings = TestDeadline.settings = TestUncached.settings = TestUnreliable.settings = (
    examples(14)
)
TestHostCache.settings = TestHostCacheUnreliable.settings = examples(14)
TestWindowHostCache.settings = TestWindowHostCacheOverlap.settings = examples(10)
TestWindowHostCacheUnreliable.settings = examples(10)
TestLending.settings = TestLendingOverlap.settings = examples(10)
TestAdapters.settings = TestAdaptersUnreliable.settings = TestAdaptersHostOverlap.settings = examples(10)
TestStored.settings = TestStoredOverlap.settings = TestStoredUnreliable.settings = examples(10)
TestHost.settings = TestHostOverlap.settings = TestHostUncached.settings = TestHostUnreliable.settings = (
    TestHostUnreliableUncached.settings
) = examples(8)
