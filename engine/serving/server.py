"""The engine's end of the channel: a session for each router over any link, and one message out for each step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, inference_pb2

from ...channel.link import Link
from ...grammars.fair_threads import FairThreads, QueueFull
from ...settings.engine import Role
from ..core.adapter import AdapterLoader
from ..core.sequence import EndReason, Sequence, State
from ..core.step import Ended, StepOutput
from ..loop import loop as engine_loop
from ..loop.step_trace import TraceSnapshot
from ..scheduling.tenants import TenantTable
from .adapters import HeldAdapters, Question
from .cache_feed import BlockFeed, Feed, Follower, StrideFeed
from .codec import (
    InvalidMessage,
    PendingOutput,
    Rejected,
    check_abort,
    check_adapter,
    check_submit,
    check_take_trace,
    rejected,
    sequences_from_submit,
    tenants_message,
    trace_messages,
)

if TYPE_CHECKING:
    from ..guidance import Grammars

log = logging.getLogger("pagoda.engine")

LOAD_EVERY_S = 0.25  # to routers for whom a step did nothing; with many of them, theirs would cost more than the rest
LOOKS_AGAIN_S = 0.05  # how often the sequences that are left are counted
STALL_TIMEOUT_S = 30.0  # a router that takes no message for this long is dropped

_ROLES: dict[Role, engine_pb2.Role] = {
    "both": engine_pb2.ROLE_UNSPECIFIED,
    "prefill": engine_pb2.ROLE_PREFILL,
    "decode": engine_pb2.ROLE_DECODE,
}

RouterLink: TypeAlias = Link[engine_pb2.RouterMessage, engine_pb2.EngineMessage]


@dataclass(frozen=True, slots=True)
class _Compilation:
    """A grammar that is compiled for the sequences of a request; without a future, it is there already."""

    ids: list[int]
    future: Future[None] | None = None


class Connection:
    """One router's session. The event loop's thread owns it."""

    def __init__(self, epoch: int) -> None:
        self.pending = PendingOutput()
        self.link: RouterLink | None = None  # once it is greeted
        self._epoch = epoch
        self._unsent: engine_pb2.EngineMessage | None = None  # a message that was made and found no room
        self._tenants: TenantTable | None = None  # the table that was sent last
        self._taken_at = -math.inf  # when the load was sent last
        self._timer: asyncio.TimerHandle | None = None  # sends a load that comes too soon after another
        self.flushed: list[int] = []
        self.traces: list[Iterator[engine_pb2.Trace]] = []
        self.owes_pong = False
        self.is_writing = False
        self.takes_goodbye = False  # the router has announced that it knows it
        self.owes_goodbye = False
        self.followers: dict[Feed[Any], Follower] = {}  # of the prefix cache
        self.adapter_answers: list[engine_pb2.AdapterAnswer] = []
        self.follows_adapters = self.owes_adapters = False
        self.wake = asyncio.Event()
        self.ids: dict[int, int] = {}  # the router's sequence numbers → ours

    def report(self, load: engine_loop.LoadSnapshot) -> None:
        """Send what is pending, and the load with it. A load alone waits if another one has just been sent."""
        self.pending.load = load
        if self.pending.has_output or (wait_s := self._taken_at + LOAD_EVERY_S - time.monotonic()) <= 0:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        """Send what is pending, within this call if the link has room, else as soon as it has."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.has_output:  # it left with something else
            return
        if self.link is None or self.wake.is_set() or not self.link.is_free:
            self.wake.set()
            return
        message = self.take()
        if not self.link.try_write(message):
            self._unsent = message
            self.wake.set()

    @property
    def has_output(self) -> bool:
        return self._unsent is not None or self.pending.load is not None or self.pending.has_output

    def take(self) -> engine_pb2.EngineMessage:
        if self._unsent is not None:
            message, self._unsent = self._unsent, None
            self.wake.set()  # for what has become pending since
            return message
        taken, self.pending = self.pending, PendingOutput()
        self._taken_at = time.monotonic()
        step = taken.to_message()
        if taken.load and taken.load.tenants is not self._tenants:
            self._tenants = taken.load.tenants
            step.tenants.CopyFrom(tenants_message(self._tenants))
        return self.message(step=step)

    def message(self, **message: object) -> engine_pb2.EngineMessage:
        return engine_pb2.EngineMessage(epoch=self._epoch, **message)  # type: ignore[arg-type]


