"""The engine's end of the channel: a session for each router over any link, and one message out for each step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ...settings.engine import Role
from ..core.adapter import AdapterLoader
from ..core.sequence import Sequence, State
from ..core.step import Ended, StepOutput
from ..loop import loop as engine_loop
from ..loop.step_trace import TraceSnapshot
from .adapters import HeldAdapters, Question
from .cache_feed import BlockFeed, Feed, StrideFeed
from .codec import (
    InvalidMessage,
    Rejected,
    check_abort,
    check_adapter,
    check_submit,
    check_take_trace,
    rejected,
    sequences_from_submit,
    trace_messages,
)
from .compilations import Compilations
from .session import RouterLink, Session

if TYPE_CHECKING:
    from ..guidance import Grammars

log = logging.getLogger("pagoda.engine")

LOOKS_AGAIN_S = 0.05  # how often the sequences that are left are counted

_ROLES: dict[Role, engine_pb2.Role] = {
    "both": engine_pb2.ROLE_UNSPECIFIED,
    "prefill": engine_pb2.ROLE_PREFILL,
    "decode": engine_pb2.ROLE_DECODE,
}


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
        self._greeting = {
            "hello": info,
            "answers_pings": True,
            "follows_cache": True,
            "follows_blocks": True,
            "block_layout": block_layout,
            "adapter_limits": None if self._adapters is None else self._adapters.limits,
            "role": _ROLES[role],
        }
        self.is_leaving = False  # the engine is going to end
        self._info = info
        self._clock = clock
        self._inbox: engine_loop.Inbox | None = None
        self._events = asyncio.get_running_loop()
        self._next_id = itertools.count()
        self._routes: dict[int, tuple[Session, int]] = {}  # our sequence id → router, its number
        self._sessions: set[Session] = set()
        self._load: engine_loop.LoadSnapshot | None = None  # as of the last step
        self._strides, self._blocks = StrideFeed(), BlockFeed()
        self._compilations = Compilations(
            make_grammars, clock, soon=self._soon, add=self._add, abort=self._end_added, end=self._end
        )

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
                session, number = route
                del session.ids[number]
                session.pending.ended.append((number, ended))
        self._load = load
        self._strides.add(output.cached)
        self._blocks.add(output.blocks)
        for session in self._sessions:
            session.report(load)

    # -- from a router ----------------------------------------------------------------------------------------------

    def connect(self) -> Session:
        """Register a router: it gets what its sequences produce from now on, and the load."""
        session = Session(self._info.epoch)
        self._sessions.add(session)
        if self._load is not None:
            session.report(self._load)
        return session

    async def serve(self, link: RouterLink) -> Exception | None:
        """Run a session until the router is gone, breaks the protocol, or takes no message for too long.

        Return why the router was dropped; None: it has left.
        """
        error: Exception | None = None
        session = self.connect()
        log.info("router connected")
        tasks = [
            asyncio.create_task(self._read(session, link)),
            asyncio.create_task(session.write(link, **self._greeting)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._drop(session)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    error = result
                    log.warning("dropped a router: %s", error or type(error).__name__)
            log.info("router disconnected")
        return error

    async def _read(self, session: Session, link: RouterLink) -> None:
        while (message := await link.read()) is not None:
            match message.WhichOneof("message"):
                case "submit":
                    self.submit(session, message.submit)
                case "abort":
                    check_abort(message.abort)
                    self.abort(session, message.abort.sequences)
                case "flush_cache":
                    self._put(engine_loop.FlushCache(partial(self._soon, self._note_flushed, session)))
                case "take_trace":
                    check_take_trace(message.take_trace)
                    self._take_trace(session, message.take_trace)
                case "ping":
                    self._note_ping(session, message.ping)
                    self._put(engine_loop.Ping(partial(self._soon, self._pong, session)))
                case "follow_cache":
                    self._follow(session, self._strides)
                case "follow_blocks":
                    self._follow(session, self._blocks)
                case "load_adapter":
                    self._ask(session, message.load_adapter)
                case "unload_adapter":
                    self._ask(session, message.unload_adapter)
                case "follow_adapters" if self._adapters is not None:
                    session.follows_adapters = True
                    session.owe("adapters", adapters=self._adapters.all())
                case _:
                    raise InvalidMessage("it sent a message without content")
            await asyncio.sleep(0)  # a router that sends without a pause shares the event loop with others

    def _ask(self, session: Session, question: Question) -> None:
        """Load or unload an adapter."""
        check_adapter(question)
        if self._adapters is None:
            raise InvalidMessage("it sent an adapter to an engine that takes none")
        self._adapters.ask(question, lambda answer: session.owe(object(), adapter_answer=answer))

    def _report_adapters(self) -> None:
        assert self._adapters is not None, "it reports"
        for session in self._sessions:
            if session.follows_adapters:
                session.owe("adapters", adapters=self._adapters.all())

    def _note_ping(self, session: Session, ping: engine_pb2.Ping) -> None:
        if ping.takes_goodbye and not session.takes_goodbye:
            session.takes_goodbye = True
            if self.is_leaving:
                session.owe("goodbye", goodbye=engine_pb2.Goodbye())

    async def leave(self, grace_s: float, now: asyncio.Event) -> None:
        """Tell the routers that the engine is going to end. Return when no sequence is left, or after `grace_s`.

        now  ends the wait when it is set
        """
        self.is_leaving = True
        for session in self._sessions:
            if session.takes_goodbye:
                session.owe("goodbye", goodbye=engine_pb2.Goodbye())
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
        return bool(self._routes) or any(session.is_behind for session in self._sessions)

    def submit(self, session: Session, submit: engine_pb2.Submit) -> None:
        """Name the request's sequences and put them into the loop's inbox. Raises InvalidMessage."""
        reason = None
        try:
            check_submit(submit, self._info.vocab_size, self._info.max_model_len)
        except Rejected as error:
            reason = str(error)
        numbers = range(submit.first_sequence, submit.first_sequence + (submit.sampling.n or 1))
        if not session.ids.keys().isdisjoint(numbers):
            raise InvalidMessage("it used a number that a live sequence has")
        adapter = self._adapters.get(submit.adapter) if self._adapters is not None and submit.adapter else None
        field = ""
        if reason is None and submit.adapter and adapter is None:
            reason, field = "no such adapter is loaded", "adapter"
        if reason is not None:
            session.pending.ended += [(number, rejected(self._clock(), reason, field)) for number in numbers]
            session.wake.set()
            return
        ids = [next(self._next_id) for _ in numbers]
        for id, number in zip(ids, numbers, strict=True):
            self._routes[id] = (session, number)
            session.ids[number] = id
        make = partial(sequences_from_submit, submit, ids, self._clock(), self._info.vocab_size, adapter)
        if submit.HasField("guided"):
            self._compilations.begin(submit, make, ids)
        else:
            self._add(make())

    def _add(self, sequences: list[Sequence]) -> None:
        first, *siblings = sequences
        self._put(engine_loop.Add(first, tuple(siblings)))

    def _end(self, ids: list[int], ended: Ended) -> None:
        """End sequences that never reach the loop."""
        for id in ids:
            if route := self._routes.pop(id, None):
                session, number = route
                del session.ids[number]
                session.pending.ended.append((number, ended))
                session.wake.set()

    def abort(self, session: Session, numbers: Iterable[int]) -> None:
        """End sequences by the router's numbers; unknown ones have just ended."""
        self._abort([session.ids[number] for number in numbers if number in session.ids])

    def _abort(self, ids: list[int]) -> None:
        self._compilations.abort(ids)
        self._end_added(ids)

    def _end_added(self, ids: list[int]) -> None:
        self._put(engine_loop.Abort(ids))

    def _note_flushed(self, session: Session, freed: int) -> None:
        session.owe(object(), cache_flushed=engine_pb2.CacheFlushed(freed_blocks=freed))

    def _pong(self, session: Session) -> None:
        session.owe("pong", pong=engine_pb2.Pong())

    def _follow(self, session: Session, feed: Feed[Any]) -> None:
        if (follower := session.followers.get(feed)) is not None:
            follower.restart()
            return
        session.followers[feed] = feed.follow(session.wake.set)
        self._put(engine_loop.WatchCache(blocks=feed is self._blocks))

    def _take_trace(self, session: Session, take: engine_pb2.TakeTrace) -> None:
        def reply(snapshot: TraceSnapshot) -> None:
            session.traces.append(trace_messages(take.number, snapshot))
            session.wake.set()

        last_s = take.last_s if take.HasField("last_s") else math.inf
        self._put(engine_loop.TakeTrace(last_s, partial(self._soon, reply)))

    def _drop(self, session: Session) -> None:
        self._sessions.discard(session)
        session.close()
        self._abort(list(session.ids.values()))
        for id in session.ids.values():
            del self._routes[id]
        session.ids.clear()

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop's thread, from any other."""
        with suppress(RuntimeError):  # the event loop has closed, so no router is left
            self._events.call_soon_threadsafe(function, *arguments)

    def _put(self, message: engine_loop.Message) -> None:
        assert self._inbox is not None, "attach() comes before serving"
        self._inbox.put(message)
