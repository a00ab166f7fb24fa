from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pagoda_server.kernels.triton import configs
from pagoda_server.kernels.triton.configs import remembered, table_path, trying, tuned
from pagoda_server.kernels.triton.inputs import ModelShape
from pagoda_server.kernels.triton.linear import gated_linear_triton, linear_triton
from pagoda_server.kernels.triton.timing import num_copies
from pagoda_server.kernels.triton.tune import table, tune, tune_all
from pagoda_server.kernels.triton.tuning_spaces import (
    Space,
    decode_space,
    layer_spaces,
    prefill_space,
    product_spaces,
    sampling_space,
)
from tests.kernels.triton.device import DEVICE

TINY = ModelShape("tiny", 2, 4, 2, 16, 32, 48, 300)


@dataclass(frozen=True, slots=True)
class Config:
    tile: int
    num_stages: int


DEFAULT, NONE = Config(tile=16, num_stages=3), Config(tile=0, num_stages=0)


def space(default: Config = DEFAULT, broken: int = -1, wrong: int = -1, start: dict[str, int] | None = None) -> Space:
    """An op whose calls return their configuration. One tile does not compile, and another gives a wrong result."""

    def launch() -> Config:
        config = tuned("op", "key", default)
        if config.tile == broken:
            raise RuntimeError("out of resource")
        return config

    def result() -> torch.Tensor:
        return torch.tensor([math.nan if launch().tile == wrong else 1.0])

    return Space("op", lambda: [[launch]], result, start or {})


def cost(calls: Sequence[Callable[[], Config]]) -> float:
    """A timer whose minimum, 100 µs, is at a tile of 64 and 5 stages; launching no kernel costs 0."""
    config = calls[0]()
    if config == NONE:
        return 140.0
    return 100.0 + 100 * abs(math.log2(config.tile) - 6) + 10 * abs(config.num_stages - 5)


def test_fields_are_changed_while_that_is_faster() -> None:
    found = tune(space(), cost)
    assert found.key == "key"
    assert found.fields == {"tile": 64, "num_stages": 5}
    assert (found.default_us, found.best_us) == (320.0, 100.0)


def test_what_does_not_compile_or_gives_another_result_is_passed_over() -> None:
    assert tune(space(broken=64), cost).fields == {"tile": 32, "num_stages": 5}
    assert tune(space(wrong=64), cost).fields == {"tile": 32, "num_stages": 5}


def test_a_default_that_is_best_gets_no_entry() -> None:
    found = tune(space(Config(64, 5)), cost)
    assert found.fields is None
    assert table([found], "GPU")["configs"] == {}


def test_a_kernel_takes_the_librarys_place_only_where_it_is_faster() -> None:
    assert tune(space(NONE, start={"tile": 32, "num_stages": 5}), cost).fields == {"tile": 64, "num_stages": 5}
    assert tune(space(NONE, broken=64, start={"tile": 32, "num_stages": 5}), cost).fields is None


def test_the_table_is_what_launchers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    written = table([tune(space(), cost)], "NVIDIA H200")
    assert written["gpu"] == "NVIDIA H200"
    table_path("NVIDIA H200").write_text(json.dumps(written))
    configs._table.cache_clear()
    try:
        assert tuned("op", "key", DEFAULT) == Config(64, 5)
        assert tuned("op", "another key", DEFAULT) == DEFAULT
    finally:
        configs._table.cache_clear()


def test_an_op_that_cannot_be_tuned_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(tune_all([space(broken=16), space()], cost, limit_s=60))
    assert [one.fields for one in found] == [{"tile": 64, "num_stages": 5}]
    assert "op cannot be tuned: RuntimeError: out of resource" in capsys.readouterr().err


def test_what_the_time_does_not_reach_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tune_all([space()], cost, limit_s=-1)) == []
    assert "no time is left" in capsys.readouterr().err


def test_what_was_remembered_is_forgotten_where_configurations_are_tried() -> None:
    @remembered
    def chosen() -> Config:
        return tuned("op", "key", DEFAULT)

    assert chosen() == DEFAULT
    with trying("op", tile=128) as asked:
        assert chosen() == Config(128, 3)
    assert asked == {"key": {"tile": 128, "num_stages": 3}}
    assert chosen() == DEFAULT


def test_large_buffers_need_no_copies_and_small_ones_not_endlessly_many() -> None:
    assert [num_copies(size) for size in (10**9, 10**8, 1)] == [1, 3, 32]


def spaces() -> list[Space]:
    device = torch.device(DEVICE)
    return [
        decode_space(TINY, torch.bfloat16, device, ((2, 20, 1), (1, 40, 1))),
        prefill_space(TINY, torch.bfloat16, device, ((1, 20, 20), (1, 40, 8))),
        sampling_space(300, device, 2),
        *layer_spaces(TINY, device, (2, 3)),
        *product_spaces(TINY, "linear", linear_triton, gated_linear_triton, device, (1, 16)),
    ]


@pytest.mark.parametrize("at", range(16))
def test_every_op_launches_all_its_workloads_by_one_configuration(at: int) -> None:
    space = spaces()[at]
    expected = space.result()
    with trying(space.op, **space.start) as asked:
        for calls in space.workloads():
            calls[0]()
        result = space.result()
    assert len(asked) == 1
    assert all(next(iter(asked.values())).values())
    torch.testing.assert_close(result, expected, atol=0.02, rtol=0.02)
