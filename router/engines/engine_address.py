"""Where a router that spawns its engine tells it to listen."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator

from pagoda_server.channel.address import HAS_SHM, SHM_PREFIX
from pagoda_server.settings import ServeConfig


@contextlib.contextmanager
def spawn_address(config: ServeConfig) -> Iterator[str]:
    """An address of its own over the channel's transport, until the block ends."""
    if config.channel == "shm" or (config.channel == "auto" and HAS_SHM):
        yield f"{SHM_PREFIX}@pagoda-{secrets.token_hex(8)}"
        return
    with tempfile.TemporaryDirectory(prefix="pagoda-") as private:  # mode 0700: the socket is ours alone
        yield f"unix:{private}/engine.sock"
