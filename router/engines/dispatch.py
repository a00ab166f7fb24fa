"""Which engine replica takes a request: of those that are ready, the one with the fewest sequences."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda_server.router.engines.channel import EngineChannel
from pagoda_server.router.errors import Unavailable


class Dispatcher:
    def __init__(self, channels: Sequence[EngineChannel]) -> None:
        self.channels = channels

    @property
    def ready(self) -> list[EngineChannel]:
        return [channel for channel in self.channels if channel.is_ready]

    def pick(self) -> EngineChannel:
        """Raises Unavailable if no engine is ready."""
        if not (ready := self.ready):
            raise Unavailable("the engine is loading or being restarted")
        return min(ready, key=lambda channel: channel.num_live_sequences)
