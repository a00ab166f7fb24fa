from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_tensors_in_every_run() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the suite's workers share the cores
