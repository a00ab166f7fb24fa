"""What tests share: the default model's folder, and servers that take a while to start."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.triton_interpreter import patch_interpreter

# Servers and stubs are imported where they are used: tests of the kernels run where no gRPC package is.
if TYPE_CHECKING:
    import grpc

    from pagoda.v1 import admin_pb2_grpc, control_pb2_grpc, inference_pb2_grpc
    from tests.servers import Server

# In a script's background job SIGINT is ignored, and every process started here would inherit that. Tests that
# interrupt a process need a terminal's default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers and the servers that they start share the cores: with as many threads of torch's in each as there are cores,
# most wait for one that does not run. Read when torch is imported; --threads overrules it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# GPU kernels run in Triton's interpreter, on CPU tensors, unless TRITON_INTERPRET=0 says that there is a GPU. It is
# chosen when a kernel is defined, so before any is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# An instruction set that is forced limits torch in the tests' processes too, before its first operation.
if os.environ.get("PAGODA_INSTRUCTION_SET"):
    importlib.import_module("pagoda_server.kernels")


@pytest.fixture(autouse=True, scope="session")
def _triton_is_interpreted_without_detours() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "triton" in sys.modules and os.environ["TRITON_INTERPRET"] == "1":
            patch_interpreter(patch)
        yield


# gRPC's poller calls the loops of tests that have ended, and asyncio logs that in the test that runs then.
logging.getLogger("asyncio").addFilter(lambda record: "PollerCompletionQueue" not in record.getMessage())


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A clock that jumps to the event loop's next timer as soon as nothing else is left to do.

    A sleep then ends when all that can happen has happened, and a time is exact, however slow the machine is.
    """
    selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select, now = selector.select, time.monotonic()

    def select_or_jump(timeout_s: float | None) -> Any:
        nonlocal now
        found = select(timeout_s and 0)  # None: without a timer it really waits
        if timeout_s and not found:
            now += timeout_s
        return found

    monkeypatch.setattr(selector, "select", select_or_jump)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    yield
    monkeypatch.undo()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line per reason for skipped tests, most frequent first."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True, scope="session")
def _imported_modules_are_no_garbage() -> Iterator[None]:
    """Keep what collection imported out of every search for garbage: with torch's, one takes half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The default model, imported into the cache on first use; later runs find it there."""
    from pagoda_server.checkpoints import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def plain_model_folder(default_model_folder: Path) -> Path:
    """The default model with its weights dequantized, as transformers and others read it."""
    from pagoda_server.checkpoints.dequantized import dequantized

    return dequantized(default_model_folder)


@pytest.fixture(scope="session")
def synthetic_server() -> Iterator[Server]:
    """A server of the synthetic model, 2 ms per step. Tests share it and must leave it unchanged."""
    from tests.servers import running_server

    with running_server("--model", "synthetic", "--step-ms", "2", "--max-requests", "256") as server:
        yield server


@pytest.fixture
def channel(synthetic_server: Server) -> Iterator[grpc.Channel]:
    import grpc

    with grpc.insecure_channel(synthetic_server.address) as channel:
        yield channel


@pytest.fixture
def inference(channel: grpc.Channel) -> inference_pb2_grpc.InferenceStub:
    from pagoda.v1 import inference_pb2_grpc

    return inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture
def control(channel: grpc.Channel) -> control_pb2_grpc.ControlStub:
    from pagoda.v1 import control_pb2_grpc

    return control_pb2_grpc.ControlStub(channel)


@pytest.fixture
def admin(channel: grpc.Channel) -> admin_pb2_grpc.AdminStub:
    from pagoda.v1 import admin_pb2_grpc

    return admin_pb2_grpc.AdminStub(channel)
