"""Workloads by name: what is asked, of which length, how much at once. A seed gives the same requests everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Request:
    """Greedy, end-of-sequence ignored, so that every system generates exactly output_len tokens."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: list[Request]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)


def mixed(vocab_size: int, seed: int = 0, count: int = 64) -> Workload:
    """All at once; prompt and output lengths log-normal, as conversations are: a few are much longer than the rest."""
    random = np.random.default_rng(seed)

    def lengths(mean: float, most: int) -> list[int]:
        return [min(most, max(8, int(length))) for length in random.lognormal(mean, 0.8, count)]

    requests = [
        Request(random.integers(0, vocab_size, prompt_len).tolist(), output_len)
        for prompt_len, output_len in zip(lengths(4.2, 256), lengths(4.0, 192), strict=True)
    ]
    return Workload("mixed", requests)


def single(vocab_size: int, seed: int = 0) -> Workload:
    """One stream: a prompt of 64 tokens, 128 out."""
    prompt = np.random.default_rng(seed).integers(0, vocab_size, 64).tolist()
    return Workload("single", [Request(prompt, 128)])


WORKLOADS = {"mixed": mixed, "single": single}
