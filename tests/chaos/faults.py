"""A server under test, what its processes hold, and the faults that are done to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda.v1 import admin_pb2, admin_pb2_grpc, control_pb2, control_pb2_grpc, trace_pb2
from tests.chaos.checker import UNAVAILABLE, Held, Window
from tests.chaos.load import NEWEST, OPERATORS, STALL_TIMEOUT_S, Call, Clients, credentials, tenants_file
from tests.chaos.probe.sitecustomize import NUM_COLUMNS, STAGES
from tests.servers import Server, running_server

HANG_TIMEOUT_S = 6.0
OWN_CALLS = 10_000_000  # the first number of calls that faults make
PROBE = Path(__file__).parent / "probe"
RECOVERY_S = 120.0
SLACK_S = 3.0  # clients notice later than the server that it is back


# -- the server -------------------------------------------------------------------------------------------------------


class Victim:
    """A server whose processes can be probed and hurt. `folder` is where probes and the clock's jump lie."""

    def __init__(self, server: Server, folder: Path, workers: int, jump: memoryview) -> None:
        self.server = server
        self.folder = folder
        self.workers = workers
        self._jump = jump

    # Processes by role. With one worker, the server itself is the router.

    def routers(self) -> list[psutil.Process]:
        if self.workers == 1:
            return [psutil.Process(self.server.process.pid)]
        return self._children("pagoda_server.router.process.main")

    def engines(self) -> list[psutil.Process]:
        return self._children("pagoda_server.engine")

    def templates(self) -> list[psutil.Process]:
        return self._children("pagoda_server.router.text.template_process")

    def everything(self) -> list[psutil.Process]:
        main = psutil.Process(self.server.process.pid)
        return [main, *main.children(recursive=True)]

    def roles(self) -> dict[str, list[psutil.Process]]:
        roles = {"router": self.routers(), "engine": self.engines()}
        return roles if self.workers == 1 else roles | {"parent": [psutil.Process(self.server.process.pid)]}

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return found

    def held(self) -> dict[str, list[Held]]:
        """What each process holds now, by role."""
        return {role: [self._held(process) for process in found] for role, found in self.roles().items()}

    def _held(self, process: psutil.Process) -> Held:
        return Held(
            descriptors=process.num_fds() - self._num_kept_by_clients(process),
            threads=process.num_threads(),
            children=len([child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]),
            tasks=sum(self.tasks(process).values()),
            memory_bytes=_own_memory_bytes(process),
        )

    def _num_kept_by_clients(self, process: psutil.Process) -> int:
        """Connections that this test's clients have not closed yet: the server must keep them."""
        port = int(self.server.address.rpartition(":")[2])
        ours = {link.laddr.port for link in psutil.Process().net_connections("tcp") if link.raddr[1:] == (port,)}
        return sum(link.raddr[1] in ours for link in process.net_connections("tcp") if link.raddr)

    def tasks(self, process: psutil.Process) -> Counter[str]:
        """The asyncio tasks of a process, by their coroutine."""
        path = self.folder / f"{process.pid}.tasks"
        path.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, f"process {process.pid} does not answer"
            time.sleep(0.005)
        return Counter(json.loads(path.read_text()))

    def open_files(self, process: psutil.Process) -> Counter[str]:
        """What a process has open: kinds of files, and states of its connections."""
        found = Counter[str](link.status for link in process.net_connections())
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[entry.readlink().name.partition("[")[0]] += 1
        return found

    def aborts(self) -> dict[str, Counter[int]]:
        """What sequences did when they were aborted, by the steps until their blocks were free; all engines so far."""
        found = {stage: Counter[int]() for stage in STAGES}
        for path in self.folder.glob("*.cancels"):
            counts = memoryview(path.read_bytes()).cast("I")
            for row, stage in enumerate(STAGES):
                for steps in range(NUM_COLUMNS):
                    found[stage][steps] += counts[row * NUM_COLUMNS + steps]
        return found

    def set_clock(self, ahead_s: int) -> None:
        self._jump[0] = ahead_s

    def is_whole(self) -> bool:
        """All processes are there, and each router accepts calls, which only new connections can tell."""
        with contextlib.suppress(psutil.NoSuchProcess, grpc.RpcError):
            options = [("grpc.use_local_subchannel_pool", 1)]
            for _ in range(10 if self.workers > 1 else 1):  # the kernel spreads connections over the routers
                with grpc.insecure_channel(self.server.address, options=options) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    status = stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status
                if status != health_pb2.HealthCheckResponse.SERVING:
                    return False
            return len(self.engines()) == 1 and len(self.routers()) == self.workers
        return False

    async def wait_whole(self) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while not await asyncio.to_thread(self.is_whole):
            assert self.server.process.poll() is None, f"the server exited:\n{self.server.tail()}"
            assert time.monotonic() < deadline, f"not whole after {RECOVERY_S} s:\n{self.server.tail()}"
            await asyncio.sleep(0.1)

    def load(self) -> control_pb2.Load:
        with grpc.insecure_channel(self.server.address) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            return stub.GetLoad(control_pb2.GetLoadRequest(), timeout=30, metadata=credentials(OPERATORS))