class EngineServer:
    """Names each router's sequences for the loop, and sorts each step's output by router."""

    def __init__(
        self,
        info: control_pb2.EngineInfo,
        make_grammars: Callable[[], Grammars] | None = None,
        clock: Callable[[], float] = time.monotonic,
        block_layout: bytes = b"",
        adapters: tuple[AdapterLoader, int] | None = None,
        role: Role = "both",
    ) -> None:
        """
        make_grammars  makes what compiles the grammars of requests, when the first comes; None: there is nothing
        block_layout   see EngineMessage
        adapters       what loads adapters, and how many it may hold; None: the model takes none
        role           what routers give it
        """
        self._adapters = HeldAdapters(*adapters, self._report_adapters) if adapters is not None else None
        self._block_layout = block_layout
        self._role = _ROLES[role]
        self.is_leaving = False  # the engine is going to end
        self._info = info
        self._clock = clock
        self._inbox: engine_loop.Inbox | None = None
        self._events = asyncio.get_running_loop()
        self._next_id = itertools.count()
        self._routes: dict[int, tuple[Connection, int]] = {}  # our sequence id → router, its number
        self._connections: set[Connection] = set()
        self._load: engine_loop.LoadSnapshot | None = None  # as of the last step
        self._strides, self._blocks = StrideFeed(), BlockFeed()
        self._make_grammars = make_grammars
        self._grammars: Grammars | None = None
        self._making = threading.Lock()  # one of them
        self._compilers = FairThreads(2, "grammars")  # one may take a second
        self._compiling: dict[int, _Compilation] = {}  # by our id of a sequence that waits for its grammar

    async def loop_answers(self) -> None:
        """Wait until the loop, which makes the steps, has answered."""
        answered = asyncio.Event()
        self._put(engine_loop.Ping(lambda: self._soon(answered.set)))
        await answered.wait()

    async def lend(self, addresses: list[bytes]) -> list[bytes]:
        """Return the contents of the blocks at these addresses, up to the first one that is not cached."""
        lent: asyncio.Future[list[bytes]] = self._events.create_future()

        def take(contents: list[bytes]) -> None:
            if not lent.done():
                lent.set_result(contents)

        self._put(engine_loop.Lend(addresses, partial(self._soon, take)))
        return await lent

    def attach(self, inbox: engine_loop.Inbox) -> None:
        self._inbox = inbox

    # -- from the loop ----------------------------------------------------------------------------------------------

    def send(self, output: StepOutput, load: engine_loop.LoadSnapshot) -> None:
        self._soon(self.deliver, output, load)

    def deliver(self, output: StepOutput, load: engine_loop.LoadSnapshot) -> None:
        """Sort a step's output by router; on the event loop's thread."""
        for id, token, logprobs in zip(output.sequences, output.tokens, output.logprobs, strict=True):
            if route := self._routes.get(id):
                pending = route[0].pending
                if logprobs is not None:
                    pending.logprobs.append((len(pending.tokens), logprobs))
                pending.sequences.append(route[1])
                pending.tokens.append(token)
        for move in output.moves:
            if move.to is State.RUNNING and (route := self._routes.get(move.seq.id)):
                route[0].pending.started.append(route[1])
        for id, reading in output.readings:
            if route := self._routes.get(id):
                route[0].pending.readings.append((route[1], reading))
        for ended in output.ended:
            if route := self._routes.pop(ended.seq.id, None):
                connection, number = route
                del connection.ids[number]
                connection.pending.ended.append((number, ended))
        self._load = load
        self._strides.add(output.cached)
        self._blocks.add(output.blocks)
        for connection in self._connections:
            connection.report(load)

    # -- from a router ----------------------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """Register a router: it gets what its sequences produce from now on, and the load."""
        connection = Connection(self._info.epoch)
        self._connections.add(connection)
        if self._load is not None:
            connection.report(self._load)
        return connection

    async def serve(self, link: RouterLink) -> Exception | None:
        """Run a session until the router is gone, breaks the protocol, or takes no message for too long.

        Return why the router was dropped; None: it has left.
        """
        error: Exception | None = None
        connection = self.connect()
        log.info("router connected")
        tasks = [asyncio.create_task(self._read(connection, link)), asyncio.create_task(self._write(connection, link))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._drop(connection)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    error = result
                    log.warning("dropped a router: %s", error or type(error).__name__)
            log.info("router disconnected")
        return error

    async def _read(self, connection: Connection, link: RouterLink) -> None:
        while (message := await link.read()) is not None:
            match message.WhichOneof("message"):
                case "submit":
                    self.submit(connection, message.submit)
                case "abort":
                    check_abort(message.abort)
                    self.abort(connection, message.abort.sequences)
                case "flush_cache":
                    self._put(engine_loop.FlushCache(lambda freed: self._reply_flushed(connection, freed)))
                case "take_trace":
                    check_take_trace(message.take_trace)
                    self._take_trace(connection, message.take_trace)
                case "ping":
                    self._note_ping(connection, message.ping)
                    self._put(engine_loop.Ping(lambda: self._reply_ping(connection)))
                case "follow_cache":
                    self._follow(connection, self._strides)
                case "follow_blocks":
                    self._follow(connection, self._blocks)
                case "load_adapter":
                    self._ask(connection, message.load_adapter)
                case "unload_adapter":
                    self._ask(connection, message.unload_adapter)
                case "follow_adapters" if self._adapters is not None:
                    connection.follows_adapters = connection.owes_adapters = True
                    connection.wake.set()
                case _:
                    raise InvalidMessage("it sent a message without content")
            await asyncio.sleep(0)  # a router that sends without a pause shares the event loop with others

    def _ask(self, connection: Connection, question: Question) -> None:
        """Load or unload an adapter."""
        check_adapter(question)
        if self._adapters is None:
            raise InvalidMessage("it sent an adapter to an engine that takes none")

        def reply(answer: engine_pb2.AdapterAnswer) -> None:
            connection.adapter_answers.append(answer)
            connection.wake.set()

        self._adapters.ask(question, reply)

    def _report_adapters(self) -> None:
        for connection in self._connections:
            connection.owes_adapters = connection.follows_adapters
            connection.wake.set()

    def _note_ping(self, connection: Connection, ping: engine_pb2.Ping) -> None:
        if ping.takes_goodbye and not connection.takes_goodbye:
            connection.takes_goodbye = connection.owes_goodbye = True
            self._say_goodbye(connection)

    def _say_goodbye(self, connection: Connection) -> None:
        """Say so, once, that the engine is going to end; if it is."""
        if self.is_leaving and connection.owes_goodbye:
            connection.wake.set()

    async def leave(self, grace_s: float, now: asyncio.Event) -> None:
        """Tell the routers that the engine is going to end. Return when no sequence is left, or after `grace_s`.

        now  ends the wait when it is set
        """
        self.is_leaving = True
        for connection in self._connections:
            self._say_goodbye(connection)
        if self._routes:
            log.info("leaving: %d sequences, up to %.0f s", len(self._routes), grace_s)
        ended = asyncio.create_task(now.wait())
        deadline = time.monotonic() + grace_s
        while self._is_busy and not ended.done() and (rest_s := deadline - time.monotonic()) > 0:
            await asyncio.wait([ended], timeout=min(LOOKS_AGAIN_S, rest_s))
        ended.cancel()
        if self._routes:
            log.warning("leaving %d sequences unfinished", len(self._routes))

    @property
    def _is_busy(self) -> bool:
        """Whether a sequence is left, or a router has not been sent everything."""
        return bool(self._routes) or any(
            each.has_output or each.is_writing or each.owes_goodbye for each in self._connections
        )

    def submit(self, connection: Connection, submit: engine_pb2.Submit) -> None:
        """Name the request's sequences and put them into the loop's inbox. Raises InvalidMessage."""
        reason = None
        try:
            check_submit(submit, self._info.vocab_size, self._info.max_model_len)
        except Rejected as error:
            reason = str(error)
        numbers = range(submit.first_sequence, submit.first_sequence + (submit.sampling.n or 1))
        if not connection.ids.keys().isdisjoint(numbers):
            raise InvalidMessage("it used a number that a live sequence has")
        adapter = self._adapters.get(submit.adapter) if self._adapters is not None and submit.adapter else None
        field = ""
        if reason is None and submit.adapter and adapter is None:
            reason, field = "no such adapter is loaded", "adapter"
        if reason is not None:
            connection.pending.ended += [(number, rejected(self._clock(), reason, field)) for number in numbers]
            connection.wake.set()
            return
        ids = [next(self._next_id) for _ in numbers]
        for id, number in zip(ids, numbers, strict=True):
            self._routes[id] = (connection, number)
            connection.ids[number] = id
        make = partial(sequences_from_submit, submit, ids, self._clock(), self._info.vocab_size, adapter)
        if not submit.HasField("guided"):
            self._add(make())
        elif self._make_grammars is None:
            self._refuse(ids, "cannot be followed: this model has no tokenizer")
        elif self._grammars is not None and self._grammars.knows(submit.guided):
            self._compiling.update(dict.fromkeys(ids, _Compilation(ids)))
            self._make(self._make_grammars, submit.guided, make, ids)()
        else:
            work = partial(self._compile, self._make_grammars, submit.guided, make, ids)
            try:
                compilation = _Compilation(ids, self._compilers.submit(submit.tenant, work))
            except QueueFull as error:
                self._end(ids, rejected(self._clock(), str(error), reason=EndReason.OVERLOADED))
            else:
                self._compiling.update(dict.fromkeys(ids, compilation))

    def _add(self, sequences: list[Sequence]) -> None:
        first, *siblings = sequences
        self._put(engine_loop.Add(first, tuple(siblings)))

    def _compile(
        self,
        make_grammars: Callable[[], Grammars],
        guided: inference_pb2.Guided,
        make: Callable[..., list[Sequence]],
        ids: list[int],
    ) -> None:
        """Compile a grammar and make the sequences that follow it; on a thread of its own."""
        done = self._make(make_grammars, guided, make, ids)
        self._soon(done)

    def _make(
        self,
        make_grammars: Callable[[], Grammars],
        guided: inference_pb2.Guided,
        make: Callable[..., list[Sequence]],
        ids: list[int],
    ) -> Callable[[], None]:
        """Make the sequences that follow a grammar. Return what is to be done with them on the event loop's thread.

        Whatever goes wrong ends these sequences alone: a panic of llguidance is a BaseException.
        """
        from ...grammars.compiling import GrammarError  # only now: most engines never see a grammar

        try:
            with self._making:
                if self._grammars is None:
                    self._grammars = make_grammars()
            sequences = make(self._grammars.mask_maker(guided))
        except GrammarError as error:
            return partial(self._refuse, ids, str(error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.exception("a grammar could not be compiled")
            return partial(self._fail, ids, f"{type(error).__name__} in its grammar")
        return partial(self._compiled, ids, sequences)

    def _compiled(self, ids: list[int], sequences: list[Sequence]) -> None:
        """Queue sequences, and end those that were aborted while their grammar was compiled."""
        self._add(sequences)
        aborted = [id for id in ids if id not in self._compiling]
        self._forget_compiling(ids)
        if aborted:
            self._put(engine_loop.Abort(aborted))

    def _refuse(self, ids: list[int], detail: str) -> None:
        self._end(ids, rejected(self._clock(), detail, "guided"))

    def _fail(self, ids: list[int], detail: str) -> None:
        self._end(ids, rejected(self._clock(), detail, reason=EndReason.FAILED))

    def _end(self, ids: list[int], ended: Ended) -> None:
        """End sequences that never reach the loop."""
        self._forget_compiling(ids)
        for id in ids:
            if route := self._routes.pop(id, None):
                connection, number = route
                del connection.ids[number]
                connection.pending.ended.append((number, ended))
                connection.wake.set()

    def abort(self, connection: Connection, numbers: Iterable[int]) -> None:
        """End sequences by the router's numbers; unknown ones have just ended."""
        self._abort([connection.ids[number] for number in numbers if number in connection.ids])

    def _abort(self, ids: list[int]) -> None:
        for id in ids:
            if (compilation := self._compiling.pop(id, None)) is None:
                continue
            is_waited_for = any(other in self._compiling for other in compilation.ids)
            if not is_waited_for and compilation.future is not None and compilation.future.cancel():
                self._end(compilation.ids, rejected(self._clock(), "", reason=EndReason.ABORTED))
        self._put(engine_loop.Abort(ids))

    def _forget_compiling(self, ids: list[int]) -> None:
        for id in ids:
            self._compiling.pop(id, None)

    def _reply_flushed(self, connection: Connection, freed: int) -> None:
        def reply() -> None:
            connection.flushed.append(freed)
            connection.wake.set()

        self._soon(reply)

    def _reply_ping(self, connection: Connection) -> None:
        def reply() -> None:
            connection.owes_pong = True
            connection.wake.set()

        self._soon(reply)

    def _follow(self, connection: Connection, feed: Feed[Any]) -> None:
        if (follower := connection.followers.get(feed)) is not None:
            follower.restart()
            return
        connection.followers[feed] = feed.follow(connection.wake.set)
        self._put(engine_loop.WatchCache(blocks=feed is self._blocks))

    def _take_trace(self, connection: Connection, take: engine_pb2.TakeTrace) -> None:
        def reply(snapshot: TraceSnapshot) -> None:
            self._soon(write, snapshot)

        def write(snapshot: TraceSnapshot) -> None:
            connection.traces.append(trace_messages(take.number, snapshot))
            connection.wake.set()

        self._put(engine_loop.TakeTrace(take.last_s if take.HasField("last_s") else math.inf, reply))

    async def _write(self, connection: Connection, link: RouterLink) -> None:
        async def write(message: engine_pb2.EngineMessage) -> None:
            connection.is_writing = True
            try:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await link.write(message)
            except TimeoutError:
                raise TimeoutError(f"it took no message for {STALL_TIMEOUT_S:.0f} s") from None
            finally:
                connection.is_writing = False

        await write(
            connection.message(
                hello=self._info,
                answers_pings=True,
                follows_cache=True,
                follows_blocks=True,
                block_layout=self._block_layout,
                adapter_limits=None if self._adapters is None else self._adapters.limits,
                role=self._role,
            )
        )
        connection.link = link
        while True:
            await connection.wake.wait()
            connection.wake.clear()
            if connection.has_output:
                await write(connection.take())
            if self.is_leaving and connection.owes_goodbye:
                connection.owes_goodbye = False
                await write(connection.message(goodbye=engine_pb2.Goodbye()))
            if connection.owes_pong:
                connection.owes_pong = False
                await write(connection.message(pong=engine_pb2.Pong()))
            while connection.adapter_answers:
                await write(connection.message(adapter_answer=connection.adapter_answers.pop(0)))
            if connection.owes_adapters and self._adapters is not None:
                connection.owes_adapters = False
                await write(connection.message(adapters=self._adapters.all()))
            while connection.flushed:
                freed_blocks = connection.flushed.pop(0)
                await write(connection.message(cache_flushed=engine_pb2.CacheFlushed(freed_blocks=freed_blocks)))
            for follower in list(connection.followers.values()):
                if (news := follower.take()) is not None:
                    await write(connection.message(**news))
                    connection.wake.set()
            if connection.traces:  # one part at a time: tokens do not wait for a whole trace
                if (part := next(connection.traces[0], None)) is None:
                    del connection.traces[0]
                else:
                    await write(connection.message(trace=part))
                connection.wake.set()

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        connection.close()
        for follower in connection.followers.values():
            follower.leave()
        self._abort(list(connection.ids.values()))
        for id in connection.ids.values():
            del self._routes[id]
        connection.ids.clear()

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop's thread, from any other."""
        with suppress(RuntimeError):  # the event loop has closed, so no router is left
            self._events.call_soon_threadsafe(function, *arguments)

    def _put(self, message: engine_loop.Message) -> None:
        assert self._inbox is not None, "attach() comes before serving"
        self._inbox.put(message)
