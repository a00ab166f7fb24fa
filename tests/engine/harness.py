"""An engine without threads or sockets: a scheduler and a synthetic runner, stepped by hand in simulated time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

from pagoda_server.channel.strides import chain_root
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.guarded_mask import GuardedMask
from pagoda_server.engine.core.layer_groups import LayerGroups
from pagoda_server.engine.core.sequence import Lender, Readout, Request, SamplingParams, Sequence, TokenMask
from pagoda_server.engine.core.step import Ended, Reading, Sampled, StepPlan
from pagoda_server.engine.drafting import Speculation
from pagoda_server.engine.kv.block_file import BlockFile
from pagoda_server.engine.kv.block_store import BlockStore, Done, HostRows
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.runner_info import KVCacheSpec, RunnerInfo
from pagoda_server.engine.runners.synthetic import (
    HIDDEN_SIZE,
    SyntheticRunner,
    advance,
    expected_tokens,
    first_checksum,
    identity_of,
)
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.serving.kv_store import restore
from pagoda_server.settings.engine import PolicyName, StepLimits

VOCAB_SIZE = 258
_STARTS: Counter[Path] = Counter()  # of engines, by the file of blocks


def synthetic_runner(
    num_blocks: int,
    block_size: int,
    lookahead: int = 0,
    num_host_blocks: int = 0,
    copy_s: float = 0.0,
    windows: tuple[int | None, ...] = (None,),
) -> SyntheticRunner:
    """Make a synthetic runner, with a layer for each of `windows`. Copying a block of host memory takes `copy_s`."""
    groups = LayerGroups(1, windows, tuple((group, 0) for group in range(len(windows))))
    spec = KVCacheSpec(groups=groups, num_kv_heads=1, head_dim=1, element_bytes=4, block_size=block_size)
    info = RunnerInfo(
        model="synthetic",
        architecture="synthetic",
        device="cpu",
        dtype="int64",
        kernel_backend="none",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        max_model_len=32_768,
        weight_bytes=0,
        kv_cache=spec,
        num_blocks=num_blocks,
        limits=StepLimits(max_num_seqs=8, token_budget=16),
        num_host_blocks=num_host_blocks,
    )
    if num_host_blocks:
        return ContentCheckingRunner(info, lookahead, copy_s)
    return SyntheticRunner(info, lookahead=lookahead)


class WrongContent(BaseException):
    """Not an Exception, because a step that fails is computed again, and that must not hide this."""


class ContentCheckingRunner(SyntheticRunner):
    """Checks every slot of a chunk's context before it computes it: each must hold what the sequence's tokens give.

    is_misled  a step was not computed, so later steps are void until it is computed again
    """

    def __init__(self, info: RunnerInfo, lookahead: int, copy_s: float) -> None:
        super().__init__(info, lookahead=lookahead)
        self.is_misled = False
        self._copy_s = copy_s
        self._expected: dict[int, list[int]] = {}  # checksums, by sequence

    def recover(self) -> None:
        super().recover()
        self.is_misled = False

    def _compute(self, plan: StepPlan) -> Sampled:
        sampled = super()._compute(plan)
        return replace(sampled, copied_s=self._copy_s * (len(plan.saves) + len(plan.loads)))

    def _copy_blocks(self, plan: StepPlan) -> None:
        super()._copy_blocks(plan)
        if self.is_misled:
            return
        size = self._block_size
        for chunk in plan.chunks:
            tokens = chunk.seq.tokens
            expected = self._expected.setdefault(chunk.seq.id, [])
            while len(expected) < chunk.start:
                previous = expected[-1] if expected else first_checksum(identity_of(chunk.seq))
                expected.append(advance(previous, tokens[len(expected)]))
            table = chunk.seq.blocks
            for blocks, window in zip((table, *table.windows), (None, *self._windows), strict=True):
                seen = 0 if window is None else max(0, chunk.start - window + 1)
                for at in range(seen, chunk.start, size):
                    slots = range(at, min(at + size, chunk.start))
                    found = [self._cache[self._slot(blocks, slot)] for slot in slots]
                    if found != expected[at : slots.stop]:
                        raise WrongContent(f"sequence {chunk.seq.id}: block {at // size} of its table is another's")


class Rules(TypedDict, total=False):
    """What a request may ask for."""

    priority: int
    tenant: str
    ttft_s: float
    tpot_s: float
    timeout_s: float
    salt: str
    bypass: bool
    stop_token_ids: frozenset[int]
    min_tokens: int
    output: list[int]  # that exists already
    age_s: float
    readout: Readout
    make_mask: Callable[..., TokenMask]  # of a grammar
    lender: Lender
    adapter: bytes  # its identity


class TakesTime(Protocol):
    def of(self, plan: StepPlan) -> float:
        """Return the seconds that a step takes."""


class SteppedPeers:
    """Fetches blocks from engines of a test.

    corrupt   changes the blocks that arrive for a read
    is_stuck  nothing arrives
    steps     whether a lender is stepped until it has lent
    """

    def __init__(self, rows: HostRows, lenders: dict[str, SteppedEngine]) -> None:
        self.rows = rows
        self.is_stuck = False
        self.steps = True
        self.corrupt: Callable[[list[bytes]], list[bytes]] = lambda contents: contents
        self._lenders = lenders
        self._asked: list[tuple[str, list[int], list[list[bytes]]]] = []  # the reply comes into the last one
        self._done: list[Done] = []

    def read(self, peer: str, wanted: Several[tuple[bytes, int]]) -> None:
        replies: list[list[bytes]] = []
        self._asked.append((peer, [host for _, host in wanted], replies))
        if peer in self._lenders:
            self._lenders[peer].scheduler.lend([address for address, _ in wanted], replies.append)
        else:
            replies.append([])

    def work(self) -> bool:
        """Take the oldest reply; return whether any is expected."""
        if self.is_stuck or not self._asked:
            return False
        peer, hosts, replies = self._asked[0]
        if not replies:
            if self.steps:
                self._lenders[peer].step()
            return True
        del self._asked[0]
        contents = self.corrupt(replies[0])
        for host, content in zip(hosts, contents, strict=False):
            self.rows.host_row(host)[:] = content
        self._done += [Done(host, at < len(contents), 0.0) for at, host in enumerate(hosts)]
        return True

    def take_done(self) -> list[Done]:
        done, self._done = self._done, []
        return done


class SteppedEngine:
    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        token_budget: int = 16,
        max_model_len: int = 200,
        prefix_caching: bool = True,
        lookahead: int = 0,
        policy: PolicyName = "priority",
        ageing_s: float = 60.0,
        tenant_weights: Mapping[str, float] | None = None,
        target_itl_s: float | None = None,
        longest_step_s: float = math.inf,
        step_time: TakesTime | None = None,
        host_blocks: int = 0,
        copy_s: float = 0.0,
        speculation: Speculation | None = None,
        windows: tuple[int | None, ...] = (None,),
        store_path: Path | None = None,
        store_blocks: int = 100,
        lenders: dict[str, SteppedEngine] | None = None,
        adapter_slots: int = 0,
    ) -> None:
        """
        step_time  how long a step takes in simulated time; None: no time, and a second passes between steps
        copy_s     how long a copy of a block to or from host memory takes
        windows    of each group of layers
        store_path, store_blocks  a file of blocks, and how many it holds; its thread's work is done in steps
        lenders    engines by their addresses, from which blocks are fetched in steps; None: nothing is lent either
        """
        self.now = 0.0
        self.step_time = step_time
        self.pool = BlockPool(num_blocks, block_size)
        self.runner = synthetic_runner(num_blocks, block_size, lookahead, host_blocks, copy_s, windows)
        self.store: BlockStore | None = None
        self.jobs_a_step = 100  # of the store
        self.num_restored = 0
        if store_path is not None:
            _STARTS[store_path] += 1
            started = _STARTS[store_path] * 100_000.0  # each engine starts later than the one before
            file = BlockFile(store_path, bytes(32), 8 * block_size, store_blocks, now=lambda: started + self.now)
            self.store = BlockStore(file, self.runner)
            self.num_restored = restore(self.store, self.pool, host_blocks)
        self.peers = None if lenders is None else SteppedPeers(self.runner, lenders)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
            clock=lambda: self.now,
            policy=policy,
            ageing_s=ageing_s,
            tenant_weights=tenant_weights,
            target_itl_s=target_itl_s,
            longest_step_s=longest_step_s,
            num_host_blocks=host_blocks,
            store=self.store,
            peers=self.peers,
            speculation=speculation,
            windows=windows,
            num_adapter_slots=adapter_slots,
        )
        self.copy_s = copy_s
        self.steps = StepsInFlight(self.scheduler, self.runner)
        self.outputs: dict[int, list[int]] = {}
        self.arrived_with: dict[int, int] = {}  # tokens
        self.ended: dict[int, Ended] = {}
        self.readings: dict[int, list[Reading]] = {}
        self.is_saving = False  # the store was at work in the last step
        self._ids = itertools.count()

    def add(self, prompt: list[int], max_tokens: int = 8, **rules: Unpack[Rules]) -> Sequence:
        (seq,) = self.add_siblings(1, prompt, max_tokens, **rules)
        return seq

    def add_siblings(
        self, count: int, prompt: list[int], max_tokens: int = 8, **rules: Unpack[Rules]
    ) -> list[Sequence]:
        """Add a request of several sequences."""
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=rules.get("stop_token_ids", frozenset()),
            min_tokens=rules.get("min_tokens", 0),
        )
        tokens = [*prompt, *rules.get("output", [])]
        request = Request(
            len(prompt),
            arrived=self.now,
            deadline=self.now + rules.get("timeout_s", math.inf),
            age_s=rules.get("age_s", 0.0),
            priority=rules.get("priority", 0),
            tenant=rules.get("tenant", ""),
            ttft_s=rules.get("ttft_s", math.inf),
            tpot_s=rules.get("tpot_s", math.inf),
            cache_root=chain_root(rules.get("salt", ""), identity := rules.get("adapter", b"")),
            bypass_cache=rules.get("bypass", False),
            shares_prompt=count > 1,
            readout=rules.get("readout"),
            lender=rules.get("lender"),
            adapter=Adapter(identity, 1, 0, None) if identity else None,
        )
        make_mask = rules.get("make_mask")
        masks = [
            GuardedMask(make_mask(prompt_len=len(prompt), stop_ids=params.stop_token_ids, min_tokens=params.min_tokens))
            if make_mask
            else None
            for _ in range(count)
        ]
        seqs = [Sequence(next(self._ids), list(tokens), request, params, mask) for mask in masks]
        for seq in seqs:
            self.outputs[seq.id] = []
            self.arrived_with[seq.id] = seq.num_tokens
            self.scheduler.add(seq)
        self._take_output()
        return seqs

    def abort(self, *ids: int) -> None:
        self.scheduler.abort(ids)
        self._take_output()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.steps.launch(plan)
            if self.step_time:
                self.now += self.step_time.of(plan) + self.copy_s * (len(plan.saves) + len(plan.loads))
        if len(self.steps) > (0 if plan.is_empty else self.runner.lookahead):
            self.steps.commit_oldest()
        self._take_output()
        self.is_saving = plan.is_empty and not self.steps and self.scheduler.copy_idly()
        for _ in range(self.jobs_a_step):
            if self.store is None or not self.store.work():
                break
            self.is_saving = True
        if self.peers is not None and self.peers.work():
            self.is_saving = True
        if not self.step_time:
            self.now += 1.0
        self.scheduler.check_integrity()
        return plan

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left to do; return the number of steps."""
        for count in range(limit):
            was_busy = len(self.steps) > 0
            if self.step().is_empty and not was_busy and not self.is_saving:
                return count
        raise AssertionError(f"still at work after {limit} steps")

    def expected(self, seq: Sequence) -> list[int]:
        """Return the tokens that a sequence must generate."""
        count = self.arrived_with[seq.id]
        more = seq.request.prompt_len + seq.params.max_tokens - count
        return expected_tokens(seq.tokens[:count], more, VOCAB_SIZE, identity_of(seq))

    def _take_output(self) -> None:
        output = self.scheduler.take_output()
        self.steps.trace.note(output)
        for id, token in zip(output.sequences, output.tokens, strict=True):
            assert id not in self.ended, f"a token for sequence {id} after its end"
            self.outputs.setdefault(id, []).append(token)
        for id, reading in output.readings:
            assert id not in self.ended, f"a reading of sequence {id} after its end"
            self.readings.setdefault(id, []).append(reading)
        for ended in output.ended:
            assert ended.seq.id not in self.ended, f"sequence {ended.seq.id} ended twice"
            self.ended[ended.seq.id] = ended
