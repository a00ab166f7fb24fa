from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from pagoda_server.kernels import INT4
from pagoda_server.kernels.triton import configs, tune
from pagoda_server.kernels.triton.configs import IS_INTERPRETED, remembered, table_path, trying, tuned
from pagoda_server.kernels.triton.inputs import ModelShape
from pagoda_server.kernels.triton.linear import linear_grouped_triton, linear_triton
from pagoda_server.kernels.triton.timing import num_copies
from pagoda_server.kernels.triton.tune import (
    CannotTune,
    Compilers,
    Found,
    Log,
    OutOfTime,
    Table,
    Tuner,
    search,
)
from pagoda_server.kernels.triton.tuning_spaces import (
    Space,
    Work,
    decode_space,
    layer_spaces,
    prefill_space,
    product_spaces,
    sampling_space,
    spaces,
)
from pagoda_server.kernels.triton.tuning_worker import Answer, Bench, Fields, Worker, WorkerDied
from tests.kernels.triton.device import DEVICE

pytestmark = pytest.mark.simulated

ROOT = Path(__file__).parent.parent.parent.parent
TINY = ModelShape("tiny", 2, 4, 2, 16, 32, 48, 300)
WHOLE_GROUPS = ModelShape("of whole groups", 2, 4, 2, 16, 32, 64, 300)
HEADER = {"gpu": "NVIDIA H200", "triton": "1", "torch": "2", "kernels": "3"}


@dataclass(frozen=True, slots=True)
class Config:
    tile: int
    num_stages: int


DEFAULT, NONE = Config(tile=16, num_stages=3), Config(tile=0, num_stages=0)
BEST = {"tile": 64, "num_stages": 5}


def space(default: Config = DEFAULT, broken: int = -1, wrong: int = -1, rivals: Sequence[Fields] = ()) -> Space:
    """An op whose calls return their configuration. One tile raises an error, and another gives a wrong result."""

    def launch() -> Config:
        config = tuned("op", "key", default)
        if config.tile == broken:
            raise RuntimeError("out of resource")
        return config

    def result() -> torch.Tensor:
        return torch.tensor([math.nan if launch().tile == wrong else 1.0])

    return Space("op, a shape", "op", lambda device: Work([[launch]], result, rivals))


def cost(calls: Sequence[Callable[[], Config]]) -> float:
    """A timer whose minimum, 100 µs, is at a tile of 64 and 5 stages; launching no kernel costs 140."""
    config = calls[0]()
    if config == NONE:
        return 140.0
    return 100.0 + 100 * abs(math.log2(config.tile) - 6) + 10 * abs(config.num_stages - 5)


def answer_to(bench: Bench, fields: Fields) -> Answer:
    try:
        return bench.time(fields)
    except RuntimeError as failure:
        return {"error": str(failure)}


def found_in(space: Space) -> Found:
    bench = Bench.open(space, torch.device("cpu"), cost)
    return search(space, partial(answer_to, bench), lambda candidates: None)


class FakeDevice(Worker):
    """A device that answers from `Bench`, counts what it is asked, and faults at one tile."""

    def __init__(self, *spaces: Space, faulty: int = -1, takes_s: float = 0.0) -> None:
        self._benches = {space.name: Bench.open(space, torch.device("cpu"), cost) for space in spaces}
        self._faulty, self._takes_s = faulty, takes_s
        self.asked: list[Fields] = []

    def ask(self, request: dict[str, object], timeout_s: float) -> Answer:
        fields: Fields = request["fields"]  # type: ignore[assignment]
        self.asked.append(fields)
        time.sleep(self._takes_s)
        if fields.get("tile") == self._faulty:
            raise WorkerDied("the process ended with -11")
        return answer_to(self._benches[str(request["space"])], fields)


