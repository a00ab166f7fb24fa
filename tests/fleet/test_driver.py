"""The driver of a fleet, with real engines on hosts of this process, and routers that follow its file."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import stat
import sys
import urllib.request
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from pagoda.v1 import inference_pb2_grpc
from pagoda_server import installed_version
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.fleet import control
from pagoda_server.fleet.driver import Driver
from pagoda_server.fleet.folder import CONTROL, MEMBERS, FleetFolder
from pagoda_server.fleet.group import FleetError, HostsError
from pagoda_server.fleet.host import Host, Report, State
from pagoda_server.fleet.metrics import Metrics
from pagoda_server.settings.fleet import Bounds, FleetConfig
from tests.end_to_end.asking import Answer, request
from tests.servers import ROOT, running_server

pytestmark = pytest.mark.thorough
WAIT_S = 120.0
CONFIG = FleetConfig(model="synthetic", threads=1)


@dataclass
class HereHosts:
    """Hosts in this process. They outlive a driver, as those on a cluster do.

    room       how many can be placed; others wait
    is_silent  whether none answers
    """

    room: int = 100
    is_silent: bool = False
    placed: dict[str, Host] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    hints: list[int] = field(default_factory=list)

    def _host(self, name: str) -> Host:
        if self.is_silent or name not in self.placed:
            raise HostsError("it does not answer")
        return self.placed[name]

    async def names(self) -> list[str]:
        return [*self.placed, *self.waiting]

    async def place(self, name: str) -> None:
        if self.is_silent:
            raise HostsError("it does not answer")
        if len(self.placed) < self.room:
            self.placed[name] = Host("here", "127.0.0.1")
        else:
            self.waiting.append(name)

    async def remove(self, name: str) -> None:
        if name in self.waiting:
            self.waiting.remove(name)
        else:
            self.placed.pop(name).close()

    async def hint(self, num_engines: int) -> None:
        self.hints.append(num_engines)

    async def start(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> None:
        self._host(name).start([*arguments, *self.arguments], files)

    async def start_router(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes], port: int) -> None:
        self._host(name).start_router(arguments, files, port)

    async def update(self, name: str, files: Mapping[str, bytes]) -> None:
        self._host(name).update(files)

    async def drain(self, name: str) -> None:
        self._host(name).drain()

    async def report(self, name: str) -> Report | None:
        if self.is_silent or name in self.waiting:
            return None
        return Report.of(self.placed[name].report()) if name in self.placed else Report(State.GONE)

    def lose(self, name: str) -> None:
        """Lose a host's machine, and have another one take its place."""
        self.placed.pop(name).close()
        self.placed[name] = Host("elsewhere", "127.0.0.1")


@pytest.fixture
async def hosts() -> AsyncIterator[HereHosts]:
    found = HereHosts()
    yield found
    for host in found.placed.values():
        host.close()


@contextlib.asynccontextmanager
async def driving(
    folder: Path, hosts: HereHosts, *, drains: bool = False, metrics_shown: Metrics | None = None, **settings: Any
) -> AsyncIterator[Driver]:
    """A driver that runs while the block does, with its socket."""
    fleet = FleetFolder(folder)
    fleet.prepare()
    config, stop = replace(CONFIG, folder=str(folder), **settings), asyncio.Event()
    driver = Driver(config, hosts, fleet, metrics_shown)
    async with control.answering(folder / CONTROL, driver.answer):
        running = asyncio.create_task(driver.run(stop, drains=drains))
        try:
            yield driver
        finally:
            stop.set()
            await running


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 (of other processes too)
            await asyncio.sleep(0.05)


async def status(driver: Driver) -> dict[str, str]:
    """The states of all engines by name."""
    return {each["name"]: each["state"] for each in (await driver.answer("status", ""))["engines"]}


