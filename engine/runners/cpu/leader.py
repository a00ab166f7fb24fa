"""Rank 0's side of a tensor-parallel group: it starts the other ranks, sends them its steps, and ends with them."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ....settings import EXIT_CONFIG, EXIT_FAILURE
from ....settings.engine import EngineConfig
from ...core.errors import ConfigError, EngineError
from .ranks import join, leave, receive_frame, send_frame, share_of

log = logging.getLogger("pagoda.engine")


def exit_at_once() -> None:
    """End this process: nothing is retried without a rank. Whatever started the engine starts it again."""
    logging.shutdown()
    os._exit(EXIT_FAILURE)


class Leader:
    """The processes of all ranks but this one, which end when this process ends, however it ends.

    Each rank gets a socket of its own. The ranks exchange partial sums over the loopback interface.

    on_loss  called on another thread when a rank ends before `close`
    """

    def __init__(self, config: EngineConfig, on_loss: Callable[[], None] = exit_at_once) -> None:
        self.share = share_of(0, config.tensor_parallel)
        self._config, self._on_loss = config, on_loss
        self._is_in_step, self._is_closed = True, False
        # The ranks meet through an unnamed file: no other user can open it, and it vanishes with them.
        self._store = os.memfd_create("pagoda-ranks")
        self._sockets: list[socket.socket] = []
        self._asked: list[socket.socket] = []  # for what ranks answer beside the steps
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.tensor_parallel):
            self._start(rank)

    def wait_until_loaded(self) -> int:
        """Wait for the other ranks, and return the bytes of their weights.

        Raises ConfigError if a rank cannot serve with these settings.
        """
        weight_bytes = 0
        for rank, (ours, process) in enumerate(zip(self._sockets, self.processes, strict=True), 1):
            if (loaded := receive_frame(ours)) is None:
                code = process.wait()
                message = f"--tensor-parallel: rank {rank} ended with code {code} before it had loaded its part"
                raise ConfigError(message) if code == EXIT_CONFIG else EngineError(message)
            weight_bytes += int(loaded)
        for each in (*self._sockets, *self._asked):
            each.settimeout(self._config.hang_timeout_s)
        for ours in self._sockets:
            send_frame(ours, b"join")
        join(self._config, self._store, 0)
        return weight_bytes

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks. The first that fails leaves the ranks out of step."""
        was_in_step, self._is_in_step = self._is_in_step, False
        for each in self._sockets:
            send_frame(each, message)
        self._is_in_step = was_in_step

    def ask(self, question: bytes) -> None:
        """Ask the other ranks for what they do beside the steps. One thread asks, and waits for `answers` then."""
        for each in self._asked:
            send_frame(each, question)

    def answers(self) -> list[bytes]:
        """The answers to the last question, in the order of ranks. Raises EngineError if a rank has ended or hangs."""
        try:
            found = [receive_frame(each) for each in self._asked]
        except TimeoutError:
            message = f"--tensor-parallel: a rank has not answered for {self._config.hang_timeout_s:g} s"
            log.error("%s: the engine ends with it", message)
            self._on_loss()
            raise EngineError(message) from None
        if any(each is None for each in found):
            raise EngineError("--tensor-parallel: a rank has ended")
        return [each for each in found if each is not None]

    @contextmanager
    def step(self, message: bytes) -> Iterator[None]:
        """Send what this rank computes inside, too. If that fails, the others wait for its sums in vain."""
        self.send(message)
        self._is_in_step = False
        yield
        self._is_in_step = True

    def check_in_step(self) -> None:
        """Raise EngineError if the other ranks do not wait for the next step."""
        if not self._is_in_step:
            raise EngineError("--tensor-parallel: a step failed on one rank, so the group must start again")

    def close(self) -> None:
        """End the group. Its processes have ended then."""
        self._is_closed = True
        for each in (*self._sockets, *self._asked):
            each.close()
        leave()
        for process in self.processes:
            process.kill()
            process.wait()
        os.close(self._store)

    def _start(self, rank: int) -> None:
        (ours, theirs), (asked, answering) = socket.socketpair(), socket.socketpair()
        with theirs, answering:
            kept = [theirs.fileno(), answering.fileno(), self._store]
            arguments = map(str, (*kept[:2], os.getpid()))
            command = [sys.executable, "-m", "pagoda_server.engine.runners.cpu.follower", *arguments]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, pass_fds=kept))
        self._sockets.append(ours)
        self._asked.append(asked)
        threading.Thread(target=self._watch, args=(rank, self.processes[-1]), name=f"rank {rank}", daemon=True).start()
        start = {"config": asdict(self._config), "rank": rank, "store": self._store}
        send_frame(ours, json.dumps(start).encode())

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._is_closed and code != EXIT_CONFIG:  # `wait_until_loaded` reports that one
            log.error("rank %d of %d ended with %d: the engine ends with it", rank, self.share.count, code)
            self._on_loss()
