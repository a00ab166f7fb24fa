"""Finds and imports models: a name, a folder or a file becomes a Hugging Face folder for router and engine."""

from .catalog import (
    DEFAULT_MODEL,
    AvailableModel,
    FoundModel,
    accept_terms,
    find_model,
    hold,
    list_models,
    missing_terms,
    remove_model,
    resolve,
)
from .files import verify
from .folder import CheckpointError
from .progress import PrintedProgress, Progress

__all__ = [
    "DEFAULT_MODEL",
    "AvailableModel",
    "CheckpointError",
    "FoundModel",
    "PrintedProgress",
    "Progress",
    "accept_terms",
    "find_model",
    "hold",
    "list_models",
    "missing_terms",
    "remove_model",
    "resolve",
    "verify",
]
