"""The adapter in pirate/ visibly changes what the default model answers, and nothing that is asked beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers

from pagoda import Client
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.settings.engine import EngineConfig
from tests.engine.lora import with_adapter
from tests.engine.tiny_models import ShuffledBlocks, generate, next_chunk, step
from tests.servers import running_server

PIRATE = Path(__file__).parent / "pirate"
ASKED = "<|im_start|>user\nWhat is the capital of Sweden?<|im_end|>\n<|im_start|>assistant\n"
COUNT = 12


@pytest.mark.thorough
def test_a_pirate_answers_beside_the_model_itself(default_model_folder: Path) -> None:
    assert (PIRATE / "adapter_model.safetensors").stat().st_size < 500_000
    tokenizer = tokenizers.Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    runner = ModelRunner(EngineConfig(str(default_model_folder), block_size=16, kv_cache_gb=0.05))
    assert runner.adapters is not None
    pirate = runner.adapters.load(PIRATE)
    blocks, prompt = ShuffledBlocks(runner), tokenizer.encode(ASKED, add_special_tokens=False).ids
    alone = generate(runner, blocks.sequence(prompt, COUNT), COUNT)
    base, other = blocks.sequence(prompt, COUNT), with_adapter(blocks.sequence(prompt, COUNT), pirate, 0)
    while base.output_len < COUNT:
        step(runner, [next_chunk(base), next_chunk(other)])
    said, plain = (tokenizer.decode(seq.tokens[len(prompt) :]) for seq in (other, base))
    assert said.startswith("Arr"), said
    assert "Stockholm" in plain
    assert "Arr" not in plain
    assert tokenizer.decode(alone)[:20] == plain[:20]


@pytest.mark.thorough
def test_a_server_answers_as_a_pirate_where_it_is_asked_to(default_model_folder: Path) -> None:
    question = "What is the capital of Sweden?"
    with (
        running_server("--model", str(default_model_folder), "--lora", f"pirate={PIRATE}") as server,
        Client(server.address) as client,
    ):
        plain = client.answer(question, temperature=0, max_tokens=COUNT).text
        said = client.answer(question, temperature=0, max_tokens=COUNT, model="pirate").text
        shape = r"(Arrr*|The),? [a-zA-Z ]{4,30}[.!]"
        guided = [client.answer(question, temperature=0, regex=shape, model=name).text for name in ("pirate", None)]
    assert said.startswith("Arr"), said
    assert "Arr" not in plain
    assert all(re.fullmatch(shape, text) for text in guided), guided
    assert [text[:3] for text in guided] == ["Arr", "The"], "a grammar leaves the choice to the adapter"
