"""`python -m bench.simulate`: scheduling policies in simulated time. A seed reproduces every figure."""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import record
from bench.measure import Targets
from bench.options import OUTPUT, Output, Seed
from bench.record import Setting, usable_cores
from bench.report import page
from bench.simulate import report
from bench.simulate.arrivals import Arrivals, draw
from bench.simulate.simulator import Outcome, Server, System, simulate
from bench.simulate.step_times import DEFAULT, measure
from pagoda_server.checkpoints import DEFAULT_MODEL
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.policies import POLICIES

NAME = "simulate"
BASELINES = [System("FCFS, prompts whole", token_budget=None)]


def main(
    requests: Annotated[int, typer.Option(help="Requests in the table, for every system.")] = 20_000,
    load: Annotated[
        float, typer.Option(help="Load in the table: work that arrives ÷ work that a full batch computes.")
    ] = 0.9,
    loads: Annotated[
        str, typer.Option(help="Loads of the goodput curve, comma-separated; empty: no curve.")
    ] = "0.4,0.6,0.8,1.0,1.5,3.0",
    curve_requests: Annotated[int, typer.Option(help="Requests at each load of the curve, for every system.")] = 5_000,
    policies: Annotated[str, typer.Option(help="Policies, comma-separated.")] = ",".join(POLICIES),
    baselines: Annotated[bool, typer.Option(help="FCFS with prompts that are never cut.")] = True,
    target_itl_ms: Annotated[
        float, typer.Option(help="As in pagoda serve. Each policy runs without and with it; 0: only without.")
    ] = 80.0,
    ttft_ms: Annotated[float, typer.Option(help="Target for goodput: time to first token.")] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(help="Target for goodput: mean time per later token.")] = 100.0,
    timeout_s: Annotated[float, typer.Option(help="Deadline of every request.")] = 60.0,
    step_ms: Annotated[
        str | None, typer.Option(help="Step time as BASE,PER_SEQUENCE,PER_TOKEN.", show_default="the default model's")
    ] = None,
    measure_model: Annotated[
        bool, typer.Option("--measure", help="Measure the default model's step time first.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Concurrent simulations.", show_default="one per core")] = None,
    seed: Seed = 0,
    output: Output = OUTPUT,
) -> None:
    """Simulate bursts, heavy tails, a hostile tenant and a few prompts of 100,000 tokens."""
    console = Console(width=max(150, Console().width))
    step_time = StepTime.parse(step_ms) if step_ms else measure(DEFAULT_MODEL) if measure_model else DEFAULT
    parts = (step_time.base_s, step_time.per_sequence_s, step_time.per_token_s)
    console.print(f"a step: {', '.join(f'{1e3 * part:.4g}' for part in parts)} ms (base, sequence, token)")
    if unknown := [name for name in policies.split(",") if name not in POLICIES]:
        raise ConfigError(f"there is no policy {unknown[0]!r}, there are: {', '.join(POLICIES)}")
    chosen = [policy for policy in POLICIES if policy in policies.split(",")]
    systems = list(BASELINES) if baselines else []
    systems += [System(policy, policy=policy) for policy in chosen]
    if target_itl_ms:
        name = f"ITL {target_itl_ms:g} ms"
        systems += [System(f"{policy}, {name}", policy=policy, target_itl_ms=target_itl_ms) for policy in chosen]
    server, targets = Server(step_time, timeout_s=timeout_s), Targets(ttft_ms, tpot_ms)
    curve = [float(value) for value in loads.split(",") if value]

    with ProcessPoolExecutor(jobs or usable_cores(), get_context("spawn")) as pool, console.status("") as status:
        arrivals = draw(requests, load, step_time, server.max_num_seqs, seed)
        jobs_of = {at: draw(curve_requests, at, step_time, server.max_num_seqs, seed) for at in curve}
        table_jobs = [pool.submit(simulate, system, server, arrivals, targets) for system in systems]
        curve_jobs = {
            at: [pool.submit(simulate, system, server, drawn, targets) for system in systems]
            for at, drawn in jobs_of.items()
        }
        outcomes = []
        for system, job in zip(systems, table_jobs, strict=True):
            status.update(f"{system.name}: {requests:,} requests")
            outcomes.append(job.result())
        by_load = {}
        for at, of_load in curve_jobs.items():
            status.update(f"load {at:g}: {curve_requests:,} requests per system")
            by_load[at] = _results(of_load)
    _report(console, output, seed, load, arrivals, targets, outcomes, by_load)


def _results(jobs: list[Future[Outcome]]) -> list[Outcome]:
    return [job.result() for job in jobs]


def _report(
    console: Console,
    output: Path,
    seed: int,
    load: float,
    arrivals: Arrivals,
    targets: Targets,
    outcomes: list[Outcome],
    by_load: dict[float, list[Outcome]],
) -> None:
    """Print the tables; write simulate.json, .md and pictures into the folder."""
    cells = [
        report.table(outcomes, arrivals, load, targets),
        report.groups_table(outcomes, arrivals, targets),
    ]
    for part in cells:
        console.print(part.rich(), "")
    output.mkdir(parents=True, exist_ok=True)
    title = f"{len(arrivals):,} simulated requests at load {load:g}, seed {seed}"
    pictures = [f"{NAME}-latency.png"]
    report.draw_latency(outcomes, title, output / pictures[0])
    if by_load:
        pictures.append(f"{NAME}-goodput.png")
        goal = f"TTFT ≤ {targets.ttft_ms:g} ms and TPOT ≤ {targets.tpot_ms:g} ms"
        report.draw_goodput(by_load, targets, f"Goodput against load: {goal}", output / pictures[1])
    setting = Setting.here(threads=1)
    document = {
        "setting": record.fields(setting),
        "seed": seed,
        "load": load,
        "systems": [report.figures(outcome, targets) for outcome in outcomes],
        "curve": {at: [report.figures(outcome, targets) for outcome in found] for at, found in by_load.items()},
    }
    record.write(output, NAME, document)
    (output / f"{NAME}.md").write_text(page("Scheduling policies, simulated", setting, cells, [], pictures))
    console.print(f"JSON, Markdown and pictures: {output}")


if __name__ == "__main__":
    typer.run(main)