class FakeCompiler(Worker):
    """A compiler that refuses one tile."""

    def __init__(self, refused: int = -1, deadly: int = -1) -> None:
        self._refused, self._deadly = refused, deadly

    def ask(self, request: dict[str, object], timeout_s: float) -> Answer:
        fields: Fields = request["fields"]  # type: ignore[assignment]
        if fields.get("tile") == self._deadly:
            raise WorkerDied("the process ended with -6")
        if fields.get("tile") == self._refused:
            return {"error": "CompilationError"}
        return {} if fields else {"default": asdict(DEFAULT), "rivals": []}

    def close(self) -> None:
        pass


def run(device: Worker, log: Path, *every: Space, compiler: Worker | None = None, limit_s: float = 60.0) -> list[Found]:
    """Tune with the log in a file. What was found before the time ran out is returned too."""
    found: list[Found] = []
    compilers = Compilers(2, lambda: compiler or FakeCompiler(), 90)
    try:
        found.extend(Tuner(device, compilers, Log(log, HEADER), time.monotonic() + limit_s).tune(every))
    except OutOfTime:
        pass
    finally:
        compilers.close()
    return found


def entries(log: Path) -> list[Answer]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_fields_are_changed_while_that_is_faster() -> None:
    found = found_in(space())
    assert found.key == "key"
    assert found.fields == BEST
    assert (found.default_us, found.best_us) == (320.0, 100.0)


def test_what_cannot_be_launched_or_gives_another_result_is_passed_over() -> None:
    assert found_in(space(broken=64)).fields == {"tile": 32, "num_stages": 5}
    assert found_in(space(wrong=64)).fields == {"tile": 32, "num_stages": 5}


def test_a_kernel_takes_the_librarys_place_only_where_it_is_faster() -> None:
    rivals = [{"tile": 32, "num_stages": 5}, asdict(NONE)]
    assert found_in(space(NONE, rivals=rivals)).fields == BEST
    assert found_in(space(NONE, broken=64, rivals=rivals)).fields is None


def test_the_library_takes_a_kernels_place_where_no_configuration_of_it_is_as_fast() -> None:
    rivals = [asdict(DEFAULT), asdict(NONE)]
    assert found_in(space(rivals=rivals)).fields == BEST
    assert found_in(space(broken=64, rivals=rivals)).fields == asdict(NONE)


def test_candidates_are_announced_before_they_are_tried() -> None:
    one = space()
    bench = Bench.open(one, torch.device("cpu"), cost)
    announced: list[Fields] = [{}]
    tried: list[Fields] = []

    def attempt(fields: Fields) -> Answer:
        assert fields in announced
        tried.append(fields)
        return bench.time(fields)

    search(one, attempt, announced.extend)
    assert len(tried) > 6


def test_a_default_that_cannot_be_measured_leaves_the_other_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Space("op, broken", "op", space(broken=16).work)
    device = FakeDevice(space())
    device._benches[broken.name] = Bench(torch.device("cpu"), cost, broken, broken.work(torch.device("cpu")),
                                         "key", asdict(DEFAULT), torch.ones(1))  # fmt: skip
    assert [one.fields for one in run(device, tmp_path / "log", broken, space())] == [BEST]
    assert "op, broken cannot be tuned: out of resource" in capsys.readouterr().err
    with pytest.raises(CannotTune):
        search(broken, lambda fields: {"error": "no"}, lambda candidates: None)


def test_a_configuration_that_breaks_the_device_costs_only_itself_and_is_never_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    device = FakeDevice(space(), faulty=64)
    assert [one.fields for one in run(device, log, space())] == [{"tile": 32, "num_stages": 5}]
    faults = [entry["asked"] for entry in entries(log) if entry.get("is_fault")]
    assert {fields["tile"] for fields in faults} == {64}
    again = FakeDevice(space(), faulty=64)
    assert [one.fields for one in run(again, log, space())] == [{"tile": 32, "num_stages": 5}]
    assert again.asked == []


