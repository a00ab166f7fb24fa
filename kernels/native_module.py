"""The compiled module, built when Pagoda is installed if there is a C++ compiler, and its instruction set.

Its functions take addresses and sizes. The `…_native` functions of the ops call them after checking dtypes and layouts,
and leave cases that the module does not support to plain torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

VARIABLE = "PAGODA_INSTRUCTION_SET"
NO_COMPILED_CODE = "none"

# For each of our instruction sets, the limits of torch's own kernels, of oneDNN and of MKL; amx needs none.
_TORCH_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_TORCH_LIMITS = {
    "generic": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avxvnni": ("avx2", "AVX2_VNNI", "AVX2_E1"),
    "avx512": ("avx512", "AVX512_CORE_FP16", "AVX512"),
    "neon": ("default",),
    "neon-i8mm": ("default",),
}


def forced_name() -> str:
    """The value of PAGODA_INSTRUCTION_SET, which tests and support set; empty if it is not set."""
    return os.environ.get(VARIABLE, "")


def force_instruction_set(native: ModuleType | None) -> ModuleType | None:
    """Apply PAGODA_INSTRUCTION_SET, if it is set, and return the compiled module unless it is ruled out.

    The name none selects plain torch without limits. Any other name limits torch too, which reads its own variables at
    its first operation. Raises ValueError for a name that this processor or build does not support, or if torch has
    already run an operation.
    """
    name = forced_name()
    if not name:
        return native
    if name == NO_COMPILED_CODE:
        return None
    usable = native.instruction_sets() if native is not None else []
    if native is None or name not in usable:
        raise ValueError(f"{VARIABLE}={name}: this processor and build support {', '.join((*usable, 'none'))}")
    native.use_instruction_set(name)
    if limits := _TORCH_LIMITS.get(name):
        os.environ.update(zip(_TORCH_VARIABLES, limits, strict=False))
        found = torch.backends.cpu.get_cpu_capability()
        if found != limits[0].upper():
            raise ValueError(f"{VARIABLE}={name}: torch is already using {found}; import kernels earlier")
    return native


_compiled: ModuleType | None
try:
    _compiled = import_module("pagoda_server.kernels._native")  # by name, since type checkers cannot find it
except ImportError:  # there was no compiler at installation
    _compiled = None
native = force_instruction_set(_compiled)

# The module's numbers for the dtypes that it supports.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def has_native() -> bool:
    return native is not None


def instruction_set() -> str:
    """The instruction set in use by compiled code, or by torch if there is no compiled code."""
    if native is not None:
        return str(native.instruction_set())
    return torch.backends.cpu.get_cpu_capability().lower()


def set_num_threads(num_threads: int) -> None:
    """Set how many threads, the caller's included, share the work of an op."""
    if native is not None:
        native.set_num_threads(num_threads)


def keep_freed_memory() -> None:
    """Keep memory that tensors free for the next step from now on. Call this once a model is loaded."""
    if native is not None:
        native.keep_freed_memory()


def address(x: Tensor | None) -> int:
    """The address of a tensor's elements; 0 if there is no tensor."""
    return 0 if x is None else x.data_ptr()


def takes(x: Tensor) -> bool:
    """Whether the module supports the tensor's dtype and layout."""
    return x.dtype in DTYPES and x.is_contiguous()
