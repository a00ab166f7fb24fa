from __future__ import annotations

import math
from pathlib import Path

from bench.gpu.expected import lines, step_s, table
from pagoda_server.kernels.triton.inputs import LLAMA_1B, LLAMA_8B

PAGE = Path(__file__).parent.parent.parent / "docs" / "performance.md"


def test_the_page_shows_every_estimate_beside_its_measurement() -> None:
    rows = PAGE.read_text().splitlines()
    for line in lines():
        (row,) = (row for row in rows if row.startswith(line))
        assert row.removeprefix(line).strip(" |")  # "not measured", or what was


def test_nothing_is_expected_to_beat_what_the_card_allows() -> None:
    assert all(math.isnan(row.limit_s) or row.limit_s <= row.time_s for row in table())


def test_one_pass_reads_the_weights_once() -> None:
    for model in (LLAMA_8B, LLAMA_1B):
        two = step_s(model, 64, 1024) + step_s(model, 0, 0, 128, sampled=1)
        assert step_s(model, 64, 1024, 128, sampled=65) < 0.75 * two


def test_a_step_takes_longer_the_more_it_computes() -> None:
    times = [step_s(LLAMA_8B, *shape) for shape in ((1, 1024), (2, 1024), (2, 2048), (2, 2048, 100), (2, 2048, 8000))]
    assert times == sorted(times)
