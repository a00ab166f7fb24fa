from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_that_no_kernel_writes_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty fills what it allocates
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
