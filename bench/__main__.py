"""`python -m bench`: the command line of the benchmarks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bench import BenchError, options
from bench.compare import compare
from bench.measure import Targets
from bench.options import OUTPUT, Address, Gguf, Model, Output, Peers, Repeat, Seed, ServeArgs, SystemOption, Threads
from bench.promises.run import SCENARIOS, promises
from bench.record import usable_cores
from bench.workloads import DEFAULT_RATE, TEXT, WORKLOADS
from pagoda_server.checkpoints import DEFAULT_MODEL, CheckpointError, resolve
from pagoda_server.cli.progress import shown_progress
from pagoda_server.engine.core.errors import ConfigError

INTERRUPTED = 130  # the exit status that a shell reports for a program ended by Ctrl-C
TARGETS = Targets()


class _ComparesByDefault(TyperGroup):
    """Make `compare` the default: `python -m bench --workload mixed` runs `compare --workload mixed`."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        if not arguments or (arguments[0].startswith("-") and arguments[0] not in context.help_option_names):
            arguments = ["compare", *arguments]
        return super().parse_args(context, arguments)


app = typer.Typer(cls=_ComparesByDefault, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def bench() -> None:
    """Compare Pagoda with other systems. Trust ratios within one run: machines differ and are shared."""


@app.command("compare")
def compare_command(
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "mixed",
    model: Model = DEFAULT_MODEL,
    address: Address = "",
    system: SystemOption = None,
    serve_args: ServeArgs = "",
    peers: Peers = options.INSTALLED,
    gguf: Gguf = None,
    threads: Threads = None,
    repeat: Repeat = 3,
    seed: Seed = 0,
    count: Annotated[int | None, typer.Option(help="Number of requests.", show_default="the workload's")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, for poisson.", show_default=f"{DEFAULT_RATE:g}")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(help="Target for goodput: time to first token.")] = TARGETS.ttft_ms,
    tpot_ms: Annotated[
        float, typer.Option(help="Target for goodput: mean time per token after the first.")
    ] = TARGETS.tpot_ms,
    output: Output = OUTPUT,
) -> None:
    """Run one workload on every system, in turns: throughput, latency, goodput, memory."""
    threads = threads or usable_cores()
    shape = {name: value for name, value in (("count", count), ("rate", rate)) if value is not None}
    load = options.build_workload(workload, model, seed, **shape)
    with shown_progress() as progress:
        systems = options.choose_systems(
            model=model,
            address=address,
            variants=system,
            serve_args=serve_args,
            peers=peers,
            gguf=gguf,
            threads=threads,
            workloads=[load],
            progress=progress,
        )
    targets = Targets(ttft_ms, tpot_ms)
    compare(systems, load, repeat=repeat, seed=seed, targets=targets, threads=threads, output=output)


@app.command("quality")
def quality_command(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to predict; may be repeated.", exists=True, dir_okay=False, show_default=TEXT.name),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help='Precision to compare with float32: also "served", what the engine chooses, and "served, int8 cache". '
            "May be repeated.",
            show_default="bfloat16, int8, int4, int8 cache",
        ),
    ] = None,
    parts: Annotated[
        Path | None,
        typer.Option(help="Keep the result of each window in this folder: a run that was stopped goes on from there."),
    ] = None,
    threads: Threads = None,
    output: Output = OUTPUT,
) -> None:
    """Compare precisions with float32: perplexity, top-1 agreement, KL divergence and greedy outputs."""
    from bench.quality import chosen, quality  # imported here: other commands need no torch

    precisions = chosen(precision or [])
    threads = threads or usable_cores()
    quality(resolve(model), text or [TEXT], threads=threads, output=output, precisions=precisions, parts=parts)


@app.command("promises")
def promises_command(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SCENARIOS)}; may be repeated.")] = None,
    model: Model = DEFAULT_MODEL,
    serve_args: ServeArgs = "",
    threads: Threads = None,
    repeat: Repeat = 3,
    output: Output = OUTPUT,
) -> None:
    """Test the promises of docs/scheduling.md on real servers: each bound beside its measurement."""
    if unknown := [name for name in only or [] if name not in SCENARIOS]:
        raise BenchError(f"there is no scenario {unknown[0]!r}, there are: {', '.join(SCENARIOS)}")
    threads = threads or usable_cores()
    with shown_progress() as progress:
        resolve(model, progress)
    promises(
        [name for name in SCENARIOS if not only or name in only],
        arguments=["--model", model, "--threads", str(threads), *shlex.split(serve_args)],
        vocab_size=options.vocab_size(model),
        repeat=repeat,
        threads=threads,
        output=output,
    )


def main() -> int:
    try:
        app()
    except (BenchError, CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
