"""The one thread that owns all model state: scheduler, blocks and runner. Other threads put messages in its inbox."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..core.sequence import Sequence
from ..core.step import Counters, StepOutput
from ..kv.host_blocks import HostLoad
from ..scheduling.scheduler import Scheduler
from ..scheduling.tenants import TenantTable
from .step_trace import TraceSnapshot
from .steps_in_flight import Runner, StepsInFlight

log = logging.getLogger("pagoda.engine")

MOST_ADDED = 131_072  # tokens that arrive between two steps: a policy may take 20 ms to search the cache for them


@dataclass(frozen=True, slots=True)
class Add:
    """A request's sequences, the first and its siblings. They arrive together so that they can share the prompt."""

    seq: Sequence
    siblings: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class FlushCache:
    """`reply` is called on the loop's thread with the number of freed blocks."""

    reply: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TakeTrace:
    """`reply` is called on the loop's thread with the record of the last `last_s` seconds."""

    last_s: float
    reply: Callable[[TraceSnapshot], None]


@dataclass(frozen=True, slots=True)
class Ping:
    """`reply` is called on the loop's thread, which shows that the loop is not stuck in a step."""

    reply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Blocks have been read for which sequences may wait."""


@dataclass(frozen=True, slots=True)
class Lend:
    """`reply` is called on the loop's thread with the contents of the blocks at these addresses, while they last."""

    addresses: list[bytes]
    reply: Callable[[list[bytes]], None]


@dataclass(frozen=True, slots=True)
class WatchCache:
    """From now on each step's output says what the prefix cache holds and no longer holds, by stride or by block."""

    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Add | Abort | FlushCache | TakeTrace | Ping | Wake | Lend | WatchCache | Stop


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """How busy the engine is after a step."""

    counters: Counters
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    block_size: int
    kv_slots_unused: int
    step_s: float
    tenants: TenantTable
    host: HostLoad = field(default_factory=HostLoad)
    uncomputed_tokens: int = 0
    prefill_tokens_per_s: float = 0.0


class Outbox(Protocol):
    """Takes a step's output to the routers. The loop calls it on its own thread; it must not block."""

    def send(self, output: StepOutput, load: LoadSnapshot) -> None: ...


class Inbox:
    """A queue of messages for the loop, from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def take(self, timeout_s: float | None = 0.0) -> list[Message]:
        """Take messages until they add MOST_ADDED tokens; the rest stay for the next call.

        With a timeout, or None for none, wait for the first one.
        """
        messages: list[Message] = []
        added = 0
        try:
            messages.append(message := self._queue.get(block=timeout_s != 0.0, timeout=timeout_s))
            while (added := added + _added(message)) < MOST_ADDED:
                messages.append(message := self._queue.get_nowait())
        except queue.Empty:
            pass
        return messages


def _added(message: Message) -> int:
    """Count the tokens for which a policy may search the cache when the message is handled."""
    return message.seq.num_tokens * (1 + len(message.siblings)) if isinstance(message, Add) else 0


class EngineLoop(threading.Thread):
    """Runs the loop until `stop`, or until it fails: `failure` then holds the error.

    `run` may be called on another thread instead of starting this one.

    on_end     is called on this thread when the loop has ended
    lookahead  how many steps are launched before the first of them is read: at most the runner's
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, outbox: Outbox, on_end: Callable[[], None], lookahead: int = 0
    ) -> None:
        super().__init__(name="engine-loop", daemon=True)
        self.inbox = Inbox()
        self.failure: BaseException | None = None  # what ended the loop, if anything but stop() did
        self._scheduler = scheduler
        self._steps = StepsInFlight(scheduler, runner)
        self._lookahead = lookahead
        self._outbox = outbox
        self._on_end = on_end
        self._stopping = False
        self._has_stored = False  # since the load was last sent

    def stop(self) -> None:
        self.inbox.put(Stop())

    def run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.critical("the engine loop died", exc_info=True)
            self.failure = error
        finally:
            self._on_end()

    def _loop(self) -> None:
        timeout_s: float | None = 0.0
        self._outbox.send(StepOutput(), self.load())  # so that routers know the load of an engine that is still idle
        while True:
            for message in self.inbox.take(timeout_s):
                self._take_in(message)
            if self._stopping:
                return
            plan = self._scheduler.schedule()
            if not plan.is_empty:
                self._steps.launch(plan)
            commits = len(self._steps) > (0 if plan.is_empty else self._lookahead)
            if commits:
                self._steps.commit_oldest()
            output = self._scheduler.take_output()
            self._steps.trace.note(output)
            if commits or self._has_stored or not output.is_empty:
                self._outbox.send(output, self.load())
                self._has_stored = False
            is_idle = plan.is_empty and not self._steps and not commits
            timeout_s = self._idle_timeout_s() if is_idle and not self._scheduler.copy_idly() else 0.0

    def _take_in(self, message: Message) -> None:
        match message:
            case Add(seq, siblings):
                for each in (seq, *siblings):
                    self._scheduler.add(each)
            case Abort(ids):
                self._scheduler.abort(ids)
            case FlushCache(reply):
                reply(self._scheduler.flush_cache())
            case TakeTrace(last_s, reply_trace):
                reply_trace(self._steps.trace.take(last_s))
            case Ping(reply_ping):
                reply_ping()
            case Wake():
                self._has_stored = True  # the next plan takes it in
            case Lend(addresses, reply_lent):
                self._scheduler.lend(addresses, reply_lent)
            case WatchCache(blocks):
                self._scheduler.watch_cache(blocks=blocks)
            case Stop():
                self._stopping = True

    def _idle_timeout_s(self) -> float | None:
        """Return how long to wait for a message when nothing can run: until the next deadline; None without one."""
        until = self._scheduler.next_deadline - self._scheduler.clock()
        return min(max(until, 0.001), threading.TIMEOUT_MAX) if until < float("inf") else None

    def load(self) -> LoadSnapshot:
        """Return how busy the engine is now. Call this on the loop's thread, or while that does not run."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        return LoadSnapshot(
            counters=replace(scheduler.counters),
            waiting=scheduler.num_waiting,
            running=len(scheduler.running),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_evictable=pool.num_evictable,
            block_size=pool.block_size,
            kv_slots_unused=scheduler.num_slots_unused,
            step_s=self._steps.step_s,
            tenants=scheduler.tenants.table(scheduler.running),
            host=scheduler.host.load(),
            uncomputed_tokens=scheduler.num_uncomputed,
            prefill_tokens_per_s=scheduler.costs.prefill_tokens_per_s,
        )