async def until_serving(driver: Driver, *names: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while await status(driver) != dict.fromkeys(names, "serving"):  # noqa: ASYNC110 (the same)
            await asyncio.sleep(0.05)


async def ask(folder: Path, command: str, argument: str = "") -> dict[str, Any]:
    return await asyncio.to_thread(control.ask, folder / CONTROL, command, argument)


@contextlib.asynccontextmanager
async def streams(folder: Path, count: int = 4, max_tokens: int = 400) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Streams through a router that follows the folder's file; yields what waits for their ends and checks them."""
    options = ("--model=synthetic", "--failover-wait-s=60", *FleetFolder(folder).router_options)
    with running_server(*options) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            inference: Any = inference_pb2_grpc.InferenceStub(channel)

            async def one(text: str) -> None:
                answer = Answer([each async for each in inference.Generate(request(text, max_tokens))])
                assert answer.ids() == expected_tokens(text.encode(), max_tokens, 258)

            calls = [asyncio.create_task(one(f"stream {at}")) for at in range(count)]
            await asyncio.sleep(0)

            async def end() -> None:
                async with asyncio.timeout(WAIT_S):
                    await asyncio.gather(*calls)

            yield end


async def test_a_fleet_serves_with_its_own_certificates_and_leaves_nothing(tmp_path: Path, hosts: HereHosts) -> None:
    folder = tmp_path / "fleet"
    async with driving(folder, hosts, drains=True, engines="2") as driver:
        await until_serving(driver, "engine-1", "engine-2")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / CONTROL).stat().st_mode) == 0o600
        assert hosts.hints == [2]
        async with streams(folder) as end:
            await end()
    assert not hosts.placed
    assert FleetFolder(folder).members() == {}


async def test_engines_whose_process_machine_or_host_is_lost_are_replaced(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="3") as driver:
        await until_serving(driver, "engine-1", "engine-2", "engine-3")
        before = FleetFolder(tmp_path).members()
        os.kill(hosts.placed["engine-1"].report()["pid"], signal.SIGKILL)
        hosts.lose("engine-2")
        hosts.placed.pop("engine-3").close()
        await until(lambda: not set(before.values()) & set(FleetFolder(tmp_path).members().values()))
        await until_serving(driver, "engine-1", "engine-2", "engine-3")
        assert (await driver.answer("status", ""))["engines"][1]["node"] == "elsewhere"


async def test_an_engine_that_hangs_is_ended_and_replaced(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="1", hang_timeout_s=2.0) as driver:
        await until_serving(driver, "engine-1")
        pid = hosts.placed["engine-1"].report()["pid"]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: "engine-1" in hosts.placed and hosts.placed["engine-1"].report()["pid"] not in (0, pid))
        await until_serving(driver, "engine-1")


async def test_a_silent_cluster_changes_no_member_and_breaks_no_stream(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="2", target_itl_ms=0) as driver:
        await until_serving(driver, "engine-1", "engine-2")
        members = (tmp_path / MEMBERS).read_bytes()
        async with streams(tmp_path, max_tokens=300) as end:
            hosts.is_silent = True
            await ask(tmp_path, "scale", "3")
            await end()
            assert (tmp_path / MEMBERS).read_bytes() == members
            hosts.is_silent = False
            await until_serving(driver, "engine-1", "engine-2", "engine-3")


async def test_a_driver_takes_over_what_an_earlier_one_has_left(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="2") as driver:
        await until_serving(driver, "engine-1", "engine-2")
    members = (tmp_path / MEMBERS).read_bytes()
    pids = {name: host.report()["pid"] for name, host in hosts.placed.items()}
    async with streams(tmp_path) as end:
        hosts.is_silent = True  # as long as nothing is known, they stay members
        async with driving(tmp_path, hosts, engines="1..3") as driver:
            await until(lambda: all(each.ready_since for each in driver.engines.values()) and driver.engines)
            assert (tmp_path / MEMBERS).read_bytes() == members
            hosts.is_silent = False
            await until_serving(driver, "engine-1", "engine-2")
            assert {name: host.report()["pid"] for name, host in hosts.placed.items()} == pids
            with pytest.raises(FileExistsError, match="another driver runs"):
                async with control.answering(tmp_path / CONTROL, driver.answer):
                    raise AssertionError
        await end()


async def test_engines_come_and_go_by_command_without_a_broken_stream(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="1") as driver:
        await until_serving(driver, "engine-1")
        async with streams(tmp_path, max_tokens=1500) as end:
            assert await ask(tmp_path, "scale", "2") == {"wanted": 2, "bounds": "2"}
            await until_serving(driver, "engine-1", "engine-2")
            await ask(tmp_path, "drain", "engine-1")
            assert await status(driver) == {"engine-2": "serving", "engine-3": "serving"}
            await ask(tmp_path, "scale", "1")
            await until(lambda: len(driver.engines) == 1)
            await end()


