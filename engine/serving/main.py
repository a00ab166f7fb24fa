"""The engine process: make a scheduler, a runner and a loop from the settings, and serve the channel."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pagoda.v1 import control_pb2

from ...channel.address import is_shm, is_unix
from ...channel.link import MAX_MESSAGE_BYTES
from ...checkpoints import CheckpointError, PrintedProgress, hold, resolve
from ...checkpoints.fingerprint import weights_fingerprint
from ...checkpoints.parsed_once import forget_headers
from ...runtime import event_loop
from ...runtime.channel_trust import ChannelTrust
from ...runtime.logs import print_line, start_logging
from ...runtime.parent_watch import exit_with_parent
from ...runtime.service_manager import READY, STOPPING, notify, report_progress
from ...runtime.signals import on_stop
from ...settings import EXIT_CONFIG, EXIT_FAILURE, EngineConfig, EngineSettings, SettingError
from ..core.errors import ConfigError
from ..drafting import PromptLookup, Speculation
from ..kv.blocks import BlockPool
from ..loop.loop import EngineLoop, Wake
from ..runners.load import InformedRunner, load_runner
from ..scheduling.scheduler import Scheduler
from .kv_store import layout_of, open_store, restore
from .listen import check_exposure, start_listening
from .server import EngineServer

if TYPE_CHECKING:
    from ..guidance import Grammars
    from ..runners.runner_info import RunnerInfo
    from .block_peers import BlockPeers

log = logging.getLogger("pagoda.engine")

PROTOCOL_VERSION = 2  # EngineInfo.protocol_version

T = TypeVar("T")


def run(config: EngineConfig) -> int:
    """Serve a model's tokens to routers."""
    start_logging(config)
    if config.exit_with_parent:
        exit_with_parent()
    try:
        trust = check_exposure(config)
        progress = PrintedProgress()
        folder = resolve(config.model, progress)
        hold(folder)
        engine = OneThread("engine")
        fingerprint = OneThread("fingerprint").submit(lambda: weights_fingerprint(folder))  # while the model is loaded
        runner = engine.submit(lambda: load_runner(config, folder, progress)).result()
        speculation = engine.submit(lambda: _speculation(replace(config, model=str(folder)), runner, progress)).result()
        known = fingerprint.result()
        forget_headers()  # the fingerprint may have been made after the model was loaded
        gc.enable()
        # Else a full collection, in the middle of any step, walks the 170,000 objects that torch made. Few of them are
        # garbage, so none comes before: it would take as long.
        gc.freeze()
        return event_loop.run(_serve(config, folder, runner, known, speculation, engine, trust))
    except (ConfigError, CheckpointError, SettingError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    except MemoryError:
        print("error: not enough memory to load the model; --quantization can help", file=sys.stderr, flush=True)
    return EXIT_CONFIG


class OneThread:
    """Calls functions one after the other on one thread, which ends with the process.

    The model is loaded and served on the same thread, because CUDA's libraries keep handles and memory for each.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def _work(self) -> None:
        while True:
            self._calls.get()()


async def _serve(
    config: EngineConfig,
    folder: Path,
    runner: InformedRunner,
    fingerprint: str,
    speculation: Speculation | None,
    engine: OneThread,
    trust: ChannelTrust,
) -> int:
    info = runner.info
    leaves, stop = asyncio.Event(), asyncio.Event()
    # The first signal begins the grace period, and a second one ends it.
    on_stop(lambda: (stop if leaves.is_set() else leaves).set())
    events = asyncio.get_running_loop()
    # A service manager may send it to all processes of a unit.
    events.add_signal_handler(signal.SIGUSR2, log.warning, "SIGUSR2: it is for the first process of a server")
    peers = peers_of(config, runner, fingerprint, trust)
    if peers is None and config.role != "both":
        raise ConfigError(
            f"--role {config.role}: this engine fetches and lends no blocks. That needs --host-kv-gb, --listen "
            "unix:PATH or HOST:PORT, the prefix cache, and a model of one process without sliding windows"
        )
    layout = peers.lent.layout if peers is not None else b""
    server = EngineServer(
        engine_info(config, runner, folder, fingerprint),
        partial(make_grammars, folder, info),
        block_layout=layout,
        adapters=(runner.adapters, config.max_loaded_adapters) if runner.adapters is not None else None,
        role=config.role,
    )
    pool = BlockPool(info.num_blocks, info.kv_cache.block_size)
    store = open_store(config, runner, fingerprint) if config.kv_store else None
    if store is not None:
        num_restored = await asyncio.wrap_future(engine.submit(lambda: restore(store, pool, info.num_host_blocks)))
        log.info("%d blocks of %s are cached again", num_restored, config.kv_store)
    loop = EngineLoop(
        Scheduler(
            pool,
            max_num_seqs=info.limits.max_num_seqs,
            token_budget=info.limits.token_budget,
            max_model_len=info.max_model_len,
            windows=info.kv_cache.groups.windows,
            prefix_caching=config.prefix_caching,
            clock=time.monotonic,
            policy=config.policy,
            ageing_s=config.priority_ageing_s,
            tenant_weights=config.weight_of_tenant(),
            target_itl_s=config.target_itl_s,
            longest_step_s=config.longest_step_s,
            num_host_blocks=info.num_host_blocks,
            store=store,
            peers=peers,
            speculation=speculation,
            num_adapter_slots=runner.adapters.num_slots if runner.adapters is not None else 0,
        ),
        runner,
        server,
        on_end=lambda: wake(events, stop),
        lookahead=runner.lookahead,
    )
    server.attach(loop.inbox)
    if store is not None:
        store.start(lambda: loop.inbox.put(Wake()))
    if peers is not None:
        peers.start(lambda: loop.inbox.put(Wake()))
    listener = await start_listening(server, config, trust, peers.lent if peers is not None else None)
    ended = engine.submit(loop.run)
    log.info("serving %s at %s with %s kernels", info.model, listener.address, info.kernels)
    if not (is_shm(listener.address) or is_unix(listener.address)):  # a program that gave port 0 learns the actual one
        print_line(config, log.name, f"serving at {listener.address}", {"address": listener.address})
    notify(READY)
    watchdog = asyncio.create_task(report_progress(server.loop_answers))
    await _first_of(leaves, stop)
    notify(STOPPING)
    if not stop.is_set():
        await server.leave(config.grace_s, stop)
    watchdog.cancel()
    loop.stop()
    await listener.stop()
    if peers is not None:
        peers.close()
    wait([ended], timeout=5.0)
    return EXIT_FAILURE if loop.failure else 0


def peers_of(config: EngineConfig, runner: InformedRunner, fingerprint: str, trust: ChannelTrust) -> BlockPeers | None:
    """What fetches blocks from other engines; None: this one neither fetches nor lends.

    Blocks pass through host memory, and calls reach engines that listen with gRPC. Addresses stand for tokens alone, so
    the weights must be known, and what lies behind a window cannot be found.
    """
    info, spec = runner.info, runner.info.kv_cache
    can_keep = info.num_host_blocks and config.prefix_caching and len(spec.groups.windows) == 1 and fingerprint
    can_send = not is_shm(config.listen) and spec.bytes_per_block < MAX_MESSAGE_BYTES // 2
    if not (can_keep and can_send) or config.tensor_parallel > 1:
        return None
    if (certificates := trust.current.certificates) is not None and not certificates.is_clients:
        log.info("no blocks are fetched or lent: --channel-tls-cert is a server's alone, and no client's")
        return None
    # Only now: an engine that its router has started loads no gRPC.
    from .block_lender import Lent
    from .block_peers import BlockPeers

    most = -(-info.max_model_len // spec.block_size)
    return BlockPeers(runner, Lent(layout_of(config, info, fingerprint), spec.bytes_per_block, most), trust)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of these is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _speculation(config: EngineConfig, runner: InformedRunner, progress: PrintedProgress) -> Speculation | None:
    """Choose what drafts. Raises ConfigError if the draft model cannot draft for this runner."""
    info = runner.info
    if config.draft_model and (info.device != "cpu" or info.architecture == "synthetic"):
        raise ConfigError(f"--draft-model: a model does not draft for {info.architecture} on {info.device}")
    if config.speculation == "off":
        return None
    if not config.draft_model:
        return Speculation(PromptLookup(), config.max_draft_tokens, info.vocab_size, runner.max_choices)
    from ..runners.cpu.draft_model import DraftModel  # only now, because torch takes a second

    drafter = DraftModel(config, resolve(config.draft_model, progress), info.vocab_size, progress)
    return Speculation(drafter, config.max_draft_tokens, info.vocab_size, runner.max_choices)


def make_grammars(folder: Path, info: RunnerInfo) -> Grammars:
    from ..guidance import Grammars  # only now: most engines never see a grammar

    return Grammars(folder, info.vocab_size, needs_all_masks=info.device != "cpu")


def wake(events: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set an event of an event loop from another thread."""
    with contextlib.suppress(RuntimeError):  # the event loop has closed: this process is ending anyway
        events.call_soon_threadsafe(stop.set)


def engine_info(config: EngineConfig, runner: InformedRunner, folder: Path, fingerprint: str) -> control_pb2.EngineInfo:
    info = runner.info
    spec = info.kv_cache
    quantized = (name for name in ("int4", "int8", "fp8") if name in info.kernel_backend)
    settings = config.reported(
        EngineSettings,
        device=info.device,
        dtype=info.dtype,
        quantization=next(quantized, "none"),
        max_model_len=info.max_model_len,
        kv_cache_gb=info.num_blocks * spec.bytes_per_block / 1e9,
        block_size=spec.block_size,
        max_num_seqs=info.limits.max_num_seqs,
        token_budget=info.limits.token_budget,
        overlap="on" if runner.lookahead else "off",
    )
    settings["role"] = config.role
    if config.node:
        settings["node"] = config.node
    return control_pb2.EngineInfo(
        epoch=secrets.randbits(63),
        model=info.model,
        architecture=info.architecture,
        device=info.device,
        dtype=info.dtype,
        kernel_backend=info.kernels,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.limits.max_num_seqs,
        token_budget=info.limits.token_budget,
        kv_cache=control_pb2.KvCacheInfo(
            block_size=spec.block_size,
            num_blocks=info.num_blocks,
            bytes_per_token=spec.bytes_per_token,
            bytes_per_block=spec.bytes_per_block,
            total_bytes=info.num_blocks * spec.bytes_per_block,
            token_capacity=info.token_capacity,
        ),
        weight_bytes=info.weight_bytes,
        settings=settings,
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        weights_fingerprint=fingerprint,
        precision=control_pb2.Precision(
            weights=info.weights,
            dtype=info.dtype,
            kv_cache=info.cache_dtype or info.dtype,
            is_deterministic=info.is_deterministic,
        ),
        protocol_version=PROTOCOL_VERSION,
    )
