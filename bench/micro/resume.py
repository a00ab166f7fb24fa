"""`python -m bench.micro.resume`: time to resume a preempted sequence, recomputed or loaded from host memory.

Runs in this process, alone. A sequence gives up its blocks in the middle of its output, another sequence takes all of
them for one step, and the first starts again. The time from then to its next token is measured.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer

from pagoda_server.checkpoints import resolve
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.sequence import Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Sampled, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import Launched, StepsInFlight
from pagoda_server.engine.runners.load import InformedRunner, load_runner
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.settings.engine import EngineConfig

LENGTHS = (256, 1024, 4096)
OUTPUT = 8  # tokens before the preemption, and as many after it


@dataclass(frozen=True, slots=True)
class Resumption:
    """Times in seconds. `copied_s` is that of all copies to host memory and back, 0 without copies."""

    resume_s: float
    copied_s: float
    tokens: list[int]


class Watched:
    """A runner that adds up the seconds of copies."""

    lookahead = 0

    def __init__(self, runner: InformedRunner) -> None:
        self.copied_s = 0.0
        self._runner = runner

    def launch(self, plan: StepPlan) -> Launched:
        launched, watched = self._runner.launch(plan), self

        class Step:
            def result(self) -> Sampled:
                sampled = launched.result()
                watched.copied_s += sampled.copied_s
                return sampled

        return Step()

    def recover(self) -> None:
        self._runner.recover()


def resume(runner: InformedRunner, length: int, token_budget: int, uses_host: bool) -> Resumption:
    """Preempt a sequence of `length` tokens once, and time its resumption."""
    size = runner.info.kv_cache.block_size
    watched = Watched(runner)
    pool = BlockPool(-(-(length + OUTPUT) // size) + 2, size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=4,
        token_budget=token_budget,
        max_model_len=runner.info.max_model_len,
        prefix_caching=False,
        clock=time.monotonic,
        num_host_blocks=runner.info.num_host_blocks if uses_host else 0,
    )
    steps = StepsInFlight(scheduler, watched)

    def step() -> None:
        steps.launch(scheduler.schedule())
        steps.commit_oldest()

    prompt = random.Random(length).choices(range(1000, 20_000), k=length - OUTPUT)
    seq, other = (
        Sequence(
            id, tokens, Request(len(tokens), arrived=time.monotonic(), priority=id), SamplingParams(max_tokens=count)
        )
        for id, (tokens, count) in enumerate(((prompt, 2 * OUTPUT), (prompt[::-1] + [1000] * OUTPUT, 1)))
    )
    scheduler.add(seq)
    while seq.num_tokens < length:
        step()
    scheduler.add(other)  # of higher priority
    step()
    scheduler.abort([other.id])
    started = time.perf_counter()
    while seq.num_tokens == length:
        step()
    resume_s = time.perf_counter() - started
    while seq.num_tokens < length + OUTPUT:
        step()
    scheduler.check_integrity()
    assert seq.account.preemptions == 1
    assert (seq.account.loaded_tokens > 0.9 * length) == uses_host
    return Resumption(resume_s, watched.copied_s, seq.tokens[seq.request.prompt_len :])


def main(
    model: Annotated[str, typer.Option(help="Model name or folder.")] = "smollm2-135m-instruct",
    turns: Annotated[int, typer.Option(help="Turns per length, each with both ways; one more turn warms up.")] = 5,
    token_budget: Annotated[int, typer.Option(help="Tokens per step.")] = 512,
) -> None:
    """Time resumption by recomputation and from host memory; print medians."""
    folder = resolve(model, no_progress)
    config = EngineConfig(str(folder), token_budget=token_budget, host_kv_gb=0.25)
    runner = load_runner(config, folder, no_progress)
    for length in LENGTHS:
        rounds: list[list[Resumption]] = []
        for turn in range(turns + 1):
            both = [resume(runner, length, token_budget, uses_host) for uses_host in (False, True)]
            if turn:
                rounds.append(both)
        again, loaded = zip(*rounds, strict=True)
        seconds = [[of.resume_s for of in way] for way in (again, loaded)]
        slow, fast = (median(way) * 1e3 for way in seconds)
        spread = [f"{min(way) * 1e3:.0f}–{max(way) * 1e3:.0f}" for way in seconds]
        print(
            f"{length} tokens: recomputed {slow:.0f} ms ({spread[0]}), from host memory {fast:.0f} ms ({spread[1]}), "
            f"ratio {slow / fast:.1f}, copies {median(of.copied_s for of in loaded) * 1e3:.1f} ms, "
            f"tokens equal in {sum(a.tokens == b.tokens for a, b in rounds)} of {len(rounds)}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
