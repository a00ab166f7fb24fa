"""What steps cost: measured with the default model in this process, or calculated from the data sheet of a card."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.batching.loops import LOOPS, Real
from bench.micro.step import PROMPT, prompt_ms, steps
from bench.record import Setting, usable_cores
from bench.workloads import mixed
from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.timing.cost_model import StepLoad, StepTimeFilter
from pagoda_server.settings.engine import EngineConfig

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SIZE, COUNT = 8, 16  # of the batches that loops make, and of the requests that they serve
CONTEXT, STEPS, READS, LONG_PROMPT = 64, 32, 15, 2048


@dataclass(frozen=True, slots=True)
class Measured:
    """
    setting       where and when, with the kernels
    samples       steps, each as the fields of a StepLoad and its seconds
    decode_s      batch size and median seconds of a step of as many decodes
    memory_bound  steps a second if a step only read the weights
    token_bound   tokens a second at the rate of multiplications that a step of prompt tokens reaches
    loops         output tokens a second of each loop, one figure a turn
    """

    setting: dict[str, Any]
    samples: list[tuple[list[float], float]]
    decode_s: list[tuple[int, float]]
    memory_bound: float
    token_bound: float
    loops: dict[str, list[float]]

    def costs(self) -> StepTimeFilter:
        """The server's own model of a step's time after it has seen these steps, in random order."""
        found = StepTimeFilter()
        for load, seconds in random.Random(0).sample(self.samples, len(self.samples)):
            found.observe(StepLoad(*load), seconds)
        return found


def measure(turns: int, say: Callable[[str], None]) -> Measured:
    """Time steps of every batch size and of prompts, then all loops, in turns."""
    folder = resolve(DEFAULT_MODEL)
    runner = ModelRunner(EngineConfig(str(folder), device="cpu", max_num_seqs=max(BATCHES), token_budget=8192))
    info, samples = runner.info, list[tuple[list[float], float]]()
    decodes, loops = {size: list[float]() for size in BATCHES}, {name: list[float]() for name in LOOPS}
    for turn in range(turns):
        for size, context, length in [*((size, CONTEXT, STEPS) for size in BATCHES), (1, LONG_PROMPT, 2)]:
            say(f"turn {turn + 1}: steps of {size}")
            for plan, ms in [*steps(runner, size, context, length)][1:]:
                samples.append(([*StepLoad.of_chunks(plan.chunks, plan.num_tokens)], ms / 1e3))
                if len(plan.chunks) == plan.num_tokens == size:
                    decodes[size].append(ms / 1e3)
    for turn in range(turns):
        for name, loop in [*LOOPS.items()][:: 1 if turn % 2 == 0 else -1]:
            say(f"turn {turn + 1}: {name}")
            run = loop(Real(runner), mixed(info.vocab_size, count=COUNT).requests, SIZE)
            loops[name].append(run.tokens_per_s)
    weights = torch.ones(info.weight_bytes // 4)
    body, head = _weights(folder)
    return Measured(
        asdict(Setting.here(usable_cores())) | {"kernels": info.kernels, "weights": info.weights},
        samples,
        [(size, median(times)) for size, times in decodes.items()],
        1 / median(_seconds(weights.sum) for _ in range(READS)),
        PROMPT / (prompt_ms(runner) / 1e3) * body / (body + head),
        loops,
    )


def card() -> StepTimeFilter:
    """OPT-13B in 16 bits on an A100 with 40 GB, at the peaks of its data sheet: no step can be faster."""
    weights, layers, hidden = 13e9, 40, 5120
    bytes_per_s, operations_per_s = 1.555e12, 312e12
    token_s, key_s = 2 * weights / operations_per_s, 4 * layers * hidden / bytes_per_s
    pair_s = 4 * layers * hidden / operations_per_s  # of a prompt token and a key
    found, units = StepTimeFilter(), (1.0, 1 / 64, 1 / 65_536, 1 / 64, 1 / 512, 1 / 524_288, 1 / 65_536)  # of StepLoad
    seconds = (2 * weights / bytes_per_s, token_s, key_s, 0.0, token_s, pair_s, key_s)
    found.parts = [each / unit for each, unit in zip(seconds, units, strict=True)]
    return found


def _weights(folder: Path) -> tuple[int, int]:
    """Count the weights of a Llama's layers, with which each token is multiplied, and those of its head."""
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    kv_size = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * config["intermediate_size"]
    return layers * layer, hidden * config["vocab_size"]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