async def test_an_upgrade_replaces_every_engine_without_a_broken_stream(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="2") as driver:
        await until_serving(driver, "engine-1", "engine-2")
        pids = {host.report()["pid"] for host in hosts.placed.values()}
        async with streams(tmp_path, max_tokens=1500) as end:
            assert await ask(tmp_path, "upgrade") == {"replaced": 2}
            await until(lambda: len(driver.engines) == 2)
            assert not pids & {host.report()["pid"] for host in hosts.placed.values()}
            await end()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--no-such-option"], "does not start"),
        (["--block-size=8"], "it has blocks of 8 tokens"),
    ],
)
async def test_an_upgrade_whose_engines_cannot_serve_changes_nothing(
    tmp_path: Path, hosts: HereHosts, arguments: list[str], reason: str
) -> None:
    async with driving(tmp_path, hosts, engines="2") as driver:
        await until_serving(driver, "engine-1", "engine-2")
        members = FleetFolder(tmp_path).members()
        hosts.arguments = arguments
        for command in (("upgrade",), ("drain", "engine-1")):
            with pytest.raises(ValueError, match=reason):
                await ask(tmp_path, *command)
        await until_serving(driver, "engine-1", "engine-2")
        assert FleetFolder(tmp_path).members() == members


async def test_the_load_decides_between_the_bounds(tmp_path: Path, hosts: HereHosts) -> None:
    settings = {"engines": "1..2", "max_num_seqs": 8, "step_ms": "5", "scale_up_s": 0.5, "scale_down_s": 2.0}
    async with driving(tmp_path, hosts, **settings) as driver:
        await until_serving(driver, "engine-1")
        async with streams(tmp_path, count=16, max_tokens=1500) as end:
            await until(lambda: len(driver.engines) == 2)
            await end()
            await until(lambda: len(driver.engines) == 1)
        assert driver.wanted == 1


async def answered(address: str, text: str, max_tokens: int = 20, timeout_s: float = WAIT_S) -> None:
    """Ask a router, and check the tokens."""
    async with grpc.aio.insecure_channel(address) as channel:
        inference: Any = inference_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(request(text, max_tokens), timeout=timeout_s)
        assert Answer([each async for each in call]).ids() == expected_tokens(text.encode(), max_tokens, 258)


async def test_the_last_engine_ends_and_a_request_that_waits_brings_one_back(tmp_path: Path, hosts: HereHosts) -> None:
    settings = {"engines": "0..2", "scale_to_zero_s": 2.0}
    async with driving(tmp_path, hosts, **settings) as driver:
        await asyncio.sleep(2.5)
        assert not driver.engines, "nobody has asked for one"
        options = ("--model=synthetic", "--engine-wait-s=60", *FleetFolder(tmp_path).router_options)
        with running_server(*options) as server:
            for text in ("the first", "after a pause"):
                await asyncio.gather(*(answered(server.address, f"{text} {at}") for at in range(4)))
                assert driver.wanted == 1
                await until(lambda: not driver.engines)
            rare = [answered(server.address, f"rare {at}", max_tokens=1) for at in range(6)]
            await rare.pop()
            began = driver.engines["engine-1"]
            for each in rare:  # more often than the engine may be idle, and between two looks of the driver
                await asyncio.sleep(1.3)
                await each
            assert driver.engines == {"engine-1": began}


async def test_no_request_brings_an_engine_to_a_fleet_that_must_have_none(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="0") as driver:
        options = ("--model=synthetic", "--engine-wait-s=3", *FleetFolder(tmp_path).router_options)
        with running_server(*options) as server, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            await answered(server.address, "in vain")
        assert not hosts.placed
        assert driver.wanted == 0


