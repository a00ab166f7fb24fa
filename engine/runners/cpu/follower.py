"""`python -m pagoda_server.engine.runners.cpu.follower FD PID`: a rank of a tensor-parallel group, without a scheduler.

FD is its end of a socket to rank 0, which is the process PID.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback

from ....settings import EXIT_CONFIG, EXIT_FAILURE
from ....settings.engine import EngineConfig
from ...core.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compute the steps that rank 0 sends, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may reach all processes of a terminal or a unit; rank 0 decides
    # A rank that is stopped, or that loads its part, does not read the end of its socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
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
    while (message := receive_frame(leader)) is not None:
        runner.follow(message)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILURE
    os._exit(code)  # nothing is left to do, and gloo may wait for ranks that have ended
