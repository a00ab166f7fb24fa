"""The engine process: from a configuration to a served channel."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

import uvloop

from pagoda.v1 import control_pb2
from pagoda_server.checkpoints import CheckpointError, PrintedProgress, resolve
from pagoda_server.engine.core.config import EngineConfig
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.loop import EngineLoop
from pagoda_server.engine.runners.load import InformedRunner, load_runner
from pagoda_server.engine.runners.runner_info import RunnerInfo
from pagoda_server.engine.runners.synthetic import StepTime
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.engine.serving.listen import start_listening
from pagoda_server.engine.serving.server import EngineServer

log = logging.getLogger("pagoda.engine")

EXIT_FAILURE = 1
EXIT_CONFIG = 2  # no restart mends it


def run(config: EngineConfig, listen: str, *, exit_with_parent: bool, step_time: StepTime | None) -> int:
    """Serves until told to stop. Returns the process's exit code."""
    if exit_with_parent:
        threading.Thread(target=_exit_at_end_of_input, name="parent-watch", daemon=True).start()
    try:
        progress = PrintedProgress()
        folder = resolve(config.model, progress)
        runner = load_runner(config, folder, progress, step_time)
        gc.collect()
        gc.freeze()  # else a full collection, in the middle of any step, walks the 170,000 objects that torch has made
        return uvloop.run(_serve(config, folder, runner, listen))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG


async def _serve(config: EngineConfig, folder: Path, runner: InformedRunner, listen: str) -> int:
    info = runner.info
    stop = asyncio.Event()
    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(number, stop.set)
    server = EngineServer(engine_info(config, info, folder))
    loop = EngineLoop(
        Scheduler(
            BlockPool(info.num_blocks, info.kv_cache.block_size),
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            max_model_len=info.max_model_len,
            prefix_caching=config.prefix_caching,
            clock=time.monotonic,
            policy=config.policy,
            ageing_s=config.priority_ageing_s,
            tenant_weights=config.weight_of_tenant(),
            target_itl_s=config.target_itl_s,
            num_host_blocks=info.num_host_blocks,
        ),
        runner,
        server,
        on_end=lambda: wake(events, stop),
        lookahead=runner.lookahead,
    )
    server.attach(loop.inbox)
    listener = await start_listening(server, listen)
    loop.start()
    log.info("serving %s at %s with %s kernels", info.model, listen, info.kernels)
    await stop.wait()
    loop.stop()
    await listener.stop()
    loop.join(timeout=5.0)
    return EXIT_FAILURE if loop.failure else 0


def wake(events: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """From another thread."""
    with contextlib.suppress(RuntimeError):  # the event loop has closed: this process is ending anyway
        events.call_soon_threadsafe(stop.set)


def engine_info(config: EngineConfig, info: RunnerInfo, folder: Path) -> control_pb2.EngineInfo:
    spec = info.kv_cache
    return control_pb2.EngineInfo(
        epoch=secrets.randbits(63),
        model=info.model,
        architecture=info.architecture,
        device=info.device,
        dtype=info.dtype,
        kernel_backend=info.kernels,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        kv_cache=control_pb2.KvCacheInfo(
            block_size=spec.block_size,
            num_blocks=info.num_blocks,
            bytes_per_token=spec.bytes_per_token,
            bytes_per_block=spec.bytes_per_block,
            total_bytes=info.num_blocks * spec.bytes_per_block,
            token_capacity=info.token_capacity,
        ),
        weight_bytes=info.weight_bytes,
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
    )


def _exit_at_end_of_input() -> None:
    """The parent holds the other end of our standard input; when it is gone, nobody wants our tokens."""
    while os.read(0, 1024):
        pass
    os._exit(0)
