"""The Python client: `Client` blocks, `AsyncClient` is for asyncio; both stream tokens and raise typed errors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagoda.aio import AsyncClient
    from pagoda.answer import Answer, ToolCall
    from pagoda.beams import Hypothesis
    from pagoda.chunk import Chunk, FinishReason, Score, Timing, TokenLogprob, ToolCallDelta, Usage
    from pagoda.client import Client
    from pagoda.errors import (
        AlreadyExists,
        Cancelled,
        DeadlineExceeded,
        InvalidArgument,
        NotFound,
        Overloaded,
        PagodaError,
        PermissionDenied,
        Unauthenticated,
        Unavailable,
        Unimplemented,
    )

__all__ = [
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "Cancelled",
    "Chunk",
    "Client",
    "DeadlineExceeded",
    "FinishReason",
    "Hypothesis",
    "InvalidArgument",
    "NotFound",
    "Overloaded",
    "PagodaError",
    "PermissionDenied",
    "Score",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for first: a process that needs the messages alone, in `pagoda.v1`, loads no gRPC."""
    if name in __all__:
        for module in ("errors", "chunk", "answer", "beams", "client", "aio"):
            if hasattr(found := import_module(f"pagoda.{module}"), name):
                globals()[name] = value = getattr(found, name)
                return value
    raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
