"""Faults and changes of a fleet, under load: `make test-chaos`. No call may notice more than a pause.

One engine of three dies, hangs, ends, leaves, is cut off or comes back with a certificate of strangers; an engine of
another model joins; the routers are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import control_pb2, control_pb2_grpc
from pagoda_server.runtime.authority import Authority
from tests.chaos.checker import check_calls, check_canaries, check_idle, check_log, report
from tests.chaos.faults import Cable
from tests.chaos.load import (
    OPERATORS,
    STALL_TIMEOUT_S,
    Clients,
    calls,
    catalogue,
    credentials,
    solo_runs,
    tenants_file,
    work,
)
from tests.chaos.test_chaos import FIRST_SEED, NUM_SEEDS, model
from tests.servers import Server, free_address, running_engine, running_server

__all__ = ["model"]  # a fixture

NUM_CLIENTS = 24
HANG_TIMEOUT_S = 4.0
ROUNDS = 2  # each engine's faults
RECOVERY_S = 60.0
REFUSED = "ENGINES_LOST"
NUM_ROUTERS = 2
OWN, FOREIGN = "own", "foreign"  # folders of an authority each
STRANGE = "its certificate is from an authority that is not in"
AGE_S = 1  # of a connection; routers that are replaced end once every connection has been asked to
EXPLAINED = (
    r"ERROR the engine at .* hangs: it has not answered for 4 s",
    r"ERROR the engine at .* is not used: (it has|its certificate is from an authority) ",
    r"Got goaway .*Cancelling all calls",  # gRPC's, of a router that ends
    r"Closing acceptor. Failed accept4",  # gRPC's, of a port that is no longer listened on
)


class Engines:
    """Three engines, each over another transport, and a server that uses them."""

    def __init__(self, stack: contextlib.ExitStack, model: Path, folder: Path, cable: Cable) -> None:
        self._listening = [f"shm:{folder / 'a'}", f"unix:{folder / 'b'}", cable.target]
        self._addresses = [*self._listening[:2], cable.address]
        self._cable = cable
        self._folder = folder
        for fleet in (folder / OWN, folder / FOREIGN):
            Authority(fleet, days=1).add(["engine"])
        self._impostor = f"unix:{folder / 'impostor'}"
        self._list = folder / "engines.json"
        self._write(self._addresses)
        self._arguments = (
            "--model", str(model), "--dtype", "float32", "--quantization", "none", "--threads", "1",
            "--kv-cache-gb", "0.0005", "--max-num-seqs", "24",
        )  # fmt: skip
        self._contexts = [contextlib.ExitStack() for _ in self._addresses]
        for context in self._contexts:
            stack.enter_context(context)
        self.processes: list[subprocess.Popen[str]] = [self._start(at) for at in range(len(self._addresses))]
        tenants = folder / "tenants.toml"
        tenants.write_text(tenants_file())
        self.server: Server = stack.enter_context(
            running_server(
                "--model", str(model), "--engine", f"file:{self._list}", "--tenants-file", str(tenants),
                "--max-requests", "64", "--stall-timeout-s", str(STALL_TIMEOUT_S),
                "--hang-timeout-s", str(HANG_TIMEOUT_S), "--workers", str(NUM_ROUTERS),
                "--max-connection-age-s", str(AGE_S), "--channel-tls-name", "pagoda-engine",
                *self._certificates(OWN, "router"),
            )
        )  # fmt: skip

    def _certificates(self, fleet: str, name: str) -> list[str]:
        files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}
        return [f"--channel-tls-{option}={self._folder / fleet / file}" for option, file in files.items()]

    def _start(self, at: int, fleet: str = OWN) -> subprocess.Popen[str]:
        address = self._listening[at]
        trust = self._certificates(fleet, "engine") if address == self._cable.target else []
        return self._contexts[at].enter_context(running_engine(address, *self._arguments, *trust))

    def _write(self, addresses: list[str]) -> None:
        new = self._list.with_suffix(".new")
        new.write_text(json.dumps({"engines": [{"address": address} for address in addresses]}))
        new.replace(self._list)

    def start_again(self, at: int, fleet: str = OWN) -> None:
        self._contexts[at].close()
        self.processes[at] = self._start(at, fleet)

    def load(self) -> control_pb2.Load:
        with grpc.insecure_channel(self.server.address) as channel:
            request = control_pb2.GetLoadRequest()
            return control_pb2_grpc.ControlStub(channel).GetLoad(request, timeout=30, metadata=credentials(OPERATORS))

    def refusal(self, address: str) -> str:
        """Why the server does not use the engine at this address, "" if it does."""
        with grpc.insecure_channel(self.server.address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            request = control_pb2.GetServerInfoRequest()
            info = control.GetServerInfo(request, timeout=30, metadata=credentials(OPERATORS))
        (found,) = [engine for engine in info.engines if engine.name == address]
        return found.refused

    async def wait(self, is_so: Callable[[control_pb2.Load], bool]) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while not is_so(load := await asyncio.to_thread(self.load)):
            assert time.monotonic() < deadline, f"{load}\n{self.server.tail()}"
            await asyncio.sleep(0.05)

    async def wait_whole(self) -> None:
        await self.wait(lambda load: len(load.engines) == len(self._addresses))

    # The faults.

    async def kill(self, at: int) -> None:
        self.processes[at].kill()
        await self.wait(lambda load: len(load.engines) < len(self._addresses))
        await asyncio.to_thread(self.start_again, at)

    async def hang(self, at: int) -> None:
        self.processes[at].send_signal(signal.SIGSTOP)
        await self.wait(lambda load: len(load.engines) < len(self._addresses))
        self.processes[at].send_signal(signal.SIGCONT)

    async def drain(self, at: int) -> None:
        self.processes[at].send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.processes[at].wait, RECOVERY_S)
        assert code == 0, f"an engine that drains exited with {code}"
        await asyncio.to_thread(self.start_again, at)

    async def leave(self, at: int) -> None:
        """It leaves the list, runs its streams to their end, and joins again."""
        self._write([address for address in self._addresses if address != self._addresses[at]])
        await self.wait(lambda load: len(load.engines) < len(self._addresses))
        self._write(self._addresses)

    async def impostor(self, at: int) -> None:
        """An engine of another model joins, is refused and leaves."""
        refusals = self.server.log.read_text().count("is not used")
        with running_engine(self._impostor, "--model", "synthetic"):
            self._write([*self._addresses[at:], self._impostor, *self._addresses[:at]])
            async with asyncio.timeout(RECOVERY_S):
                while self.server.log.read_text().count("is not used") == refusals:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            self._write(self._addresses)

    async def cut(self, at: int) -> None:
        """The link to an engine carries nothing any more, and says so to neither end."""
        self._cable.cut()
        await self.wait(lambda load: len(load.engines) < len(self._addresses))
        self._cable.mend()

    async def strange_certificate(self, at: int) -> None:
        """An engine comes back with a certificate that another authority has signed, and is not used."""
        guarded = self._listening.index(self._cable.target)
        await asyncio.to_thread(self.start_again, guarded, FOREIGN)
        async with asyncio.timeout(RECOVERY_S):
            while STRANGE not in await asyncio.to_thread(self.refusal, self._cable.address):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.to_thread(self.start_again, guarded)

    async def upgrade(self, at: int) -> None:
        """Other routers take the place of those that serve."""
        count = self.server.log.read_text().count("the routers have been replaced")
        self.server.process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(RECOVERY_S):
            while self.server.log.read_text().count("the routers have been replaced") == count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(NUM_SEEDS))
async def test_faults_and_changes_of_a_fleet_are_a_pause(number: int, model: Path, tmp_path: Path) -> None:
    seed = FIRST_SEED + number
    chance = random.Random(seed)
    print(f"\nSEED={seed} make test-chaos repeats this")
    items = catalogue(chance)
    with contextlib.ExitStack() as stack:
        cable = Cable(free_address())
        await cable.open()
        engines = Engines(stack, model, tmp_path, cable)
        await engines.wait_whole()
        solo = await solo_runs(engines.server.address, items)
        clients = Clients(engines.server.address, (), items)
        clients.connect()
        of_each = (engines.kill, engines.hang, engines.drain, engines.leave)
        faults = [(fault, at) for fault in of_each for at in range(3)] * ROUNDS
        faults += [
            (fault, at)
            for fault in (engines.impostor, engines.upgrade, engines.cut, engines.strange_certificate)
            for at in range(2)
        ]
        chance.shuffle(faults)
        injected: list[tuple[str, float, float]] = []  # with the times of their beginning and end

        async def inject() -> None:
            for fault, at in faults:
                await asyncio.sleep(chance.uniform(0.5, 2.0))
                began = time.monotonic()
                await fault(at)
                await engines.wait_whole()
                injected.append((f"{fault.__name__} {at}", began, time.monotonic()))
                print(f"      {time.monotonic() - began:5.1f} s  {injected[-1][0]}", flush=True)

        injecting = asyncio.create_task(inject())
        queue = calls(chance, items, 0, clients.num_connections)
        await asyncio.gather(*(work(clients, queue, injecting.done) for _ in range(NUM_CLIENTS)))
        await injecting
        await clients.close()
        await engines.wait(lambda load: not check_idle(load))
        code = await asyncio.to_thread(engines.server.stop)
        await cable.close()
        for outcome in clients.outcomes:
            num_met = sum(outcome.began_s <= until and since <= outcome.ended_s for _, since, until in injected)
            if outcome.error_reason == REFUSED and num_met >= 2:
                outcome.allowed |= {outcome.status}
        violations = check_canaries(solo) + check_calls(clients.begun, clients.outcomes, (), solo)
        log = engines.server.log.read_text()
        violations += check_log(log, EXPLAINED)
        violations += [f"the server exited with {code} after SIGTERM"] if code else []
    statuses = Counter(f"{each.status} {each.error_reason}".strip() for each in clients.outcomes)
    print(f"  {len(clients.outcomes)} calls by status: {dict(statuses.most_common())}")
    print(f"  {log.count('failovers=')} of them lost an engine")
    assert "failovers=" in log
    assert not violations, f"SEED={seed}:\n{report(violations)}"
