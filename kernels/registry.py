"""The backends by name; one is chosen at start."""

from __future__ import annotations

from pagoda_server.kernels.backend import BACKENDS, Backend

TRITON_BACKENDS = ("triton", "triton-int8", "triton-fp8")  # by name, since most machines cannot import them


def load_backend(name: str) -> Backend:
    """Return the backend of this name; ValueError if there is none, ImportError if it needs Triton and there is none.

    reference           plain torch that runs on any device
    cpu                 torch's own fused and packed operations
    native              compiled code for everything but products; only if `has_native()`
    native-whole        and products with weights as they are; only if `has_native()`
    native-int8         and products in int8; only if `has_native()`
    native-int8-weight  and weights in int8, products in bfloat16; only if `has_native_int8_weight()`
    native-int4         and weights in 4 bits where the checkpoint has such, int8 elsewhere; only if `has_native()`
    triton              kernels for a GPU; with -int8 or -fp8, and weights of that
    """
    if name in TRITON_BACKENDS:
        from pagoda_server.kernels.triton import backend as triton  # a machine without a GPU never loads Triton

        return triton.BACKENDS[name]
    if name not in BACKENDS:
        raise ValueError(f"no kernel backend is called {name!r}; there are {', '.join((*BACKENDS, *TRITON_BACKENDS))}")
    return BACKENDS[name]
