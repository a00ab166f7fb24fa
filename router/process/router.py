"""A router's parts, from a configuration: the order in which they start and stop, and how they follow the engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.v1 import control_pb2

from ...runtime.restarts import keep_running
from ...settings import ServeConfig
from ...settings.engine import weights_of_tenants
from ...settings.router import named_loras
from ..engines.adapters import Adapters
from ..engines.assignment import model_of, signatures
from ..engines.block_events import BlockEvents
from ..engines.channel import EngineChannel
from ..engines.choosing import RULES
from ..engines.fleet import Engines, EnginesOf, Fleet, Member
from ..engines.group import SETTLES_S, EngineGroup
from ..engines.handshake import channel_trust
from ..engines.held_adapters import Adapter
from ..engines.membership import membership
from ..engines.refusals import WrongEngine
from ..engines.stream import Wakeups
from ..engines.waiting import Waiting, mark_of
from ..errors import ConfigError, PagodaError
from ..request.admission import Admission, LiveRequests
from ..request.failover import Failover
from ..request.migration import Migrations
from ..request.models import ServedModel, ServedModels, longest_context
from ..request.receiving import Messages
from ..request.record import Observers
from ..request.services import Services
from ..telemetry.logs import RequestLog
from ..tenants.identity import Identities, Tenants, TenantsFile
from ..tenants.ledger import OwnLedger, SharedLedger
from ..tenants.quotas import Quotas
from ..text.tokenizer import Tokenizer
from .call_guard import GRPC_LOGGER, is_worth_logging
from .control import ServingState
from .parent import Parent
from .ports import Ports, Served
from .public_port import auth_token, longest_age_s, max_message_bytes

# What serves HTTP is imported where it is used: a router without an HTTP port starts sooner, and with less memory.
if TYPE_CHECKING:
    from ..telemetry.metrics import Tally
    from ..telemetry.traces import Traces

log = logging.getLogger("pagoda.router")

QUEUE_IN_CACHES = 8  # default of max_queued_tokens, as a multiple of all KV caches: more would wait too long
PATIENCE_S = 5.0  # an engine started at the same time may load for longer; then the log has one line more
STOP_S = 0.5  # in which the answers of calls that have ended reach their clients


def import_traces() -> type[Traces]:
    """The observer that sends traces, whose libraries not every installation has. Raises ConfigError."""
    try:
        from ..telemetry.traces import Traces
    except ModuleNotFoundError as error:
        raise ConfigError("--otlp-endpoint needs more packages: pip install 'pagoda-server[tracing]'") from error
    return Traces


class Router:
    """The parts of a router and the order in which they start and stop.

    config   its served_model_name is set
    folders  those of the models, by name; the first one's is --model's
    parent   what has started this one
    socket   of this one's private services; its folder holds those of all routers of the server
    index    this one's number among those that were started with it
    spawned  address of the engine that the parent has spawned, if it has
    replaces whether this one listens only once it has an engine, because others serve the port, or have served it
    is_alone whether there is no other router until `join` is called
    adapters those that a spawned engine held in whose place another one comes
    """

    def __init__(
        self,
        config: ServeConfig,
        folders: Mapping[str, Path],
        parent: Parent,
        socket: Path,
        index: int = 0,
        spawned: str | None = None,
        replaces: bool = False,
        is_alone: bool = False,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        logging.getLogger(GRPC_LOGGER).addFilter(is_worth_logging)
        self._config = config
        self._folders = folders
        self._tokenizers = {name: Tokenizer(folder) for name, folder in folders.items()}
        self._signatures = signatures(
            [(name, folder, self._tokenizers[name].fingerprint) for name, folder in folders.items()]
        )
        self._name = next(iter(folders))  # of the model of requests that name none
        self._only_name = self._name if len(folders) == 1 else ""
        self._index = index
        self._socket = socket
        self._replaces = replaces
        self._is_alone = is_alone
        self._inherited, self._kept = adapters, [each.to_json() for each in adapters]
        self._spawned = spawned
        self._parent = parent
        self._live = LiveRequests()
        self._observers = Observers()
        self._traces = import_traces()(config.otlp_endpoint, self._name) if config.otlp_endpoint else None
        if self._traces:
            self._observers.append(self._traces)  # before the log, which has the trace's id
        self._requests = RequestLog()
        if config.log_requests:
            self._observers.append(self._requests)
            self._observers.on_refusal.append(self._requests.refused)
        self._admission = Admission(config.max_requests, config.max_queued_tokens or (1 << 62) // config.workers)
        self._quotas = Quotas(SharedLedger(Path(config.quotas_file)) if config.quotas_file else OwnLedger())
        self._identities = Identities({}) if config.tenants_file else Identities.of_one_token(auth_token(config))
        self._tenants: TenantsFile | None = None
        if config.tenants_file:
            self._tenants = TenantsFile(Path(config.tenants_file), self._adopt_tenants)
        self._trust = channel_trust(config)
        self._wakeups = Wakeups()
        self._block_events = BlockEvents()
        self._tally: Tally | None = None  # set with --http, which alone shows it
        self._has_served = asyncio.Event()  # an engine has been ready
        self._stop = asyncio.Event()
        self._failure: Exception | None = None
        self._is_retired = False

    async def run(self) -> None:
        """Serve until `stop`. Raises ConfigError."""
        if self._tenants:
            self._tenants.load()
        with contextlib.ExitStack() as stack:
            for tokenizer in self._tokenizers.values():
                stack.enter_context(contextlib.closing(tokenizer))
            self._observers.on_refusal.append(lambda method, error: self._wakeups.give_way())
            has_one = len(self._folders) == 1
            self._fleet = fleet = Fleet(self._connect, RULES[self._config.choose](), has_one_model=has_one)
            self._models = ServedModels(
                [self._served(name, fleet if has_one else EnginesOf(fleet, name)) for name in self._folders]
            )
            self._waiting = Waiting(self._config.engine_wait_s, mark_of(self._config.engine))
            self._failover = Failover(
                continues=self._config.failover,
                wait_s=self._config.failover_wait_s,
                mixes=self._config.mixed_failover,
                waiting=self._waiting,
            )
            self._migrations = Migrations(is_on=self._config.failover)
            self._engine_groups = {
                name: EngineGroup(
                    partial(self._may_have, name),
                    mixes=self._config.mixed_engines,
                    settles_s=min(SETTLES_S, self._config.hang_timeout_s / 4),
                )
                for name in self._folders
            }
            members = membership(f"0={self._spawned}" if self._spawned else self._config.engine, self._fleet)
            members.load()
            self._state = ServingState(self._fleet, self._admission, self._models, self._waiting)
            if self._config.http:
                from ..telemetry.metrics import Tally

                self._tally = Tally(
                    self._fleet, self._admission, self._failover, self._migrations, self._index, self._only_name
                )
                self._observers.append(self._tally)
                self._observers.on_refusal.append(self._tally.refused)
            self._ports = self._make_ports()
            if not self._is_alone:
                await self.join()
            await self._state.refresh()
            if not self._replaces:
                await self._listen()
            parts: list[Callable[[], Awaitable[None]]] = [self._fleet.run, members.follow]
            parts.append(partial(self._trust.follow, log))
            if self._tenants:
                parts.append(self._tenants.follow)
            parts += [self._wait_for_retirement, self._serve]
            if self._tally:
                parts.append(partial(keep_running, "the clock of the event loop", self._tally.watch_loop, log))
            async with self._running(parts):
                await self._stop.wait()
                if self._is_retired:
                    await self._retire()
                if self._failure is None:
                    await self._drain()
                await self._ports.stop(STOP_S)
            self._requests.close()
            if self._traces:
                await asyncio.to_thread(self._traces.close)
        if self._failure is not None:
            raise self._failure

    def _served(self, name: str, engines: Engines) -> ServedModel:
        declared = dict(named_loras(self._config.lora)) if name == self._name else {}
        inherited = self._inherited if name == self._name else ()
        adapters = Adapters(engines, declared, self._on_adapter_fault, inherited)
        return ServedModel.of(self._config, name, self._folders[name], self._tokenizers[name], engines, adapters)

    async def _on_adapter_fault(self, name: str, error: PagodaError) -> None:
        """An adapter of --lora cannot be loaded: no start of the only engine would change that."""
        if self._config.has_one_engine:
            self._fail(ConfigError(f"--lora: {name} cannot be loaded: {error.message}"))
        else:
            await self._look_again()

    async def _on_adapters(self, engine: EngineChannel) -> None:
        self._follow_adapters(engine)
        await self._look_again()

    def _follow_adapters(self, engine: EngineChannel) -> None:
        for model in self._models:
            if model.name == engine.model:
                model.adapters.follow(engine)
                if self._is_engine_ours:
                    self._keep(model.adapters)

    async def _look_again(self) -> None:
        """Report the state, and have requests that wait try once more, after a change of engines or adapters."""
        self._waiting.look_again()
        await self._state.refresh()
        if self._fleet.ready and all(model.adapters.are_loaded for model in self._models):
            self._parent.is_ready()

    def _keep(self, adapters: Adapters) -> None:
        """Have the parent keep what requests may name, where that has changed."""
        known = [each.to_json() for each in adapters.known.values()]
        if known != self._kept:
            self._kept = known
            self._parent.keep_adapters(known)

    def _connect(self, member: Member, number: int) -> EngineChannel:
        return EngineChannel(
            member.address,
            name=member.name,
            number=number,
            hang_timeout_s=self._config.hang_timeout_s,
            patience_s=math.inf if self._is_engine_ours else PATIENCE_S,
            check=partial(self._check_engine, member.address),
            admit=lambda channel: self._engine_groups[channel.model].admit(channel),
            on_change=self._on_engine_change,
            on_hang=self._parent.kill,
            is_supervised=self._is_engine_ours,
            wakeups=self._wakeups,
            trust=self._trust,
            table=self._fleet.chooser.table,
            block_events=self._block_events,
            on_adapters=self._on_adapters,
        )

    async def _serve(self) -> None:
        if self._replaces:
            if not self._waiting.is_on:
                await self._has_served.wait()
            for _ in range(50):  # one that is away for longer shall not keep these routers from serving
                has_adapters = all(model.adapters.are_held for model in self._models)
                if has_adapters and all(channel.is_ready for channel in self._fleet.channels):
                    break
                await asyncio.sleep(0.1)
            await self._listen()
        await self._ports.run_http()

    async def _listen(self) -> None:
        self._parent.starts(*await self._ports.listen(takes_over=self._replaces))
        if self._waiting.is_on:
            self._parent.is_ready()

    def _make_ports(self) -> Ports:
        max_bytes = max_message_bytes(
            self._config.max_text_bytes,
            self._config.max_model_len or max(map(longest_context, self._folders.values())),
            max(tokenizer.vocab_size for tokenizer in self._tokenizers.values()),
        )
        services = Services(
            models=self._models,
            admission=self._admission,
            quotas=self._quotas,
            messages=Messages(max_bytes, self._config.stall_timeout_s),
            live=self._live,
            observers=self._observers,
            failover=self._failover,
            migrations=self._migrations,
            waiting=self._waiting,
        )
        served = Served(
            self._config,
            self._folders,
            services,
            self._fleet,
            self._state,
            self._identities,
            self._wakeups,
            self._block_events,
            self._tally,
            self._engine_restarts,
        )
        return Ports(served, self._socket)

    def _adopt_tenants(self, tenants: Tenants) -> None:
        self._identities.tokens, self._identities.adapters = tenants.tokens, tenants.adapters
        hosts = self._config.quota_hosts
        self._quotas.replace({tenant: quota.part(hosts) for tenant, quota in tenants.quotas.items()})

    def _engine_restarts(self) -> int:
        return self._parent.restarts

    @property
    def _is_engine_ours(self) -> bool:
        """Whether this process or its parent supervises the engine."""
        return self._config.spawns_engine

    def _may_have(self, model: str) -> list[EngineChannel]:
        """The engines that have a model, or may turn out to."""
        return [channel for channel in self._fleet.channels if channel.model in (model, "")]

    def _check_engine(self, address: str, info: control_pb2.EngineInfo) -> str:
        """The name of the model that an engine has. Refuse an engine that has another one.

        Raises ConfigError if there can be no other engine and none has served yet, else WrongEngine.
        """
        try:
            _weights_of_tenants([info])
        except ValueError:
            raise WrongEngine("protocol", "it has invalid weights of tenants") from None
        try:
            return model_of(info, self._signatures)
        except WrongEngine as error:
            if self._config.has_one_engine and not self._has_served.is_set():
                raise ConfigError(f"the engine at {address} {str(error).removeprefix('it ')}") from None
            raise

    async def _on_engine_change(self) -> None:
        if infos := [channel.info for channel in self._fleet.ready if channel.info]:
            self._has_served.set()
            self._parent.mark_ready()
            for model in self._models:
                if len(self._models) > 1:
                    model.engines.follow_caches()
                model.adopt([channel.info for channel in model.engines.ready if channel.info])
            self._share(infos)
            for channel in self._fleet.ready:
                self._follow_adapters(channel)
        await self._look_again()

    def _share(self, engines: Sequence[control_pb2.EngineInfo]) -> None:
        """Share the places of all engines between tenants as the engines do, and admit as much as fits them."""
        self._ports.inference.share(_weights_of_tenants(engines))
        if self._config.max_queued_tokens is None:
            capacity = sum(info.kv_cache.token_capacity for info in engines)
            self._admission.max_tokens = QUEUE_IN_CACHES * capacity // self._config.workers

    async def _wait_for_retirement(self) -> None:
        await self._parent.retired()
        self._is_retired = True
        self._stop.set()

    async def _retire(self) -> None:
        """Leave the port to other routers, and serve the open connections until their calls have ended.

        Until --max-connection-age-s has passed, calls on them are new ones too: gRPC asks each client to connect anew
        when its connection is that old. Then only calls are left that have begun; they end within the grace period.
        A signal makes this a drain.
        """
        self._stop.clear()
        log.info("other routers take the port: %d requests are left here", len(self._live))
        age_s = longest_age_s(self._config)
        rest = asyncio.create_task(self._ports.leave(age_s, self._config.grace_s))
        signaled = asyncio.create_task(self._stop.wait())
        await asyncio.wait({rest, signaled}, return_when=asyncio.FIRST_COMPLETED)
        rest.cancel()
        signaled.cancel()

    async def _drain(self) -> None:
        """Report NOT_SERVING, refuse new requests, and let running ones finish within the grace period."""
        await self._ports.group.leave()  # otherwise the router that replaces this one would drain too
        await self._state.drain()
        if not self._live:
            return
        log.info("draining: %d requests, up to %.0f s", len(self._live), self._config.grace_s)
        self._stop.clear()  # a second signal ends the wait
        idle = asyncio.create_task(self._live.wait_idle())
        again = asyncio.create_task(self._stop.wait())
        _, pending = await asyncio.wait(
            {idle, again}, timeout=self._config.grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in pending:
            task.cancel()
        if self._live:
            log.warning("ending %d requests unfinished", len(self._live))
            self._live.abort_all()

    @contextlib.asynccontextmanager
    async def _running(self, parts: list[Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
        """Run the parts beside the body. A part that fails stops the router."""

        async def guarded(part: Callable[[], Awaitable[None]]) -> None:
            try:
                await part()
            except Exception as error:
                self._fail(error)

        tasks = [asyncio.create_task(guarded(part)) for part in parts]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stop.set()

    async def join(self) -> None:
        """Join the routers that share the port: answer for all of them, and drain if they are draining."""
        group = self._ports.group
        await group.start()
        if await group.are_others_draining():
            await self._state.drain()

    def stop(self) -> None:
        """Begin to end, once the requests have ended or the grace period is over; the second time at once."""
        self._stop.set()


def _weights_of_tenants(engines: Sequence[control_pb2.EngineInfo]) -> dict[str, float] | None:
    """The weights by which tenants share these engines, as the first one has them; None if not all are shared.

    Raises ValueError for weights that no engine has.
    """
    if any(info.settings.get("policy") != "fair" for info in engines):
        return None
    return weights_of_tenants(engines[0].settings.get("tenant_weights", ""))
