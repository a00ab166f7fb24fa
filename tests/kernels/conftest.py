from __future__ import annotations

import pytest
import torch

from kernels import set_num_threads


@pytest.fixture(autouse=True)
def _same_random_tensors_in_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ops_whose_parts_are_shared_out() -> None:
    """Compiled code has more threads than there may be cores; torch has one, as the suite's workers share them."""
    set_num_threads(3)
    torch.set_num_threads(1)
