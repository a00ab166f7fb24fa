"""What stands before every call: who may make it, and how an exception leaves as a status."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from pagoda_server.router.errors import to_status

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call that raised with the status that the exception means. CancelledError passes: gRPC needs to see it."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/pagoda."):
            return handler
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await behaviour(request, context)
            except Exception as error:
                status = to_status(error)
                await context.abort(status.code, status.details, status.trailing_metadata)

        streaming, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        wrap = streaming if handler.response_streaming else unary
        return wrap(guarded, handler.request_deserializer, handler.response_serializer)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call pass only with the server's bearer token. Health checks need none: they tell nothing of anybody."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = next((value for key, value in details.invocation_metadata if key == "authorization"), "")
        given_bytes = given.encode() if isinstance(given, str) else given
        if details.method.startswith("/grpc.health.") or hmac.compare_digest(given_bytes, self._expected):
            return await continuation(details)

        async def refuse(request: Any, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: a valid bearer token is required")

        # The shape of the refused method does not matter: the status ends the call before any message.
        return grpc.unary_unary_rpc_method_handler(refuse)
