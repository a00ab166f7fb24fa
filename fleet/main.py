"""`pagoda fleet`: the driver's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime import event_loop
from ..runtime.authority import CertsError
from ..runtime.channel_trust import TrustError
from ..runtime.logs import print_line, start_logging
from ..runtime.signals import on_stop
from ..settings import EXIT_CONFIG, EXIT_FAILURE
from ..settings.fleet import LOCAL, FleetConfig
from .control import answering
from .driver import Driver
from .folder import CONTROL, FleetFolder
from .group import FleetError, HostsError
from .metrics import Metrics

if TYPE_CHECKING:
    from .on_ray import RayHosts

log = logging.getLogger("pagoda.fleet")
NEEDS = "`pagoda fleet` needs more packages: pip install 'pagoda-server[ray]'"


def run(config: FleetConfig) -> int:
    """Keep a fleet of engines on Ray, on this host or on a cluster: as many as their load asks for."""
    start_logging(config)
    try:
        from .on_ray import RayHosts

        folder = FleetFolder(Path(config.folder).resolve())
        folder.prepare()
        hosts = RayHosts(config)
    except ModuleNotFoundError as error:
        print(f"error: {NEEDS} ({error.name} is missing)", file=sys.stderr)
        return EXIT_CONFIG
    except (HostsError, CertsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        return event_loop.run(_drive(config, hosts, folder))
    except (FleetError, TrustError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except (HostsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        hosts.close()


async def _drive(config: FleetConfig, hosts: RayHosts, folder: FleetFolder) -> int:
    metrics = Metrics() if config.metrics else None
    driver, stop = Driver(config, hosts, folder, metrics), asyncio.Event()
    on_stop(stop.set)
    with contextlib.ExitStack() as stack:
        if metrics is not None and config.metrics:
            port, end = metrics.serve(config.metrics)
            stack.callback(end)
            log.info("metrics at port %d", port)
        async with answering(folder.path / CONTROL, driver.answer):
            options = (f"--model={config.model}", *folder.router_options, *config.router_options)
            command = shlex.join(["pagoda", "serve", *options])
            print_line(config, log.name, f"keeping {config.bounds} engines; a router: {command}", {"router": command})
            await driver.run(stop, drains=config.ray == LOCAL)
    return 0
