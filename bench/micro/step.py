"""`python -m bench.micro.step`: milliseconds of the default model's steps, in this process.

Sequences decode at contexts from 128 tokens; the prompt step computes the first 512 tokens of a prompt.
PAGODA_INSTRUCTION_SET selects another instruction set than the processor's fastest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Annotated, TypeAlias

import torch
import typer
from rich.console import Console
from rich.table import Table

from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import EngineConfig, Quantization

Adapters: TypeAlias = tuple[Adapter | None, ...]

CONTEXT = 128
PROMPT = 512
STEPS = 40
PROMPTS = 5
SIZES = (1, 8, 32, 64)
QUANTIZATIONS: tuple[Quantization, ...] = ("int4", "int8", "none")


def steps(
    runner: ModelRunner, count: int, prompt_len: int, output_len: int, adapters: Adapters = (None,)
) -> Iterator[tuple[StepPlan, float]]:
    """Run `count` sequences with random prompts, and these adapters in turn; yield each step and its milliseconds."""
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=count,
        token_budget=PROMPT,
        max_model_len=runner.info.max_model_len,
        windows=runner.info.kv_cache.groups.windows,
        prefix_caching=False,
        clock=time.monotonic,
        num_adapter_slots=runner.adapters.num_slots if runner.adapters is not None else 0,
    )
    params = SamplingParams(max_tokens=output_len)
    for number in range(count):
        prompt = torch.randint(0, runner.info.vocab_size, (prompt_len,)).tolist()
        request = Request(prompt_len, bypass_cache=True, adapter=adapters[number % len(adapters)])
        scheduler.add(Sequence(number, prompt, request, params))
    while not (plan := scheduler.schedule()).is_empty:
        started = time.perf_counter()
        sampled = runner.launch(plan).result()
        yield plan, 1e3 * (time.perf_counter() - started)
        scheduler.commit(plan, sampled)
        scheduler.take_output()


def decode_ms(runner: ModelRunner, count: int, adapters: Adapters = (None,)) -> float:
    steps_ms = steps(runner, count, CONTEXT, STEPS, adapters)
    times = [ms for plan, ms in steps_ms if len(plan.chunks) == plan.num_tokens == count]
    return median(times[1:])  # the first step is slower: it records


def prompt_ms(runner: ModelRunner) -> float:
    return median(next(steps(runner, 1, PROMPT + 1, 1))[1] for _ in range(PROMPTS))


def times_ms(quantization: Quantization, threads: int, *, deterministic: bool) -> tuple[str, list[float]]:
    """The name of the kernels, and the medians of every kind of step."""
    config = EngineConfig(
        str(resolve(DEFAULT_MODEL)),
        dtype="bfloat16",
        device="cpu",
        quantization=quantization,
        threads=threads,
        deterministic=deterministic,
    )
    runner = ModelRunner(config)
    return runner.info.kernels, [*(decode_ms(runner, size) for size in SIZES), prompt_ms(runner)]


def main(
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
    deterministic: Annotated[
        bool, typer.Option(help="Measure --deterministic too, and its throughput divided by that without it.")
    ] = False,
) -> None:
    """Measure milliseconds per step, medians, for each quantization."""
    table = Table(title=f"Milliseconds per step, {threads} threads")
    for heading in ("kernels", *(f"{size} decodes" for size in SIZES), f"{PROMPT} prompt tokens"):
        table.add_column(heading, justify="right")
    for quantization in QUANTIZATIONS:
        kernels, without = times_ms(quantization, threads, deterministic=False)
        table.add_row(kernels, *(f"{ms:.1f}" for ms in without))
        if deterministic:
            kernels, within = times_ms(quantization, threads, deterministic=True)
            table.add_row(kernels, *(f"{ms:.1f}" for ms in within))
            ratios = (f"{before / after:.2f}" for before, after in zip(without, within, strict=True))
            table.add_row("throughput, with ÷ without", *ratios, end_section=True)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
