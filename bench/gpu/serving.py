"""`mixed` through gRPC on a model with random weights, compared with transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.attention import TINY
from bench.gpu.random_model import write_model
from bench.gpu.rows import Bench, Row, explain
from bench.measure import Run
from bench.peers.peer import PeerSettings
from bench.systems import System, pagoda_server, peer
from bench.workloads import Workload, mixed
from pagoda_server.kernels.triton.inputs import LLAMA_8B

PART = "serving"
PEER = "transformers-generate-batch"
SEED = 0
MAX_NUM_SEQS = 64


def rows(bench: Bench) -> Iterator[Row]:
    shape = TINY if bench.is_small else LLAMA_8B
    load = mixed(shape.vocab_size, SEED, count=2 if bench.is_small else 64)
    with TemporaryDirectory() as folder:
        write_model(Path(folder), shape)
        device = ["--device", bench.device.type, "--dtype", "bfloat16", "--quantization", "none"]
        yield _measure(pagoda_server("pagoda", ["--model", folder, *device]), load)
        if not bench.is_small:
            yield _measure(peer(PEER, _settings(folder, load, bench)), load)


def _settings(folder: str, load: Workload, bench: Bench) -> PeerSettings:
    return PeerSettings(
        model=folder,
        gguf="",
        threads=8,
        max_num_seqs=MAX_NUM_SEQS,
        longest=load.longest,
        count=len(load.requests),
        prefix_caching=False,
        device=bench.device.type,
    )


def _measure(system: System, load: Workload) -> Row:
    """Start the system once and measure the second of two runs; the first compiles what is compiled on first use."""
    case = f"{system.name}, mixed, {len(load.requests)} requests"
    try:
        with system.start() as started:
            started.run(load, lambda tokens: None)
            run = started.run(load, lambda tokens: None)
    except Exception as failure:
        return Row(PART, case, error=explain(failure))
    return Row(PART, case, rate=run.tokens_per_s, unit="tok/s", figures=_figures(run))


def _figures(run: Run) -> dict[str, float]:
    figures = {f"TTFT p{p} ms": run.ttft_ms(p) for p in (50, 99)} | {f"ITL p{p} ms": run.itl_ms(p) for p in (50, 99)}
    if run.mean_batch is not None:
        figures["mean batch"] = run.mean_batch
    return figures
