"""`python -m pagoda_server.router.process.worker`: one of several routers on one port, configured on stdin."""

from __future__ import annotations

import sys

from pagoda_server.router.process.main import serve_as_worker
from pagoda_server.router.process.parent_link import ParentLink
from pagoda_server.router.process.workers import WorkerConfig

if __name__ == "__main__":
    sys.exit(serve_as_worker(WorkerConfig.from_line(sys.stdin.readline()), ParentLink()))
