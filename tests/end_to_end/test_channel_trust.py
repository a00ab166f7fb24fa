"""Certificates and tokens between routers and engines: real engines at HOST:PORT, and those who call them there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from pagoda.v1 import inference_pb2_grpc
from pagoda_server.channel.address import host_of
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.engines import channel as engine_channel
from pagoda_server.router.engines import handshake
from pagoda_server.router.engines.channel import EngineChannel
from pagoda_server.router.engines.handshake import channel_trust
from pagoda_server.router.errors import ConfigError
from pagoda_server.runtime.authority import Authority
from pagoda_server.runtime.channel_trust import DAY_S, ChannelTrust
from pagoda_server.settings import ServeConfig
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import ROOT, Server, free_address, running_engine, running_server

pytestmark = pytest.mark.thorough

SYNTHETIC = ("--model", "synthetic", "--step-ms", "2")
ATTEMPTS_S = 0.5  # in which a router that is refused tries several times


@dataclass(frozen=True)
class Fleet:
    """A folder with the fleet's authority and token, and its engines' certificates for one address each."""

    folder: Path

    def certificates(self, name: str, ca: str = "ca.pem") -> list[str]:
        """The options of an end that shows this certificate."""
        files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca": ca}
        return [f"--channel-tls-{option}={self.folder / file}" for option, file in files.items()]

    def token(self, name: str = "token") -> str:
        return f"--channel-token-file={self.folder / name}"

    @contextlib.contextmanager
    def engine(self, address: str, *options: str) -> Iterator[Path]:
        """A running engine; yields its log."""
        log = self.folder / f"{address}.log"
        with running_engine(address, *SYNTHETIC, *options, log=log):
            while "serving" not in log.read_text():
                time.sleep(0.02)
            yield log

    def add(self, address: str) -> str:
        """Sign a certificate for an engine at this address, and return its name."""
        Authority(self.folder, days=1).add([host_of(address)])
        return host_of(address)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet beside which there is another one, in `other`, whose token is in `other-token`."""
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    for folder in (made.folder, made.folder / "other"):
        Authority(folder, days=1).add(["engine"])
    (made.folder / "token").write_text("of the fleet\n")
    (made.folder / "other-token").write_text("of another\n")
    return made


@dataclass(frozen=True)
class Guarded:
    address: str
    name: str
    log: Path


@pytest.fixture(scope="module")
def guarded(fleet: Fleet) -> Iterator[Guarded]:
    """An engine that asks for a certificate and for a token."""
    address = free_address()
    name = fleet.add(address)
    with fleet.engine(address, *fleet.certificates(name), fleet.token()) as log:
        yield Guarded(address, name, log)


def trust(*options: str) -> ChannelTrust:
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    return channel_trust(ServeConfig(**{name.replace("-", "_"): value for name, value in given.items()}))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def connecting(address: str, trust: ChannelTrust) -> AsyncIterator[EngineChannel]:
    async def on_change() -> None:
        pass

    channel = EngineChannel(address, hang_timeout_s=60, on_change=on_change, trust=trust)
    running = asyncio.create_task(channel.run())
    try:
        yield channel
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 (other tasks make it so)
            await asyncio.sleep(0.01)


def wait_for_line(log: Callable[[], str], line: str, times: int = 1) -> None:
    deadline = time.monotonic() + 60
    while log().count(line) < times:
        assert time.monotonic() < deadline, f"no {line!r} in:\n{log()}"
        time.sleep(0.02)


async def test_what_fits_connects_by_the_address_and_by_the_name_of_all_engines(fleet: Fleet, guarded: Guarded) -> None:
    options = [*fleet.certificates("router"), fleet.token()]
    async with (
        connecting(guarded.address, trust(*options)) as by_address,
        connecting(guarded.address, trust(*options, "--channel-tls-name=pagoda-engine")) as by_name,
    ):
        await until(lambda: by_address.is_ready and by_name.is_ready)


