"""The runner of a CPU: how it uses a checkpoint and its settings, and how it computes planned steps."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_server.checkpoints import resolve
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import SamplingParams
from pagoda_server.engine.core.step import Chunk, StepPlan
from pagoda_server.engine.runners import load
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.cpu.step_arrays import attended_parts
from pagoda_server.engine.runners.cuda.rehearsal import largest_plan
from pagoda_server.engine.runners.loaded_model import load_for_serving
from pagoda_server.kernels import has_native, has_native_int8_weight, load_backend
from pagoda_server.settings import EngineConfig, SettingError
from tests.engine.tiny_models import (
    MODELS,
    VOCAB_SIZE,
    ShuffledBlocks,
    generate,
    load_runner,
    next_chunk,
    random_prompt,
    save_model,
    step,
    step_logits,
)

LOADED_MODEL = "pagoda_server.engine.runners.loaded_model"

needs_int8 = pytest.mark.skipif(not has_native(), reason="needs compiled code for products in int8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return folders of saved models by their names in MODELS. Tests must not change them."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("model")
            save_model(MODELS[name], folders[name])
        return folders[name]

    return folder


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a Llama that a test may break."""
    folder = tmp_path / "broken"
    shutil.copytree(saved("llama"), folder)
    return folder


@pytest.fixture(scope="module")
def runner(saved: Callable[[str], Path]) -> ModelRunner:
    return load_runner(saved("llama"))


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


# What it says of itself


