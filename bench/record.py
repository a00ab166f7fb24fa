"""JSON records with everything that a reader needs to judge or repeat a measurement."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from bench.measure import PERCENTILES, Run, Targets, Turns
from bench.workloads import Workload

PACKAGES = ("pagoda-server", "torch", "grpcio", "numpy")
# Variables that choose a system's instruction set, so results on the same machine depend on them.
INSTRUCTION_SETS = ("PAGODA_INSTRUCTION_SET", "LLAMA_SERVER", "OV_CPU_MAX_ISA", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a measurement was made."""

    command: str
    environment: dict[str, str]
    date: str
    cpu: str
    cores: int
    threads: int
    memory_gb: float
    system: str
    versions: dict[str, str]

    @classmethod
    def here(cls, threads: int) -> Setting:
        return cls(
            command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
            environment={name: os.environ[name] for name in INSTRUCTION_SETS if name in os.environ},
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            cpu=_cpu(),
            cores=usable_cores(),
            threads=threads,
            memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
            system=platform.platform(terse=True),
            versions={"python": platform.python_version()} | dict(_installed(PACKAGES)),
        )


def usable_cores() -> int:
    """Number of physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def document(setting: Setting, workload: Workload, seed: int, targets: Targets, systems: list[Turns]) -> dict[str, Any]:
    peers = [turns for turns in systems if turns.is_peer]
    return {
        "setting": fields(setting),
        "workload": {
            "name": workload.name,
            "seed": seed,
            "requests": len(workload.requests),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "rate": workload.rate,
        },
        "targets": asdict(targets),
        "systems": [
            {
                "name": turns.name,
                "command": turns.command,
                "versions": turns.versions,
                "rates": turns.rates,
                "ratio": asdict(systems[0].ratios(turns)),
                "ratio_to_best_peer": asdict(turns.ratios_to_best(peers)) if peers and not turns.is_peer else None,
                "turns": [figures(run, targets) for run in turns.runs],
            }
            for turns in systems
        ],
    }


def figures(run: Run, targets: Targets) -> dict[str, Any]:
    """A run's figures, and the times behind them: for each request its kind, due time and token arrivals."""
    return {
        "elapsed_s": run.elapsed_s,
        "output_tokens": run.output_tokens,
        "tokens_per_s": run.tokens_per_s,
        "requests_per_s": run.requests_per_s,
        "goodput_per_s": run.goodput(targets),
        "ttft_ms": {f"p{p}": run.ttft_ms(p) for p in PERCENTILES},
        "ttft_ms_by_kind": {kind: {f"p{p}": run.ttft_ms(p, kind) for p in PERCENTILES} for kind in run.kinds()},
        "itl_ms": {f"p{p}": run.itl_ms(p) for p in PERCENTILES} if len(run.itls_ms()) else None,
        "steps": run.steps,
        "mean_batch": run.mean_batch,
        "kv": asdict(run.kv) if run.kv else None,
        "peak_memory_bytes": run.peak_memory_bytes,
        "times": [
            [times.kind, round(times.submitted, 6), [round(arrival, 6) for arrival in times.arrivals]]
            for times in run.times
        ],
    }


def write(folder: Path, name: str, record: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def fields(setting: Setting) -> dict[str, Any]:
    return asdict(setting)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
