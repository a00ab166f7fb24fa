"""How much of the KV memory holds tokens, by how it is given out.

Before paging, a sequence had its memory in one piece that was reserved when it started. The published comparison
(PagedAttention, Kwon et al., 2023, section 6 and figure 2) has three sizes of reservation in a buddy allocator. Paging
here is the server's own scheduler with its block pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bench.batching.loops import Simulated, continuous
from bench.workloads import Request
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.timing.cost_model import StepTimeFilter

MAX_MODEL_LEN = 2048  # of OPT, the published model
NUM_SLOTS = 15_700  # tokens that fit beside OPT-13B on the published card
MOST_AT_ONCE = 512
DATASETS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}  # published mean lengths of prompts and outputs


class Use(NamedTuple):
    """Slots of a step, or their shares of the memory; and how many sequences run.

    tokens   hold a token
    to_come  are reserved and will hold one, or are left in a block
    never    are reserved and never will, or lie behind a reservation because of rounding
    free     are too few, or too scattered, for the next sequence in line
    """

    tokens: float
    to_come: float
    never: float
    free: float
    at_once: float

    @classmethod
    def mean(cls, steps: Sequence[Use]) -> Use:
        """Shares, over all steps but the first fifth, in which the memory fills and lengths find their balance."""
        kept = np.array(steps[len(steps) // 5 :])
        return cls._make([*kept[:, :4].mean(0) / kept[0, :4].sum(), kept[:, 4].mean()])


class Buddies:
    """Memory in pieces of a power of two, each at a multiple of its size; the first that is free is taken."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.taken: dict[int, int] = {}  # start -> size

    def take(self, length: int) -> int | None:
        """Take a piece for so many tokens; return its start, or None if there is none."""
        size, start = power_of_two(length), 0
        for begin, taken in sorted(self.taken.items()):
            if start + size <= begin:
                break
            start = -(-(begin + taken) // size) * size
        if start + size > self.num_slots:
            return None
        self.taken[start] = size
        return start


def power_of_two(length: int) -> int:
    """Round up."""
    return 1 << (length - 1).bit_length()


RESERVATIONS: dict[str, Callable[[Request], int]] = {
    "reserves the maximum": lambda request: MAX_MODEL_LEN,
    "reserves a power of two": lambda request: min(
        MAX_MODEL_LEN, len(request.prompt) + power_of_two(request.output_len)
    ),
    "knows the output": lambda request: len(request.prompt) + request.output_len,
}


def reserving(requests: Sequence[Request], reserve: Callable[[Request], int], num_slots: int = NUM_SLOTS) -> list[Use]:
    """Serve requests that wait from the start, in order, until none waits; each running one gets a token a step."""
    memory, waiting, steps = Buddies(num_slots), deque(requests), list[Use]()
    running: dict[int, tuple[Request, int]] = {}  # by start, with the output so far
    while waiting:
        while waiting and (start := memory.take(reserve(waiting[0]))) is not None:
            running[start] = waiting.popleft(), 0
        tokens = sum(len(request.prompt) + made for request, made in running.values())
        at_end = sum(len(request.prompt) + request.output_len for request, _ in running.values())
        taken = sum(memory.taken.values())
        steps.append(Use(tokens, at_end - tokens, taken - at_end, num_slots - taken, len(running)))
        for start, (request, made) in list(running.items()):
            running[start] = request, made + 1
            if made + 1 == request.output_len:
                del running[start], memory.taken[start]
    return steps


def paging(requests: Sequence[Request], costs: StepTimeFilter, num_slots: int = NUM_SLOTS) -> list[Use]:
    """Serve the same requests with the server's scheduler; return the steps while some wait."""
    machine, steps = Simulated(costs, num_slots), list[Use]()

    def watch(scheduler: Scheduler) -> None:
        tokens = sum(seq.num_computed for seq in scheduler.running)
        taken = scheduler.pool.num_referenced * scheduler.pool.block_size
        if scheduler.num_waiting:
            steps.append(Use(tokens, taken - tokens, 0, num_slots - taken, len(scheduler.running)))

    continuous(machine, requests, MOST_AT_ONCE, token_budget=4 * MOST_AT_ONCE, watch=watch)
    return steps


def conversations(name: str, count: int, seed: int = 0) -> list[Request]:
    """Requests with the published mean lengths of a data set. That lengths are exponential is an assumption."""
    draw, found = np.random.default_rng(seed), list[Request]()
    while len(found) < count:
        prompt, output = (1 + int(draw.exponential(mean)) for mean in DATASETS[name])
        if prompt + output <= MAX_MODEL_LEN:
            found.append(Request([0] * prompt, output))
    return found
