"""The text side: what clients speak to. It never imports torch."""

import os

# The engine is started by fork and exec from a process that runs gRPC. gRPC's fork handlers, which serve children that
# go on using it, would only complain that they cannot run. Read when grpc is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
