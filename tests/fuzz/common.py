"""What several targets need: folders of files, and what an error's text must be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_LINE = 1000
_MEMORY = "/dev/shm"


@contextmanager
def folder_of(**files: bytes) -> Iterator[Path]:
    """A folder that holds these files; in their names __ stands for a dot."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as name:
        for file, content in files.items():
            (Path(name) / file.replace("__", ".")).write_bytes(content)
        yield Path(name)


def check_line(error: Exception) -> None:
    """Fail unless the error's text is one line of bounded length: an operator reads it."""
    text = str(error)
    assert len(text) < MAX_LINE, text[:MAX_LINE]
    assert text.isprintable(), ascii(text)
