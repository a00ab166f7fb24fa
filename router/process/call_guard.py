"""What happens to every call before and after its handler: its caller, an early refusal, its message, its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeAlias

import grpc

from ..errors import (
    PagodaError,
    QuotaExceeded,
    ResourceExhausted,
    Status,
    Unauthenticated,
    to_status,
)
from ..request.client_call import Context
from ..request.receiving import SMALL_BYTES, Messages
from ..tenants.caller import Right, set_caller
from ..tenants.identity import Identities

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"
Refusal: TypeAlias = "Callable[[str], PagodaError | None]"

GRPC_LOGGER = "grpc._cython.cygrpc"
HEALTH = "/grpc.health."
_NEEDED = {  # rights, by method; Abort and what Control shows depend on the request
    "/pagoda.v1.Admin/Drain": Right.ADMIN,
    "/pagoda.v1.Admin/FlushCache": Right.ADMIN,
    "/pagoda.v1.Admin/LoadLora": Right.ADMIN,
    "/pagoda.v1.Admin/UnloadLora": Right.ADMIN,
    "/pagoda.v1.Admin/ListLoras": Right.ADMIN,
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Right.ADMIN,  # it shows all tenants' prompts
}


class CallGuard(grpc.aio.ServerInterceptor):
    """Guards every call of a server.

    messages    reads the messages of methods whose requests are not streams
    identities  whose the calls are. Health checks are anyone's: they reveal nothing
    refusals    by method: why a tenant's call would be refused now, before anything of it is read
    on_refusal  called for each call that is refused so, and of each whose caller is unknown or lacks a right

    Handlers of request streams get bytes, which they parse themselves. A call that raised ends with the gRPC status of
    its exception. CancelledError passes, because gRPC needs it.
    """

    def __init__(
        self,
        messages: Messages,
        identities: Identities,
        refusals: dict[str, Refusal] | None = None,
        on_refusal: Callable[[str, PagodaError], None] = lambda method, error: None,
    ) -> None:
        self._messages = messages
        self._identities = identities
        self._refusals = refusals or {}
        self._on_refusal = on_refusal
        self._guarded: dict[str, Handler] = {}
        self._unauthenticated = refusing(to_status(Unauthenticated()))

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        method = details.method
        if not method.startswith(HEALTH):
            try:
                caller = self._identities.caller_of(details.invocation_metadata)
                if (right := _NEEDED.get(method)) is not None:
                    caller.require(right)
            except PagodaError as error:
                self._on_refusal(method, error)
                return self._unauthenticated if isinstance(error, Unauthenticated) else refusing(to_status(error))
            set_caller(caller)
            if (refusal := self._refusals.get(method)) is not None and (why := refusal(caller.tenant)) is not None:
                self._on_refusal(method, why)
                if isinstance(why, QuotaExceeded):
                    return refusing(to_status(why))
                kind = type(why)
                return _refusing_like(kind, why.message, why.retry_after_s, why.queue_depth)  # type: ignore[arg-type]
        if (guarded := self._guarded.get(method)) is not None:
            return guarded
        handler = await continuation(details)
        if handler is not None:  # None: there is no such method, and its name must not stay here
            handler = self._guarded[method] = self._guard(handler)
        return handler

    def _guard(self, handler: Handler) -> Handler:
        if handler.request_streaming:
            behaviour = handler.stream_stream if handler.response_streaming else handler.stream_unary
        else:
            behaviour = self._reading(handler)

        async def guarded(messages: object, context: Context) -> Any:
            try:
                return await behaviour(messages, context)
            except grpc.aio.AbortError as aborted:
                _release(aborted)
                return None  # gRPC raises it again
            except grpc.aio.InternalError:  # a write failed, because the client has gone
                raise asyncio.CancelledError from None
            except Exception as error:
                status = to_status(error)
            return await _abort(context, status)

        streaming, unary = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        wrap = streaming if handler.response_streaming else unary
        return wrap(guarded, None, handler.response_serializer)

    def _reading(self, handler: Handler) -> Callable[[object, Context], Awaitable[Any]]:
        """A unary method's behaviour as that of a stream of bytes. Such requests are small: they name one thing."""
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        kind = handler.request_deserializer.__self__  # the generated code gives FromString of the message's class

        async def read_first(messages: object, context: Context) -> Any:
            with await self._messages.read(context, most=SMALL_BYTES) as message:
                request = await message.parsed(kind.FromString)
                await self._messages.check_end(context)
            return await behaviour(request, context)

        return read_first


def is_worth_logging(record: logging.LogRecord) -> bool:
    """A filter for GRPC_LOGGER: drops its error that a call's last status did not arrive, because the client has gone.

    gRPC itself drops it only if it has already heard that the client has gone.
    """
    is_failure = record.exc_info is not None and isinstance(record.exc_info[1], grpc.aio.InternalError)
    return not (is_failure and record.getMessage().startswith("ExecuteBatchError raised in core"))


def refusing(status: Status) -> Handler:
    """A handler that ends a call without reading anything. A stream of requests fits every method, as in receiving."""

    async def refuse(messages: object, context: Context) -> None:
        await _abort(context, status)

    return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(context: Context, status: Status) -> None:
    """End a call with a status. The handler must return after it: gRPC then raises AbortError again."""
    try:
        await context.abort(*status)
    except grpc.aio.AbortError as aborted:
        _release(aborted)
    except grpc.aio.InternalError:  # the client has gone
        raise asyncio.CancelledError from None


def _release(aborted: grpc.aio.AbortError) -> None:
    """Let go of the frames that the exception holds.

    gRPC keeps the exception with the call, and the frames hold the call: what they hold as well, a prompt for example,
    would stay until a garbage collection.
    """
    aborted.__traceback__ = aborted.__context__ = None


@lru_cache(256)
def _refusing_like(
    kind: type[PagodaError], message: str, retry_after_s: float | None, queue_depth: int | None
) -> Handler:
    """`refusing` of an error. An overloaded server gives thousands of calls the same status: made once."""
    details = {"queue_depth": queue_depth} if issubclass(kind, ResourceExhausted) else {}
    return refusing(to_status(kind(message, retry_after_s=retry_after_s, **details)))