def test_a_device_that_breaks_each_time_ends_the_run(tmp_path: Path) -> None:
    class Broken(FakeDevice):
        def ask(self, request: dict[str, object], timeout_s: float) -> Answer:
            return {"error": "gone", "is_fault": True} if self.asked else super().ask(request, timeout_s)

    other = Space("op, another shape", "op", space().work)
    with pytest.raises(WorkerDied, match="5 configurations in a row"):
        run(Broken(space(), other), tmp_path / "log", space(), other)


def test_what_does_not_compile_never_reaches_the_device(tmp_path: Path) -> None:
    device = FakeDevice(space())
    found = run(device, tmp_path / "log", space(), compiler=FakeCompiler(refused=64))
    assert [one.fields for one in found] == [{"tile": 32, "num_stages": 5}]
    device = FakeDevice(space())
    found = run(device, tmp_path / "other log", space(), compiler=FakeCompiler(deadly=64))
    assert [one.fields for one in found] == [{"tile": 32, "num_stages": 5}]
    assert all(fields.get("tile") != 64 for fields in device.asked)
    errors = [entry["error"] for entry in entries(tmp_path / "other log") if "error" in entry]
    assert errors
    assert set(errors) == {"does not compile: the process ended with -6"}


def test_a_second_run_goes_on_where_the_time_ran_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    other = Space("op, another shape", "op", space().work)
    slow = FakeDevice(space(), other, takes_s=0.05)
    assert run(slow, log, space(), other, limit_s=0.3) == []
    assert slow.asked
    device = FakeDevice(space(), other)
    found = run(device, log, space(), other)
    assert [one.fields for one in found] == [BEST, BEST]
    tried = [(entry["space"], json.dumps(entry["asked"])) for entry in entries(log)[1:]]
    assert len(tried) == len(set(tried))


def test_a_log_of_another_card_or_version_is_kept_and_not_used(tmp_path: Path) -> None:
    path = tmp_path / "log"
    one = space()
    Log(path, HEADER).add(one, BEST, {"time_us": 1.0})
    assert Log(path, {**HEADER, "kernels": "4"}).get(one, BEST) is None
    assert Log(path, HEADER).get(one, BEST) == {"time_us": 1.0}
    with path.open("a") as file:
        file.write('{"space": "op, a sh')  # killed as it wrote
    assert Log(path, HEADER).num_known == 1
    Log(path, HEADER).add(one, {}, {"time_us": 2.0})
    assert Log(path, HEADER).num_known == 2


def test_the_table_is_what_launchers_read_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = table_path("NVIDIA H200")
    Table(path, "NVIDIA H200").add(found_in(space()))
    Table(path, "NVIDIA H200").add(Found(Space("", "other", space().work), "another key", BEST, 2.0, 1.0))
    configs._table.cache_clear()
    try:
        assert tuned("op", "key", DEFAULT) == Config(64, 5)
        assert tuned("other", "another key", DEFAULT) == Config(64, 5)
        assert tuned("op", "another key", DEFAULT) == DEFAULT
    finally:
        configs._table.cache_clear()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # it was never there in part
    Table(path, "NVIDIA H200").add(found_in(space(Config(64, 5))))  # the default is best now
    assert json.loads(path.read_text())["configs"].keys() == {"other"}
    monkeypatch.setattr(tune.triton, "__version__", "0")
    Table(path, "NVIDIA H200")
    assert "rows are dropped" in capsys.readouterr().err


