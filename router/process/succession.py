"""How the first process of a server goes on in the code that is installed now, once an upgrade's last router has ended.

It runs another program in its place (execve): pid, children and their pipes stay, and so do requests to upgrade. What
it knows of them goes along in a file without a name. Before that, another process of the new code has said that it
understands it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...settings import ServeConfig

log = logging.getLogger("pagoda.router")

PROGRAM = ("-m", "pagoda_server.router.process")
CHECK, GO_ON = "--check", "--go-on"
CHECK_S = 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)  # wait until the new program has handlers


@dataclass(frozen=True, slots=True)
class ChildState:
    """A running child.

    stdin, stdout  this process's ends of its pipes; no stdout: the child shares this process's
    restarts       how often it has been started again
    """

    pid: int
    stdin: int
    stdout: int | None
    restarts: int


@dataclass(frozen=True, slots=True)
class Handover:
    """A server whose routers are all children.

    config   settings, with the actual ports
    folders  those of the models, by name; the first one's is --model's
    private  folder of the server's own files
    number   of the routers' generation; `last` is the highest one that there was
    address  of the engine that this process has spawned; None: there is none
    asks     descriptor on which requests to upgrade wait; None: there is none
    adapters those of that engine, as `Adapter.to_json` describes them
    """

    config: ServeConfig
    folders: dict[str, str]
    private: str
    number: int
    last: int
    routers: list[ChildState]
    address: str | None
    engine: ChildState | None
    asks: int | None
    adapters: list[dict[str, object]] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handover:
        """Raises TypeError, KeyError or ValueError if another version of this code has written it otherwise."""
        given = json.loads(text)
        engine = given["engine"] and ChildState(**given["engine"])
        routers = [ChildState(**router) for router in given["routers"]]
        config = ServeConfig(**given["config"])
        return cls(**(given | {"config": config, "routers": routers, "engine": engine}))

    def descriptors(self) -> list[int]:
        """What has to stay open."""
        children = [*self.routers, *([self.engine] if self.engine else [])]
        all_of_them = [self.asks, *(end for child in children for end in (child.stdin, child.stdout))]
        return [each for each in all_of_them if each is not None]


def objection(handover: Handover) -> str:
    """Ask the installed code whether it can go on from here. Return why it cannot; "": it can."""
    try:
        command = [sys.executable, *PROGRAM, CHECK]
        subprocess.run(
            command, input=handover.to_json(), text=True, check=True, timeout=CHECK_S, stderr=subprocess.PIPE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        said: list[str] = error.stderr.strip().splitlines()
        return said[-1] if said else f"exit code {error.returncode}"
    return ""


def go_on(handover: Handover) -> None:
    """Run the installed code in this process. Returns only if that fails."""
    kept = {0, 1, 2, *handover.descriptors()}
    with tempfile.TemporaryFile("w+") as file:
        file.write(handover.to_json())
        file.flush()
        file.seek(0)
        # Libraries may have opened others for their children, too. A port that is open and not listened on loses calls.
        others = {int(name) for name in os.listdir("/dev/fd")} - kept
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            _set_inheritable(others, False)
            _set_inheritable((*kept, file.fileno()), True)
            for handler in logging.getLogger().handlers:
                handler.flush()
            os.execv(sys.executable, [sys.executable, *PROGRAM, GO_ON, str(file.fileno())])
        except OSError as error:
            _set_inheritable(handover.descriptors(), False)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            log.error("the first process keeps its code: %s", error.strerror)


def take_over(file: int) -> Handover:
    """Read what the program that ran in this process before has left."""
    with open(file) as left:
        handover = Handover.from_json(left.read())
    _set_inheritable(handover.descriptors(), False)
    return handover


def unblock_signals() -> None:
    """Let signals in that have come since `go_on`: their handlers are there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _set_inheritable(descriptors: Iterable[int], is_inheritable: bool) -> None:
    for descriptor in descriptors:
        with suppress(OSError):  # of the folder that was listed
            os.set_inheritable(descriptor, is_inheritable)


class Inherited:
    """A child that the program started which ran in this process before, as `subprocess.Popen` would show it."""

    def __init__(self, state: ChildState) -> None:
        self.pid = state.pid
        self.stdin = open(state.stdin, "wb")  # noqa: SIM115 (as long as the child)
        self.stdout = None if state.stdout is None else open(state.stdout, "rb")  # noqa: SIM115
        self._code = 0
        self._has_ended = threading.Event()
        threading.Thread(target=self._reap, name=f"child {self.pid}", daemon=True).start()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._has_ended.set()

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._code

    def poll(self) -> int | None:
        return self._code if self._has_ended.is_set() else None

    def send_signal(self, number: int) -> None:
        if not self._has_ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def folder_of(address: str) -> Path | None:
    """The folder that was made for a spawned engine's socket, if there is one."""
    return Path(address.removeprefix("unix:")).parent if address.startswith("unix:") else None
