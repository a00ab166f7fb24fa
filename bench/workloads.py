"""Workloads by name: what is asked, of which length, and when. A seed gives the same requests everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.measure import OUTPUT_RATE, PROMPT_RATE, Rate

TEXT = Path(__file__).with_name("quality_text.txt")  # prose, where random tokens will not do; written for this
DEFAULT_RATE = 2.0  # requests a second
RAG_PROMPT_LEN = 4096
SHARED_PREFIX_LEN = 512
PREFILL_PROMPT_LEN = 512


@dataclass(frozen=True, slots=True)
class Request:
    """Greedy, end-of-sequence ignored, so that every system generates exactly output_len tokens.

    arrival_s  when it is sent, in seconds from the run's start, whatever became of those before it (open loop)
    kind       what reports tell apart within a workload
    """

    prompt: list[int]
    output_len: int
    arrival_s: float = 0.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """
    reuses_prefixes   prefix caches are on; in every other workload repetitions are to measure the same work
    one_at_a_time     each request is sent when the one before is done (closed loop); arrival_s does not count
    rate              what reports compare systems by
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
        """Prompt and output of the longest request."""
        return max(len(request.prompt) + request.output_len for request in self.requests)


@dataclass(frozen=True, slots=True)
class Draw:
    """Random lengths and prompts of a vocabulary, from one seed."""

    random: np.random.Generator
    vocab_size: int

    def lengths(self, count: int, mean: float, spread: float, least: int, most: int) -> list[int]:
        """Log-normal, `mean` and `spread` those of the logarithm, as conversations are: a few are much longer."""
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
    """All at once; prompt and output lengths log-normal."""
    return Workload("mixed", Draw(np.random.default_rng(seed), vocab_size).mixed(count))


def single(vocab_size: int, seed: int = 0) -> Workload:
    """One stream: a prompt of 64 tokens, 128 out."""
    return Workload("single", [Request(Draw(np.random.default_rng(seed), vocab_size).prompt(64), 128)])


def prefill(vocab_size: int, seed: int = 0, count: int = 16) -> Workload:
    """Prompts of 512 tokens one after the other, each with one token out: its TTFT is all there is."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = [Request(draw.prompt(PREFILL_PROMPT_LEN), 1) for _ in range(count)]
    return Workload("prefill", requests, one_at_a_time=True, rate=PROMPT_RATE)


def chat(vocab_size: int, seed: int = 0, count: int = 16) -> Workload:
    """Short in, long out, all at once: decoding decides."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    lengths = zip(draw.lengths(count, 3.2, 0.5, 8, 64), draw.lengths(count, 5.5, 0.4, 64, 512), strict=True)
    return Workload("chat", [Request(draw.prompt(prompt_len), output_len) for prompt_len, output_len in lengths])


def rag(vocab_size: int, seed: int = 0, count: int = 4, short: int = 16, every_s: float = 0.5) -> Workload:
    """Prompts of 4,096 tokens with 64 out, all at once; short requests arrive one by one while those are computed."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = [Request(draw.prompt(RAG_PROMPT_LEN), 64, kind="long") for _ in range(count)]
    requests += [Request(draw.prompt(32), 16, arrival_s=every_s * (at + 1), kind="short") for at in range(short)]
    return Workload("rag", requests)


def shared_prefix(vocab_size: int, seed: int = 0, count: int = 32, every_s: float = 0.1) -> Workload:
    """One prefix of 512 tokens, as a system prompt is, then 32 tokens of each request's own; 32 out."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    prefix = draw.prompt(SHARED_PREFIX_LEN)
    requests = [Request(prefix + draw.prompt(32), 32, arrival_s=every_s * at) for at in range(count)]
    return Workload("shared-prefix", requests, reuses_prefixes=True)


def burst(vocab_size: int, seed: int = 0, count: int = 96, waves: int = 3, every_s: float = 4.0) -> Workload:
    """Waves of requests like `mixed`, each wave at one moment, whether or not the one before is done."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    requests = [
        Request(request.prompt, request.output_len, arrival_s=every_s * (at * waves // count), kind="")
        for at, request in enumerate(draw.mixed(count))
    ]
    return Workload("burst", requests)


def poisson(vocab_size: int, seed: int = 0, count: int = 64, rate: float = DEFAULT_RATE) -> Workload:
    """Requests like `mixed` that arrive independently of each other and of the server, `rate` a second on average."""
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
    """`count` requests of one length at once."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    return Workload("uniform", [Request(draw.prompt(prompt_len), output_len) for _ in range(count)])


def long_tail(
    vocab_size: int, seed: int = 0, count: int = 32, short_len: int = 16, long_len: int = 192, one_in: int = 8
) -> Workload:
    """A queue in which one output in eight is twelve times as long as the rest."""
    draw = Draw(np.random.default_rng(seed), vocab_size)
    lengths = [long_len if at % one_in == one_in - 1 else short_len for at in range(count)]
    return Workload("long-tail", [Request(draw.prompt(16), length) for length in lengths])


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
