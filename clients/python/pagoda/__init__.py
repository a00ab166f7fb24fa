"""The Python client: `Client` blocks, `AsyncClient` is for asyncio; both stream tokens and raise typed errors."""

from pagoda.aio import AsyncClient
from pagoda.answer import Answer, ToolCall
from pagoda.chunk import Chunk, FinishReason, Timing, TokenLogprob, ToolCallDelta, Usage
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
    "InvalidArgument",
    "NotFound",
    "Overloaded",
    "PagodaError",
    "PermissionDenied",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
]
