from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagoda_server.kernels import set_num_threads
from tests.kernels.backends import INSTRUCTION_SETS, using


@pytest.fixture(autouse=True)
def _same_random_tensors_in_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ops_whose_parts_are_shared_out() -> None:
    """Give compiled code several threads, even on fewer cores, and torch one, since the suite's workers share cores."""
    set_num_threads(3)
    torch.set_num_threads(1)


@pytest.fixture(params=INSTRUCTION_SETS or [pytest.param("", marks=pytest.mark.skip(reason="needs compiled code"))])
def each_instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test once with every instruction set that compiled code can use on this processor."""
    with using(request.param):
        yield
