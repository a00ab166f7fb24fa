"""`python -m router.worker`: one of several router processes on one port. Its configuration is one line of input."""

from __future__ import annotations

import sys

from router.main import serve_as_worker
from router.parent_link import ParentLink
from router.worker_config import WorkerConfig

if __name__ == "__main__":
    sys.exit(serve_as_worker(WorkerConfig.from_line(sys.stdin.readline()), ParentLink()))
