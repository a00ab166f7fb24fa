"""A checkpoint as Qwen3-Embedding is published: vectors of a real server are those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
import torch
from transformers import AutoModel, Qwen3Config

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import resolve
from tests.router.test_pooling import modes, write_pooling
from tests.servers import running_server

TEXTS = ["a text", "another one, " * 20, "ö"]


def save_embedding_model(folder: Path, pooling: str) -> tuple[Any, tokenizers.Tokenizer]:
    """Save tensors without a prefix, a tokenizer that adds a token at the end, and the pooling."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=258, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.3, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["Qwen3ForCausalLM"]}))
    shutil.copy(resolve("synthetic") / "tokenizer_config.json", folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve("synthetic") / "tokenizer.json"))
    end = tokenizer.id_to_token(257)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 257)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_pooling(folder, modes(pooling))
    return model, tokenizer


@pytest.mark.parametrize("pooling", ["mean_tokens", pytest.param("lasttoken", marks=pytest.mark.thorough)])
def test_vectors_are_pooled_as_the_model_was_trained(pooling: str, tmp_path: Path) -> None:
    model, tokenizer = save_embedding_model(tmp_path, pooling)
    with (
        running_server("--model", str(tmp_path), "--dtype", "float32", "--quantization", "none") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        inputs = [inference_pb2.EmbedInput(text=text) for text in TEXTS]
        response = stub.Embed(inference_pb2.EmbedRequest(inputs=inputs), timeout=60)
        first = stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, pooling=inference_pb2.POOLING_CLS), timeout=60)
    for index, text in enumerate(TEXTS):
        ids = tokenizer.encode(text).ids
        assert ids[-1] == 257
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = states[-1] if pooling == "lasttoken" else states.mean(dim=0)
        for found, state in ((response, pooled), (first, states[0])):
            expected = torch.nn.functional.normalize(state, dim=0)
            torch.testing.assert_close(torch.tensor(list(found.embeddings[index].values)), expected, atol=1e-4, rtol=0)
