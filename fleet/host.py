"""A host: a place on some machine that runs one engine or router as a child, and answers for it.

Only control passes here: start, address, members, drain, the exit code and the last lines of the log. Tokens go from
engines to routers, so a host that is slow or cut off touches no stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from .. import installed_version
from ..channel.address import check_address
from ..router.engines.waiting import read_mark
from ..runtime.authority import write_whole
from ..settings import EngineConfig, ServeConfig, Settings
from ..settings.router import FILE_PREFIX, environment_without_secrets
from ..settings.sources import environment_without_settings, read_settings
from .health import Health

LOG_LINES = 50
MEMBERS_OPTION = "--engine"  # of a router; it names the file of members
CONFIG_OPTION = "--config"  # of a router; it names the file of its settings


class State(StrEnum):
    EMPTY = "empty"  # it has been given no engine since it was placed, or since its machine was lost
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"
    GONE = "gone"  # there is no such host any more, and none will come by itself


@dataclass(frozen=True, slots=True)
class Report:
    """What a host says of its engine or router.

    address    where it is reached; empty: it does not listen yet
    node       names the machine
    exit_code  None: it has not ended
    log        the last lines that it has logged
    version    of the server that is installed there
    warning    what is wrong with the machine; empty: nothing is
    http       a router's URL of HTTP; empty: it has none
    mark       what a router writes while requests wait there for an engine
    silent_s   how long a router has not answered its host
    """

    state: State = State.EMPTY
    address: str = ""
    node: str = ""
    pid: int = 0
    exit_code: int | None = None
    log: tuple[str, ...] = ()
    version: str = ""
    warning: str = ""
    http: str = ""
    mark: str = ""
    silent_s: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Report:
        """Make one of what `Host.report` returns. Unknown names are left out: the host may be of a newer version."""
        known = {field.name for field in fields(cls)}
        report = cls(**{name: value for name, value in given.items() if name in known})
        return cls(**asdict(report) | {"state": State(report.state), "log": tuple(report.log)})


class Host:
    """Runs one engine or router.

    node     names the machine
    ip       its address, at which the child listens
    warning  what is wrong with it; empty: nothing is
    """

    def __init__(self, node: str, ip: str, warning: str = "") -> None:
        self._node = node
        self._ip = ip
        self._process: subprocess.Popen[str] | None = None
        self._folder: Path | None = None
        self._address = self._http = ""
        self._is_draining = False
        self._health: Health | None = None  # of a router that listens
        self._warning = warning
        self._log: deque[str] = deque(maxlen=LOG_LINES)

    def start(self, arguments: Sequence[str], files: Mapping[str, bytes]) -> None:
        """Start an engine, unless one runs.

        arguments  its command line, without its address
        files      contents of files that only it may read, by the option that names each
        """
        self._start(["pagoda_server.engine", f"--node={self._node}", *arguments], files, 0, EngineConfig)

    def start_router(self, arguments: Sequence[str], files: Mapping[str, bytes], port: int) -> None:
        """Start a router, unless one runs. The arguments are those of `start`; 0: it takes a free port."""
        self._start(["pagoda_server.cli", "serve", *arguments], files, port, ServeConfig)

    def _start(self, arguments: Sequence[str], files: Mapping[str, bytes], port: int, config: type[Settings]) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end_health()
        self._remove_files()
        self._folder = Path(tempfile.mkdtemp(prefix="pagoda-engine-"))  # which no other user can enter
        self.update(files)
        paths = {option: str(self._folder / option.lstrip("-")) for option in files}
        given = [f"{option}={FILE_PREFIX if option == MEMBERS_OPTION else ''}{path}" for option, path in paths.items()]
        host = f"[{self._ip}]" if ":" in self._ip else self._ip
        command = [sys.executable, "-m", *arguments, *given]
        self._address, self._http, self._is_draining = "", "", False
        self._process = subprocess.Popen(
            [*command, f"--listen={host}:{port}", "--exit-with-parent"],
            stdin=subprocess.PIPE,  # which ends when this process does, however it ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment_without_settings(environment_without_secrets(), config),
            start_new_session=True,
        )
        is_router = config is ServeConfig
        threading.Thread(target=self._read_address, args=(self._process.stdout, is_router), daemon=True).start()
        threading.Thread(target=self._read_log, args=(self._process.stderr,), daemon=True).start()

    def update(self, files: Mapping[str, bytes]) -> None:
        """Replace files of the child, by option."""
        if self._folder is not None:
            for option, content in files.items():
                write_whole(self._folder / option.lstrip("-"), content, 0o600)

    def report(self) -> dict[str, Any]:
        """What `Report.of` reads, in types that every version knows."""
        process = self._process
        exit_code = None if process is None else process.poll()
        if process is None:
            state = State.EMPTY
        elif exit_code is not None:
            state = State.ENDED
        elif self._is_draining:
            state = State.DRAINING
        else:
            state = State.SERVING if self._address else State.STARTING
        pid = process.pid if process is not None else 0
        log = list(self._log) if state is not State.SERVING else []
        mark = read_mark(self._folder / MEMBERS_OPTION.lstrip("-")) if self._folder is not None else ""
        report = Report(
            state,
            self._address,
            self._node,
            pid,
            exit_code,
            version=installed_version(),
            warning=self._warning,
            http=self._http,
            mark=mark,
            silent_s=self._health.silent_s if self._health is not None else 0.0,
        )
        return asdict(report) | {"state": str(state), "log": log}

    def drain(self) -> None:
        """Ask the child to end: it takes nothing new, and ends once its streams have, or after its --grace-s."""
        if self._process is not None and not self._is_draining:
            self._is_draining = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill the child, and remove its files."""
        self._end_health()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._remove_files()

    def _end_health(self) -> None:
        if self._health is not None:
            self._health.close()
            self._health = None

    def _remove_files(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read_address(self, printed: IO[str], is_router: bool) -> None:
        """Find the address in the first line that has one; a router tells its URL there, too."""
        for line in printed:
            words = line.split()
            address, http = "".join(words[-1:]), next((word for word in words if word.startswith("http")), "")
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    address, http = said.get("address") or said.get("grpc", ""), said.get("http", "")
            with contextlib.suppress(ValueError):
                if not self._address:
                    check_address(address, can_be_shm=False, lowest_port=1)
                    self._address, self._http = address, http
                    if is_router:
                        self._health = Health(address, has_tls=self._has_tls())

    def _has_tls(self) -> bool:
        """Whether the router's file of settings gives it a certificate."""
        path = self._folder / CONFIG_OPTION.lstrip("-") if self._folder is not None else None
        return path is not None and path.exists() and "tls_cert" in read_settings(path, ServeConfig)

    def _read_log(self, logged: IO[str]) -> None:
        for line in logged:
            self._log.append(line.rstrip("\n")[:1000])
            print(line, end="", file=sys.stderr, flush=True)  # to the logs that whatever placed this host keeps
