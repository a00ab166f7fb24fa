"""What a peer is: told its settings once, then given workloads. Its modules import their system when it is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.measure import RequestTimes
from bench.workloads import Request, Workload

OnTokens = Callable[[int], None]  # called with the number of tokens that have just appeared


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """
    model            folder with config.json and safetensors weights
    gguf             the model as a GGUF file; empty where there is none
    threads          for arithmetic, as many as Pagoda has
    max_num_seqs     sequences that run at once, as many as Pagoda's
    longest          prompt and output of the longest request
    count            requests that can be there at once
    prefix_caching   as Pagoda's, by workload
    device           for peers that run on more than a CPU
    """

    model: str
    gguf: str
    threads: int
    max_num_seqs: int
    longest: int
    count: int
    prefix_caching: bool
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PeerRun:
    """`steps`: forward passes, None if the system does not tell."""

    times: list[RequestTimes]
    steps: int | None = None


class Peer(Protocol):
    """`pid`: the process whose memory, with that of its descendants, is the system's; its own unless it starts one."""

    pid: int
    versions: dict[str, str]

    def run(self, workload: Workload, on_tokens: OnTokens) -> PeerRun: ...


class Arrivals:
    """Collects when each request's tokens appeared, for peers that a loop of ours drives."""

    def __init__(self, requests: list[Request], on_tokens: OnTokens) -> None:
        self._requests = requests
        self._on_tokens = on_tokens
        self._arrivals: list[list[float]] = [[] for _ in requests]
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def add(self, at: int, count: int = 1) -> None:
        """`count` tokens of request number `at` are here. Those beyond its output_len were not asked for."""
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