async def test_routers_are_placed_and_follow_the_engines(tmp_path: Path, hosts: HereHosts) -> None:
    config = tmp_path / "router.toml"
    config.write_text('served_model_name = "one"\nhttp = "127.0.0.1:0"\n')
    settings = {"engines": "0..2", "scale_to_zero_s": 600.0, "routers": 2, "router_config": str(config)}
    async with driving(tmp_path / "fleet", hosts, drains=True, **settings) as driver:
        await until(lambda: [each.state for each in driver.routers.values()] == ["serving", "serving"])
        shown = (await driver.answer("status", ""))["routers"]
        assert [each["name"] for each in shown] == ["router-1", "router-2"]
        addresses = [each["address"] for each in shown]
        await answered(addresses[0], "its mark reaches the driver through its host")
        await answered(addresses[1], "the other one has the engine, too", timeout_s=5)
        models = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{shown[0]['http']}/v1/models").read())
        assert json.loads(models)["data"][0]["id"] == "one"

        os.kill(shown[0]["pid"], signal.SIGKILL)
        hosts.lose("router-2")
        await until(
            lambda: all(each.report.pid and each.address not in ("", *addresses) for each in driver.routers.values())
        )
        await until(lambda: [each.state for each in driver.routers.values()] == ["serving", "serving"])
        for router in driver.routers.values():
            await answered(router.address, "again")
        await ask(tmp_path / "fleet", "scale", "2")
        pids = {each.report.pid for each in (*driver.routers.values(), *driver.engines.values())}
        await until_serving(driver, "engine-1", "engine-2")
        assert await ask(tmp_path / "fleet", "upgrade") == {"replaced": 4}
        await until(lambda: len(driver.routers) == len(driver.engines) == 2)
        assert not pids & {each.report.pid for each in (*driver.routers.values(), *driver.engines.values())}
        for router in driver.routers.values():
            await answered(router.address, "and after an upgrade")
    assert not hosts.placed


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_router_that_hangs_is_ended_and_replaced(has_tls: bool, tmp_path: Path, hosts: HereHosts) -> None:
    settings: dict[str, Any] = {"engines": "0", "routers": 1, "hang_timeout_s": 2.0}
    if has_tls:
        made = trustme.CA().issue_cert("router.example.org")
        made.cert_chain_pems[0].write_to_path(tmp_path / "router.pem")
        made.private_key_pem.write_to_path(tmp_path / "router.key")
        config = tmp_path / "router.toml"
        config.write_text(f'tls_cert = "{tmp_path}/router.pem"\ntls_key = "{tmp_path}/router.key"\n')
        settings["router_config"] = str(config)
    async with driving(tmp_path / "fleet", hosts, **settings) as driver:
        await until(lambda: [each.state for each in driver.routers.values()] == ["serving"])
        before = driver.routers["router-1"].report
        await asyncio.sleep(5)
        assert driver.routers["router-1"].report == before, "one without engines answers, and stays"
        os.kill(before.pid, signal.SIGSTOP)
        await until(lambda: driver.routers["router-1"].report.pid not in (0, before.pid))
        await until(lambda: [each.state for each in driver.routers.values()] == ["serving"])
        with pytest.raises(ProcessLookupError):
            os.kill(before.pid, 0)


async def test_a_router_keeps_its_engines_while_its_host_is_silent(tmp_path: Path, hosts: HereHosts) -> None:
    async with driving(tmp_path, hosts, engines="1", routers=1) as driver:
        await until_serving(driver, "engine-1")
        await until(lambda: [each.state for each in driver.routers.values()] == ["serving"])
        hosts.is_silent = True
        await asyncio.sleep(2.5)
        await answered(driver.routers["router-1"].address, "goes on", timeout_s=30)
    hosts.is_silent = False
    pid = hosts.placed["router-1"].report()["pid"]
    async with driving(tmp_path, hosts, engines="1", routers=1) as driver:
        await until(lambda: [each.state for each in driver.routers.values()] == ["serving"])
        assert driver.routers["router-1"].report.pid == pid, "the next driver finds it"


async def test_the_driver_shows_its_own_metrics(tmp_path: Path, hosts: HereHosts) -> None:
    metrics = Metrics()
    port, end = metrics.serve("127.0.0.1:0")

    def shown() -> dict[str, float]:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    hosts.room = 2
    async with driving(tmp_path, hosts, engines="1..3", metrics_shown=metrics) as driver:
        await until_serving(driver, "engine-1")
        os.kill(hosts.placed["engine-1"].report()["pid"], signal.SIGKILL)
        await ask(tmp_path, "scale", "3")
        await until(lambda: [each.state for each in driver.engines.values()].count("serving") == 2)
        await until(lambda: shown()['pagoda_fleet_restarts_total{kind="engine"}'] == 1)
        page = shown()
        assert page["pagoda_fleet_engines_wanted"] == page["pagoda_fleet_engines_most"] == 3
        assert page['pagoda_fleet_members{kind="engine",state="serving"}'] == 2
        assert page['pagoda_fleet_members{kind="engine",state="waits for a machine"}'] == 1
        assert page['pagoda_fleet_scale_decisions_total{by="command"}'] == 1
        version = installed_version()
        assert page[f'pagoda_fleet_placed{{kind="engine",name="engine-1",node="here",version="{version}"}}'] == 1
        hosts.is_silent = True
        await ask(tmp_path, "scale", "4")
        await until(lambda: 'pagoda_fleet_fault{fault="it does not answer",of="placing"}' in shown())
        hosts.is_silent = False
        await until(lambda: not any(name.startswith("pagoda_fleet_fault{") for name in shown()))
    await asyncio.to_thread(end)


