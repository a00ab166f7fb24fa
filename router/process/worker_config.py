"""What one of several routers is told by the process that starts it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from pagoda_server.router.process.config import ServeConfig


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """
    serve    with the address that is shared, and this worker's part of the limits
    folder   of the model
    sockets  of all workers' private Control services, this one's first
    spawned  where the engine listens that the same process has spawned; None: `serve` says where engines run
    """

    serve: ServeConfig
    folder: str
    sockets: list[str]
    spawned: str | None

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> WorkerConfig:
        fields = json.loads(line)
        return replace(cls(**fields), serve=ServeConfig(**fields["serve"]))
