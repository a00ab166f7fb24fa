"""The interface of a peer: created with settings, then given workloads. Its module imports the peer's system."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bench.measure import RequestTimes
from bench.workloads import Request, Workload

OnTokens = Callable[[int], None]  # called with the number of tokens that have just arrived


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """
    model            folder with config.json and safetensors weights
    gguf             the model's GGUF file; empty if there is none
    threads          compute threads, as many as Pagoda's
    max_num_seqs     sequences that run at once, as many as Pagoda's
    longest          tokens of the longest request, prompt and output
    count            the most requests at once
    prefix_caching   on for the same workloads as Pagoda's
    device           for peers that do not run only on a CPU
    token_budget     most tokens of a step, as Pagoda's, for peers that have such a limit
    adapters         GGUF files of LoRA adapters by name, for peers that serve several
    """

    model: str
    gguf: str
    threads: int
    max_num_seqs: int
    longest: int
    count: int
    prefix_caching: bool
    device: str = "cpu"
    token_budget: int = 512
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerRun:
    """A peer's run. `steps` is the number of forward passes, None if the system does not report it."""

    times: list[RequestTimes]
    steps: int | None = None


class Peer(Protocol):
    """A peer. `pid` and its descendants are the processes whose memory counts: its own unless it starts a server."""

    pid: int
    versions: dict[str, str]

    def run(self, workload: Workload, on_tokens: OnTokens) -> PeerRun: ...


class Arrivals:
    """Collects the arrival times of each request's tokens, for peers that our own loop drives."""

    def __init__(self, requests: list[Request], on_tokens: OnTokens) -> None:
        self._requests = requests
        self._on_tokens = on_tokens
        self._arrivals: list[list[float]] = [[] for _ in requests]
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def add(self, at: int, count: int = 1) -> None:
        """Record that `count` tokens of request `at` arrived. Tokens beyond its output_len do not count."""
        arrivals = self._arrivals[at]
        wanted = min(count, self._requests[at].output_len - len(arrivals))
        if wanted > 0:
            arrivals += [self.now()] * wanted
            self._on_tokens(wanted)

    def times(self) -> list[RequestTimes]:
        return [
            RequestTimes(request.arrival_s, arrivals, request.kind, len(request.prompt))
            for request, arrivals in zip(self._requests, self._arrivals, strict=True)
        ]