async def test_a_model_that_cannot_work_ends_the_driver_with_the_engines_own_words(
    tmp_path: Path, hosts: HereHosts
) -> None:
    folder = FleetFolder(tmp_path)
    folder.prepare()
    with pytest.raises(FleetError, match="no-such-model"):
        await Driver(replace(CONFIG, model="no-such-model"), hosts, folder).run(asyncio.Event(), drains=False)


async def test_an_engine_for_which_there_is_no_room_can_be_given_up(tmp_path: Path, hosts: HereHosts) -> None:
    hosts.room = 1
    async with driving(tmp_path, hosts, engines="2") as driver:
        await until(lambda: driver.engines.get("engine-1") and driver.engines["engine-1"].ready_since)
        assert await status(driver) == {"engine-1": "serving", "engine-2": "waits for a machine"}
        await ask(tmp_path, "scale", "1")
        await until_serving(driver, "engine-1")
        assert not hosts.waiting


async def test_a_wrong_command_is_refused_in_words(tmp_path: Path, hosts: HereHosts) -> None:
    with pytest.raises(control.NoDriverError, match="no `pagoda fleet` runs"):
        await ask(tmp_path, "status")
    async with driving(tmp_path, hosts, engines="0"):
        for command, argument, words in (
            ("scale", "many", "must be a number of engines"),
            ("scale", "4..2", "must be a number of engines"),
            ("scale", "5000", "at most 1024"),
            ("drain", "engine-9", "there is no engine or router 'engine-9'"),
            ("dance", "", "does not know the command 'dance'"),
        ):
            with pytest.raises(ValueError, match=words):
                await ask(tmp_path, command, argument)
        assert await ask(tmp_path, "status") == {"wanted": 0, "bounds": "0", "engines": [], "routers": []}


def test_bounds_are_a_number_or_a_range() -> None:
    assert Bounds.of("3") == Bounds(3, 3)
    assert str(Bounds.of("1..4")) == "1..4"


async def command(*arguments: str) -> tuple[int, str, str]:
    """The exit code of `pagoda fleet` with these arguments, and what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagoda_server.cli", "fleet", *arguments, stdout=PIPE, stderr=PIPE, cwd=ROOT
    )
    printed, errors = await process.communicate()
    return process.returncode or 0, printed.decode(), errors.decode()


async def test_the_commands_show_and_change_a_fleet(tmp_path: Path, hosts: HereHosts) -> None:
    folder = f"--folder={tmp_path}"
    assert (await command("status", folder))[0] == 2, "no driver runs"
    async with driving(tmp_path, hosts, engines="1") as driver:
        await until_serving(driver, "engine-1")
        code, printed, _ = await command("status", folder)
        assert code == 0
        assert re.search(r"^engine-1 +serving +here +127\.0\.0\.1:\d+ ", printed, re.MULTILINE), printed
        (engine,) = json.loads((await command("status", "--json", folder))[1])["engines"]
        assert (engine["name"], engine["state"], engine["sequences"]) == ("engine-1", "serving", 0)
        assert await command("scale", "0", folder) == (0, "0 engines are wanted, of 0\n", "")
        await until(lambda: not driver.engines)
        code, _, errors = await command("drain", "engine-1", folder)
        assert code == 1
        assert "there is no engine or router 'engine-1'" in errors


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
async def test_a_fleet_without_ray_says_what_to_install(tmp_path: Path) -> None:
    code, _, errors = await command("--model=synthetic", f"--folder={tmp_path / 'fleet'}")
    assert code == 2
    assert "pip install 'pagoda-server[ray]'" in errors


async def test_settings_that_a_fleet_decides_itself_are_refused() -> None:
    code, _, errors = await command("--channel-token-file=token")
    assert code == 2
    assert "--channel-token-file: a fleet makes its own certificates and token in --folder" in errors
