"""How both processes log: lines of text or JSON on standard error. A thread writes them, so that no caller waits."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ..settings.engine import CommonSettings

MOST_LINES = 100  # of an exception
MOST_BYTES = 4 << 20  # of lines that wait for a reader of standard error; later ones are dropped
FLUSH_S = 1.0  # how long the end of the process waits for that reader
_PLAIN = re.compile(r"[\w.:/@%+-]+")  # a value that text shows without quotes

log = logging.getLogger("pagoda.log")


def start_logging(settings: CommonSettings) -> None:
    """Log to standard error as the settings say. Does nothing where logging has been set up, as in tests."""
    root = logging.getLogger()
    if root.handlers:
        return
    formatter = JsonFormatter() if settings.log_format == "json" else TextFormatter()
    root.setLevel(settings.log_level.upper())
    root.addHandler(LineWriter(sys.stderr.fileno(), formatter))
    logging.captureWarnings(True)
    if settings.log_format == "json":
        sys.stderr = _LoggedStream()  # whatever prints there, such as progress and the last error
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


class TextFormatter(logging.Formatter):
    """Time, logger, level and message on one line, and below it, indented, an exception.

    `extra={"fields": {…}}` adds `name=value` to the message. What is not printable is escaped: no value from outside
    can begin a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.name} {record.levelname} {printable(record.getMessage())}"
        for name, value in _fields(record).items():
            line += f" {name}={_as_text(value)}"
        for part in _exception(record).splitlines():
            line += f"\n    {printable(part)}"
        return line


class JsonFormatter(logging.Formatter):
    """An object of time, level, logger, message, a record's `fields` and its exception; in ASCII, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if exception := _exception(record):
            content["exception"] = exception
        return json.dumps(content, default=str)


class LineWriter(logging.Handler):
    """Writes lines to a descriptor in a thread of its own.

    While nothing reads the descriptor, lines wait in bounded memory. Lines beyond that are dropped, and counted in a
    line of their own as soon as there is a reader again.
    """

    def __init__(self, descriptor: int, formatter: logging.Formatter, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # of lines that wait or are being written
        self._num_dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode() + b"\n"
        except Exception:  # an argument that does not fit its message
            self.handleError(record)
            return
        with self._changed:
            if self._num_bytes + len(line) > self._most_bytes:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            self._num_bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every line is written, but not long: the reader may never come."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, FLUSH_S)

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                lines = self._waiting.popleft()
                while self._waiting and len(lines) + len(self._waiting[0]) <= select.PIPE_BUF:
                    lines += self._waiting.popleft()  # one write; a pipe takes so much without another's bytes between
            self._write(lines)
            with self._changed:
                dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                message = f"{dropped} lines were dropped here: standard error was not read"
                record = log.makeRecord(log.name, logging.WARNING, __file__, 0, message, (), None)
                self._write(self.format(record).encode() + b"\n")
            with self._changed:
                self._num_bytes -= len(lines)
                self._changed.notify_all()

    def _write(self, lines: bytes) -> None:
        with contextlib.suppress(OSError):  # no room on the disk, or no reader any more: nothing can be written
            while lines:
                try:
                    lines = lines[os.write(self._descriptor, lines) :]
                except BlockingIOError:  # another process has made the pipe so
                    select.select([], [self._descriptor], [])


class _LoggedStream(io.TextIOBase):
    """Takes the place of standard error, and logs each line that is printed."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, lines):
            log.log(logging.ERROR if line.startswith("error: ") else logging.INFO, "%s", line)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def print_line(settings: CommonSettings, logger: str, message: str, fields: Mapping[str, str]) -> None:
    """Print a line on standard output, for whatever has started this process.

    With JSON logs it is an object of their shape, with these fields. Where it cannot be written, because the disk is
    full or the reader has gone, that is logged, and this and later lines are lost.
    """
    if settings.log_format == "json":
        record = logging.LogRecord(logger, logging.INFO, __file__, 0, message, (), None)
        record.fields = fields
        message = JsonFormatter().format(record)
    try:
        print(message, flush=True)
    except OSError as error:
        log.warning("cannot write to standard output: %s", error.strerror)
        with open(os.devnull, "w") as nowhere:  # what waits in the buffer is written again at the process's end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def printable(text: str) -> str:
    """The text with escapes in place of line ends, control characters and marks that turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=(kind, error or kind(), trace))


def _time(record: logging.LogRecord) -> str:
    """When it was, in UTC, as RFC 3339 writes it."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _as_text(value: object) -> str:
    match value:
        case dict():
            value = ", ".join(f"{name}: {each}" for name, each in value.items())
        case list():
            value = ",".join(map(str, value))
    text = str(value)
    return text if _PLAIN.fullmatch(text) else printable(json.dumps(text, ensure_ascii=False))


def _exception(record: logging.LogRecord) -> str:
    """A record's exception. The middle of a long one is left out, as a request may decide how deep it is."""
    parts = [logging.Formatter().formatException(record.exc_info)] if record.exc_info else []
    lines = "\n".join([*parts, record.stack_info] if record.stack_info else parts).split("\n")
    if (left_out := len(lines) - MOST_LINES) > 0:
        half = MOST_LINES // 2
        lines[half:-half] = [f"  … {left_out} lines …"]
    return "\n".join(lines)
