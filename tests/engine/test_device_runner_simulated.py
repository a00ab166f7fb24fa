"""The runner of a device on a simulated GPU, which computes as late as it may, or at once.

Tests run on both. Kernels are the reference's, except where a test asks for Triton's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.runners import load, loaded_model
from pagoda_server.engine.runners.cuda.graphs import StepGraphs
from pagoda_server.engine.runners.cuda.outcomes import DeviceStep
from pagoda_server.engine.serving.main import engine_info
from pagoda_server.kernels import UNQUANTIZED, load_backend
from pagoda_server.kernels.triton.low_rank import TritonBank, add_low_rank_triton
from pagoda_server.settings.engine import EngineConfig, StepLimits
from tests.checkpoints.tiny_gguf import tiny_model
from tests.engine import test_device_runner
from tests.engine.lora import random_pairs, with_adapter, write_adapter
from tests.engine.test_device_runner import *  # noqa: F403
from tests.engine.test_device_runner import (
    PARAMS,
    Served,
    ask,
    device_runner,
    fill_cache,
    knowing,
    one_by_one,
    outputs,
)
from tests.engine.test_host_memory import (
    test_a_loaded_sequence_generates_what_an_undisturbed_run_does,  # noqa: F401
    test_steps_that_fail_once_change_no_token_of_a_loaded_sequence,  # noqa: F401
)
from tests.engine.test_on_gpu import (
    test_a_cache_that_the_device_cannot_hold_names_the_flag,  # noqa: F401
    test_graphs_give_what_the_kernels_give_one_by_one,  # noqa: F401
    test_launching_waits_for_nothing,  # noqa: F401
    test_without_a_size_the_cache_takes_most_of_what_is_free,  # noqa: F401
)
from tests.engine.tiny_models import ShuffledBlocks, generate, load_runner, random_prompt, saved_model
from tests.rehearsal import launched_reference
from tests.simulated_cuda import SimulatedCuda

pytestmark = pytest.mark.simulated

KINDS = {
    "late": {},
    "at once": {"is_late": False},
    "newest stream first": {"newest_is_early": True},
}
AT_ONCE_TOO = ("preempted", "start_in_one_step")
COPIES = ("loaded_sequence",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    kinds = ["late", *(["at once"] if any(part in name for part in AT_ONCE_TOO) else [])]
    if any(part in name for part in COPIES):
        kinds.append("newest stream first")
    if "cuda" not in metafunc.fixturenames or not _names_its_card(metafunc):
        metafunc.parametrize("cuda", kinds, indirect=True)


def _names_its_card(metafunc: pytest.Metafunc) -> bool:
    marks = metafunc.definition.iter_markers("parametrize")
    return any("cuda" in str(mark.args[0]) for mark in marks)


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    monkeypatch.setattr(test_device_runner, "DEVICE", "cuda")
    with SimulatedCuda(**KINDS[request.param]).in_place_of_cuda(monkeypatch) as device:
        reference = launched_reference(device)
        monkeypatch.setattr(
            loaded_model,
            "load_backend",
            lambda name, *rest: reference if name == "reference" else load_backend(name, *rest),
        )
        yield device


@contextmanager
def no_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module", params=["llama", "mistral with a sliding window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("qwen3", tmp_path_factory)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("qwen3", False),
        pytest.param("qwen3", True, marks=pytest.mark.simulated),
        pytest.param("olmo2", False, marks=pytest.mark.slow),
    ],
)
def test_kernels_of_the_gpu_in_graphs_generate_what_the_cpu_does_and_no_launch_waits(
    name: str, drafts: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = saved_model(name, tmp_path_factory)
    runner = device_runner(folder, "triton", max_num_seqs=4)
    launch = runner.launch

    def watched(plan: StepPlan) -> DeviceStep:
        with no_wait():
            return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    expected = one_by_one(folder, 4, max_tokens=4 if drafts else 2)
    served = Served(runner, 30, speculation=knowing(runner, expected, accuracy=0.9) if drafts else None)
    seqs = ask(served, 4, max_tokens=4 if drafts else 2)
    served.run()
    assert not [ended.detail for ended in served.ended if ended.detail]
    assert outputs(seqs) == expected
    assert (served.scheduler.counters.accepted_tokens > 0) == drafts


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_weights_and_pages_of_8_bits_serve_in_graphs(qwen3: Path, kv_cache_dtype: str) -> None:
    settings = {"quantization": "int8", "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 2}
    served = Served(device_runner(qwen3, "triton", **settings), 30)
    seqs = [served.add(random_prompt(5 + at, seed=at), SamplingParams(max_tokens=3)) for at in range(2)]
    served.run()
    assert [len(tokens) for tokens in outputs(seqs)] == [3, 3]


def test_weights_of_4_bits_serve_in_graphs_as_a_cpu_serves_their_values(tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    tiny.quantisation = gguf.GGMLQuantizationType.Q4_1
    tiny.kinds = {"blk.0.attn_v.weight": gguf.GGMLQuantizationType.Q8_0}  # beside others in one product
    import_gguf(tiny.write(tmp_path / "model.gguf"), tmp_path, no_progress)
    runner = device_runner(tmp_path, "triton", quantization="int4", max_num_seqs=3)
    launch = runner.launch

    def watched(plan: StepPlan) -> DeviceStep:
        with no_wait():
            return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    served = Served(runner, 30)
    seqs = ask(served, 3, max_tokens=2)
    served.run()
    assert not [ended.detail for ended in served.ended if ended.detail]
    assert outputs(seqs) == one_by_one(tmp_path, 3, max_tokens=2)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_adapters_in_graphs_generate_what_the_cpu_does_with_each_alone(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, has_drafts: bool
) -> None:
    """More adapters than slots, beside the model itself: each slot changes while steps before it have not run yet."""
    others = loaded_model.load_backend("reference")
    backend = replace(others, add_low_rank=add_low_rank_triton, bank=TritonBank)
    monkeypatch.setattr(
        loaded_model, "load_backend", lambda name, *_: backend if name == "reference" else load_backend(name)
    )
    runner = device_runner(llama, "reference", max_num_seqs=4, max_adapters=2, max_lora_rank=16)
    cpu = load_runner(llama)
    assert runner.adapters is not None
    assert cpu.adapters is not None
    modules = runner.adapters._limits.modules
    some = {name: shape for name, shape in modules.items() if name.endswith(("q_proj", "v_proj", "up_proj"))}
    paths = [
        write_adapter(tmp_path / str(number), random_pairs(of, rank, seed=number), r=rank)
        for number, (of, rank) in enumerate([(modules, 4), (some, 16), (modules, 1)])
    ]
    adapters = [None, *(runner.adapters.load(path) for path in paths)]
    prompts = [random_prompt(4 + 5 * number, seed=number) for number in range(5)]
    expected = []
    for number, prompt in enumerate(prompts):
        adapter = cpu.adapters.load(paths[number % 4 - 1]) if number % 4 else None
        expected.append(generate(cpu, with_adapter(ShuffledBlocks(cpu).sequence(prompt, 4), adapter, 0), 4))
    launch, shapes = runner.launch, set[bool]()

    def watched(plan: StepPlan) -> DeviceStep:
        shapes.add(any(chunk.seq.adapter_slot >= 0 for chunk in plan.chunks))
        with no_wait():
            return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    speculation = knowing(runner, expected, accuracy=0.9) if has_drafts else None
    served = Served(runner, 30, speculation=speculation, num_adapter_slots=2)
    seqs = [
        served.add(prompt, SamplingParams(max_tokens=4), adapter=adapters[number % 4])
        for number, prompt in enumerate(prompts)
    ]
    served.run()
    seqs.append(served.add(prompts[0], SamplingParams(max_tokens=2)))
    served.run()
    assert not [ended.detail for ended in served.ended if ended.detail]
    assert outputs(seqs) == [*expected, expected[0][:2]]
    assert len({tuple(tokens) for tokens in expected}) == 5
    assert shapes == {True, False}


def test_slots_for_adapters_double_the_graphs_and_are_not_there_unless_asked_for(llama: Path) -> None:
    assert device_runner(llama).adapters is None
    without, with_slots = (
        StepGraphs(lambda shape: None, lambda shape: None, 6, 19, None, has_adapters) for has_adapters in (False, True)
    )
    assert len(with_slots.shapes) == 2 * len(without.shapes)
    for shape in with_slots.shapes:
        assert with_slots.fit(replace(shape, chunks=max(0, shape.chunks - 1))) == shape


def test_blocks_go_to_host_memory_and_come_back_without_a_wait(qwen3: Path) -> None:
    runner = device_runner(qwen3, host_kv_gb=1e-4)
    assert runner._host is not None
    for kv in runner._cache:
        kv.keys.normal_()
        kv.values.normal_()
    before = [kv.keys[[3, 1, 4]].clone() for kv in runner._cache]
    plans = [StepPlan([], saves=[(3, 7), (1, 0), (4, 9)]), StepPlan([], saves=[(2, 1)], loads=[(7, 5), (0, 3), (9, 1)])]
    with no_wait():
        copied_s = [runner._host.launch(plan) for plan in plans]
    torch.cuda.synchronize()
    assert all(seconds() > 0 for seconds in copied_s)
    for kv, expected in zip(runner._cache, before, strict=True):
        assert torch.equal(kv.keys[[5, 3, 1]], expected)


def copied_beside_a_step(folder: Path) -> list[Tensor]:
    """Launch a step and, before it has run, another one that saves and loads blocks, of which the first uses two.

    Return what is then in the host memory and in the cache.
    """
    runner = device_runner(folder, host_kv_gb=1e-4)
    host = runner._host
    assert host is not None
    fill_cache(runner, 1.0)
    host._rows.fill_(0)
    first, second = (
        Chunk(Sequence(at, random_prompt(7, seed=at), Request(7), SamplingParams(), blocks=blocks), 0, 7, samples=True)
        for at, blocks in enumerate((BlockTable([2, 5]), BlockTable([8, 9])))
    )
    runner.launch(StepPlan([first]))
    assert host._before is not None
    host._before.synchronize()  # only what was launched before this step has run
    runner.launch(StepPlan([second], saves=[(8, 0), (5, 1)], loads=[(3, 9), (4, 2)]))
    torch.cuda.synchronize()
    return [host._rows[:2].clone(), *(kv.keys[[2, 5, 8, 9]].cpu() for kv in runner._cache)]


STREAM, TOUCHED = "tests.simulated_cuda.Stream", "pagoda_server.engine.runners.cuda.copies._Touched"


@pytest.mark.parametrize(
    ("cuda", "place", "mutant"),
    [
        ("late", f"{STREAM}.wait_stream", lambda *_: None),  # a step does not wait for its copies
        ("newest stream first", f"{STREAM}.wait_event", lambda *_: None),  # copies wait for no step
        ("newest stream first", f"{TOUCHED}.written", lambda _: set()),  # saves do not wait for the step before
        ("newest stream first", f"{TOUCHED}.used", lambda _: set()),  # loads do not
    ],
    indirect=["cuda"],
)
def test_each_wait_of_copies_and_steps_is_needed(
    qwen3: Path, place: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = copied_beside_a_step(qwen3)
    monkeypatch.setattr(place, mutant)
    wrong = copied_beside_a_step(qwen3)
    assert not all(torch.equal(*pair) for pair in zip(right, wrong, strict=True))


@pytest.mark.parametrize("cuda", ["late", "at once", "newest stream first"], indirect=True)
def test_copies_are_in_order_with_steps_in_whatever_order_streams_run(qwen3: Path) -> None:
    rows, *layers = copied_beside_a_step(qwen3)
    in_cache = [keys.flatten(1) for keys in layers]
    assert all((keys[0] == 0).all() for keys in in_cache), "loaded after the step that used it"
    assert not any((keys[1:] == 1).all(dim=1).any() for keys in in_cache), "steps have written to these"
    one = torch.ones(1).view(torch.uint8)
    assert torch.equal(rows[0], one.repeat(rows.shape[1] // 4)), "saved before the step overwrote it"
    assert torch.equal(rows[1][: in_cache[0].shape[1] * 4].view(torch.float32), in_cache[0][1])


@pytest.mark.parametrize("cuda", ["newest stream first"], indirect=True)
def test_copies_overlap_with_the_step_before_unless_it_uses_their_blocks(qwen3: Path) -> None:
    runner = device_runner(qwen3, host_kv_gb=1e-4)
    host = runner._host
    assert host is not None
    host._rows.fill_(0)
    chunk = Chunk(Sequence(0, [1] * 7, Request(7), SamplingParams(), blocks=BlockTable([2, 5])), 0, 7, samples=True)
    step = runner.launch(StepPlan([chunk]))
    assert host._before is not None
    host._before.synchronize()
    in_cache = runner._cache[0].keys.contents  # type: ignore[attr-defined]
    with torch.cuda.stream(runner._stream):
        host.launch(StepPlan([], saves=[(8, 0), (5, 1)], loads=[(3, 9), (4, 2)]))
    assert [bool((in_cache[block] == 0).all()) for block in (9, 2)] == [True, False]
    assert step.result().tokens != [-1]


def test_graphs_are_captured_on_the_runners_stream_without_garbage_collection(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, captured = torch.cuda.graph, []

    def watched(*args: object, stream: object = None, **kwargs: object) -> object:
        captured.append((stream, torch.cuda.current_stream(), gc.isenabled()))
        return capture(*args, stream=stream, **kwargs)

    monkeypatch.setattr(torch.cuda, "graph", watched)
    runner = device_runner(llama)
    assert gc.isenabled()
    assert captured == [(runner._stream, runner._stream, False)] * len(runner._graphs.shapes)


def test_small_steps_are_one_graph_with_prompts_and_without(llama: Path) -> None:
    runner = device_runner(llama)
    runner._compute = None  # type: ignore[assignment, method-assign]
    runner._graphs._run = None  # type: ignore[assignment]
    served = Served(runner, 36)
    seqs = ask(served, 16)
    served.run()
    assert not [ended.detail for ended in served.ended if ended.detail]
    assert outputs(seqs) == one_by_one(llama, 16)


def test_the_cache_leaves_room_for_all_graphs(
    llama: Path, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulated_cuda.BYTES_OF_A_NODE", 16384)
    monkeypatch.setattr("pagoda_server.engine.runners.cuda.runner.GPU_SHARE", 0.98)
    runner = device_runner(llama, kv_cache_gb=None)
    assert cuda.taken_by_graphs > 0.1 * cuda.capacity
    assert runner.info.num_blocks * runner.info.kv_cache.bytes_per_block < 0.9 * cuda.capacity


@pytest.mark.slow
def test_the_default_model_starts_on_a_card_of_two_gigabytes_and_answers(
    default_model_folder: Path, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.capacity = 2 << 30
    monkeypatch.setattr(loaded_model, "choose_backend", lambda *_, **__: ("reference", UNQUANTIZED))
    config = EngineConfig(str(default_model_folder), max_num_seqs=2, token_budget=64, max_model_len=256)
    runner = load.load_runner(config, default_model_folder, no_progress)
    assert runner.info.device == "cuda"
    assert 0.7 * cuda.capacity < cuda.allocated < cuda.capacity, "the cache takes what the weights leave"
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    question = "<|im_start|>user\nWhat is the capital of Sweden?<|im_end|>\n<|im_start|>assistant\n"
    served = Served(runner, 40, block_size=runner.info.kv_cache.block_size)
    seq = served.add(tokenizer.encode(question, add_special_tokens=False).ids, SamplingParams(max_tokens=10))
    served.run()
    assert "Stockholm" in tokenizer.decode(seq.tokens[seq.request.prompt_len :])


GPU_LIMITS = StepLimits(max_num_seqs=256, token_budget=8192)


@pytest.fixture
def unlimited(llama: Path) -> EngineConfig:
    return EngineConfig(str(llama), dtype="float32", max_model_len=120)


@pytest.fixture
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "choose_backend", lambda *_, **__: ("reference", UNQUANTIZED))


@pytest.mark.usefixtures("_reference_kernels")
def test_by_default_a_card_runs_256_sequences_and_computes_8192_tokens_a_step(
    unlimited: EngineConfig, cuda: SimulatedCuda
) -> None:
    cuda.capacity = 1 << 27
    runner = load.load_runner(unlimited, Path(unlimited.model), no_progress)
    assert runner.info.limits == GPU_LIMITS
    (Path(unlimited.model) / "tokenizer.json").touch()
    settings = engine_info(unlimited, runner, Path(unlimited.model), "").settings
    assert (settings["max_num_seqs"], settings["token_budget"]) == ("256", "8192")


@pytest.mark.usefixtures("_reference_kernels")
def test_on_a_card_that_is_too_small_for_them_the_defaults_shrink_and_the_log_says_so(
    unlimited: EngineConfig, cuda: SimulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capacity = 10 << 20
    runner = load.load_runner(unlimited, Path(unlimited.model), no_progress)
    limits = runner.info.limits
    assert 64 <= limits.max_num_seqs < GPU_LIMITS.max_num_seqs
    assert 512 <= limits.token_budget < GPU_LIMITS.token_budget
    assert runner.info.token_capacity >= limits.token_budget
    assert "steps of 256 sequences and 8192 tokens are too large for this device: not enough" in caplog.messages[0]


@pytest.mark.usefixtures("_reference_kernels")
def test_limits_that_are_set_do_not_shrink_and_the_error_names_their_flags(
    unlimited: EngineConfig, cuda: SimulatedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capacity = 10 << 20
    config = replace(unlimited, max_num_seqs=256, token_budget=8192)
    with pytest.raises(ConfigError, match=r"not enough device memory for .*--max-num-seqs, --token-budget"):
        load.load_runner(config, Path(config.model), no_progress)
    assert caplog.messages == []


def test_a_fault_that_the_card_keeps_ends_the_engine_and_not_one_request_after_the_other(
    llama: Path, cuda: SimulatedCuda
) -> None:
    served = Served(device_runner(llama), 36)
    served.add(random_prompt(9, seed=1), PARAMS[0])
    for _ in range(3):
        served.step()
    cuda.is_broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        served.run()
    assert not served.ended, "no sequence was at fault"


def test_memory_that_runs_out_beside_torch_names_the_flags_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr("pagoda_server.engine.runners.cuda.runner.HostCopies", fails)
    with pytest.raises(ConfigError, match=r"not enough device memory for the blocks of host memory .*--host-kv-gb"):
        device_runner(llama, host_kv_gb=1e-4)


def test_what_sequences_start_with_is_sent_while_the_step_before_is_computed(
    llama: Path, cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the step needed more than one send has room for, the host would wait for that step."""
    runner = device_runner(llama)
    served = Served(runner, 60)
    served.add(random_prompt(3, seed=9), SamplingParams(max_tokens=60))
    for _ in range(3):
        served.step()
    for at in range(5):
        params = SamplingParams(max_tokens=5, frequency_penalty=0.3, logit_bias=((at, 1.0),), seed=at)
        served.add(random_prompt(3, seed=at), params)
    launched = runner.launch(plan := served.scheduler.schedule())
    assert len(plan.chunks) == 6
    assert cuda.num_launched > 50, "nothing of the step has run"
    served.scheduler.commit(plan, launched.result())