def _own_memory_bytes(process: psutil.Process) -> int:
    """Anonymous memory. Pages of libraries are left out: whose they are alone depends on what else runs here."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")))


def fake_clock(folder: Path) -> Path:
    """Compile the clock that can jump; the compiler is the one that the kernels need."""
    library = folder / "clock.so"
    source = Path(__file__).parent / "clock.c"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler is missing"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


@contextlib.contextmanager
def victim(folder: Path, workers: int, *arguments: str) -> Iterator[Victim]:
    """A server with the probe and the clock in all of its processes."""
    folder.mkdir()
    tenants = folder / "tenants.toml"
    tenants.write_text(tenants_file())
    clock = folder / "clock"
    clock.write_bytes(bytes(8))
    with clock.open("r+b") as file:
        jump = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
    environment = {
        "PYTHONPATH": path,
        "LD_PRELOAD": str(fake_clock(folder)),
        "PAGODA_CHAOS_CLOCK": str(clock),
        "PAGODA_CHAOS_PROBE": str(folder),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with running_server("--workers", str(workers), "--tenants-file", str(tenants), *arguments) as server:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            yield Victim(server, folder, workers, jump)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


# -- a connection that can be cut -------------------------------------------------------------------------------------


class Cable:
    """A second address of a server, whose connections can be reset, and cut without a word."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_whole = asyncio.Event()
        self._is_whole.set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._carry_both, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def close(self) -> None:
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Reset every connection on both sides, as TCP does when a host forgets it (RST)."""
        for writer in list(self._writers):
            link = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def cut(self) -> None:
        """Carry nothing from now on, of new connections either, and tell neither side."""
        self._is_whole.clear()

    def mend(self) -> None:
        """Carry new connections again. Those that were cut are reset."""
        self.reset()
        self._is_whole.set()

    async def _carry_both(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far_in, far_out = await asyncio.open_connection(*self.target.split(":"))
        except OSError:
            near_out.transport.abort()
            return
        await asyncio.gather(self._carry(near_in, far_out), self._carry(far_in, near_out))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        self._writers.add(target)
        try:
            while data := await source.read(1 << 16):
                await self._is_whole.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(target)
            with contextlib.suppress(OSError):
                target.close()


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a fault can reach."""

    victim: Victim
    clients: Clients
    cables: list[Cable]
    windows: list[Window] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    explained_lines: list[str] = field(default_factory=list)  # patterns of log lines
    calls: list[asyncio.Task[None]] = field(default_factory=list)  # that faults make; a round waits for them
    numbers: Iterator[int] = field(default_factory=lambda: count(OWN_CALLS))  # of calls that faults make themselves


@dataclass(frozen=True)
class Fault:
    """
    explains        statuses of calls that run at its time, and of which scope: see Window
    explained_lines patterns of log lines that look like trouble
    needs_workers   it makes sense only with several router processes
    """

    do: Callable[[Run, random.Random], Awaitable[None]]
    explains: Mapping[str, str] = field(default_factory=dict)
    explained_lines: tuple[str, ...] = ()
    needs_workers: bool = False


async def inject(name: str, run: Run, chance: random.Random) -> None:
    """Do a fault, wait until the server is whole again, and record the time that it explains."""
    fault = FAULTS[name]
    since = time.monotonic()
    run.explained_lines += fault.explained_lines
    await fault.do(run, chance)
    await run.victim.wait_whole()
    run.windows.append(Window(name, since, time.monotonic() + SLACK_S, fault.explains))


