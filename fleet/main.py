"""`pagoda fleet`: the driver's process."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime import event_loop
from ..runtime.authority import CertsError
from ..runtime.channel_trust import TrustError
from ..runtime.logs import print_line, start_logging
from ..settings import EXIT_CONFIG, EXIT_FAILURE
from ..settings.fleet import LOCAL, FleetConfig
from .control import answering
from .driver import Driver, FleetError, HostsError
from .folder import CONTROL, FleetFolder

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
    driver, stop = Driver(config, hosts, folder), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with answering(folder.path / CONTROL, driver.answer):
        command = shlex.join(["pagoda", "serve", f"--model={config.model}", *folder.router_options])
        print_line(config, log.name, f"keeping {config.bounds} engines; a router: {command}", {"router": command})
        await driver.run(stop, drains=config.ray == LOCAL)
    return 0
