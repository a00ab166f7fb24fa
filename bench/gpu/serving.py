"""`mixed` through gRPC on a model with random weights, compared with transformers' continuous batching."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.attention import TINY
from bench.gpu.random_model import write_model
from bench.gpu.rows import Bench, Row, failed
from bench.measure import Run
from bench.peers.peer import PeerSettings
from bench.peers.registry import PEERS
from bench.systems import System, pagoda_server, peer
from bench.workloads import Workload, mixed
from pagoda_server.kernels.triton.inputs import LLAMA_8B

PART = "serving"
PEER = "transformers-generate-batch"
PEER_SHARE = 0.4  # of the time limit: if more has passed, the peer would hardly end in time
SEED = 0
COUNT, MAX_NUM_SEQS, TOKEN_BUDGET = 512, 256, 8192


def rows(bench: Bench) -> Iterator[Row]:
    started = time.monotonic()
    shape = TINY if bench.is_small else LLAMA_8B
    load = mixed(shape.vocab_size, SEED, count=2 if bench.is_small else COUNT)
    limits = ["--max-num-seqs", str(MAX_NUM_SEQS), "--token-budget", str(TOKEN_BUDGET)]
    environment: dict[str, str] = {}
    with TemporaryDirectory() as folder, TemporaryDirectory() as startup:
        if bench.is_small:
            from tests import rehearsal

            environment = rehearsal.environment(Path(startup))
            limits = ["--max-num-seqs", "4", "--token-budget", "64", "--kv-cache-gb", "0.01"]
        write_model(Path(folder), shape)
        options = ["--model", folder, "--device", bench.device.type, "--dtype", "bfloat16", "--quantization", "none"]
        server = pagoda_server("pagoda", [*options, *limits], environment, bench.evidence / "server.log")
        yield _measure(server, load)
        if bench.is_small or PEERS[PEER].interpreter() is None:
            return
        if time.monotonic() - started > PEER_SHARE * bench.limit_s:
            yield Row(PART, PEER, error="no time left")
        else:
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
        token_budget=TOKEN_BUDGET,
    )


def _measure(system: System, load: Workload) -> Row:
    """Start the system once and measure the second of two runs; the first compiles what is compiled on first use."""
    case = f"{system.name}, mixed, {len(load.requests)} requests"
    try:
        with system.start() as started:
            started.run(load, lambda tokens: None)
            run = started.run(load, lambda tokens: None)
    except Exception as failure:
        return failed(PART, case, failure)
    return Row(PART, case, rate=run.tokens_per_s, unit="tok/s", figures=_figures(run))


def _figures(run: Run) -> dict[str, float]:
    figures = {f"TTFT p{p} ms": run.ttft_ms(p) for p in (50, 99)} | {f"ITL p{p} ms": run.itl_ms(p) for p in (50, 99)}
    if run.mean_batch is not None:
        figures["mean batch"] = run.mean_batch
    return figures
