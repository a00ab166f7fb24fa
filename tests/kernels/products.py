"""What tests of products share."""

from __future__ import annotations

from collections.abc import Callable

from pagoda_server.kernels import GATED, Linear


def gated(make: Callable[..., Linear]) -> Callable[..., Linear]:
    """The maker of gated products in the same format."""
    return lambda weight, bias, *rest: make(weight, bias, GATED, *rest)
