"""A child that ends with the process which has started it."""

from __future__ import annotations

import os
import threading

from .service_manager import forget_manager


def exit_with_parent() -> None:
    """Exit at the end of standard input, from now on. The parent holds its other end, and has then ended."""
    forget_manager()
    threading.Thread(target=_exit_at_end_of_input, name="parent-watch", daemon=True).start()


def _exit_at_end_of_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)
