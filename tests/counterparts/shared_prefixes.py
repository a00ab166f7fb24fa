"""Prompts that share prefixes, and how many of their tokens are cached where a router chooses among two engines."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import grpc

from pagoda.v1 import control_pb2, control_pb2_grpc
from tests.servers import free_address, running_engine, running_server

# A cache holds 26 of the prompts.
SMALL_CACHE = ("--model", "synthetic", "--step-ms", "2,0.1,0.02", "--kv-cache-gb", "0.0003")
CLIENTS = 8


def prompts_with_shared_prefixes() -> list[str]:
    """400 prompts with 24 prefixes of 600 tokens, some far more frequent than others."""
    random = Random(1)
    prefixes = ["".join(random.choices("abcdefgh ", k=600)) for _ in range(24)]
    weights = [1 / place for place in range(1, 25)]
    return [
        random.choices(prefixes, weights)[0] + "".join(random.choices("xyz ", k=100))
        for _ in range(400)
    ]  # fmt: skip


def complete(base: str, prompt: str, model: str = "synthetic") -> str:
    """Complete a prompt through an OpenAI server; return its answer."""
    asked = {"model": model, "temperature": 0, "ignore_eos": True, "prompt": prompt, "max_tokens": 16}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content.decode()


def hits(complete: Callable[[str], str], prompts: list[str]) -> float:
    """Return the part of the prompts' tokens that were cached, with eight clients at once."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        used = [json.loads(answer)["usage"] for answer in clients.map(complete, prompts)]
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
    return cached / sum(each["prompt_tokens"] for each in used)


def hits_of_the_router(
    prompts: list[str], model: str = "synthetic", engine: Sequence[str] = SMALL_CACHE
) -> tuple[float, list[int]]:
    """Return `hits` of a router with two engines, and the prompt tokens of each engine, the fewest first."""
    addresses = [free_address() for _ in range(2)]
    with (
        running_engine(addresses[0], *engine),
        running_engine(addresses[1], *engine),
        running_server("--model", model, "--engine", ",".join(addresses), "--http", "127.0.0.1:0") as router,
    ):
        found = hits(lambda prompt: complete(router.http, prompt, model), prompts)
        with grpc.insecure_channel(router.address) as channel:
            engines = control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest()).engines
    return found, sorted(engine.prompt_tokens for engine in engines)
