"""`pagoda fleet` on a real Ray cluster of three nodes on this host, in a network namespace, under load all the time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pagoda.v1 import inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.fleet import control
from pagoda_server.fleet.folder import CONTROL, FleetFolder
from tests.counterparts.environments import python_with
from tests.end_to_end.asking import Answer, request
from tests.servers import ROOT, running_server

pytestmark = pytest.mark.counterpart
RAY = "ray>=2.59,<3"
SYNTHETIC = ("--model=synthetic", "--step-ms=20", "--max-num-seqs=8", "--target-itl-ms=0")
TOKENS = 100  # two seconds of a stream
SOON = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",  # of processes that start slowly where the cores are busy
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",  # as docs/fleet.md asks for
}
WAIT_S = 120.0


def ray_python() -> Path:
    """The Python of an environment with Ray. It finds this project and what it needs in this one's."""
    python = python_with("ray", RAY)
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    paths = (ROOT / "src", ROOT / "clients" / "python", sysconfig.get_path("purelib"))
    (Path(packages) / "development.pth").write_text("".join(f"{path}\n" for path in paths))
    return python


@pytest.fixture(scope="module")
def inside() -> Iterator[list[str]]:
    """What runs commands in a network namespace of their own: Ray takes ports as it likes."""
    name = f"pagoda-ray-{os.getpid()}"
    try:
        try:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need ip and the rights to use it: {error}")
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextlib.contextmanager
def spawned(command: Sequence[str | Path], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process, which is killed with all that it has started when the block ends."""
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | SOON
        )
        children: list[psutil.Process] = []
        try:
            yield process
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        finally:
            for each in (*children, process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


class Cluster:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self._lines = process.stdout
        self.address = self._lines.readline().strip()

    def do(self, line: str) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._lines.readline().split()


@pytest.fixture(scope="module")
def cluster(inside: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray makes sockets below it, whose paths must be short
    log = tmp_path_factory.mktemp("cluster") / "log"
    try:
        command = [*inside, ray_python(), ROOT / "tests" / "counterparts" / "ray_cluster.py", folder]
        with spawned(command, log) as process:
            cluster = Cluster(process)
            assert cluster.address, log.read_text()[-4000:]
            yield cluster
    finally:
        left = [each for each in psutil.process_iter(["cmdline"]) if folder in " ".join(each.info["cmdline"] or [])]
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        shutil.rmtree(folder, ignore_errors=True)


class RunningFleet:
    """A driver on the cluster, which can be killed and started again."""

    def __init__(self, folder: Path, cluster: Cluster, inside: list[str], *more: str) -> None:
        self.folder = folder
        options = [f"--ray={cluster.address}", f"--folder={folder}", "--threads=1", "--grace-s=60"]
        self._command = [*inside, ray_python(), "-m", "pagoda_server.cli", "fleet", *SYNTHETIC, *options]
        self._command += ["--scale-up-s=1", "--scale-down-s=4", *(more or ["--engines=1..3"])]
        self._log = folder.parent / "driver.log"

    @contextlib.contextmanager
    def driver(self, kind: str = "engines") -> Iterator[None]:
        """A driver that has found or started what is of this kind; killed when the block ends."""
        with spawned(self._command, self._log):
            self.until(lambda: bool(self.serving(kind)))
            yield

    def ask(self, command: str, argument: str = "") -> Any:
        return control.ask(self.folder / CONTROL, command, argument)

    def engines(self) -> list[dict[str, Any]]:
        return self.serving("engines")

    def serving(self, kind: str) -> list[dict[str, Any]]:
        """The engines or routers that serve; none if no driver answers."""
        with contextlib.suppress(control.NoDriverError):
            return [each for each in self.ask("status")[kind] if each["state"] == "serving"]
        return []

    def until(self, is_so: Callable[[], bool]) -> float:
        """Wait until something is so; return how many seconds that took."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > WAIT_S:
                states = "no driver"
                with contextlib.suppress(control.NoDriverError):
                    states = json.dumps(self.ask("status"), indent=1)
                pytest.fail(f"not within {WAIT_S} s: {states}\n{self._log.read_text()[-6000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def until_serving(self, count: int) -> float:
        return self.until(lambda: len(self.engines()) == count)


class Load:
    """Streams that follow each other, as many at once as asked for. Each must have the tokens of an idle server."""

    def __init__(self, address: str) -> None:
        self.num_ended = 0
        self.faults: list[str] = []
        self.count = 0
        self._numbers = itertools.count()
        self._channel = grpc.insecure_channel(address)
        self._is_over = False
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(16)]
        for thread in self._threads:
            thread.start()

    def _run(self, place: int) -> None:
        inference = inference_pb2_grpc.InferenceStub(self._channel)
        while not self._is_over:
            if place >= self.count:
                time.sleep(0.05)
                continue
            text = f"stream {next(self._numbers)}"
            try:
                answer = Answer(list(inference.Generate(request(text, TOKENS), timeout=WAIT_S)))
                if answer.ids() != expected_tokens(text.encode(), TOKENS, 258):
                    self.faults.append(f"{text}: other tokens")
            except grpc.RpcError as error:
                self.faults.append(f"{text}: {error}")
            self.num_ended += 1

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(WAIT_S)
        self._channel.close()


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, inside: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunningFleet:
    return RunningFleet(tmp_path_factory.mktemp("fleet") / "fleet", cluster, inside)


@pytest.fixture(scope="module")
def load(fleet: RunningFleet, inside: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    socket = tmp_path_factory.mktemp("router") / "socket"
    folder = FleetFolder(fleet.folder)
    folder.prepare()
    options = ("--model=synthetic", f"--listen=unix:{socket}", "--failover-wait-s=60", *folder.router_options)
    with running_server(*options, inside=inside, ready=False) as server:
        with fleet.driver():
            server.wait_ready()
        load = Load(server.address)
        yield load
        load.end()


@pytest.fixture(autouse=True)
def no_stream_breaks(fleet: RunningFleet, load: Load) -> Iterator[None]:
    """Streams run through each test, and none of them may fail."""
    load.count, ended = 2, load.num_ended
    yield
    load.count = 2
    fleet.until(lambda: load.num_ended > ended)
    assert load.faults == []


def test_a_new_driver_finds_the_engines_of_the_last_one_which_was_killed(fleet: RunningFleet) -> None:
    before = FleetFolder(fleet.folder).members()
    with fleet.driver():
        fleet.until_serving(1)
        assert FleetFolder(fleet.folder).members() == before


def test_the_load_makes_a_fleet_grow_to_three_engines_and_shrink_to_one(fleet: RunningFleet, load: Load) -> None:
    with fleet.driver():
        load.count = 16
        fleet.until_serving(3)
        assert len({each["node"] for each in fleet.engines()}) <= 2, "the head has no room for engines"
        load.count = 1
        fleet.until_serving(1)


def test_a_placed_router_brings_the_last_engine_back_which_has_ended(
    cluster: Cluster, inside: list[str], tmp_path: Path
) -> None:
    options = ("--engines=0..1", "--routers=1", "--namespace=zero", "--scale-to-zero-s=3")
    fleet = RunningFleet(tmp_path / "zero", cluster, inside, *options, "--engine-cpus=0", "--router-cpus=0")

    def generated() -> str:
        [router] = fleet.serving("routers")
        command = [*inside, sys.executable, "-m", "pagoda_server.cli", "generate", f"--address={router['address']}"]
        done = subprocess.run(
            [*command, "--max-tokens=5", "--temperature=0", "hello"], capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with fleet.driver("routers"):
        first = generated()
        fleet.until(lambda: not fleet.ask("status")["engines"])
        assert generated() == first
        os.kill(fleet.serving("routers")[0]["pid"], signal.SIGKILL)
        fleet.until(lambda: not fleet.serving("routers"))
        fleet.until(lambda: bool(fleet.serving("routers")))
        assert generated() == first
    with fleet.driver("routers"):  # the next driver finds the router, which is where it was
        assert generated() == first


def test_an_upgrade_replaces_the_engines(fleet: RunningFleet) -> None:
    with fleet.driver():
        fleet.ask("scale", "2")
        fleet.until_serving(2)
        before = set(FleetFolder(fleet.folder).members().values())
        assert fleet.ask("upgrade") == {"replaced": 2}
        assert not before & set(FleetFolder(fleet.folder).members().values())


def test_an_engine_whose_node_is_lost_serves_again_on_another_node(fleet: RunningFleet, cluster: Cluster) -> None:
    with fleet.driver():
        fleet.ask("scale", "2")
        fleet.until_serving(2)
        for _ in range(3):  # Ray spreads them, but knows nothing of those that have left
            lost, other = fleet.engines()
            if lost["node"] != other["node"]:
                break
            fleet.ask("drain", other["name"])
            fleet.until_serving(2)
        assert lost["node"] != other["node"]
        cluster.do(f"kill {lost['node']}")
        took_s = fleet.until(
            lambda: len(fleet.engines()) == 2 and lost["node"] not in {each["node"] for each in fleet.engines()}
        )
        print(f"two engines served {took_s:.1f} s after the node was killed")


def test_a_head_that_is_killed_breaks_no_stream_and_engines_are_commanded_on(
    fleet: RunningFleet, cluster: Cluster, load: Load
) -> None:
    with fleet.driver():
        fleet.ask("scale", "2")
        fleet.until_serving(2)
        cluster.do("kill head")
        members, ended = FleetFolder(fleet.folder).members(), load.num_ended
        fleet.until(lambda: load.num_ended >= ended + 10)
        assert FleetFolder(fleet.folder).members() == members
        assert [each["state"] for each in fleet.ask("status")["engines"]] == ["serving", "serving"]
        os.kill(fleet.ask("status")["engines"][0]["pid"], signal.SIGKILL)
        fleet.until(lambda: FleetFolder(fleet.folder).members() != members)
        fleet.until_serving(2)
