"""Which engine of a fleet gets a request, and how engines join and leave while streams run."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pagoda_server.router.engines.choosing import ByPrefix
from pagoda_server.router.engines.fleet import EnginesOf, Fleet, Member
from pagoda_server.router.engines.membership import MAX_ENGINES, MAX_FILE_BYTES, membership, read_members
from pagoda_server.router.engines.refusals import Standing
from pagoda_server.router.errors import ConfigError, Unavailable
from pagoda_server.runtime import followed, restarts
from tests.router.fleets import fleet_of


@dataclass(eq=False)
class Channel:
    """What a Fleet reads of a channel."""

    num_sequences: int = 0
    is_suspect: bool = False
    role: str = "both"
    is_ready: bool = True
    is_leaving: bool = False
    sequences: list[int] = field(default_factory=list)
    name: str = ""
    address: str = ""
    label: str = ""
    number: int = 0
    retry_after_s: float | None = None
    model: str = ""
    is_followed: bool = False
    error: Exception | None = None
    is_open: bool = False
    is_closed: bool = False
    num_runs: int = 0
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    standing: Standing = field(default_factory=Standing)

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.is_leaving

    def follow_cache(self) -> None:
        self.is_followed = True

    def close(self) -> None:
        self.is_closed = True

    async def run(self) -> None:
        self.is_open, self.num_runs = True, self.num_runs + 1
        try:
            await self.failed.wait()
            assert self.error is not None
            raise self.error
        finally:
            self.is_open = False


def joining(*addresses: str) -> tuple[Fleet, list[Channel]]:
    """A fleet of these members, and all channels that it ever makes."""
    made: list[Channel] = []

    def connect(member: Member, number: int) -> Any:
        made.append(Channel(name=member.name, address=member.address, number=number))
        return made[-1]

    fleet = Fleet(connect)
    fleet.set_members(members(*addresses))
    return fleet, made


def members(*addresses: str) -> list[Member]:
    return [Member(address, address) for address in addresses]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 (other tasks make it so)
            await asyncio.sleep(0.001)


# -- which one ---------------------------------------------------------------------------------------------------------


def picked(*channels: Channel, count: int, avoid: tuple[int, ...] = (), has_begun: bool = False) -> list[int]:
    fleet = fleet_of(*channels)
    away: Any = [channels[place] for place in avoid]
    return [fleet.pick(away, has_begun=has_begun).number for _ in range(count)]


def test_engines_with_as_few_sequences_are_picked_in_turn() -> None:
    channels = [Channel(), Channel(num_sequences=1), Channel(), Channel(is_ready=False), Channel()]
    assert picked(*channels, count=9) == [0, 2, 4] * 3


def test_an_engine_whose_answer_is_late_is_picked_only_if_all_are_late() -> None:
    late, busy = Channel(is_suspect=True), Channel(num_sequences=9)
    assert set(picked(late, busy, count=10)) == {1}
    assert picked(late, Channel(9, is_suspect=True), count=10) == [0] * 10


def test_engines_to_avoid_are_picked_only_if_no_other_is_ready() -> None:
    assert picked(Channel(), Channel(9), count=3, avoid=(0,)) == [1] * 3
    assert picked(Channel(), Channel(9, is_suspect=True), count=3, avoid=(0,)) == [1] * 3
    assert picked(Channel(), Channel(9, is_ready=False), count=3, avoid=(0,)) == [0] * 3


def test_engines_are_picked_among_those_that_have_the_model_and_take_turns_there() -> None:
    channels = [Channel(model="one"), Channel(model="two"), Channel(model="one"), Channel(model="two"), Channel()]
    fleet = fleet_of(*channels)
    one, two = EnginesOf(fleet, "one"), EnginesOf(fleet, "two")
    assert [(one.pick().number, two.pick().number) for _ in range(4)] == [(0, 1), (2, 3)] * 2
    channels[0].is_ready = channels[2].is_ready = False
    assert (fleet.refusal(), two.refusal()) == (None, None)
    with pytest.raises(Unavailable, match=r"^no engine that has the model one is ready$"):
        one.pick()


def test_caches_are_followed_where_several_engines_have_a_model() -> None:
    channels = [Channel(model="one"), Channel(model="two"), Channel(model="one")]

    def connect(member: Member, number: int) -> Any:
        return channels[number]

    fleet = Fleet(connect, ByPrefix(), has_one_model=False)
    fleet.set_members(members("a:1", "b:1", "c:1"))
    assert not any(channel.is_followed for channel in channels)
    for model in ("one", "two"):
        EnginesOf(fleet, model).follow_caches()
    assert [channel.is_followed for channel in channels] == [True, False, True]


# -- joining and leaving -----------------------------------------------------------------------------------------------


async def test_an_engine_that_joins_a_running_fleet_is_opened_and_numbered_anew() -> None:
    fleet, made = joining("a:1", "b:1")
    running = asyncio.create_task(fleet.run())
    await until(lambda: len(made) == 2 and all(each.is_open for each in made))
    fleet.set_members(members("b:1", "c:1"))
    await until(lambda: made[2].is_open and not made[0].is_open)
    assert [(each.name, each.number) for each in fleet.channels] == [("b:1", 1), ("c:1", 2)]
    await until(lambda: len(fleet.channels) == 2)
    assert made[1].is_open, "a member that stays is left alone"
    assert fleet.find(0) is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not any(each.is_open for each in made)


async def test_an_engine_that_leaves_gets_nothing_new_and_is_closed_once_its_streams_have_ended() -> None:
    fleet, (first, second) = joining("a:1", "b:1")
    first.sequences = [1]
    second.num_sequences = 9
    running = asyncio.create_task(fleet.run())
    await until(lambda: first.is_open)
    fleet.set_members(members("b:1"))
    assert [fleet.pick().number for _ in range(3)] == [1, 1, 1]
    await asyncio.sleep(0.3)
    assert first.is_open, "its stream runs"
    first.sequences = []
    await until(lambda: first.is_closed)
    assert not first.is_open
    assert [each.number for each in fleet.channels] == [1]
    running.cancel()


async def test_an_engine_that_comes_back_before_it_has_left_stays() -> None:
    fleet, (first,) = joining("a:1")
    first.sequences = [1]
    running = asyncio.create_task(fleet.run())
    await until(lambda: first.is_open)
    fleet.set_members([])
    with pytest.raises(Unavailable):
        fleet.pick()
    fleet.set_members(members("a:1"))
    first.sequences = []
    await asyncio.sleep(0.3)
    assert first.is_open
    assert fleet.pick().number == 0
    running.cancel()


async def test_a_channel_that_cannot_work_ends_the_fleet() -> None:
    fleet, made = joining("a:1", "b:1")
    made[1].error = ConfigError("it cannot work here")
    made[1].failed.set()
    with pytest.raises(ConfigError, match="it cannot work here"):
        await fleet.run()
    assert not any(each.is_open for each in made)


async def test_an_exception_in_a_channel_ends_that_channel_alone_and_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_PAUSE_S", 0.01)
    fleet, (good, bad) = joining("a:1", "b:1")
    bad.error = KeyError("nobody foresaw this")
    bad.failed.set()
    running = asyncio.create_task(fleet.run())
    await until(lambda: bad.num_runs >= 3)
    bad.failed.clear()
    await until(lambda: bad.is_open and good.is_open)
    assert good.num_runs == 1
    assert not running.done()
    (line,) = [each for each in caplog.records if "the channel to the engine" in each.getMessage()]
    assert line.exc_info
    running.cancel()


# -- who belongs to it -------------------------------------------------------------------------------------------------


def test_a_list_names_engines_or_counts_them() -> None:
    fleet, _ = joining()
    membership("unix:/tmp/a=b,blue=host:1,shm:@x", fleet).load()
    assert [(each.name, each.address) for each in fleet.channels] == [
        ("0", "unix:/tmp/a=b"), ("blue", "host:1"), ("2", "shm:@x"),
    ]  # fmt: skip


async def test_a_file_is_followed_on_after_an_exception_that_nobody_foresaw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_PAUSE_S", 0.01)
    works, num_left = followed.in_daemon, 3

    async def fails(work: Any) -> Any:
        nonlocal num_left
        if (num_left := num_left - 1) >= 0:
            raise RuntimeError("can't start new thread")
        return await works(work)

    path = tmp_path / "engines.json"
    path.write_text('{"engines": []}')
    fleet, _ = joining()
    source = membership(f"file:{path}", fleet)
    source.load()
    monkeypatch.setattr(followed, "in_daemon", fails)
    following = asyncio.create_task(source.follow())
    path.write_text('{"engines": [{"address": "h:1"}]}')
    await until(lambda: [each.name for each in fleet.channels] == ["h:1"])
    following.cancel()
    (line,) = [each for each in caplog.records if each.exc_info]
    assert line.getMessage().startswith("the reader of the engines failed")


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "engines.json"

    def write(*entries: dict[str, str]) -> None:
        path.write_text(json.dumps({"engines": entries}))

    def names() -> list[str]:
        return [each.name for each in fleet.channels if not each.is_leaving]

    write({"name": "blue", "address": "h:1"}, {"address": "h:2"})
    fleet, _ = joining()
    source = membership(f"file:{path}", fleet)
    source.load()
    assert names() == ["blue", "h:2"]
    following = asyncio.create_task(source.follow())
    write({"name": "red", "address": "h:3"})
    await until(lambda: names() == ["red"])
    with caplog.at_level(logging.ERROR, "pagoda.router"):
        path.write_text('{"engines": [{}]}')
        await until(lambda: bool(caplog.records))
    assert names() == ["red"]
    write()
    await until(lambda: names() == [])
    following.cancel()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "Expecting value"),
        ("[]", 'must be an object {"engines": '),
        ('{"engines": [], "more": 1}', 'must be an object {"engines": '),
        ('{"engines": [1]}', r"engines\[0\]: must be an object of texts"),
        ('{"engines": [{"address": 7}]}', r"engines\[0\]: must be an object of texts"),
        ('{"engines": [{"name": "a"}]}', r"engines\[0\]: has no address"),
        ('{"engines": [{"address": "h:1", "port": "1"}]}', r"engines\[0\]: 'port' is neither name nor address"),
        ('{"engines": [{"address": "h:99999"}]}', r"engines\[0\]: 'h:99999': a port is from 1 to 65535"),
        ('{"engines": [{"address": "h:1", "name": "a b"}]}', r"engines\[0\]: an engine's name is 1 to 64 letters"),
        ('{"engines": [{"address": "h:1"}, {"address": "h:1"}]}', "'h:1': another engine has the same name"),
        ('{"engines": [{"address": "h:1", "name": "a"}, {"address": "h:2", "name": "a"}]}', "has the same name"),
        ('{"engines": [{"address": "h:1", "name": "a"}, {"address": "h:1", "name": "b"}]}', "has the same address"),
        ("[" * 100_000, "recursion"),
        (json.dumps({"engines": [{"address": f"h:{1 + at}"} for at in range(MAX_ENGINES + 1)]}), "at most 1024"),
        ('{"engines": []}' + " " * MAX_FILE_BYTES, "has more than 1048576 bytes"),
        ("\udcff", "codec"),
    ],
    ids=range(16),
)
def test_a_file_that_is_wrong_is_refused_in_one_line_with_the_place(tmp_path: Path, content: str, fault: str) -> None:
    path = tmp_path / "engines.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=fault) as caught:
        read_members(path)
    assert str(caught.value).startswith(f"--engine: {path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_absent_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--engine: cannot read .*none: No such file or directory"):
        read_members(tmp_path / "none")


@pytest.mark.usefixtures("virtual_time")
async def test_the_addresses_of_a_name_join_and_stay_while_their_engines_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] = ["10.0.0.1", "10.0.0.2"]

    def getaddrinfo(host: str, port: int, type: int) -> list[Any]:
        assert (host, port, type) == ("engines.local", 50, socket.SOCK_STREAM)
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    fleet, made = joining()
    source = membership("dns:engines.local:50", fleet)
    source.load()
    following = asyncio.create_task(source.follow())
    await until(lambda: len(made) == 2)
    assert [each.name for each in fleet.channels] == ["10.0.0.1:50", "10.0.0.2:50"]
    found[:] = ["10.0.0.2", "fe80::1"]
    await until(lambda: len(made) == 3)
    assert made[2].address == "[fe80::1]:50"
    assert not made[0].is_leaving, "its engine still answers"
    made[0].is_ready = False
    await until(lambda: made[0].is_leaving)
    found.clear()
    await asyncio.sleep(60)
    assert not made[1].is_leaving
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot look up engines.local: Name or service not known"
    ]
    following.cancel()


def roles_picked(*roles: str, has_begun: bool) -> set[int]:
    """The engines that get requests, by their place among engines with these roles."""
    return set(picked(*(Channel(role=role) for role in roles), count=12, has_begun=has_begun))


@pytest.mark.parametrize(
    ("roles", "prompts", "begun"),
    [
        (("both", "both"), {0, 1}, {0, 1}),
        (("prefill", "decode", "both"), {0}, {1}),
        (("prefill", "both", "prefill", "both"), {0, 2}, {1, 3}),
        (("both", "decode"), {0}, {1}),
    ],
)
def test_prompts_and_what_follows_them_go_to_engines_for_them(
    roles: tuple[str, ...], prompts: set[int], begun: set[int]
) -> None:
    assert roles_picked(*roles, has_begun=False) == prompts
    assert roles_picked(*roles, has_begun=True) == begun


@pytest.mark.parametrize(
    ("roles", "missing", "has_begun"),
    [
        (("prefill",), "decode", False),
        (("prefill", "prefill"), "decode", True),
        (("decode",), "prefill", False),
    ],
)
def test_without_an_engine_for_a_role_the_error_names_it(roles: tuple[str, ...], missing: str, has_begun: bool) -> None:
    with pytest.raises(Unavailable, match=f"--role {missing}"):
        roles_picked(*roles, has_begun=has_begun)


def test_a_fleet_that_lacks_a_role_refuses_new_requests() -> None:
    assert fleet_of(Channel(role="prefill")).refusal() is not None
    assert fleet_of(Channel(role="prefill"), Channel(role="decode")).refusal() is None
