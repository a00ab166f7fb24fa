"""Threads that work on large requests take turns at the interpreter.

The event loop asks for the interpreter's lock several times for each token. One thread that computes in Python delays
it each time; three delayed streams by 100 ms and more, and the requests were done no sooner.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager

_TURN = threading.Lock()


def turn(is_large: bool) -> AbstractContextManager[object]:
    """Wait for a turn to run Python code on something large, in a thread; for what is small, do not wait."""
    return _TURN if is_large else contextlib.nullcontext()
