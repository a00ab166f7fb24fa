"""A pytest plug-in that ends a process whose GPU is lost, so that one fault does not fail every later test.

After an illegal access or a failed assertion in a kernel, all of CUDA's calls fail in the process that launched it. The
test that launched it is reported; then a worker of pytest-xdist ends and is replaced, and a pytest without workers
stops, to be started again for the other tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "invalid program counter",
    "not supported on global/shared address space",
    "hardware stack error",
    "launch timed out",
    "uncorrectable",
)


def tells_of_lost_device(text: str) -> bool:
    """Whether an error's text is one of CUDA's that all later calls repeat."""
    return "CUDA" in text and any(reason in text for reason in _LOST)


def wait_for_device() -> None:
    """Wait for all launched work; raise its error, if this process uses a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class DeviceFaults:
    def __init__(self, is_worker: bool) -> None:
        self._is_worker = is_worker
        self._is_lost = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """A fault shows when the host waits: let it show in the test that launched the kernel, not in the next one."""
        result = yield
        wait_for_device()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.excinfo is not None and not self._is_lost:
            self._is_lost = _is_lost(call.excinfo.value)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if self._is_lost and self._is_worker:
            os._exit(1)  # the reports are sent; its controller blames this test for the end, too
        if self._is_lost:
            item.session.shouldstop = f"{item.nodeid} lost the GPU of this process; the tests after it did not run"
        return result


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(DeviceFaults(is_worker=hasattr(config, "workerinput")))


def _is_lost(error: BaseException | None) -> bool:
    """Whether an error or one of its causes tells of a lost device, or the device answers no more."""
    while error is not None:
        if tells_of_lost_device(str(error)):
            return True
        error = error.__cause__ or error.__context__
    try:
        wait_for_device()
    except Exception:
        return True
    return False
