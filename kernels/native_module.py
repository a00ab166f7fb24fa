"""The compiled module, where there is one: built when Pagoda is installed, if a C++ compiler is at hand.

Its functions take addresses and sizes. They are called by the `…_native` function of each op, which checks dtypes and
layouts first and leaves to plain torch what the module has no code for.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from pagoda_server.kernels.processor import force_instruction_set

_compiled: ModuleType | None
try:
    _compiled = import_module("pagoda_server.kernels._native")  # by name: type checkers cannot see it
except ImportError:  # no compiler at installation, or a processor that plain torch serves as well
    _compiled = None
native = force_instruction_set(_compiled)

# The module's numbers for the dtypes that it has code for.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def has_native() -> bool:
    return native is not None


def instruction_set() -> str:
    """The instruction set in use: of compiled code, or of torch where there is none."""
    if native is not None:
        return str(native.instruction_set())
    return torch.backends.cpu.get_cpu_capability().lower()


def set_num_threads(num_threads: int) -> None:
    """How many threads share the work of an op, the caller's included."""
    if native is not None:
        native.set_num_threads(num_threads)


def keep_freed_memory() -> None:
    """From now on what tensors free is kept for the next step. Called once a model is loaded."""
    if native is not None:
        native.keep_freed_memory()


def takes(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.is_contiguous()
