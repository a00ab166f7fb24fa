"""The backends that every op's tests run with, among them compiled code for each instruction set of this processor."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagoda_server.kernels.backend import CPU, NATIVE, REFERENCE, Backend
from pagoda_server.kernels.native_module import NO_COMPILED_CODE, forced_name, native


def _instruction_sets() -> list[str]:
    """The instruction set in use and all slower ones; a forced one counts as the fastest."""
    if native is None:
        return []
    usable: list[str] = native.instruction_sets()
    return usable[usable.index(native.instruction_set()) :]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Make compiled code use this instruction set within the block."""
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
        return with_instruction_set(name, result) if callable(result) else result  # a product whose weight is packed

    return call


def _slower_native(name: str) -> Backend:
    fields = {field.name: getattr(NATIVE, field.name) for field in dataclasses.fields(Backend)}
    ops = {op: with_instruction_set(name, call) for op, call in fields.items() if callable(call)}
    makers = {weights: with_instruction_set(name, make) for weights, make in NATIVE.makers.items()}
    return dataclasses.replace(NATIVE, name=f"native-{name}", makers=makers, **ops)


INSTRUCTION_SETS = _instruction_sets()
BACKENDS = [REFERENCE, CPU]
if native is not None:
    BACKENDS += [NATIVE, *(_slower_native(name) for name in INSTRUCTION_SETS[1:])]
elif forced_name() != NO_COMPILED_CODE and any(importlib.metadata.distributions(name="pagoda-server")):
    # A checkout that is not installed has no compiled code.
    assert not shutil.which("g++"), "there is a compiler, but the CPU kernels were not compiled or do not load"
