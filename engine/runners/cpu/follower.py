"""`python -m pagoda_server.engine.runners.cpu.follower FD`: a rank of a tensor-parallel group, without a scheduler."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

from ....settings import EXIT_CONFIG
from ....settings.engine import EngineConfig
from ...core.errors import ConfigError
from .ranks import join, receive_frame, send_frame, share_of
from .runner import ModelRunner

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Compute the steps that rank 0 sends, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may reach all processes of a terminal or a unit; rank 0 decides
    if sys.platform == "linux":  # a rank that is stopped does not read the end of its socket
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
    send_frame(leader, b"joined")
    while (message := receive_frame(leader)) is not None:
        runner.follow(message)
    return 0


if __name__ == "__main__":
    os._exit(main())  # nothing is left to do, and gloo may wait for ranks that have ended
