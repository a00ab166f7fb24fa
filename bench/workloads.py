"""Workloads by name: prompts, lengths and arrival times. The same seed gives the same requests everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.measure import OUTPUT_RATE, PROMPT_RATE, Rate

TEXT = Path(__file__).with_name("quality_text.txt")  # prose for where random tokens will not do
DEFAULT_RATE = 2.0  # requests a second
RAG_PROMPT_LEN = 4096
SHARED_PREFIX_LEN = 512
PREFILL_PROMPT_LEN = 512


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request. End of sequence is ignored, so every system generates exactly output_len tokens.

    arrival_s  when it is sent, in seconds from the run's start, whether or not earlier requests are done (open loop)
    kind       label by which reports separate the requests of a workload
    adapter    name of the LoRA adapter that computes it; empty: none
    """

    prompt: list[int]
    output_len: int
    arrival_s: float = 0.0
    kind: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """
    reuses_prefixes   prefix caches are on; they are off in all other workloads, so that each turn does the same work
    one_at_a_time     each request is sent when the one before is done (closed loop); arrival_s is ignored
    rate              the figure by which reports compare systems
    """

    name: str
    requests: list[Request]
    reuses_prefixes: bool = False
    one_at_a_time: bool = False
    rate: Rate = OUTPUT_RATE

    @property
    def most_at_once(self) -> int:
        return 1 if self.one_at_a_time else len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(request.prompt) + request.output_len for request in self.requests)


@dataclass(frozen=True, slots=True)
class Draw:
    """Random lengths and prompts, from one seed."""

    random: np.random.Generator
    vocab_size: int

    def lengths(self, count: int, mean: float, spread: float, least: int, most: int) -> list[int]:
        """Draw log-normal lengths, as in conversations; `mean` and `spread` are those of the logarithm."""
        return [min(most, max(least, int(length))) for length in self.random.lognormal(mean, spread, count)]

    def prompt(self, length: int) -> list[int]:
        return [int(token) for token in self.random.integers(0, self.vocab_size, length)]

    def mixed(self, count: int) -> list[Request]:
        prompt_lens, output_lens = self.lengths(count, 4.2, 0.8, 8, 256), self.lengths(count, 4.0, 0.8, 8, 192)
        return [
            Request(self.prompt(prompt_len), output_len)
            for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True)
        ]


def mixed(vocab_size: int, seed: int = 0, count: int = 64) -> Workload:
    """Requests with log-normal prompt and output lengths, all at once."""
    return Workload("mixed", Draw(np.random.default_rng(seed), vocab_size).mixed(count))


def single(vocab_size: int, seed: int = 0) -> Workload:
    """One stream: a prompt of 64 tokens, an output of 128."""
    return Workload("single", [Request(Draw(np.random.default_rng(seed), vocab_size).prompt(64), 128)])


def prefill(vocab_size: int, seed: int = 0, count: int = 16) -> Workload:
    """Prompts of 512 tokens, one after the other, with an output of one token: prefill alone."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = [Request(draw.prompt(PREFILL_PROMPT_LEN), 1) for _ in range(count)]
    return Workload("prefill", requests, one_at_a_time=True, rate=PROMPT_RATE)


def chat(vocab_size: int, seed: int = 0, count: int = 16) -> Workload:
    """Short prompts and long outputs, all at once: decoding dominates."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    lengths = zip(draw.lengths(count, 3.2, 0.5, 8, 64), draw.lengths(count, 5.5, 0.4, 64, 512), strict=True)
    return Workload("chat", [Request(draw.prompt(prompt_len), output_len) for prompt_len, output_len in lengths])


def rag(vocab_size: int, seed: int = 0, count: int = 4, short: int = 16, every_s: float = 0.5) -> Workload:
    """Prompts of 4,096 tokens with outputs of 64, all at once; short requests arrive while they are computed."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = [Request(draw.prompt(RAG_PROMPT_LEN), 64, kind="long") for _ in range(count)]
    requests += [Request(draw.prompt(32), 16, arrival_s=every_s * (index + 1), kind="short") for index in range(short)]
    return Workload("rag", requests)


def shared_prefix(vocab_size: int, seed: int = 0, count: int = 32, every_s: float = 0.1) -> Workload:
    """Prompts that share a prefix of 512 tokens, such as a system prompt, and add 32 of their own; outputs of 32."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    prefix = draw.prompt(SHARED_PREFIX_LEN)
    requests = [Request(prefix + draw.prompt(32), 32, arrival_s=every_s * index) for index in range(count)]
    return Workload("shared-prefix", requests, reuses_prefixes=True)


def burst(vocab_size: int, seed: int = 0, count: int = 96, waves: int = 3, every_s: float = 4.0) -> Workload:
    """Waves of requests like `mixed`; a wave arrives at one moment, whether or not the last one is done."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = [
        Request(request.prompt, request.output_len, arrival_s=every_s * (index * waves // count), kind="")
        for index, request in enumerate(draw.mixed(count))
    ]
    return Workload("burst", requests)


def poisson(vocab_size: int, seed: int = 0, count: int = 64, rate: float = DEFAULT_RATE) -> Workload:
    """Requests like `mixed` with Poisson arrivals, `rate` per second on average."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = draw.mixed(count)
    arrivals = np.cumsum(draw.random.exponential(1 / rate, count))
    return Workload(
        "poisson",
        [
            Request(request.prompt, request.output_len, arrival_s=float(arrival))
            for request, arrival in zip(requests, arrivals, strict=True)
        ],
    )


def uniform(vocab_size: int, seed: int, count: int, prompt_len: int, output_len: int) -> Workload:
    """`count` requests of the same length, all at once."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    return Workload("uniform", [Request(draw.prompt(prompt_len), output_len) for _ in range(count)])


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mixed": mixed,
    "chat": chat,
    "rag": rag,
    "single": single,
    "prefill": prefill,
    "shared-prefix": shared_prefix,
    "burst": burst,
    "poisson": poisson,
}