def test_another_architecture_is_named_before_its_tensors_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    save_file({"word_embeddings.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="BloomForCausalLM is not supported; of the "):
        load_for_serving(EngineConfig(model=str(tmp_path)), torch.device("cpu"))


@pytest.mark.parametrize("name", ["qwen3", "mistral with a sliding window", "gemma2"])
def test_a_cache_of_int8_takes_half_the_memory_and_changes_logits_little(
    saved: Callable[[str], Path], name: str
) -> None:
    found = []
    for dtype, element_bytes, scale_bytes in (("auto", 2, 0), ("int8", 1, 4)):
        runner = load_runner(saved(name), dtype="bfloat16", kv_cache_dtype=dtype, block_size=8)
        spec = runner.info.kv_cache
        heads = 2 * len(spec.groups.places) * spec.num_kv_heads
        assert spec.bytes_per_token == heads * (spec.head_dim * element_bytes + scale_bytes)
        seq = ShuffledBlocks(runner).sequence(random_prompt(60, seed=1), 1)
        found.append(runner.logits(Chunk(seq, 0, 60, False)).float())
    exact, small = (logits.log_softmax(dim=-1) for logits in found)
    error = (exact - small).abs().mean() / exact.std()
    assert 0 < error < 0.05


def test_large_biases_of_keys_cost_a_cache_of_int8_no_accuracy(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("k_proj.bias"):
                tensor.view(-1, 16)[:, [7, 15]] = torch.tensor([100.0, -70.0])  # the pair that turns least

    save_model(MODELS["qwen2"], tmp_path)
    edit_tensors(tmp_path, enlarge)
    edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    found = []
    for dtype in ("auto", "int8"):
        runner = load_runner(tmp_path, kv_cache_dtype=dtype)
        seq = ShuffledBlocks(runner).sequence(random_prompt(60, seed=1), 1)
        found.append(runner.logits(Chunk(seq, 0, 60, False)).log_softmax(dim=-1))
    exact, small = found
    error = (exact - small).abs().mean() / exact.std()
    assert 0 < error < 0.02


def test_cache_size_follows_the_formula(saved: Callable[[str], Path]) -> None:
    info = load_runner(saved("qwen3"), kv_cache_gb=0.001, block_size=8).info
    assert info.kv_cache.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.num_blocks == 1_000_000 // (info.kv_cache.bytes_per_token * 8)
    assert info.weight_bytes == (saved("qwen3") / "model.safetensors").stat().st_size - header_bytes(saved("qwen3"))
    assert (info.architecture, info.device, info.dtype) == ("qwen3", "cpu", "float32")
    assert info.vocab_size == VOCAB_SIZE


def header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_default_cpu_cache_takes_half_a_gigabyte_that_is_not_resident_until_used(
    saved: Callable[[str], Path],
) -> None:
    before = psutil.Process().memory_info().rss
    info = load_runner(saved("llama"), kv_cache_gb=None).info
    assert 0.499e9 < info.num_blocks * info.kv_cache.bytes_per_block <= 0.5e9
    assert psutil.Process().memory_info().rss - before < 100e6


def test_context_is_what_the_model_was_trained_for_as_far_as_the_cache_holds_it(saved: Callable[[str], Path]) -> None:
    assert load_runner(saved("llama")).info.max_model_len == 256
    small = load_runner(saved("llama"), kv_cache_gb=30e3 / 1e9)
    assert small.info.max_model_len == small.info.token_capacity < 256
    assert load_runner(saved("llama"), max_model_len=100).info.max_model_len == 100


def test_yarn_extends_the_context_beyond_the_positions_that_config_names(copied: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 256}
    edit_config(copied, rope_parameters=yarn)
    assert load_runner(copied).info.max_model_len == 768


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_bfloat16_unless_the_checkpoint_is_float32(tmp_path: Path, stored: torch.dtype) -> None:
    save_model(MODELS["smollm"], tmp_path, stored)
    expected = "float32" if stored == torch.float32 else "bfloat16"
    assert load_runner(tmp_path, dtype="auto").info.dtype == expected


# What it refuses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "exceeds the model's 256 positions"),
        ({"max_model_len": 256, "kv_cache_gb": 30e3 / 1e9}, "tokens that the KV cache holds"),
        ({"kv_cache_gb": 1e-7}, "--kv-cache-gb: .* holds no block"),
        ({"kv_cache_gb": 1e6}, "not enough device memory for the KV cache .*can't allocate.* --kv-cache-gb can help"),
        ({"host_kv_gb": 1e6}, "not enough device memory for the blocks of host memory .* --host-kv-gb, --kv-cache-gb"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: there are kernels for it on a GPU only"),
        (
            {"kv_cache_dtype": "int8", "dtype": "float16"},
            "--kv-cache-dtype int8: .* bfloat16 or float32, not in float16",
        ),
    ],
)
def test_settings_that_the_model_cannot_meet_are_refused(
    saved: Callable[[str], Path], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_runner(saved("llama"), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_gb": 1e-12}, "--kv-cache-gb: .* holds no block"),
        ({"kv_cache_gb": 1e-8}, "--kv-cache-gb: .* holds no block"),
        ({"kv_cache_gb": 1e6}, "not enough memory for the cache; --kv-cache-gb, --host-kv-gb can help"),
        ({"host_kv_gb": 1e6}, "not enough memory for the cache; --kv-cache-gb, --host-kv-gb can help"),
        ({"device": "cuda"}, "--device cuda: the synthetic model"),
        ({"quantization": "fp8"}, "--quantization fp8: the synthetic model"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: the synthetic model"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: the synthetic model"),
    ],
)
def test_settings_that_the_synthetic_model_cannot_meet_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load.load_runner(EngineConfig("synthetic", **settings), resolve("synthetic"), no_progress)


def test_a_step_time_is_the_synthetic_models_alone(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--step-ms: only the synthetic model"):
        load.load_runner(EngineConfig("llama", step_ms="1"), saved("llama"), no_progress)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_gb": math.inf}, "--kv-cache-gb must be above 0, at most 1000000000, not inf"),
        ({"kv_cache_gb": math.nan}, "--kv-cache-gb must be above 0, at most 1000000000, not nan"),
        ({"kv_cache_gb": 1e300}, "--kv-cache-gb must be above 0, at most 1000000000, not 1e"),
        ({"host_kv_gb": math.inf}, "--host-kv-gb must be from 0 to 1000000000, not inf"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be from 1 to 4294967295, not 0"),
        ({"token_budget": 10**30}, "--token-budget must be from 2 to 4294967295, not 10{30}$"),
        ({"token_budget": 64}, r"--token-budget \(64\) must exceed --max-num-seqs \(64\)"),
        ({"block_size": 0}, "--block-size must be from 1 to 1048576, not 0"),
        ({"block_size": 12}, "--block-size must be a power of two, not 12"),
        ({"priority_ageing_s": 0.0}, "--priority-ageing-s must be above 0 and finite, not 0.0"),
        ({"target_itl_ms": math.nan}, "--target-itl-ms must be at least 0 and finite, not nan"),
        ({"max_model_len": 1}, "--max-model-len must be from 2 to 268435456, not 1"),
        ({"threads": -1}, "--threads must be at least 1, not -1"),
        ({"tenant_weights": "a=0"}, "--tenant-weights takes NAME=WEIGHT,… with positive weights, not 'a=0'"),
        ({"listen": ""}, "--listen '' is not shm:PATH, unix:PATH or HOST:PORT"),
        ({"tenant_weights": "a=2"}, "--tenant-weights needs --policy fair, not priority"),
    ],
)
def test_settings_that_no_model_can_meet_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        EngineConfig("any", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_missing_cuda_device_is_refused(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        load.load_runner(EngineConfig("default", device="cuda"), saved("llama"), no_progress)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["BloomForCausalLM"]},
            r"BloomForCausalLM is not supported; of the \d+ that are, the nearest names are GlmForCausalLM",
        ),
        ({"architectures": None, "model_type": "bloom"}, "architecture bloom is not supported"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "'proportional' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "short_factor of longrope RoPE must be a list"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2]}},
            "'?mrope_section'? of default RoPE is",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, but this family rotates"),
        ({"model_type": "gemma"}, "architecture LlamaForCausalLM with model_type gemma is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which this family does not compute"),
        ({"sliding_window": 3}, "sliding_window is 3, which this family does not compute"),
        ({"is_causal": False}, "is_causal is False, which"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor of linear RoPE"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor of yarn RoPE"),
        ({"rope_parameters": "fast"}, "RoPE parameters must be an object"),
        ({"hidden_act": "tanh"}, "'tanh' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config names no quant_method"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights in hqq are not supported; supported: awq, gptq"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive whole number, not 'two'"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"vocab_size": 200}, r"model.embed_tokens.weight has shape \[199, 48\].*\[200, 48\]"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
        ({"attention_bias": True}, "bias is missing"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_served_is_one_clear_error(copied: Path, fields: dict[str, Any], message: str) -> None:
    edit_config(copied, **fields)
    with pytest.raises(ConfigError, match=message):
        load_runner(copied)


@pytest.mark.parametrize("layer_types", [["full_attention"], ["full_attention", "chunked_attention"]])
def test_layers_of_unknown_attention_are_refused(
    saved: Callable[[str], Path], tmp_path: Path, layer_types: list[str]
) -> None:
    shutil.copytree(saved("qwen2"), tmp_path / "mixed")
    edit_config(tmp_path / "mixed", use_sliding_window=True, sliding_window=8, layer_types=layer_types)
    message = "layer_types must name full_attention or sliding_attention for each of 2 layers"
    with pytest.raises(ConfigError, match=message):
        load_runner(tmp_path / "mixed")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list, not an object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0 garbage"),
            "model.safetensors is missing, truncated or corrupt",
        ),
        (lambda folder: truncate(folder / "model.safetensors"), "its tensors end at byte .*, the file at"),
        (lambda folder: edit_tensors(folder, lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"), "index.json"),
    ],
    ids=["no config", "broken config", "config of a list", "no weights", "garbage", "truncated", "no tensor", "index"],
)
def test_a_broken_checkpoint_is_one_clear_error(copied: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(copied)
    with pytest.raises(ConfigError, match=message):
        load_runner(copied)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# How it loads


def test_sharded_weights_are_the_same_model(runner: ModelRunner, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name].clone() for name in held}, copied / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    prompt = random_prompt(9, seed=1)
    sharded = load_runner(copied)
    assert generate(sharded, ShuffledBlocks(sharded).sequence(prompt, 20), 20) == generate(
        runner, ShuffledBlocks(runner).sequence(prompt, 20), 20
    )
    (copied / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2.safetensors is missing"):
        load_runner(copied)


def test_blocks_are_of_four_tokens_on_a_cpu_and_of_sixteen_on_a_gpu_unless_told(saved: Callable[[str], Path]) -> None:
    config = EngineConfig(str(saved("llama")), device="cpu", kv_cache_gb=0.001, threads=1)
    assert ModelRunner(config).info.kv_cache.block_size == 4
    assert config.tokens_a_block("cuda") == 16
    assert EngineConfig("default", block_size=32).tokens_a_block("cpu") == 32


def test_progress_rises_to_the_bytes_of_the_weights(saved: Callable[[str], Path]) -> None:
    calls: list[tuple[int, int]] = []
    config = EngineConfig(str(saved("llama")), device="cpu", kv_cache_gb=0.001, threads=1)
    info = ModelRunner(config, lambda description, done, total: calls.append((done, total))).info
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (info.weight_bytes, info.weight_bytes)


# How it steps


def test_a_chunk_that_does_not_reach_the_last_token_samples_none(runner: ModelRunner) -> None:
    seq = ShuffledBlocks(runner).sequence(random_prompt(10, seed=1), 1)
    sampled = runner.execute(StepPlan([next_chunk(seq, at_most=4)]))
    assert (sampled.tokens, sampled.logprobs, sampled.faults) == ([-1], [None], {})


def test_a_plan_run_twice_has_the_same_outcome(runner: ModelRunner) -> None:
    blocks = ShuffledBlocks(runner)
    params = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2, logprobs=2)
    seqs = [blocks.sequence(random_prompt(length, seed=length), 8, params) for length in (3, 12)]
    step(runner, [next_chunk(seq) for seq in seqs])
    plan = StepPlan([next_chunk(seq) for seq in seqs])
    assert runner.execute(plan) == runner.execute(plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_gives_the_same_tokens_alone_and_under_load(saved: Callable[[str], Path], dtype: str) -> None:
    runner = load_runner(saved("llama"), dtype=dtype)
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=42)
    alone = generate(runner, ShuffledBlocks(runner).sequence(random_prompt(9, seed=1), 30, params), 30, chunk_size=5)
    blocks = ShuffledBlocks(runner)
    seq = blocks.sequence(random_prompt(9, seed=1), 30, params)
    others = [
        blocks.sequence(random_prompt(n, seed=n), 40, SamplingParams(temperature=2.0, seed=n)) for n in range(1, 12)
    ]
    while seq.output_len < 30:
        step(runner, [next_chunk(one, at_most=5) for one in (*others, seq)])
    assert seq.tokens[9:] == alone


def test_bfloat16_logits_of_a_decode_are_the_same_to_the_last_bit_alone_and_in_a_batch(
    saved: Callable[[str], Path],
) -> None:
    runner = load_runner(saved("llama"), dtype="bfloat16")
    blocks = ShuffledBlocks(runner)
    seqs = [blocks.sequence(random_prompt(length, seed=length), 20) for length in (1, 3, 15, 16, 17, 40, 70)]
    step(runner, [next_chunk(seq) for seq in seqs])
    for _ in range(18):
        chunks = [next_chunk(seq) for seq in seqs]
        together = step_logits(runner, chunks)
        alone = torch.cat([step_logits(runner, [chunk]) for chunk in chunks])
        assert torch.equal(together, alone)
        step(runner, chunks)


def test_the_last_token_of_a_chunk_that_samples_is_attended_by_itself() -> None:
    lengths, contexts = np.array([1, 5, 4, 2, 1]), np.array([9, 5, 14, 2, 3])
    samples = np.array([True, True, False, True, False])
    parts, part_lengths, part_contexts = attended_parts(lengths, contexts, samples)
    assert parts.tolist() == [0, 1, 1, 2, 3, 3, 4]
    assert part_lengths.tolist() == [1, 4, 1, 4, 1, 1, 1]
    assert part_contexts.tolist() == [9, 4, 5, 14, 1, 2, 3]


def test_a_chunk_has_logits_after_each_of_its_tokens(saved: Callable[[str], Path]) -> None:
    runner = load_runner(saved("llama"))
    blocks = ShuffledBlocks(runner)
    prompt = random_prompt(12, seed=1)
    seq = blocks.sequence(prompt, 1)
    found = torch.cat([runner.logits(Chunk(seq, 0, 5, False)), runner.logits(Chunk(seq, 5, 7, True))])
    alone = [step_logits(runner, [next_chunk(blocks.sequence(prompt[:length], 1))]) for length in range(1, 13)]
    torch.testing.assert_close(found, torch.cat(alone))


def test_the_reference_backend_generates_the_same_tokens(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=9)
    for name in ("mistral with a sliding window", "qwen3", "olmo2"):
        monkeypatch.undo()
        here = load_runner(saved(name))
        monkeypatch.setattr(f"{LOADED_MODEL}.load_backend", lambda *_: load_backend("reference"))
        there = load_runner(saved(name))
        assert there.info.kernel_backend == "reference" != here.info.kernel_backend
        tokens = [
            generate(runner, ShuffledBlocks(runner).sequence(random_prompt(21, seed=1), 30, params), 30, chunk_size=8)
            for runner in (here, there)
        ]
        assert tokens[0] == tokens[1]


def test_recomputation_after_preemption_does_not_change_tokens(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.3)
    undisturbed = generate(runner, ShuffledBlocks(runner).sequence(random_prompt(7, seed=2), 20, params), 20)
    for preempted_at in range(1, 20, 3):
        blocks = ShuffledBlocks(runner)
        seq = blocks.sequence(random_prompt(7, seed=2), 20, params)
        generate(runner, seq, preempted_at)
        seq.blocks = blocks.sequence(seq.tokens, 20).blocks
        seq.num_computed = 0
        assert generate(runner, seq, 20, chunk_size=5) == undisturbed


def test_a_sequence_whose_cache_holds_nan_fails_alone(saved: Callable[[str], Path]) -> None:
    runner = load_runner(saved("llama"))
    blocks = ShuffledBlocks(runner)
    seqs = [blocks.sequence(random_prompt(6, seed=n), 4) for n in range(3)]
    step(runner, [next_chunk(seq) for seq in seqs])
    expected = runner.execute(StepPlan([next_chunk(seq) for seq in seqs]))
    runner._cache[0].values[seqs[1].blocks[0]] = math.nan
    sampled = runner.execute(StepPlan([next_chunk(seq) for seq in seqs]))
    assert sampled.tokens == [expected.tokens[0], -1, expected.tokens[2]]
    assert list(sampled.faults) == [1]


def test_blocks_that_a_failed_sequence_leaves_behind_do_no_harm(saved: Callable[[str], Path]) -> None:
    runner = load_runner(saved("mistral with a sliding window"))
    expected = generate(runner, ShuffledBlocks(runner).sequence(random_prompt(6, seed=1), 30), 30)
    for kv in runner._cache:
        kv.keys.fill_(math.nan)
        kv.values.fill_(math.inf)
    assert generate(runner, ShuffledBlocks(runner).sequence(random_prompt(6, seed=1), 30), 30) == expected


def test_the_largest_plan_uses_the_budget_and_samples_for_every_sequence(runner: ModelRunner) -> None:
    plan = largest_plan(token_budget=512, max_num_seqs=60, block_size=4)
    assert 512 - 60 < plan.num_tokens <= 512
    assert len(plan.chunks) == 60
    assert all(chunk.samples for chunk in plan.chunks)
    blocks = [block for chunk in plan.chunks for block in chunk.seq.blocks]
    assert len(set(blocks)) == len(blocks)
    assert len(runner.execute(plan).tokens) == 60


# In int8


@needs_int8
def test_bfloat16_on_a_cpu_is_served_in_int8_unless_told_otherwise(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(dtype: str, quantization: str) -> str:
        return load_runner(saved("smollm"), dtype=dtype, quantization=quantization).info.kernel_backend

    monkeypatch.setattr(f"{LOADED_MODEL}.instruction_set", lambda: "avx2")
    int8 = "native-int8-weight" if has_native_int8_weight() else "native-int8"
    assert backend("bfloat16", "auto") == int8
    assert backend("float32", "int8") == int8
    monkeypatch.setattr(f"{LOADED_MODEL}.has_native_int8_weight", lambda: False)
    assert backend("bfloat16", "auto") == backend("float32", "int8") == "native-int8"
    assert backend("bfloat16", "none") == backend("float32", "auto") == backend("float16", "auto") == "native"
    monkeypatch.setattr(f"{LOADED_MODEL}.instruction_set", lambda: "generic")
    assert backend("bfloat16", "auto") == "native"


def test_int8_is_refused_where_there_are_no_kernels_for_it(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="can be bfloat16 or float32, not float16"):
        load_runner(saved("smollm"), dtype="float16", quantization="int8")
    monkeypatch.setattr(f"{LOADED_MODEL}.has_native", lambda: False)
    with pytest.raises(ConfigError, match="--quantization int8 needs Pagoda installed where there is a C"):
        load_runner(saved("smollm"), quantization="int8")
    assert load_runner(saved("smollm"), dtype="bfloat16").info.kernel_backend == "cpu"


@needs_int8
@pytest.mark.parametrize("name", ["smollm", "llama with biases", "qwen3", "mistral with a sliding window", "olmo2"])
@pytest.mark.parametrize("has_matrix_unit", [True, False])
def test_logits_in_int8_are_near_those_in_float32(
    saved: Callable[[str], Path], name: str, has_matrix_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_matrix_unit and not has_native_int8_weight():
        pytest.skip("needs a processor with AMX for bfloat16, and compiled code")
    monkeypatch.setattr(f"{LOADED_MODEL}.has_native_int8_weight", lambda: has_matrix_unit)

    def logits(quantization: str) -> Tensor:
        runner = load_runner(saved(name), quantization=quantization)
        return step_logits(runner, [next_chunk(ShuffledBlocks(runner).sequence(random_prompt(40, seed=5), 1))])[0]

    exact = logits("none")
    assert (
        logits("int8") - exact
    ).norm() / exact.norm() < 0.15  # random weights, far from smooth: a wrong scale gives 1


@pytest.mark.thorough
@needs_int8
def test_a_sequence_that_computes_a_prompts_last_token_again_finds_its_logits_to_the_last_bit(
    default_model_folder: Path,
) -> None:
    config = EngineConfig(str(default_model_folder), quantization="int8", kv_cache_gb=0.1, threads=1)
    runner = ModelRunner(config)
    sequences = ShuffledBlocks(runner)
    for at in range(4):
        seq = sequences.sequence(random_prompt(200 + 30 * at, seed=at), 1)
        whole = step_logits(runner, [next_chunk(seq)])
        again = step_logits(runner, [Chunk(seq, seq.request.prompt_len - 1, 1, samples=True)])
        assert torch.equal(whole, again), at
