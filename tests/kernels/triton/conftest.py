from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagoda_server.kernels.triton import configs, product


@pytest.fixture(autouse=True)
def _memory_that_no_kernel_writes_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty fills what it allocates
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def table() -> Iterator[dict[str, dict[str, dict[str, int]]]]:
    """The table of measurements of this GPU, which the test fills."""
    entries: dict[str, dict[str, dict[str, int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "_table", lambda: entries)
        product._choose.cache_clear()  # type: ignore[attr-defined]
        yield entries
    product._choose.cache_clear()  # type: ignore[attr-defined]
