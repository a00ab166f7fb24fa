"""The instruction set that PAGODA_INSTRUCTION_SET forces on compiled code and on torch, for tests and for support."""

from __future__ import annotations

import os
from types import ModuleType

import torch

VARIABLE = "PAGODA_INSTRUCTION_SET"
NO_COMPILED_CODE = "none"

# The limits of torch's own kernels, of oneDNN and of MKL for each of our instruction sets; amx is no limit.
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
    """The value of PAGODA_INSTRUCTION_SET; empty if it is not set."""
    return os.environ.get(VARIABLE, "")


def force_instruction_set(native: ModuleType | None) -> ModuleType | None:
    """Do what PAGODA_INSTRUCTION_SET says, if it is set; return the compiled code that may be used.

    none is plain torch as it is. Any other name limits torch too, which reads its variables at its first operation.
    Raises ValueError for a name that this processor or this build does not have, or if torch has already computed.
    """
    name = forced_name()
    if not name:
        return native
    if name == NO_COMPILED_CODE:
        return None
    usable = native.instruction_sets() if native is not None else []
    if native is None or name not in usable:
        raise ValueError(f"{VARIABLE}={name}: this processor, or this build, has {', '.join((*usable, 'none'))}")
    native.use_instruction_set(name)
    if limits := _TORCH_LIMITS.get(name):
        os.environ.update(zip(_TORCH_VARIABLES, limits, strict=False))
        found = torch.backends.cpu.get_cpu_capability()
        if found != limits[0].upper():
            raise ValueError(f"{VARIABLE}={name}: torch has already computed with {found}; import kernels earlier")
    return native
