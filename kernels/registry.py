"""The backends by name. The engine chooses one when it starts."""

from __future__ import annotations

from dataclasses import replace

from .backend import CPU, NATIVE, REFERENCE, UNQUANTIZED, Backend

BACKENDS = {backend.name: backend for backend in (REFERENCE, CPU, NATIVE)}


def load_backend(name: str, weights: str = UNQUANTIZED, is_deterministic: bool = False) -> Backend:
    """Return a backend whose weights have this format. Raises ImportError for `triton` where that is not installed.

    reference  plain torch, on any device
    cpu        torch's own fused and packed operations
    native     compiled code, and torch's products where those are faster; it needs `has_native()`, and
               `has_native_int8_weight()` for that format
    triton     kernels for a GPU

    Raises ValueError for an unknown name, or for a format that the backend has no products for.
    """
    if name == "triton":
        from .triton.backend import TRITON as backend  # a machine without a GPU never loads Triton
    elif name in BACKENDS:
        backend = BACKENDS[name]
    else:
        raise ValueError(f"no kernel backend is called {name!r}; known: {', '.join((*BACKENDS, 'triton'))}")
    if weights not in backend.makers:
        raise ValueError(f"{name} has no products of weights in {weights!r}; known: {', '.join(backend.makers)}")
    return replace(backend, weights=weights, is_deterministic=is_deterministic)