FAULTS: dict[str, tuple[str, Callable[[Fleet, str], list[str]]]] = {
    "no certificate": (
        "it uses TLS: give --channel-tls-cert, --channel-tls-key and --channel-tls-ca",
        lambda fleet, engine: [fleet.token()],
    ),
    "a certificate of another authority": (
        "it refuses this router's certificate: its --channel-tls-ca must hold the authority",
        lambda fleet, engine: [*fleet.certificates("other/router"), fleet.token()],
    ),
    "an engine of another authority": (
        "its certificate is from an authority that is not in this router's --channel-tls-ca",
        lambda fleet, engine: [*fleet.certificates("router", ca="other/ca.pem"), fleet.token()],
    ),
    "another name": (
        "its certificate does not bear the name elsewhere: renew its --channel-tls-cert, or set --channel-tls-name",
        lambda fleet, engine: [*fleet.certificates("router"), fleet.token(), "--channel-tls-name=elsewhere"],
    ),
    "no token": (
        "it asks for a token: give --channel-token-file",
        lambda fleet, engine: fleet.certificates("router"),
    ),
    "another token": (
        "it refuses this router's token: both must have it in their --channel-token-file",
        lambda fleet, engine: [*fleet.certificates("router"), fleet.token("other-token")],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_one_line_that_names_the_setting_and_disturbs_no_other_router(
    fault: str, fleet: Fleet, guarded: Guarded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_channel, "WRONG_ENGINE_PAUSE_S", 0.02)
    line, options = FAULTS[fault]
    lines_before = len(guarded.log.read_text().splitlines())
    with (
        running_server(
            *SYNTHETIC[:2], "--engine", guarded.address, *fleet.certificates("router"), fleet.token()
        ) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request("goes on", max_tokens=800))
        first = next(call)
        async with connecting(guarded.address, trust(*options(fleet, guarded.name))) as refused:
            await until(lambda: line in caplog.text)
            await asyncio.sleep(ATTEMPTS_S)
            assert not refused.is_ready
        assert Answer([first, *call]).ids() == expected_tokens(b"goes on", 800, 258)
        assert "lost" not in server.tail()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        record.message for record in caplog.records if line in record.message
    ], "nothing else is logged"
    assert caplog.text.count(line) == 1
    new = guarded.log.read_text().splitlines()[lines_before:]
    assert len([each for each in new if "router connected" not in each and "router disconnected" not in each]) <= 1


async def test_an_engine_without_tls_is_named_to_a_router_that_has_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    address = free_address()
    with fleet.engine(address):
        async with connecting(address, trust(*fleet.certificates("router"))):
            await until(lambda: "it does not use TLS: start it with --channel-tls-cert" in caplog.text)


async def test_what_does_not_answer_a_handshake_is_away(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with connecting(f"127.0.0.1:{silent.getsockname()[1]}", trust(*fleet.certificates("router"))):
            await until(lambda: "no answer to a TLS handshake within 1 s" in caplog.text)


async def test_certificates_that_have_expired_are_named_on_either_end(
    fleet: Fleet, guarded: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An end refuses to start with such a certificate, so here each of them expires later."""
    late = Fleet(tmp_path)
    for each in ("ca.pem", "ca.key"):
        (tmp_path / each).write_bytes((fleet.folder / each).read_bytes())
    Authority(tmp_path, days=-0.01).add(["127.0.0.1"])
    pair = tuple((tmp_path / f"127.0.0.1.{kind}").read_bytes() for kind in ("key", "pem"))
    authority = (tmp_path / "ca.pem").read_bytes()
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], authority, True))
    await server.start()
    async with connecting(f"127.0.0.1:{port}", trust(*fleet.certificates("router"))):
        await until(lambda: "its certificate has expired: renew its --channel-tls-cert" in caplog.text)
    await server.stop(None)

    with pytest.raises(Exception, match=r"router\.pem.*not a certificate for a router: certificate has expired"):
        trust(*late.certificates("router"))
    expired = trust(*fleet.certificates("router"))
    assert expired.current.certificates
    context = expired.current.certificates.context
    context.load_cert_chain(tmp_path / "router.pem", tmp_path / "router.key")
    expired.adopt(replace(expired.current, certificates=replace(expired.current.certificates, expires=0)))
    async with connecting(guarded.address, expired):
        await until(lambda: "this router's own certificate has expired: renew --channel-tls-cert" in caplog.text)


@pytest.mark.usefixtures("virtual_time")
async def test_a_certificate_that_expires_soon_is_logged_every_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for days in (29.96, 365):
        fleet = Fleet(tmp_path / str(days))
        Authority(fleet.folder, days).add(["127.0.0.1"])
        following = asyncio.create_task(trust(*fleet.certificates("router")).follow(logging.getLogger("pagoda.router")))
        await asyncio.sleep(2.5 * DAY_S)
        following.cancel()
    line = f"--channel-tls-cert {tmp_path / '29.96' / 'router.pem'}: it expires in 30.0 days: renew it"
    assert caplog.messages == [line] * 3, "time.time() stands still here"


def test_the_certificate_of_an_engine_makes_no_router(fleet: Fleet, guarded: Guarded) -> None:
    with pytest.raises(ConfigError, match=r"not a certificate for a router: it bears the name of all engines, pagoda-"):
        trust(*fleet.certificates(guarded.name))
    read = {kind: (fleet.folder / f"{guarded.name}.{kind}").read_bytes() for kind in ("key", "pem")}
    credentials = grpc.ssl_channel_credentials((fleet.folder / "ca.pem").read_bytes(), read["key"], read["pem"])
    with grpc.secure_channel(guarded.address, credentials) as channel:
        connect = channel.stream_stream("/pagoda.engine.v1.Engine/Connect")
        call = connect(iter([b""]), metadata=[("authorization", "Bearer of the fleet")])
        with pytest.raises(grpc.RpcError) as caught:
            call.next()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.details() == "a certificate of pagoda-engine makes no router"


def test_certificates_and_tokens_change_under_running_streams_and_none_breaks(tmp_path: Path) -> None:
    """Both ends get new files in an order that no one controls; the old and the new ones hold meanwhile."""
    fleet, address = Fleet(tmp_path), free_address()
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        Authority(folder, days=1).add([host_of(address)])
    for end, name in (("engine", host_of(address)), ("router", "router")):
        for kind in ("pem", "key"):
            (tmp_path / f"{end}.{kind}").write_bytes((old / f"{name}.{kind}").read_bytes())
        (tmp_path / f"{end}-token").write_text("first\n")
        (tmp_path / f"{end}-ca.pem").write_bytes((old / "ca.pem").read_bytes())

    def options(end: str) -> list[str]:
        return [*fleet.certificates(end, ca=f"{end}-ca.pem"), fleet.token(f"{end}-token")]

    def log_of(server: Server) -> Callable[[], str]:
        return server.log.read_text

    read_again = "read the channel's certificates and tokens again"
    with (
        fleet.engine(address, *options("engine")) as engine_log,
        running_server(*SYNTHETIC[:2], "--engine", address, *options("router")) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)
        calls = [inference.Generate(request(f"{at}", max_tokens=4000)) for at in range(4)]
        firsts = [next(call) for call in calls]
        logs = {"engine": engine_log.read_text, "router": log_of(server)}
        # Half of a new pair, and a file that is cut, are not used.
        (tmp_path / "engine.key").write_bytes((new / f"{host_of(address)}.key").read_bytes())
        (tmp_path / "router-ca.pem").write_bytes((new / "ca.pem").read_bytes()[:100])
        for end, log in logs.items():
            wait_for_line(log, "the channel's certificates and tokens stay as they were: --channel-tls-")
            assert read_again not in log(), end
        # Both authorities and both tokens hold, then the new pairs are used, then the old ones are forgotten.
        for at, (tokens, authorities, pair) in enumerate(
            (("first\nsecond\n", (old, new), old), ("first\nsecond\n", (old, new), new), ("second\n", (new,), new)), 1
        ):
            for end, name in (("router", "router"), ("engine", host_of(address))):
                for kind in ("pem", "key"):
                    (tmp_path / f"{end}.{kind}").write_bytes((pair / f"{name}.{kind}").read_bytes())
                (tmp_path / f"{end}-token").write_text(tokens)
                (tmp_path / f"{end}-ca.pem").write_bytes(
                    b"".join((each / "ca.pem").read_bytes() for each in authorities)
                )
                wait_for_line(logs[end], read_again, at)
                with running_server(*SYNTHETIC[:2], "--engine", address, *options("router")):
                    pass  # another router, which is ready at each step
        for at, (first, call) in enumerate(zip(firsts, calls, strict=True)):
            assert Answer([first, *call]).ids() == expected_tokens(f"{at}".encode(), 4000, 258)
        assert "lost the engine" not in server.log.read_text()


def test_a_router_comes_back_with_the_new_certificate(tmp_path: Path) -> None:
    fleet, address = Fleet(tmp_path), free_address()
    name = fleet.add(address)
    with contextlib.ExitStack() as stack:
        with fleet.engine(address, *fleet.certificates(name)):
            server = stack.enter_context(
                running_server(*SYNTHETIC[:2], "--engine", address, *fleet.certificates("router"))
            )
        for each in tmp_path.glob("*.*"):
            each.unlink()
        assert fleet.add(address) == name
        with fleet.engine(address, *fleet.certificates(name)), grpc.insecure_channel(server.address) as channel:
            server.wait_ready()
            inference = inference_pb2_grpc.InferenceStub(channel)
            assert ask(inference, request("again", max_tokens=5)).ids() == expected_tokens(b"again", 5, 258)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--listen=0.0.0.0:0"],
            "--listen 0.0.0.0:0 is reachable from other hosts: give --channel-tls-cert, --channel",
        ),
        (
            ["--channel-tls-cert=router.pem"],
            "--channel-tls-cert, --channel-tls-key and --channel-tls-ca must be given to",
        ),
        (["--listen=unix:x", "--channel-token-file=token"], "--channel-token-file: only for HOST:PORT"),
        (["--listen=shm:x", "--health-listen=127.0.0.1:1"], "--health-listen: only beside HOST:PORT and unix:PATH"),
        (["--channel-token-file=absent"], "--channel-token-file: cannot read absent: No such file"),
        (["--channel-token-file=empty"], "--channel-token-file: empty must hold a token, or the old and the new one"),
        (["--channel-token-file=three"], "--channel-token-file: three must hold a token, or the old and the new one"),
        (["--channel-token-file=large"], "--channel-token-file: large has more than 4096 bytes"),
        (["--channel-token-file=bytes"], "--channel-token-file: bytes must hold printable ASCII"),
        (["--channel-token-file=/dev/zero"], "--channel-token-file: /dev/zero is not a regular file"),
        (["pair", "router.pem", "127.0.0.1.key", "ca.pem"], "not a certificate and its own unencrypted key in PEM"),
        (["pair", "127.0.0.1.pem", "127.0.0.1.key", "token"], "--channel-tls-ca token: holds no certificates in PEM"),
        (
            ["pair", "router.pem", "router.key", "ca.pem"],
            "not a certificate for an engine: unsuitable certificate purpose",
        ),
    ],
)
def test_a_wrong_file_is_one_clear_line_and_exit_code_two(tmp_path: Path, options: list[str], complaint: str) -> None:
    Authority(tmp_path, days=1).add(["127.0.0.1"])
    for name, content in {"token": b"t", "empty": b"\n", "three": b"1\n2\n3\n", "bytes": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "large").write_bytes(b"x" * 5000)
    if options[0] == "pair":
        options = [
            f"--channel-tls-{kind}={file}" for kind, file in zip(("cert", "key", "ca"), options[1:], strict=True)
        ]
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_server.engine", "--listen=127.0.0.1:0", "--model=synthetic", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert result.returncode == 2
    assert complaint in " ".join(result.stderr.split())
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("guard", ["token", "certificates"])
def test_an_engine_that_other_hosts_can_reach_starts_with_a_guard(fleet: Fleet, guarded: Guarded, guard: str) -> None:
    options = [fleet.token()] if guard == "token" else fleet.certificates(guarded.name)
    with fleet.engine("0.0.0.0:0", *options) as log:
        is_warned = "without --channel-tls-cert tokens, prompts and answers travel in the clear" in log.read_text()
    assert is_warned == (guard == "token")


def test_a_probe_without_a_certificate_asks_for_health_and_for_nothing_else(fleet: Fleet, guarded: Guarded) -> None:
    address, probed = free_address(), free_address()
    options = [*fleet.certificates(guarded.name), fleet.token(), f"--health-listen={probed}"]
    with fleet.engine(address, *options), grpc.insecure_channel(probed) as channel:
        health = subprocess.run(
            [sys.executable, "-m", "pagoda_server.cli", "health", "--address", probed], capture_output=True, check=False
        )
        assert (health.returncode, health.stdout) == (0, b"SERVING\n")
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_stream("/pagoda.engine.v1.Engine/Connect")(iter([b""])).next()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
