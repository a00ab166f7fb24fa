"""Hosts as detached actors of Ray, spread over its nodes. No other file imports Ray.

An actor stays when the driver ends, and Ray starts it again elsewhere when its machine is lost; it is empty then, and
the driver gives it its engine again. Calls between the driver and an actor do not pass Ray's head (GCS), which only
placing and removing need.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
from ray.autoscaler import sdk as autoscaler
from ray.exceptions import ActorDiedError
from ray.util import get_node_ip_address, list_named_actors

from ..runtime import followed
from ..settings.fleet import LOCAL, FleetConfig
from .group import HostsError
from .host import Host, Report, State

ANSWER_S = 2.0  # how long an actor may take to answer before it counts as silent
HEAD_S = 10.0  # how long Ray's head may take
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"  # after so long without the head, Ray's processes end themselves
PATIENT_S = 3600.0
Result = TypeVar("Result")


class RayHost(Host):
    """A host that knows the node on which Ray has placed it."""

    def __init__(self) -> None:
        node = ray.get_runtime_context().get_node_id()[:12]
        patience_s = float(os.environ.get(PATIENCE, "60"))  # as the node itself has it, which has started this process
        ends = f"it ends itself and its engines when Ray's head is away for {patience_s:.0f} s: set {PATIENCE}"
        super().__init__(node, get_node_ip_address(), ends if patience_s < PATIENT_S else "")


class RayHosts:
    """The hosts of one fleet in a Ray cluster.

    config.ray is the cluster's address. Raises HostsError if it cannot be reached.
    """

    def __init__(self, config: FleetConfig) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report what runs here to its makers
        os.environ.setdefault(PATIENCE, "86400")
        options: dict[str, Any] = {"address": config.ray}
        if config.ray == LOCAL:
            options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        try:
            ray.init(namespace=config.namespace, log_to_driver=False, logging_level="warning", **options)
        except Exception as error:  # Ray raises plain ones too
            raise HostsError(f"--ray {config.ray}: {str(error) or type(error).__name__}") from error
        memory = {"memory": config.engine_memory_gb * 1e9} if config.engine_memory_gb else {}
        given = {"CPU": config.engine_cpus, "GPU": config.engine_gpus} | memory
        self._of_engine = {name: number for name, number in given.items() if number}
        self._of_router = {"CPU": config.router_cpus} if config.router_cpus else {}
        self._num_routers = config.routers
        self._handles: dict[str, Any] = {}
        self._at_head: threading.Thread | None = None  # what has asked Ray's head last
        self._asked: dict[str, Any] = {}  # reports that have not come, by host: no second one is asked for

    def close(self) -> None:
        """Leave the cluster; end it if it is this host's alone."""
        ray.shutdown()

    async def names(self) -> list[str]:
        """The hosts that there are."""
        return sorted(await self._of_head(partial(list_named_actors)))

    async def place(self, name: str) -> None:
        """Have Ray place a host as soon as a machine has room for it, unless it is there."""

        def place() -> None:
            with contextlib.suppress(ValueError):  # placed by an attempt that had no answer in time
                self._handles[name] = ray.get_actor(name)
                return
            resources = self._of_router if name.startswith("router-") else self._of_engine
            actor = ray.remote(RayHost).options(
                name=name,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                memory=resources.get("memory"),
                scheduling_strategy="SPREAD",  # else a node's loss could take all engines while others stand empty
            )
            self._handles[name] = actor.remote()

        await self._of_head(place)

    async def remove(self, name: str) -> None:
        """Remove a host, and what runs there with it."""

        def remove() -> None:
            with contextlib.suppress(ValueError):  # there is none, because an attempt without an answer removed it
                ray.kill(self._handle(name), no_restart=True)

        await self._of_head(remove)
        self._handles.pop(name, None)
        self._asked.pop(name, None)

    async def hint(self, num_engines: int) -> None:
        """Have an autoscaler of the cluster keep room for so many engines, and for the routers."""
        bundles = [self._of_engine] * num_engines + [self._of_router] * self._num_routers
        if bundles := [bundle for bundle in bundles if bundle]:
            await self._of_head(partial(autoscaler.request_resources, bundles=bundles))

    async def start(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> None:
        await self._of_host(lambda: self._handle(name).start.remote(arguments, files))

    async def start_router(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes], port: int) -> None:
        await self._of_host(lambda: self._handle(name).start_router.remote(arguments, files, port))

    async def update(self, name: str, files: Mapping[str, bytes]) -> None:
        await self._of_host(lambda: self._handle(name).update.remote(files))

    async def drain(self, name: str) -> None:
        await self._of_host(lambda: self._handle(name).drain.remote())

    async def report(self, name: str) -> Report | None:
        """What a host says; None: nothing in time, because it has not been placed, is lost, or Ray is slow."""

        def ask() -> Report | None:
            try:
                handle = self._handle(name)
            except ValueError:  # Ray's head knows none of this name
                return Report(State.GONE)
            if name not in self._asked:
                self._asked[name] = handle.report.remote()
            if not ray.wait([self._asked[name]], timeout=ANSWER_S)[0]:
                return None
            try:
                return Report.of(ray.get(self._asked.pop(name)))
            except ActorDiedError:  # somebody has killed it, or it was dying when it was found by its name
                self._handles.pop(name, None)
                return Report(State.GONE)

        try:
            return await self._bounded(ask, 2 * ANSWER_S)
        except HostsError:
            return None

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name)
        return self._handles[name]

    async def _of_head(self, work: Callable[[], Result]) -> Result:
        """Ask Ray's head, once the last call has had an answer: one that is away would hold a thread for each."""
        if self._at_head is not None and self._at_head.is_alive():
            raise HostsError("Ray: its head does not answer")

        def ask() -> Result:
            self._at_head = threading.current_thread()
            return work()

        return await self._bounded(ask, HEAD_S)

    async def _of_host(self, call: Callable[[], Any]) -> None:
        await self._bounded(lambda: ray.get(call(), timeout=ANSWER_S), 2 * ANSWER_S)

    async def _bounded(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Work in a thread: calls of Ray block, some for as long as its head is away. Raises HostsError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await followed.in_daemon(work)
        except Exception as error:  # also TimeoutError, which says nothing
            raise HostsError(f"Ray: {str(error) or 'it does not answer'}") from error
