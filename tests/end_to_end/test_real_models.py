"""Real models besides the default one give transformers' tokens in float32, from the same GGUF files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagoda.v1 import inference_pb2_grpc
from pagoda_server.checkpoints import resolve
from pagoda_server.checkpoints.dequantized import write_dequantized
from pagoda_server.router.text.chat_template import Chat, Message
from pagoda_server.router.text.tokenizer import Tokenizer
from tests.end_to_end.asking import Answer, ask
from tests.end_to_end.test_default_model import request_as_reference
from tests.engine.lora import merged, random_pairs, scale_of, write_adapter
from tests.real_models import gemma_gguf, qwen_gguf
from tests.servers import running_server

pytestmark = pytest.mark.thorough

COUNT = 16  # tokens of a continuation
NEAR_TIE = 1e-3  # between the two greatest logits of transformers: the order of sums may decide
FLOAT32 = ("--dtype", "float32", "--quantization", "none", "--kv-cache-gb", "0.3")
FILES = {"Qwen2.5-Coder": qwen_gguf, "Gemma 3 270M": gemma_gguf}
PROMPTS = [
    "The capital of Sweden is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "La capitale de la France est",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Water boils at",
    "SELECT name, count(*) FROM",
    "Dear Sir or Madam,\n\nI am writing to",
    "Die Hauptstadt von Österreich ist",
    "The three laws of motion are",
    "class Stack:\n    def __init__(self):\n",
    "日本の首都は",
    "Photosynthesis is the process by which",
    "import numpy as np\n\nx = np.",
    "She opened the door and saw",
    "<html>\n  <head>\n    <title>",
    "Roses are red, violets are",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "En un lugar de la Mancha,",
    "git commit -m",
    "The quick brown fox",
    "| name | age |\n|---|---|\n| Ada |",
    "To be, or not to be,",
]


@dataclass(frozen=True)
class Continuation:
    """
    tokens  what transformers generates greedily
    gaps    between the greatest two logits before each token
    """

    tokens: list[int]
    gaps: list[float]


def references(
    folder: Path, prompts: Sequence[str] = PROMPTS, change: Callable[[Any], Any] = lambda model: model
) -> list[Continuation]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = change(model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ids = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        found: Any = model.generate(
            **ids,
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=tokenizer.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack([logits.topk(2).values for logits in found.logits], dim=1)
    gaps = (best[..., 0] - best[..., 1]).tolist()
    tokens = found.sequences[:, ids["input_ids"].shape[1] :].tolist()
    return [Continuation(*each) for each in zip(tokens, gaps, strict=True)]


@dataclass(frozen=True)
class Model:
    """
    path      its GGUF file
    folder    the same for transformers, in float32
    expected  what transformers continues PROMPTS with
    """

    path: Path
    folder: Path
    expected: list[Continuation]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path, folder = FILES[request.param](), tmp_path_factory.mktemp("model")
    try:
        write_dequantized(resolve(str(path)), folder)
        yield Model(path, folder, references(folder))
    finally:
        shutil.rmtree(folder)  # of two gigabytes


@pytest.mark.parametrize("model", FILES, indirect=True)
def test_greedy_tokens_are_transformers_alone_and_in_one_batch(model: Model) -> None:
    with (
        running_server("--model", str(model.path), *FLOAT32) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)

        def tokens(prompt: str) -> list[int]:
            message = request_as_reference(prompt, COUNT)
            message.sampling.temperature = 0
            return ask(inference, message).ids()

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            crowd = list(pool.map(tokens, PROMPTS))
        alone = {at: tokens(PROMPTS[at]) for at in range(0, len(PROMPTS), 10)}
    ties = 0
    for at, (prompt, wanted) in enumerate(zip(PROMPTS, model.expected, strict=True)):
        sure = next((place for place, gap in enumerate(wanted.gaps) if gap < NEAR_TIE), COUNT)
        ties += sure < COUNT
        for found in (crowd[at], alone.get(at, crowd[at])):
            assert len(found) == COUNT
            assert found[:sure] == wanted.tokens[:sure], prompt
    assert ties <= 2, "most prompts are compared to their ends"


@pytest.mark.parametrize("model", ["Qwen2.5-Coder"], indirect=True)
def test_greedy_tokens_with_an_adapter_are_those_of_merged_weights_beside_the_models_own(
    model: Model, tmp_path: Path
) -> None:
    prompts, base = PROMPTS[::3], model.expected[::3]
    sizes = {"self_attn.q_proj": (896, 896), "self_attn.v_proj": (896, 128), "mlp.down_proj": (4864, 896)}
    modules = {f"model.layers.{layer}.{name}": size for layer in range(24) for name, size in sizes.items()}
    pairs = random_pairs(modules, rank=8, size=0.02)
    adapter = write_adapter(tmp_path / "adapter", pairs, r=8, lora_alpha=16, target_modules=[*sizes])
    adapted = references(model.folder, prompts, lambda model: merged(model, pairs, scale_of(16, 8)))
    assert sum(one.tokens != other.tokens for one, other in zip(base, adapted, strict=True)) > len(prompts) / 2
    with (
        running_server("--model", str(model.path), *FLOAT32, "--lora", f"mine={adapter}") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference = inference_pb2_grpc.InferenceStub(channel)

        def answer(prompt: str, name: str) -> Answer:
            message = request_as_reference(prompt, COUNT)
            message.sampling.temperature, message.lora_name = 0, name
            return ask(inference, message)

        asked = [(prompt, name) for prompt in prompts for name in ("", "mine")]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda each: answer(*each), asked))
    for wanted, found in ((base, answers[::2]), (adapted, answers[1::2])):
        for expected, given in zip(wanted, found, strict=True):
            sure = next((place for place, gap in enumerate(expected.gaps) if gap < NEAR_TIE), COUNT)
            assert given.ids()[:sure] == expected.tokens[:sure]


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a place, for 'now' or <later>",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def qwens_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(resolve(str(qwen_gguf())))


@pytest.mark.parametrize("tools", [[], TOOLS[:1], TOOLS], ids=["no tools", "one tool", "two tools"])
@pytest.mark.parametrize("system", [None, "You answer in Swedish."])
def test_the_template_with_tools_gives_the_ids_of_transformers(
    system: str | None, tools: list[dict[str, Any]], qwens_tokenizer: Any
) -> None:
    messages = [] if system is None else [Message("system", system)]
    messages += [Message("user", "Hello"), Message("assistant", "Hej!"), Message("user", "Is it raining in Göteborg?")]
    expected = qwens_tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tools=tools or None,
        add_generation_prompt=True,
        return_dict=False,
    )
    ours = Tokenizer(resolve(str(qwen_gguf())))
    assert ours.encode_chat(Chat(tuple(messages), tools=tuple(tools))) == expected