async def kill_engine(run: Run, chance: random.Random) -> None:
    for engine in run.victim.engines():
        engine.kill()
    await asyncio.sleep(0.3)


async def crash_loop(run: Run, chance: random.Random) -> None:
    """Kill the engine, then the next ones as soon as they appear."""
    for _ in range(chance.choice((2, 3))):
        for _ in range(3000):
            if engines := run.victim.engines():
                for engine in engines:
                    engine.kill()
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)


async def pause_engine(run: Run, chance: random.Random) -> None:
    await pause(run.victim.engines(), chance.uniform(0.2, 2.0))


async def hang_engine(run: Run, chance: random.Random) -> None:
    await stop_until_killed(run, lambda: None)


async def hang_engine_beside_deadlines(run: Run, chance: random.Random) -> None:
    """Clients whose deadlines are shorter than the hang timeout go on calling."""
    await stop_until_killed(run, lambda: start_calls(run, chance, 1, "a deadline"))


async def stop_until_killed(run: Run, meanwhile: Callable[[], None]) -> None:
    """Stop the engine for longer than --hang-timeout-s: the server kills it, whatever its clients do."""
    engines = run.victim.engines()
    for engine in engines:
        engine.suspend()
    try:
        deadline = time.monotonic() + HANG_TIMEOUT_S + SLACK_S
        while any(engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE for engine in engines):
            if time.monotonic() > deadline:
                run.violations.append("an engine that hangs was not given up within the hang timeout")
                break
            meanwhile()
            await asyncio.sleep(0.1)
    except psutil.NoSuchProcess:
        pass
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


async def pause_routers(run: Run, chance: random.Random) -> None:
    await pause(run.victim.routers(), chance.uniform(0.2, 1.5))


async def pause(processes: list[psutil.Process], duration_s: float) -> None:
    for process in processes:
        process.suspend()
    await asyncio.sleep(duration_s)
    for process in processes:
        process.resume()


async def kill_router(run: Run, chance: random.Random) -> None:
    chance.choice(run.victim.routers()).kill()
    await asyncio.sleep(0.3)


async def kill_template(run: Run, chance: random.Random) -> None:
    for process in run.victim.templates():
        if chance.random() < 0.7:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    await asyncio.sleep(0.2)


async def flood(run: Run, chance: random.Random) -> None:
    """Several times as many calls at once as the server admits."""
    start_calls(run, chance, 250)
    await asyncio.sleep(1.0)


async def reset_connections(run: Run, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 3))):
        for cable in run.cables:
            cable.reset()
        await asyncio.sleep(0.3)


async def big_messages(run: Run, chance: random.Random) -> None:
    start_calls(run, chance, 40, "a big request")
    await asyncio.sleep(1.0)


async def stalled_readers(run: Run, chance: random.Random) -> None:
    start_calls(run, chance, 4, "a stalled reader given up")
    await asyncio.sleep(2 * STALL_TIMEOUT_S)


async def no_descriptors(
    run: Run, chance: random.Random, processes: list[psutil.Process], meanwhile: Callable[..., Awaitable[None]]
) -> None:
    """Lower the limit of open files below what is open, connect, and let another fault happen."""
    soft, hard = resource.prlimit(processes[0].pid, resource.RLIMIT_NOFILE)
    limit_all(processes, resource.RLIMIT_NOFILE, (1, hard))
    run.clients.connect_anew()
    start_calls(run, chance, 3)
    await meanwhile(run, chance)
    await asyncio.sleep(1.5)
    limit_all(run.victim.everything(), resource.RLIMIT_NOFILE, (soft, hard))  # children have inherited the limit


