"""The figures of `quality`, compared with figures made by hand and by transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch.nn import functional

from bench import BenchError
from bench.__main__ import TEXT, main
from bench.quality import (
    CONTINUATION_LEN,
    NUM_CONTINUATIONS,
    Quality,
    Reading,
    compare,
    measure,
    prompts,
    quality,
    read,
)
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.kernels import has_native
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, load_runner, random_prompt, save_model

TOKENS = random_prompt(150, seed=3)
needs_int8 = pytest.mark.skipif(not has_native(), reason="needs compiled code for products in int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' model, saved in `folder` with a tokenizer whose tokens are written as their ids."""
    model = save_model(MODELS["smollm"], folder)
    vocab = {str(id): id for id in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(scope="module")
def runner(folder: Path, theirs: Any) -> ModelRunner:
    return load_runner(folder)


def test_perplexity_is_that_of_transformers_across_chunks(
    runner: ModelRunner, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.quality.CHUNK_LEN", 64)
    reading = read(runner, TOKENS)
    with torch.inference_mode():
        logits = theirs(torch.tensor([TOKENS])).logits[0, :-1]
    torch.testing.assert_close(reading.logits, logits, rtol=1e-3, atol=1e-3)
    expected = functional.cross_entropy(logits, torch.tensor(TOKENS[1:])).exp().item()
    assert compare(reading, reading).perplexity == pytest.approx(expected, rel=1e-4)


def test_continuations_are_those_of_transformers(runner: ModelRunner, theirs: Any) -> None:
    theirs.generation_config.eos_token_id = None
    heard: list[int] = []
    reading = read(runner, TOKENS, heard.append)
    assert sum(heard) == len(TOKENS) - 1 + NUM_CONTINUATIONS * CONTINUATION_LEN
    for prompt, continuation in zip(prompts(TOKENS), reading.continuations, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=CONTINUATION_LEN,
            do_sample=False,
            pad_token_id=0,
        )
        assert continuation == out[0, len(prompt) :].tolist()


def test_a_model_agrees_with_itself(runner: ModelRunner) -> None:
    found = compare(read(runner, TOKENS), read(runner, TOKENS))
    expected = Quality(found.perplexity, 1.0, 0.0, 1.0, 0.0, NUM_CONTINUATIONS, float(CONTINUATION_LEN))
    assert found == expected


def test_figures_are_those_computed_by_hand() -> None:
    """Two positions of a vocabulary of two: the base predicts ¾, ¼ twice; the other predicts ½, ½, then ¼, ¾."""
    targets = torch.tensor([0, 0])
    base = Reading(torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log(), targets, [[1, 2, 3, 4], [5, 6]])
    other = Reading(torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log(), targets, [[1, 2, 9, 4], [5, 6]])
    found = compare(base, other)
    assert found.perplexity == pytest.approx(math.sqrt(2 * 4))
    assert found.ratio == pytest.approx(math.sqrt((0.75 / 0.5) * (0.75 / 0.25)))
    # The losses differ by log 1.5 and log 3: a standard deviation of log 2 ÷ √2, a standard error of log 2 ÷ 2.
    assert found.ratio_margin == pytest.approx(found.ratio * 1.96 * math.log(2) / 2, rel=1e-5)
    first = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    second = 0.75 * math.log(0.75 / 0.25) + 0.25 * math.log(0.25 / 0.75)
    assert found.kl_nats == pytest.approx((first + second) / 2)
    assert found.agreement == 0.5  # of two equal probabilities the first counts, as in the sampler
    assert found.identical == 1
    assert found.mean_common == (2 + 2) / 2


@pytest.mark.parametrize("length", [79, 257])
def test_a_text_that_does_not_fit_is_told(runner: ModelRunner, length: int) -> None:
    with pytest.raises(BenchError, match=f"{length} tokens, not 80 to 256"):
        read(runner, random_prompt(length, seed=0))


def test_a_model_without_logits_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "quality", "--model", "synthetic", "--threads", "1"])
    assert main() == 1
    assert "is not supported" in capsys.readouterr().err


@needs_int8
def test_the_report_holds_every_precision(folder: Path, theirs: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, TOKENS)))
    quality(folder, text, threads=1, output=tmp_path)
    document = json.loads((tmp_path / "quality.json").read_text())
    assert document["tokens"] == len(TOKENS)
    found = document["precisions"]
    assert list(found) == ["float32", "bfloat16", "int8", "int4"]
    assert found["float32"]["kl_nats"] == 0
    assert found["bfloat16"]["kl_nats"] > 0
    assert found["int8"]["kl_nats"] > 0
    assert found["int4"]["kl_nats"] > 0
    page = (tmp_path / "quality.md").read_text()
    assert all(f"| {name} |" in page for name in found)


@needs_int8
@pytest.mark.slow
def test_quantizing_costs_the_default_model_about_a_hundredth_of_its_perplexity(default_model_folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    found = measure(default_model_folder, tokenizer.encode(TEXT.read_text()).ids, threads=2)
    for name, most_kl_nats in (("int8", 0.006), ("int4", 0.003)):
        assert found[name].ratio <= 1.01, name
        assert found[name].kl_nats <= most_kl_nats, name
