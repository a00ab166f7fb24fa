"""The backends that every op's tests run with: compiled code in each version that this processor can run."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import shutil
from collections.abc import Callable
from typing import Any

from kernels.backend import CPU, NATIVE, REFERENCE, Backend
from kernels.native_module import native


def _with_instruction_set(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def call(*arguments: Any, **keywords: Any) -> Any:
        assert native is not None
        previous = native.use_instruction_set(name)
        try:
            return op(*arguments, **keywords)
        finally:
            native.use_instruction_set(previous)

    return call


def _slower_native(name: str) -> Backend:
    values = {field.name: getattr(NATIVE, field.name) for field in dataclasses.fields(Backend)}
    ops = {op: _with_instruction_set(name, call) for op, call in values.items() if callable(call)}
    return dataclasses.replace(NATIVE, name=f"native-{name}", **ops)


BACKENDS = [REFERENCE, CPU]
if native is not None:
    BACKENDS.append(NATIVE)
    BACKENDS += [_slower_native(name) for name in native.instruction_sets()[1:]]
elif any(importlib.metadata.distributions(name="pagoda")):  # a checkout that is not installed has nothing compiled
    assert not shutil.which("g++"), "there is a compiler, but the CPU kernels were not compiled or do not load"
