"""Where models come from: a name, a folder or a file becomes a Hugging Face folder that router and engine can read."""

from pagoda_server.checkpoints.catalog import (
    DEFAULT_MODEL,
    AvailableModel,
    FoundModel,
    find_model,
    list_models,
    resolve,
)
from pagoda_server.checkpoints.errors import CheckpointError
from pagoda_server.checkpoints.manifest import verify
from pagoda_server.checkpoints.progress import PrintedProgress, Progress

__all__ = [
    "DEFAULT_MODEL",
    "AvailableModel",
    "CheckpointError",
    "FoundModel",
    "PrintedProgress",
    "Progress",
    "find_model",
    "list_models",
    "resolve",
    "verify",
]
