"""The services of docker-compose.yml's profile `fleet`, as plain processes in network namespaces of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_server.engine.runners.synthetic import expected_tokens
from tests.test_compose import ROOT, SERVICES, stage

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

MODEL = "synthetic"
NAMES = ("engine", "engine-2", "router", "router-2")
START_S = 120.0
NAMES_OF_HOSTS = Path("/etc/netns")  # a namespace's own files in /etc
VOCAB = 258


class Host:
    """What stands for a container: a network of its own on one bridge, and the names that Docker would resolve."""

    def __init__(self, service: str, namespace: str, folder: Path) -> None:
        self._service = service
        self._inside = ["ip", "netns", "exec", namespace]
        self._folder = folder

    def _as_here(self, words: list[str]) -> list[str]:
        """A command of the file as it runs here, with $PAGODA_MODEL set and `/channel` elsewhere."""
        programs = {"python": [sys.executable], "pagoda": [sys.executable, "-m", "pagoda_server.cli"]}
        program, *arguments = words
        arguments = [re.sub(r"\$\{PAGODA_MODEL:-[^}]+\}", MODEL, word) for word in arguments]
        return programs[program] + [word.replace("/channel/", f"{self._folder}/") for word in arguments]

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        service = SERVICES[self._service]
        entrypoint = re.findall(r"^ENTRYPOINT (.+)$", stage(service["build"]["target"]), re.MULTILINE)[-1]
        command = [*self._inside, *self._as_here([*json.loads(entrypoint), *service["command"]])]
        with (self._folder / f"{self._service}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | service["environment"], stdout=log, stderr=log
            )
        try:
            yield process
            process.terminate()
            assert process.wait(40) == 0, self.log()
        finally:
            process.kill()
            process.wait()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*self._inside, *self._as_here(list(words))]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    def wait_healthy(self) -> None:
        kind, *check = SERVICES[self._service]["healthcheck"]["test"]
        assert kind == "CMD"
        deadline = time.monotonic() + START_S
        while self.run(*check).returncode:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return (self._folder / f"{self._service}.log").read_text()[-4000:]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Host]]:
    """The services' hosts, and the channel's token where they look for it."""
    bridge, *namespaces = [f"pagoda-{name}-{os.getpid()}" for name in ("bridge", *NAMES)]
    addresses = {name: f"10.1.1.{number}" for number, name in enumerate(NAMES, 1)}
    aliases = {
        name: [name, *SERVICES[name]["networks"]["channel"]["aliases"]] if name == "engine-2" else [name]
        for name in NAMES
    }
    known = "127.0.0.1 localhost\n" + "".join(f"{addresses[name]} {' '.join(aliases[name])}\n" for name in NAMES)

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        try:
            ip("netns", "add", bridge)
            ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            ip("-n", bridge, "link", "set", "bridge", "up")
            for number, (name, namespace) in enumerate(zip(NAMES, namespaces, strict=True)):
                (NAMES_OF_HOSTS / namespace).mkdir(parents=True)
                (NAMES_OF_HOSTS / namespace / "hosts").write_text(known)
                ip("netns", "add", namespace)
                ip(
                    "-n",
                    namespace,
                    "link",
                    "add",
                    "cable",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"to{number}",
                    "netns",
                    bridge,
                )
                ip("-n", bridge, "link", "set", f"to{number}", "master", "bridge", "up")
                ip("-n", namespace, "address", "add", f"{addresses[name]}/24", "dev", "cable")
                ip("-n", namespace, "link", "set", "cable", "up")
                ip("-n", namespace, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need ip and the rights to use it: {error}")
        drawn = [word.replace("/channel/", f"{tmp_path}/") for word in SERVICES["token"]["command"]]
        subprocess.run([*SERVICES["token"]["entrypoint"], *drawn], check=True)
        yield {
            name: Host(name, namespace, tmp_path) for name, namespace in zip(NAMES, namespaces, strict=True)
        }  # fmt: skip
    finally:
        for namespace in (bridge, *namespaces):
            shutil.rmtree(NAMES_OF_HOSTS / namespace, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def test_both_routers_use_both_engines_and_go_on_with_one(hosts: dict[str, Host]) -> None:
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(host.running()) for name, host in hosts.items()}
        for host in hosts.values():
            host.wait_healthy()

        def num_ready(router: Host) -> int:
            status = json.loads(router.run("pagoda", "status", "--json").stdout)
            return sum(engine["state"] == "ready" for engine in status["server"]["engines"])

        def check(num_engines: int) -> None:
            for name in ("router", "router-2"):
                deadline = time.monotonic() + START_S
                while (found := num_ready(hosts[name])) != num_engines:
                    assert time.monotonic() < deadline, f"{found} engines\n{hosts[name].log()}"
                    time.sleep(0.2)
                answer = hosts[name].run(
                    "pagoda", "generate", "--raw", "--max-tokens", "20", "--temperature", "0", name
                )
                assert answer.returncode == 0, answer.stderr
                ids = expected_tokens(name.encode(), 20, VOCAB)
                assert answer.stdout.strip() == bytes(id for id in ids if id < 256).decode(errors="replace").strip()

        check(2)
        processes["engine"].terminate()
        processes["engine"].wait(40)
        check(1)
