"""`python -m bench.micro.guided`: what a grammar costs per step, and what forced tokens save, on the default model.

Guided and unguided sequences take turns in this process, so that a machine that is busy slows both. A step's time is
that of scheduling, computing and committing it: all that passes between two tokens on the engine's loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints import DEFAULT_MODEL, resolve
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import EngineConfig

CONTEXT = 128
STEPS = 40
SIZES = (1, 8, 32)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"enum": ["engineer", "teacher", "physician", "student"]},
        "email_confirmed": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "occupation", "email_confirmed"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}  # more than the steps that are measured


def steps(
    runner: ModelRunner, count: int, max_tokens: int, make_mask: Callable[..., GrammarMask] | None, jumps: bool = False
) -> Iterator[tuple[float, list[Sequence]]]:
    """Run `count` sequences to their end; yield each step's milliseconds, prompts excepted, and the sequences."""
    scheduler = Scheduler(
        BlockPool(runner.info.num_blocks, runner.info.kv_cache.block_size),
        max_num_seqs=max(SIZES),
        token_budget=runner.info.limits.token_budget,
        max_model_len=runner.info.max_model_len,
        prefix_caching=False,
        clock=time.monotonic,
    )
    seqs = []
    for number in range(count):
        prompt = torch.randint(0, runner.info.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(number))
        mask = make_mask(prompt_len=CONTEXT, jumps=jumps) if make_mask else None
        request = Request(CONTEXT, bypass_cache=True)
        seqs.append(Sequence(number, prompt.tolist(), request, SamplingParams(max_tokens=max_tokens), mask))
        scheduler.add(seqs[-1])
    while True:
        started = time.perf_counter()
        plan = scheduler.schedule()
        if plan.is_empty:
            return
        scheduler.commit(plan, runner.launch(plan).result())
        scheduler.take_output()
        if all(chunk.start >= CONTEXT for chunk in plan.chunks):
            yield 1e3 * (time.perf_counter() - started), seqs


def main(
    turns: Annotated[int, typer.Option(min=1, help="Of each kind, for each number of sequences.")] = 9,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Measure the time per output token with and without a grammar, and what forced tokens save."""
    folder = resolve(DEFAULT_MODEL)
    runner = ModelRunner(EngineConfig(str(folder), dtype="bfloat16", device="cpu", threads=threads))
    grammars = Grammars(folder, runner.info.vocab_size)
    people, person = (
        grammars.mask_maker(inference_pb2.Guided(json_schema=json.dumps(schema))) for schema in (PEOPLE, PERSON)
    )
    table = Table(title=f"Milliseconds per step, {threads} threads, medians of {turns} turns")
    for heading in ("sequences", "unguided", "guided", "guided ÷ unguided"):
        table.add_column(heading, justify="right")
    for size in SIZES:
        times: list[tuple[float, float]] = []
        for _ in range(turns + 1):
            without, within = (
                median(ms for ms, _ in steps(runner, size, STEPS, make_mask)) for make_mask in (None, people)
            )
            times.append((without, within))
        del times[0]  # it records steps
        table.add_row(
            str(size),
            f"{median(without for without, _ in times):.2f}",
            f"{median(within for _, within in times):.2f}",
            f"{median(within / without for without, within in times):.3f}",
        )
    Console().print(table)

    table = Table(title="One answer to a schema of five properties")
    for heading in ("forced tokens", "output tokens", "of them forced", "steps", "milliseconds"):
        table.add_column(heading, justify="right")
    for jumps in (False, True):
        answers = [list(steps(runner, 1, 200, person, jumps)) for _ in range(turns)]
        (seq,) = answers[0][0][1]
        table.add_row(
            "appended" if jumps else "computed one by one",
            str(seq.output_len),
            str(seq.account.forced_tokens),
            str(len(answers[0]) + 1),
            f"{median(sum(ms for ms, _ in answer) for answer in answers):.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
