"""A worker's end of the pipes to the process that started it: a line of text is a message."""

from __future__ import annotations

import os
import sys
import threading

# From worker to parent, besides "listening on ADDRESS".
ENGINE_READY = "engine ready"
ENGINE_HANGS = "engine hangs"


class ParentLink:
    """Stands in for the engine's supervisor, which is the parent's. From the parent come its count of restarts.

    The end of standard input is the end of the parent, and of this process: a router that nobody looks after would keep
    the port.
    """

    def __init__(self) -> None:
        self.restarts = 0
        threading.Thread(target=self._listen, name="parent-link", daemon=True).start()

    def mark_ready(self) -> None:
        print(ENGINE_READY, flush=True)

    def kill(self) -> None:
        print(ENGINE_HANGS, flush=True)

    def _listen(self) -> None:
        for line in sys.stdin:
            self.restarts = int(line)
        os._exit(1)