def limit_all(processes: list[psutil.Process], which: int, limits: tuple[int, int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            resource.prlimit(process.pid, which, limits)


async def router_without_descriptors(run: Run, chance: random.Random) -> None:
    await no_descriptors(run, chance, run.victim.routers(), kill_template)


async def router_without_descriptors_loses_engine(run: Run, chance: random.Random) -> None:
    main = psutil.Process(run.victim.server.process.pid)
    await no_descriptors(run, chance, [main, *run.victim.routers()], kill_engine)


async def engine_without_descriptors(run: Run, chance: random.Random) -> None:
    meanwhile = kill_router if run.victim.workers > 1 else reset_connections
    await no_descriptors(run, chance, run.victim.engines(), meanwhile)


async def full_disk(run: Run, chance: random.Random) -> None:
    """No file can grow: the log, shared memory, and what an engine writes that starts now."""
    limit_all(run.victim.everything(), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    await kill_engine(run, chance)
    await asyncio.sleep(chance.uniform(1.0, 3.0))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limit_all(run.victim.everything(), resource.RLIMIT_FSIZE, unlimited)


async def clock_jumps(run: Run, chance: random.Random) -> None:
    """An hour back, a day ahead, and back to the right time, under load."""
    for ahead_s in (-3600, 86_400, 0):
        run.victim.set_clock(ahead_s)
        await asyncio.sleep(0.7)


async def administration(run: Run, chance: random.Random) -> None:
    """Flush caches and take traces while requests run."""
    async with grpc.aio.insecure_channel(run.victim.server.address) as channel:
        for _ in range(3):
            try:
                admin, control = admin_pb2_grpc.AdminStub(channel), control_pb2_grpc.ControlStub(channel)
                may = credentials(OPERATORS)
                await admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=60, metadata=may)
                async for _ in control.GetStepTrace(trace_pb2.GetStepTraceRequest(), timeout=60, metadata=may):
                    pass
            except grpc.aio.AioRpcError as error:
                run.violations.append(f"a call of Admin or Control failed: {error.code()} {error.details()}")
            await asyncio.sleep(0.1)


def start_calls(run: Run, chance: random.Random, number: int, behaviour: str = "read") -> None:
    """Make calls at once. The round waits for them when its load has ended: they may wait long beside it."""
    planned = reads(run, chance, behaviour)
    run.calls += [asyncio.create_task(_make(run.clients, next(planned))) for _ in range(number)]


async def _make(clients: Clients, call: Call) -> None:
    await clients.make(call)


def reads(run: Run, chance: random.Random, behaviour: str = "read") -> Iterator[Call]:
    """Calls that a fault makes itself."""
    wanted = [at for at, item in enumerate(run.clients.items) if ("stalled" in behaviour) == item.is_large]
    for number in run.numbers:
        yield Call(number, chance.choice(wanted), chance.choice(("ann", "flood")), NEWEST, behaviour)


LOST = {UNAVAILABLE: ""}
ENGINE_DIED = ("ERROR the engine exited with signal SIGKILL",)
ENGINE_HUNG = (*ENGINE_DIED, "ERROR the engine at .* hangs: it has not answered for 6 s")
ROUTER_DIED = (r"ERROR router \d exited with signal SIGKILL",)
NO_FILES = ("ERROR .* Too many open files",)

FAULTS: dict[str, Fault] = {
    "kill the engine": Fault(kill_engine, LOST, ENGINE_DIED),
    "crash loop": Fault(crash_loop, LOST, ENGINE_DIED),
    "pause the engine": Fault(pause_engine),
    "hang the engine": Fault(hang_engine, LOST, ENGINE_HUNG),
    "hang the engine beside short deadlines": Fault(hang_engine_beside_deadlines, LOST, ENGINE_HUNG),
    "pause the routers": Fault(pause_routers),
    "kill a router": Fault(kill_router, LOST, ROUTER_DIED, needs_workers=True),
    "kill what renders chats": Fault(kill_template),
    "flood": Fault(flood),
    "reset connections": Fault(reset_connections, {UNAVAILABLE: "cable"}),
    "big messages": Fault(big_messages),
    "stalled readers": Fault(stalled_readers),
    "a router without descriptors": Fault(router_without_descriptors, explained_lines=NO_FILES),
    "without descriptors, the engine dies": Fault(
        router_without_descriptors_loses_engine, LOST, (*ENGINE_DIED, *NO_FILES)
    ),
    "an engine without descriptors": Fault(engine_without_descriptors, LOST, (*ROUTER_DIED, *NO_FILES)),
    "a full disk, and the engine dies": Fault(full_disk, LOST, (*ENGINE_DIED, "ERROR .* File too large")),
    "the clock jumps": Fault(clock_jumps),
    "administration": Fault(administration),
}
