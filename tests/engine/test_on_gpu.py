"""The runner on a GPU: transformers' tokens and logits, graphs, and no hidden waits. Run by `make test-gpu`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import SamplingParams
from tests.engine.test_device_runner import Served, ask, device_runner, outputs
from tests.engine.tiny_models import MODELS, random_prompt, save_model, saved_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Collect garbage: a runner may fill most of the GPU, and lives until it is collected."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_in_float32_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_model(MODELS[name], tmp_path).cuda()
    served = Served(device_runner(tmp_path), 60)
    prompts = [random_prompt(5 + 9 * at, seed=at) for at in range(4)]
    seqs = [served.add(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    served.run()
    for prompt, tokens in zip(prompts, outputs(seqs), strict=True):
        answer = theirs.generate(torch.tensor([prompt]).cuda(), max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert answer[0, len(prompt) :].tolist()[: len(tokens)] == tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logprobs_in_half_precision_err_as_little_as_those_of_transformers(dtype: str, tmp_path: Path) -> None:
    exact = save_model(MODELS["llama"], tmp_path)
    prompt = random_prompt(50, seed=3)
    with torch.inference_mode():
        right = exact.double()(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        half = exact.to(getattr(torch, dtype)).cuda()(torch.tensor([prompt]).cuda()).logits[0, -1]
    their_error = (half.double().cpu().log_softmax(dim=-1) - right).abs().max()
    served = Served(device_runner(tmp_path, dtype=dtype), 60)
    served.add(prompt, SamplingParams(max_tokens=1, logprobs=20))
    served.run()
    (found,) = served.logprobs[0]
    ours = torch.tensor(found.top, dtype=torch.float64)
    assert (ours - right[found.top_ids]).abs().max() < 2 * their_error + 0.02


def test_graphs_give_what_the_kernels_give_one_by_one(llama: Path) -> None:
    with_graphs, without = device_runner(llama), device_runner(llama)
    assert with_graphs._graphs._graphs
    without._graphs._graphs.clear()
    found = []
    for runner in (with_graphs, without):
        served = Served(runner, 36)
        seqs = ask(served, 16)
        served.run()
        found.append(outputs(seqs))
    assert found[0] == found[1]


def test_launching_waits_for_nothing(llama: Path) -> None:
    runner = device_runner(llama)
    served = Served(runner, 36)
    ask(served, 16)
    for _ in range(3):
        served.step()  # kernels that only chunks of prompts need are compiled at their first use
    launch = runner.launch

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched
    served.run()
    assert not [ended.detail for ended in served.ended if ended.detail]


def test_a_cache_that_the_device_cannot_hold_names_the_flag(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"not enough device memory for the KV cache .*--kv-cache-gb"):
        device_runner(llama, kv_cache_gb=100_000.0)


def test_without_a_size_the_cache_takes_most_of_what_is_free(llama: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    info = device_runner(llama, kv_cache_gb=None).info
    assert 0.7 * free < info.num_blocks * info.kv_cache.bytes_per_block < free
