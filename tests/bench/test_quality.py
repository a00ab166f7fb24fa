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
    Differences,
    Parts,
    Quality,
    chosen,
    continuations,
    differences,
    measure,
    prompts,
    quality,
    read,
    summary,
    text_logits,
    windows,
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


def perplexity(parts: list[Differences]) -> float:
    return summary(parts, [[1]], [[1]]).perplexity


def test_perplexity_is_that_of_transformers_across_chunks(
    runner: ModelRunner, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.quality.CHUNK_LEN", 64)
    with torch.inference_mode():
        logits = theirs(torch.tensor([TOKENS])).logits[0, :-1]
    torch.testing.assert_close(torch.cat(list(text_logits(runner, TOKENS))), logits, rtol=1e-3, atol=1e-3)
    expected = functional.cross_entropy(logits, torch.tensor(TOKENS[1:])).exp().item()
    assert perplexity(read([runner], TOKENS)) == pytest.approx(expected, rel=1e-4)


def test_a_long_text_is_read_in_windows_that_know_nothing_of_each_other(runner: ModelRunner, theirs: Any) -> None:
    """The last of three windows, as long as the model's context, has one token: it predicts nothing. So is a text."""
    tokens, length = random_prompt(2 * 256 + 1, seed=0), runner.info.max_model_len
    heard: list[int] = []
    cut = windows([tokens, TOKENS], length)
    assert cut == [tokens[:length], tokens[length : 2 * length], TOKENS]
    parts = [part for window in cut[:2] for part in read([runner], window, heard.append)]
    losses = []
    for window in map(torch.tensor, cut[:2]):
        with torch.inference_mode():
            losses.append(functional.cross_entropy(theirs(window[None]).logits[0, :-1], window[1:]).item())
    assert sum(heard) == 2 * (length - 1)
    assert perplexity(parts) == pytest.approx(math.exp(sum(losses) / 2), rel=1e-4)


def test_continuations_are_those_of_transformers(runner: ModelRunner, theirs: Any) -> None:
    theirs.generation_config.eos_token_id = None
    heard: list[int] = []
    found = continuations(runner, prompts(TOKENS), heard.append)
    assert sum(heard) == NUM_CONTINUATIONS * CONTINUATION_LEN
    for prompt, continuation in zip(prompts(TOKENS), found, strict=True):
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=CONTINUATION_LEN,
            do_sample=False,
            pad_token_id=0,
        )
        assert continuation == out[0, len(prompt) :].tolist()


def test_a_model_agrees_with_itself(runner: ModelRunner) -> None:
    for part in read([runner, runner], TOKENS):
        found = summary([part], [[1, 2]], [[1, 2]])
        assert found == Quality(found.perplexity, 1.0, 0.0, 1.0, 0.0, 1, 2.0)


def test_figures_are_those_computed_by_hand() -> None:
    """Two positions of a vocabulary of two: the base predicts ¾, ¼ twice; the other predicts ½, ½, then ¼, ¾."""
    base, other = (torch.tensor(rows).log() for rows in ([[0.75, 0.25]] * 2, [[0.5, 0.5], [0.25, 0.75]]))
    parts = [differences(base[row, None], other[row, None], torch.tensor([0])) for row in range(2)]
    found = summary(parts, [[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]])
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


def test_a_text_that_is_too_short_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(BenchError, match="79 tokens; at least 80 are needed"):
        windows([random_prompt(40, seed=0), random_prompt(39, seed=0)], runner.info.max_model_len)


def test_a_model_without_logits_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "quality", "--model", "synthetic", "--threads", "1"])
    assert main() == 1
    assert "is not supported" in capsys.readouterr().err


@needs_int8
def test_the_report_holds_every_precision(folder: Path, theirs: Any, tmp_path: Path) -> None:
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for text, part in zip(texts, (TOKENS[:70], TOKENS[70:]), strict=True):
        text.write_text(" ".join(map(str, part)))
    quality(folder, texts, threads=1, output=tmp_path, precisions=chosen([]))
    document = json.loads((tmp_path / "quality.json").read_text())
    assert document["tokens"] == len(TOKENS)
    found = document["precisions"]
    assert list(found) == ["float32", "bfloat16", "int8", "int4", "int8 cache"]
    assert found["float32"]["kl_nats"] == 0
    assert found["bfloat16"]["kl_nats"] > 0
    assert found["int8"]["kl_nats"] > 0
    assert found["int4"]["kl_nats"] > 0
    page = (tmp_path / "quality.md").read_text()
    assert all(f"| {name} |" in page for name in found)


def test_a_run_that_was_stopped_goes_on_with_the_same_figures(
    folder: Path, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in the second of two texts: only that is read again, and then nothing is."""
    texts, precisions = [TOKENS[:70], TOKENS[70:]], chosen(["served", "bfloat16"])
    whole = measure(folder, texts, 1, precisions)
    heard: list[list[int]] = []

    def count(runners: list[ModelRunner], window: list[int], on_tokens: Any) -> list[Differences]:
        heard.append(window)
        if len(heard) == 2:
            raise KeyboardInterrupt
        return read(runners, window, on_tokens)

    monkeypatch.setattr("bench.quality.read", count)
    kept = Parts(tmp_path, str(folder))
    with pytest.raises(KeyboardInterrupt):
        measure(folder, texts, 1, precisions, kept)
    for _ in range(2):
        assert measure(folder, texts, 1, precisions, kept) == whole
    assert heard == [texts[0], texts[1], texts[1]]
    measure(folder, texts, 1, chosen(["bfloat16"]), kept)
    assert heard[3:] == texts, "other precisions were compared"


def test_an_unknown_precision_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BenchError, match="no precision 'int3', there are: bfloat16; int8"):
        chosen(["served", "int3"])


@needs_int8
@pytest.mark.slow
def test_quantizing_costs_the_default_model_about_a_hundredth_of_its_perplexity(default_model_folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    found = measure(default_model_folder, [tokenizer.encode(TEXT.read_text()).ids], 2, chosen([]))
    for name, most_kl_nats in (("int8", 0.006), ("int4", 0.003)):
        assert found[name].ratio <= 1.01, name
        assert found[name].kl_nats <= most_kl_nats, name
