"""Workloads, and the systems that they are run on."""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # servers are started from here; see router/__init__.py
