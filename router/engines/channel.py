"""The router's end of the channel: a long-lived stream to each engine that carries every request.

The stream is opened again whenever it closes. A stream that closes fails every request that it carried, and sequence
numbers are never reused, so messages from an engine's earlier epoch cannot reach later requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

from ...runtime.channel_trust import ChannelTrust
from ...runtime.restarts import PROVEN_S
from ...settings.engine import Role
from ..errors import EngineLost, Unavailable
from .block_events import BlockEvents
from .cached_keys import CachedKeys
from .choosing import Asked
from .connection import Connection, EngineHangs
from .group import Identity, may_continue
from .handshake import NotTrusted
from .held_adapters import HeldAdapters
from .questions import Questions
from .refusals import InvalidMessage, Standing, WrongEngine
from .sequences import Sequences
from .stream import EngineStream, Wakeups
from .table import EngineTable
from .transport import Transport, transport_to

log = logging.getLogger("pagoda.router")

WRONG_ENGINE_PAUSE_S = 5.0  # the engine answers, so each attempt costs both ends a connection
RETRY_AFTER_S = (0.1, 30.0)  # the least and the most that is suggested to a client when an engine is away
RECONNECT_SPAWNED_S = 0.02  # an engine that this server has started listens on this host, and each start waits for it
RECONNECT_S = 0.1  # an attempt is cheap on one host or to a near one, and finds a restarted engine at once

_ROLES: dict[int, Role] = {engine_pb2.ROLE_PREFILL: "prefill", engine_pb2.ROLE_DECODE: "decode"}


class EngineChannel:
    """The channel to one engine: sends requests, and delivers the engine's output to their streams.

    The engine's loop, which makes its steps, must answer pings: other threads of a stuck engine may still greet routers
    and take requests. An engine is ready once its loop has answered for the first time.

    address         shm:PATH, shm:@NAME, unix:PATH or HOST:PORT
    name, number    of the engine in what clients see; the name is its address unless it has one of its own
    hang_timeout_s  an engine whose loop answers nothing for this long counts as dead
    patience_s      how long an engine may be absent before the log says so
    check           checks what the engine reports of itself, and returns the name of its model; raises WrongEngine,
                    or an error that ends `run`
    admit           waits until the engine may become ready, or raises WrongEngine
    on_change       called when the engine becomes ready and when it is lost
    on_hang         called when the engine hangs, so that its supervisor can kill it
    is_supervised   whether this server starts the engine again by itself: it is tried again at once
    wakeups         wakes the streams of this and other channels; None: of this one alone
    trust           what guards the channel at HOST:PORT; None: nothing
    table           what is known of all engines; None: nothing is compared with this one
    block_events    takes the blocks that the engine has cached, once it is asked for them; None: nobody asks
    on_adapters     called when the engine reports which adapters it holds
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        number: int = 0,
        hang_timeout_s: float,
        patience_s: float = math.inf,
        check: Callable[[control_pb2.EngineInfo], str] = lambda info: "",
        admit: Callable[[EngineChannel], Awaitable[None]] | None = None,
        on_change: Callable[[], Awaitable[None]],
        on_hang: Callable[[], None] = lambda: None,
        is_supervised: bool = False,
        wakeups: Wakeups | None = None,
        trust: ChannelTrust | None = None,
        table: EngineTable | None = None,
        block_events: BlockEvents | None = None,
        on_adapters: Callable[[EngineChannel], Awaitable[None]] | None = None,
    ) -> None:
        self.address = address
        self.name = name or address
        self.number = number
        self.is_leaving = False  # it gets nothing new, and is closed once its streams have ended
        self.says_goodbye = False  # it is going to end
        self.info: control_pb2.EngineInfo | None = None
        self.model = ""  # the name of the one that the engine has, as of its last hello
        self.has_been_ready = False
        self.identity: Identity | None = None  # that of the engine which was about to be ready last
        self.identified_at = -math.inf
        self.standing = Standing()
        self._table = EngineTable() if table is None else table
        self.row = self._table.take_row()
        self.sequences = Sequences(wakeups or Wakeups(), self._table, self.row)
        self.held = HeldAdapters()
        self.questions = Questions(self._post, self.held)
        self._hang_timeout_s = hang_timeout_s
        self._patience_s = patience_s
        self._check = check
        self._admit = admit
        self._on_change = on_change
        self._on_hang = on_hang
        self._is_supervised = is_supervised
        self._connection: Connection | None = None  # once the engine has greeted
        self._offers_cache = False  # it can report what its prefix cache holds
        self._wants_cache = False
        self._offers_blocks = False  # the same of its blocks
        self._block_events = block_events or BlockEvents()
        self._on_adapters = on_adapters
        self.block_layout = b""  # see EngineMessage
        self.role: Role = "both"  # what it is for
        self.cached: CachedKeys | None = None  # while it reports that
        self._trust = trust
        self._away_since = time.monotonic()
        self._last_absence_s = 0.0
        self._logged = ""  # the last reason logged for its absence

    @property
    def is_ready(self) -> bool:
        return self.info is not None

    @property
    def takes_requests(self) -> bool:
        return self.info is not None and not self.is_leaving and not self.says_goodbye

    @property
    def is_draining(self) -> bool:
        """Whether the engine computes what it has, and gets nothing new."""
        return self.info is not None and not self.takes_requests

    @property
    def is_suspect(self) -> bool:
        """Whether the engine's loop is late with an answer: it computes a long step, or hangs."""
        return self._connection is not None and self._connection.is_suspect

    @property
    def away_s(self) -> float:
        """Seconds since the engine was lost, or else since it has been looked for."""
        return 0.0 if self.is_ready else time.monotonic() - self._away_since

    def may_continue(self, begun: control_pb2.EngineInfo, *, mixes: bool) -> bool:
        """Whether the engine is ready, and may continue a stream that one which reported this has begun.

        mixes  in another precision, too
        """
        return self.info is not None and may_continue(self.info, begun, mixes=mixes)

    @property
    def retry_after_s(self) -> float | None:
        """When a lost engine may be back: it stays away for as long as the last time, or else for as long again."""
        if not self.has_been_ready:
            return None
        absent_s = time.monotonic() - self._away_since
        rest_s = self._last_absence_s - absent_s if absent_s < self._last_absence_s else absent_s
        low, high = RETRY_AFTER_S
        return round(min(max(rest_s, low), high), 1)  # few values: see CallGuard

    @property
    def num_sequences(self) -> int:
        """The sequences in the engine, those of other routers included."""
        return self._table.num_sequences[self.row]

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens that the engine still has to compute, those of other routers included."""
        return self._table.num_uncomputed[self.row]

    @property
    def max_num_seqs(self) -> int:
        return self._table.max_num_seqs[self.row]

    @property
    def label(self) -> str:
        """The engine in a line of the log."""
        return self.address if self.name == self.address or self.name.isdigit() else f"{self.address} ({self.name})"

    def close(self) -> None:
        """Leave the table. The channel does not run any more."""
        self._table.give_back(self.row)

    # -- requests ---------------------------------------------------------------------------------------------------

    def follow_cache(self) -> None:
        """Have the engine report what its prefix cache holds, from now on, if it can."""
        if not self._wants_cache:
            self._wants_cache = True
            self._ask_for_cache()

    def _ask_for_cache(self) -> None:
        if self._wants_cache and self._offers_cache and self._connection is not None:
            self._connection.post(engine_pb2.RouterMessage(follow_cache=engine_pb2.FollowCache()))

    def ask_for_blocks(self) -> None:
        """Have the engine report all blocks that its prefix cache holds, and every change, if somebody wants that."""
        if self._block_events.is_wanted and self._offers_blocks and self._connection is not None:
            self._connection.post(engine_pb2.RouterMessage(follow_blocks=engine_pb2.FollowBlocks()))

    def submit(
        self,
        submit: engine_pb2.Submit,
        on_start: Callable[[], None] = lambda: None,
        asked: Asked | None = None,
    ) -> EngineStream:
        """Send a request and fill in its `first_sequence`. Raises Unavailable unless the engine is ready.

        on_start  called whenever one of its sequences starts to be computed, and when one ends
        asked     what has decided that this engine gets it; None: that is not known
        """
        connection = self._ready_connection()
        stream = self.sequences.add(
            submit.sampling.n,
            len(submit.prompt) - (asked.num_cached if asked else 0),
            abort=self.abort,
            forget=self.forget,
            on_start=on_start,
        )
        if asked is not None and self.cached is not None:
            self.cached.expect(asked.keys())
        submit.first_sequence, stream.adapter = stream.first_sequence, submit.adapter
        submit.ClearField("lender")  # of another engine that had the request before
        if asked is not None and asked.lender is not None and self.block_layout:
            submit.lender.address, submit.lender.num_tokens = asked.lender
        connection.post(engine_pb2.RouterMessage(submit=submit))
        return stream

    def abort(self, sequences: list[int]) -> None:
        known = self.sequences.known(sequences)
        if known and self.is_ready:
            self._post(engine_pb2.RouterMessage(abort=engine_pb2.Abort(sequences=known)))

    def forget(self, stream: EngineStream) -> None:
        numbers = self.sequences.forget(stream)
        if self._connection is not None:
            self._connection.checks.forgets(numbers)

    def _post(self, message: engine_pb2.RouterMessage) -> None:
        """Send a message. Raises Unavailable unless the engine is ready."""
        self._ready_connection().post(message)

    def _ready_connection(self) -> Connection:
        if self._connection is None or not self.is_ready:
            raise Unavailable("the engine is not ready")
        return self._connection

    # -- the stream -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the stream open until cancelled. Raises ConfigError for an address that cannot work here.

        Any other exception has failed the streams when it is raised; the channel can run again.
        """
        transport = transport_to(self.address, self._trust)
        try:
            while True:
                try:
                    pause_s = await self._use(transport)
                finally:
                    await self._lose()
                await asyncio.sleep(pause_s)
        finally:
            await transport.close()

    async def _use(self, transport: Transport) -> float:
        """Connect to the engine and use it until it is lost. Return the pause before the next attempt, in seconds."""
        has_greeted = False
        try:
            connection = Connection(
                await transport.connect(),
                self.label,
                self._hang_timeout_s,
                is_waited_for=lambda: len(self.sequences) > 0,
                on_suspect=self._table.changed,
            )
            try:
                await self._converse(connection)
            finally:
                has_greeted = connection.checks.has_greeted
                connection.close()
            self._log_away(ConnectionError("it has closed the connection"))
            return self._pause_after_death(has_greeted)
        except OSError as error:
            self._log_away(error)
            return self._pause_after_death(has_greeted)
        except EngineHangs:
            if self._is_supervised or transport.is_connected:
                self._log_hang()
            else:
                self._log_away(TimeoutError(f"no connection within {self._hang_timeout_s:g} s"))
            self._on_hang()
            return self._pause_after_fault()
        except InvalidMessage as error:
            self._log_refused(error)
            return self._pause_after_fault()
        except (WrongEngine, NotTrusted) as error:
            self._log_refused(error)
            return WRONG_ENGINE_PAUSE_S

    def _pause_after_fault(self) -> float:
        self.standing.served(self._served_s)
        return RECONNECT_SPAWNED_S if self._is_supervised else self.standing.strike()

    def _pause_after_death(self, has_greeted: bool) -> float:
        """One that greets and dies young again and again gets a growing pause; one that has not come up gets none."""
        self.standing.served(self._served_s)
        if self._is_supervised:
            return RECONNECT_SPAWNED_S
        if self.says_goodbye or not has_greeted or self._served_s >= PROVEN_S:
            return RECONNECT_S
        return self.standing.strike(RECONNECT_S)

    @property
    def _served_s(self) -> float:
        """For how long the engine has been ready on this connection."""
        return time.monotonic() - self.identified_at if self.is_ready else 0.0

    def _log_away(self, error: OSError) -> None:
        """Log why the engine is away. Attempts follow each other closely, so each reason is logged once."""
        if self.is_ready:
            level = logging.INFO if self.says_goodbye else logging.WARNING
            if self.standing.may_say(f"lost: {error}"):
                log.log(level, "lost the engine at %s: %s", self.label, error)
            return
        is_absent = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
        if is_absent and time.monotonic() - self._away_since < self._patience_s:
            return
        reason = "absent" if is_absent else str(error)
        if reason != self._logged:
            log.warning("no engine at %s: %s", self.label, error)
        self._logged = reason

    def _log_refused(self, error: WrongEngine | NotTrusted) -> None:
        self.standing.refuse(error.reason, str(error))
        if str(error) != self._logged and self.standing.may_say(str(error)):
            log.error("the engine at %s is not used: %s", self.label, error)
        self._logged = str(error)

    def _log_hang(self) -> None:
        """Log that the engine hangs: once, however often it greets without answering."""
        reason = f"it has not answered for {self._hang_timeout_s:.0f} s"
        self.standing.refuse("hang", reason)
        if reason != self._logged and self.standing.may_say(reason):
            log.error("the engine at %s hangs: %s", self.label, reason)
        self._logged = reason

    async def _converse(self, connection: Connection) -> None:
        """Take what the engine sends until it closes the connection."""
        hello: control_pb2.EngineInfo | None = None
        while (message := await connection.read()) is not None:
            match message.WhichOneof("message"):
                case "step":
                    self.sequences.deliver(message.step)
                case "pong":
                    if hello and not self.is_ready:
                        await self._become_ready(hello)
                case "hello":
                    hello = message.hello
                    self._take_hello(message, connection)
                    if not message.answers_pings:
                        await self._become_ready(hello)
                case "goodbye":
                    await self._note_goodbye()
                case "cache_flushed":
                    self.questions.flushed(message.cache_flushed)
                case "cache_snapshot" if hello is not None and self._wants_cache:
                    if self.cached is None:
                        self.cached = CachedKeys(hello, self._table.cached, self.row)
                    self.cached.take_snapshot(message.cache_snapshot)
                case "cache_delta" if self.cached is not None:
                    if not self.cached.take_delta(message.cache_delta):
                        self._ask_for_cache()
                case "cached_blocks" if hello is not None:
                    self._block_events.take(self.number, self.model, message.cached_blocks)
                case "adapter_answer":
                    self.questions.adapter_answered(message.adapter_answer)
                case "adapters":
                    self.held.report(message.adapters)
                    if self._on_adapters is not None:
                        await self._on_adapters(self)
                case "trace":
                    self.questions.traced(message.trace)

    def _take_hello(self, message: engine_pb2.EngineMessage, connection: Connection) -> None:
        """Note what an engine is, and ask for what it can report. Raises WrongEngine, and what `check` raises."""
        model = self._check(message.hello)
        if model != self.model:
            self.model, self.identity = model, None
        self._offers_cache, self._offers_blocks = message.follows_cache, message.follows_blocks
        self.block_layout, self.role = message.block_layout, _ROLES.get(message.role, "both")
        self._connection = connection
        self._table.changed()
        connection.greeted(answers_pings=message.answers_pings)
        self._ask_for_cache()
        self.ask_for_blocks()
        if self.held.greet(message):
            connection.post(engine_pb2.RouterMessage(follow_adapters=engine_pb2.FollowAdapters()))

    async def _become_ready(self, info: control_pb2.EngineInfo) -> None:
        self.identity, self.identified_at = Identity.of(info), time.monotonic()
        if self._admit is not None:
            await self._admit(self)
        self._log_ready(info)
        self.info, self.standing.refused = info, ""
        self._table.set_batch(self.row, info.max_num_seqs)
        self._table.changed()
        self._last_absence_s = time.monotonic() - self._away_since
        self.has_been_ready = True
        await self._on_change()

    async def _note_goodbye(self) -> None:
        if not self.says_goodbye:
            log.info("the engine at %s says goodbye: %d sequences run on", self.label, len(self.sequences))
            self.says_goodbye, self._away_since = True, time.monotonic()
            self._table.changed()
            await self._on_change()

    def _log_ready(self, info: control_pb2.EngineInfo) -> None:
        cache = info.kv_cache
        self._logged = ""
        log.info(
            "engine ready at %s, epoch %x: %s on %s, %s; "
            "KV cache %.2f GB: %d blocks of %d tokens, %d tokens in all, %d bytes a token",
            self.label, info.epoch, info.model, info.device, info.dtype,
            cache.total_bytes / 1e9, cache.num_blocks, cache.block_size, cache.token_capacity, cache.bytes_per_token,
        )  # fmt: skip

    async def _lose(self) -> None:
        """Fail every request, flush and trace of a stream that has closed: first, so that no later fault keeps them."""
        was_ready, info, self.info, self._connection = self.is_ready, self.info, None, None
        has_left, self.says_goodbye = self.says_goodbye, False
        self._table.changed()
        self.sequences.lose(lambda: EngineLost(info, has_left=has_left))
        self.questions.lose()
        if was_ready:
            self._away_since = time.monotonic()
        cached, self.cached = self.cached, None
        if cached is not None:
            cached.close()
        self._block_events.lose(self.number)
        self.held.lose()
        if was_ready:
            await self._on_change()
