"""What tests of products share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagoda_server.kernels import GATED, Function, Linear

# Of the activations that have any.
PARAMETERS: Mapping[Function, tuple[float, ...]] = {"clamped_silu": (7.0,), "xielu": (0.8, 1.3)}


def gated(make: Callable[..., Linear]) -> Callable[..., Linear]:
    """The maker of gated products in the same format."""
    return lambda weight, bias, *rest: make(weight, bias, GATED, *rest)
