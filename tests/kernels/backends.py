"""The backends that every op's tests run with: compiled code in each version that this processor can run."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagoda_server.kernels.backend import CPU, NATIVE, REFERENCE, Backend
from pagoda_server.kernels.native_module import native
from pagoda_server.kernels.processor import NO_COMPILED_CODE, forced_name


def _instruction_sets() -> list[str]:
    """Those in use and slower ones: an instruction set that is forced is the fastest that there is."""
    if native is None:
        return []
    usable: list[str] = native.instruction_sets()
    return usable[usable.index(native.instruction_set()) :]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compiled code computes with this instruction set inside."""
    assert native is not None
    previous = native.use_instruction_set(name)
    try:
        yield
    finally:
        native.use_instruction_set(previous)


def with_instruction_set(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with using(name):
            result = op(*arguments, **keywords)
        return with_instruction_set(name, result) if callable(result) else result  # a product with a packed weight

    return call


def _slower_native(name: str) -> Backend:
    fields = {field.name: getattr(NATIVE, field.name) for field in dataclasses.fields(Backend)}
    ops = {op: with_instruction_set(name, call) for op, call in fields.items() if callable(call)}
    return dataclasses.replace(NATIVE, name=f"native-{name}", **ops)


INSTRUCTION_SETS = _instruction_sets()
BACKENDS = [REFERENCE, CPU]
if native is not None:
    BACKENDS += [NATIVE, *(_slower_native(name) for name in INSTRUCTION_SETS[1:])]
elif forced_name() != NO_COMPILED_CODE and any(importlib.metadata.distributions(name="pagoda-server")):
    # A checkout that is not installed has nothing compiled.
    assert not shutil.which("g++"), "there is a compiler, but the CPU kernels were not compiled or do not load"
