"""The router process: `serve` runs one router or several, and turns what ends them into an exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints import CheckpointError, PrintedProgress, Progress, find_model, hold, synthetic
from ...runtime import event_loop
from ...runtime.channel_trust import ChannelTrust, TrustError
from ...runtime.followed import wait_until_read
from ...runtime.logs import start_logging
from ...runtime.parent_watch import exit_with_parent
from ...runtime.signals import on_stop
from ...settings import EXIT_CONFIG, ServeConfig, SettingError
from ...settings.router import SPAWN, named_loras, named_models
from ...settings.sources import misspelt_variables
from ..config_error import ConfigError
from ..engines.handshake import channel_trust
from .parent import ParentLink
from .public_port import check_exposure
from .succession import Handover
from .supervisor import ChildFailedError
from .workers import WorkerConfig, Workers

if TYPE_CHECKING:
    from .router import Router

log = logging.getLogger("pagoda.router")


def serve(config: ServeConfig, progress: Progress | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the process's exit code: 0, 1 for a failure, 2 for a wrong setting."""

    def run() -> None:
        if config.exit_with_parent:
            exit_with_parent()
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
        if taken := folders.keys() & dict(named_loras(config.lora)).keys():
            raise ConfigError(f"--lora: {min(taken)} is the name of a served model")
        event_loop.run(Workers(named, folders).run())

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
        from ..tenants.identity import read_tenants

        read_tenants(Path(config.tenants_file))


def serve_as_worker(config: WorkerConfig, parent: ParentLink) -> int:
    """Serve as one of several routers on a port, until SIGTERM or the parent's death. Returns the exit code."""

    def run() -> None:
        if config.serve.tenants_file:
            from ..tenants.identity import read_tenants

            tenants = Path(config.serve.tenants_file)
            wait_until_read("its tenants", [tenants], partial(read_tenants, tenants), ConfigError, log)
        trust = ChannelTrust(config.serve, is_engine=False)
        wait_until_read(trust.name, trust.paths, trust.read, TrustError, log)
        router = config.router(parent)
        event_loop.prefer_streams()
        event_loop.run(_until_signal(router, parent))

    return _exit_code_of(run, config.serve)


def serve_on(handed: Handover) -> int:
    """Serve with the processes that another program has left to this one. Returns as `serve` does."""

    def run() -> None:
        folders = {name: Path(folder) for name, folder in handed.folders.items()}
        for folder in folders.values():
            hold(folder)
        event_loop.run(Workers(handed.config, folders).run(handed))

    return _exit_code_of(run, handed.config)


def _check_engine_is_installed(config: ServeConfig) -> None:
    """Raise ConfigError if this installation can run a router alone, and shall spawn an engine."""
    if config.engine == SPAWN and config.model != synthetic.NAME and find_spec("torch") is None:
        raise ConfigError(
            "the engine is not installed: pip install 'pagoda-server[engine]', or name one that runs with --engine"
        )


def _exit_code_of(run: Callable[[], None], config: ServeConfig) -> int:
    start_logging(config)
    try:
        run()
    except (SettingError, ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except ChildFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


async def _until_signal(router: Router, parent: ParentLink) -> None:
    loop = asyncio.get_running_loop()
    parent.answer_from(loop)
    on_stop(router.stop)
    loop.add_signal_handler(signal.SIGUSR2, log.warning, "SIGUSR2: send it to the process that has started this router")
    try:
        await router.run()
    finally:
        parent.ends()


if __name__ == "__main__":  # Workers runs this module for each router and sends its settings to standard input
    sys.exit(serve_as_worker(WorkerConfig.from_line(sys.stdin.readline()), ParentLink()))
