"""The router process: `serve` runs one router or several, and turns what ends them into an exit code."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints import CheckpointError, PrintedProgress, Progress, find_model, hold
from ...runtime import event_loop
from ...runtime.channel_trust import ChannelTrust, TrustError
from ...runtime.followed import wait_until_read
from ...runtime.logs import start_logging
from ...settings import EXIT_CONFIG, ServeConfig, SettingError
from ...settings.router import SPAWN, named_models
from ...settings.sources import misspelt_variables
from ..engines.handshake import channel_trust
from ..errors import ConfigError
from ..tenants.identity import read_tenants
from .call_guard import GRPC_LOGGER, is_worth_logging
from .public_port import check_exposure
from .supervisor import ChildFailedError, spawned_engine
from .workers import ParentLink, WorkerConfig, Workers

if TYPE_CHECKING:
    from .router import Router

log = logging.getLogger("pagoda.router")

SWITCH_INTERVAL_S = 0.001
GC_THRESHOLD = 5_000  # net new objects before a collection; a request in flight holds about a hundred


def serve(config: ServeConfig, progress: Progress | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code: 0, 1 for a failure, 2 for a wrong setting."""

    def run() -> None:
        for name, meant in misspelt_variables(ServeConfig):
            log.warning("$%s is not read: a setting's variable is $%s", name, meant)
        check(config)
        model = find_model(config.model, progress or PrintedProgress())
        hold(model.folder)
        named = replace(config, served_model_name=config.served_model_name or model.name)
        folders = {named.served_model_name or model.name: model.folder}
        for name, wanted in named_models(config.also_serve):
            other = find_model(wanted, progress or PrintedProgress())
            hold(other.folder)
            if (called := name or other.name) in folders:
                raise ConfigError(f"--also-serve: two models are called {called}: give one another name, NAME={wanted}")
            folders[called] = other.folder
        if config.workers > 1:
            event_loop.run(Workers(named, folders).run())
        else:
            with spawned_engine(named, model.folder) as engine:
                _run(lambda router: router(named, folders, engine))

    return _exit_code_of(run, config)


def check(config: ServeConfig) -> None:
    """Check all that can be checked before a model is fetched. Raises SettingError or ConfigError."""
    config.check_engine_is_ours()
    _check_engine_is_installed(config)
    check_exposure(config)
    channel_trust(config)
    if config.otlp_endpoint:
        from .router import import_traces

        import_traces()
    if config.tenants_file:
        read_tenants(Path(config.tenants_file))


def serve_as_worker(config: WorkerConfig, parent: ParentLink) -> int:
    """Serve as one of several routers on a port, until SIGTERM or the parent's death. Returns the exit code."""

    def run() -> None:
        if config.serve.tenants_file:
            tenants = Path(config.serve.tenants_file)
            wait_until_read("its tenants", [tenants], partial(read_tenants, tenants), ConfigError, log)
        trust = ChannelTrust(config.serve, is_engine=False)
        wait_until_read(trust.name, trust.paths, trust.read, TrustError, log)
        folders = {name: Path(folder) for name, folder in config.folders.items()}
        socket = Path(config.socket)
        arguments = config.serve, folders, None, parent, config.index, socket, config.spawned, config.replaces
        _run(lambda router: router(*arguments))

    return _exit_code_of(run, config.serve)


def _check_engine_is_installed(config: ServeConfig) -> None:
    """Raise ConfigError if this installation can run a router alone, and shall spawn an engine."""
    if config.engine == SPAWN and find_spec("torch") is None:
        raise ConfigError(
            "the engine is not installed: pip install 'pagoda-server[engine]', or name one that runs with --engine"
        )


def _exit_code_of(run: Callable[[], None], config: ServeConfig) -> int:
    start_logging(config)
    logging.getLogger(GRPC_LOGGER).addFilter(is_worth_logging)
    try:
        run()
    except (SettingError, ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except ChildFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(make: Callable[[type[Router]], Router]) -> None:
    """Run the router with rare garbage collection, and give its event loop the interpreter soon.

    What is in memory now stays, and tokens come and go without reference cycles. With Python's default thresholds,
    collections held up the streams for 10 ms and more. A thread that parses or tokenizes something large gives way to
    the event loop after the switch interval: at Python's default of 5 ms the streams waited for 100 ms and more.
    """
    from .router import Router  # only now: it takes a while, in which a spawned engine starts

    router = make(Router)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 50, 50)
    event_loop.run(router.run())


if __name__ == "__main__":  # Workers runs this module for each router and sends its settings to standard input
    sys.exit(serve_as_worker(WorkerConfig.from_line(sys.stdin.readline()), ParentLink()))
