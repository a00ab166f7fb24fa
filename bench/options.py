"""Options that the commands share, and the systems that these options name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from bench import BenchError
from bench.peers.gguf_files import COPIES, copied_gguf, quantized_gguf
from bench.peers.peer import PeerSettings
from bench.peers.registry import PEERS
from bench.systems import System, parse_system, peer, running_server
from bench.workloads import WORKLOADS, Workload
from pagoda_server.checkpoints import Progress, resolve
from pagoda_server.checkpoints.dequantized import dequantized

INSTALLED = "installed"
NO_PEERS = "none"
MAX_NUM_SEQS = 64  # Pagoda's default on a CPU; peers get the same

Model = Annotated[str, typer.Option(help="Model to serve.")]
Address = Annotated[str, typer.Option(help="Drive the server at this address instead of starting one.")]
SystemOption = Annotated[
    list[str] | None,
    typer.Option(
        "--system",
        help='"NAME:ARGUMENTS of pagoda serve", which may begin with environment variables, as in '
        '"avx2:PAGODA_INSTRUCTION_SET=avx2 --max-num-seqs 8". May be repeated; the first is compared with all others.',
    ),
]
ServeArgs = Annotated[str, typer.Option(help="Arguments of pagoda serve that every --system gets.")]
Peers = Annotated[str, typer.Option(help=f"{INSTALLED}, {NO_PEERS}, or any of {', '.join(PEERS)}; comma-separated.")]
Gguf = Annotated[
    Path | None, typer.Option(help="The model's GGUF file, for peers that read GGUF.", show_default="found")
]
Threads = Annotated[int | None, typer.Option(help="Compute threads of every system.", show_default="one per core")]
Repeat = Annotated[int, typer.Option(min=1, help="Number of turns; reports give medians and the spread.")]
Seed = Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")]
Output = Annotated[Path, typer.Option(help="Output folder for JSON, Markdown and pictures.")]
OUTPUT = Path("bench-results")


def build_workload(name: str, model: str, seed: int, **shape: float) -> Workload:
    """Build a workload by name. Raise BenchError if there is none, or if it does not take these options."""
    if name not in WORKLOADS:
        raise BenchError(f"there is no workload {name!r}, there are: {', '.join(WORKLOADS)}")
    try:
        return WORKLOADS[name](vocab_size(model), seed, **shape)
    except TypeError as error:
        raise BenchError(f"{name} does not take these options: {error}") from error


def vocab_size(model: str) -> int:
    size: int = json.loads((resolve(model) / "config.json").read_bytes())["vocab_size"]
    return size


def choose_systems(
    *,
    model: str,
    address: str,
    variants: list[str] | None,
    serve_args: str,
    peers: str,
    gguf: Path | None,
    threads: int,
    workloads: list[Workload],
    progress: Progress,
) -> list[System]:
    """Return Pagoda's systems first, then the peers. Raise BenchError if a named peer is not installed."""
    common = ["--model", model, "--threads", str(threads), *shlex.split(serve_args)]
    if address:
        ours = [running_server(address)]
    else:
        ours = [parse_system(variant, common) for variant in variants or ["pagoda"]]
    names = peer_names(peers, model)
    needs = {PEERS[name].weights for name in names}
    quantized = gguf or (quantized_gguf(model, progress) if needs - {"folder"} else Path())
    weights = {"folder": "", "gguf": str(quantized)}
    weights |= {f"gguf-{form}": str(copied_gguf(quantized, form)) for form in COPIES if f"gguf-{form}" in needs}
    folder = resolve(model)
    settings = {
        kind: PeerSettings(
            model=str(dequantized(folder, progress) if kind == "folder" and kind in needs else folder),
            gguf=file,
            threads=threads,
            max_num_seqs=MAX_NUM_SEQS,
            longest=max(workload.longest for workload in workloads),
            count=max(workload.most_at_once for workload in workloads),
            prefix_caching=any(workload.reuses_prefixes for workload in workloads),
        )
        for kind, file in weights.items()
    }
    return ours + [peer(name, settings[PEERS[name].weights]) for name in names]


def peer_names(peers: str, model: str) -> list[str]:
    if peers == NO_PEERS or (peers == INSTALLED and model == "synthetic"):
        return []
    if peers == INSTALLED:
        return [name for name, spec in PEERS.items() if spec.interpreter()]
    names = [name.strip() for name in peers.split(",")]
    if unknown := [name for name in names if name not in PEERS]:
        raise BenchError(f"there is no peer {unknown[0]!r}, there are: {', '.join(PEERS)}")
    return names
