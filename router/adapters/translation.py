"""What the adapters share: a call of another protocol, and errors that name its own fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import grpc

from pagoda.v1 import inference_pb2

from ..errors import InvalidArgument, PagodaError, Unimplemented
from ..request.client_call import Context
from ..request.fields import Limits
from ..request.inference import InferenceServicer

Reason = inference_pb2.FinishReason
# As vLLM names them, whose words both protocols take.
REASONS = {
    Reason.FINISH_REASON_STOP: "stop",
    Reason.FINISH_REASON_LENGTH: "length",
    Reason.FINISH_REASON_CANCELLED: "abort",
}
MAX_NAME = 64  # characters of a name that an error repeats


class Adapter(Protocol):
    """A service of requests, of this protocol or another.

    service   its full name
    admitted  its methods that each start one request, and are refused unread where no request is admitted
    """

    service: str
    admitted: Sequence[str]

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The methods' handlers by name, as CallGuard takes them."""


class Translation(ABC):
    """One request of another protocol, as a call of the Inference service.

    context  the gRPC call that brought it
    route    the method that the client called, as a Record has it
    raw      its message, if that is read already
    names    our fields, or beginnings that end with a dot, and what this protocol calls them
    """

    names: ClassVar[dict[str, str]]

    def __init__(self, context: Context, route: str, raw: bytes | None = None) -> None:
        self._context = context
        self._route = route
        self._raw = raw
        self._is_read = False

    async def read(self) -> Any:
        if self._raw is None:
            return await self._context.read()
        raw, self._raw = (grpc.aio.EOF if self._is_read else self._raw), b""
        self._is_read = True
        return raw

    @abstractmethod
    async def write(self, message: inference_pb2.GenerateResponse) -> None: ...

    def time_remaining(self) -> float | None:
        remaining_s: float | None = self._context.time_remaining()
        return remaining_s

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        metadata: Sequence[tuple[str, str | bytes]] | None = self._context.invocation_metadata()
        return metadata

    @abstractmethod
    def request(self, raw: bytes, limits: Limits) -> inference_pb2.GenerateRequest:
        """Our request, from this protocol's message."""

    async def run(self, inference: InferenceServicer) -> None:
        """Serve the request. Raises the PagodaError that ends it, which names this protocol's fields."""
        try:
            await inference.generate(self, self.request, self._route)
        except (InvalidArgument, Unimplemented) as error:
            raise self._renamed(error) from error

    def _renamed(self, error: InvalidArgument | Unimplemented) -> PagodaError:
        for ours, theirs in self.names.items():
            if error.field == ours or (ours.endswith(".") and error.field.startswith(ours)):
                field = theirs + error.field.removeprefix(ours)
                if isinstance(error, InvalidArgument):
                    return InvalidArgument(field, error.description)
                return Unimplemented(field)
        return error


def named(name: str) -> str:
    """A client's name for something, if an error can repeat it; else what stands for it."""
    return name if name.isascii() and name.isprintable() and 0 < len(name) <= MAX_NAME else "?"
