"""Finds and imports models: a name, a folder or a file becomes a Hugging Face folder for router and engine."""

from pagoda_server.checkpoints.catalog import (
    DEFAULT_MODEL,
    AvailableModel,
    FoundModel,
    find_model,
    list_models,
    resolve,
)
from pagoda_server.checkpoints.files import verify
from pagoda_server.checkpoints.folder import CheckpointError
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