def test_a_worker_that_dies_or_hangs_is_started_again(tmp_path: Path) -> None:
    program = """if True:
        import json, os, sys, time
        print("started", file=sys.stderr)
        for line in sys.stdin:
            match json.loads(line):
                case "die": os._exit(7)
                case "hang": time.sleep(60)
                case "fault": print('{"error": "illegal access", "is_fault": true}', flush=True)
                case request: print(json.dumps({"echo": request}), flush=True)
    """
    worker = Worker([sys.executable, "-c", program], tmp_path / "log")
    try:
        assert worker.ask("one", 30.0) == {"echo": "one"}
        with pytest.raises(WorkerDied, match="ended with 7"):
            worker.ask("die", 30.0)
        assert worker.ask("two", 30.0) == {"echo": "two"}
        assert worker.ask("fault", 30.0)["is_fault"]
        assert worker.ask("three", 30.0) == {"echo": "three"}
        with pytest.raises(WorkerDied, match="no answer"):
            worker.ask("hang", 0.2)
        assert worker.ask("four", 30.0) == {"echo": "four"}
    finally:
        worker.close()
    assert (tmp_path / "log").read_text().count("started") == 4


LAUNCH = """if True:
    import json, os, sys, pathlib
    import torch, triton
    from pagoda_server.kernels.triton import launches
    from pagoda_server.kernels.triton.configs import trying
    from pagoda_server.kernels.triton.tuning_worker import known_spaces
    space, = [one for one in known_spaces(True) if one.name == sys.argv[1]]
    files = lambda: set(pathlib.Path(os.environ["TRITON_CACHE_DIR"]).rglob("*"))
    before = files()
    triton.runtime.driver.set_active(launches._NoDevice(90))
    for fields in json.loads(sys.argv[2]):
        with trying(space.op, **fields):
            try:
                space.work(torch.device("meta")).result()
            except AttributeError:  # it has compiled, and there is nothing to launch on
                print("new files:", len(files() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="compiles for another card than this machine's")
def test_the_command_compiles_in_parallel_what_a_launch_finds_in_the_cache(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    name = "linear_fp8_weight, tiny qkv, 1 rows"
    command = [sys.executable, "-m", "pagoda_server.kernels.triton.tune", "--rehearse", "--compilers", "2"]
    command += ["--out", str(tmp_path), "--only", name, "--limit-s", "300"]
    told = []
    for _ in range(2):
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr + (tmp_path / "tune.log").read_text()
        told.append(result.stdout)
    assert "1 of 1 shapes are tuned" in told[0]
    tried = entries(tmp_path / "rehearsal.jsonl")[1:]
    assert f"{len(tried)} configurations are in the log already" in told[1]
    assert json.loads((tmp_path / "rehearsal.json").read_text())["gpu"] == "rehearsal"
    good = [entry["asked"] or entry["default"] for entry in tried if "time_us" in entry][:3]
    arguments = ["-c", LAUNCH, name, json.dumps(good)]
    environment["TRITON_INTERPRET"] = "0"
    launched = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert launched.stdout == "new files: 0\n" * 3, launched.stderr


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


def test_products_come_first_and_names_are_unique() -> None:
    every = spaces()
    assert all("linear" in space.op for space in every[:20])
    assert len({space.name for space in every}) == len(every)


def tiny_spaces() -> list[Space]:
    return [
        decode_space(TINY, torch.bfloat16, ((2, 20, 1), (1, 40, 1))),
        prefill_space(TINY, torch.bfloat16, ((1, 20, 20), (1, 40, 8))),
        sampling_space(300, 2),
        *layer_spaces(TINY, (2, 3)),
        *product_spaces(TINY, "linear", linear_triton, (1, 16)),
        *product_spaces(WHOLE_GROUPS, "linear_4_bits", linear_grouped_triton, (16,), INT4),
    ]


@pytest.mark.parametrize("at", range(24))
def test_every_op_launches_all_its_workloads_by_one_configuration(at: int) -> None:
    space = tiny_spaces()[at]
    work = space.work(torch.device(DEVICE))
    expected = work.result()
    with trying(space.op, **(work.rivals[0] if work.rivals else {})) as asked:
        for calls in work.workloads:
            calls[0]()
        result = work.result()
    assert len(asked) == 1
    assert all(next(iter(asked.values())).values())
    torch.testing.assert_close(result, expected, atol=0.02, rtol=0.02)
