"""The backends by name. The engine chooses one when it starts."""

from __future__ import annotations

from .backend import BACKENDS, Backend

TRITON_BACKENDS = tuple(  # names alone, since most machines cannot import them
    f"triton{weights}{order}" for order in ("", "-deterministic") for weights in ("", "-int8", "-fp8")
)


def load_backend(name: str) -> Backend:
    """Return a backend. Raises ValueError for an unknown name, ImportError for a Triton backend without Triton.

    reference           plain torch, on any device
    cpu                 torch's own fused and packed operations
    native              compiled code for everything except products
    native-whole        the same, and products with unquantized weights
    native-int8         the same, and products in int8
    native-int8-weight  the same, and products of int8 weights in bfloat16; only if `has_native_int8_weight()`
    native-int4         the same, and products with 4-bit weights where the checkpoint has them, in int8 elsewhere
    triton              kernels for a GPU; triton-int8 and triton-fp8 have weights of that type
    …-deterministic     native-whole, -int8 or -int4, or any of a GPU, whose logits depend on nothing but a sequence's
                        own tokens

    The native backends need `has_native()`.
    """
    if name in TRITON_BACKENDS:
        from .triton import backend as triton  # a machine without a GPU never loads Triton

        return triton.BACKENDS[name]
    if name not in BACKENDS:
        raise ValueError(f"no kernel backend is called {name!r}; known: {', '.join((*BACKENDS, *TRITON_BACKENDS))}")
    return BACKENDS[name]
