"""`python -m pagoda_server.engine.runners.cpu.follower STEPS QUESTIONS PID`: a rank of a tensor-parallel group.

It has no scheduler. STEPS and QUESTIONS are its ends of sockets to rank 0, which is the process PID: it computes the
steps that come from one, and answers at the other what it is asked beside them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from ....settings import EXIT_CONFIG, EXIT_FAILURE
from ....settings.engine import EngineConfig
from ...core.errors import ConfigError

if TYPE_CHECKING:
    from .runner import ModelRunner

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compute the steps that rank 0 sends, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they may reach all processes of a terminal or a unit; rank 0 decides
    # A rank that is stopped, or that loads its part, does not read the end of its socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[3]):
        return EXIT_FAILURE  # rank 0 has ended before
    # Only now: torch takes seconds.
    from .ranks import join, receive_frame, send_frame, share_of
    from .runner import ModelRunner

    leader = socket.socket(fileno=int(sys.argv[1]))
    if (start := receive_frame(leader)) is None:
        return 0
    fields = json.loads(start)
    config, rank = EngineConfig(**fields["config"]), int(fields["rank"])
    try:
        runner = ModelRunner(config, share=share_of(rank, config.tensor_parallel))
    except ConfigError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    send_frame(leader, str(runner.info.weight_bytes).encode())
    if receive_frame(leader) is None:
        return 0
    join(config, fields["store"], rank)
    answering = socket.socket(fileno=int(sys.argv[2]))
    threading.Thread(target=_answer_all, args=(runner, answering), name="questions", daemon=True).start()
    while (message := receive_frame(leader)) is not None:
        runner.follow(message)
    return 0


def _answer_all(runner: ModelRunner, leader: socket.socket) -> None:
    from .ranks import receive_frame, send_frame

    while (question := receive_frame(leader)) is not None:
        send_frame(leader, runner.answer(question))


if __name__ == "__main__":
    code = EXIT_FAILURE
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:  # even if there is no memory left to print with
        os._exit(code)  # nothing is left to do, and gloo may wait for ranks that have ended
