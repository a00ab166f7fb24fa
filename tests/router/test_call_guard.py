"""What a call leaves behind after its end, on a server of gRPC."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import grpc
import pytest

from pagoda_server.router.errors import InvalidArgument, ResourceExhausted
from pagoda_server.router.process.call_guard import GRPC_LOGGER, CallGuard, is_worth_logging
from pagoda_server.router.request.receiving import Messages
from pagoda_server.router.tenants.identity import Identities

REFUSED, FULL = "/pagoda.v1.Test/Refused", "/pagoda.v1.Test/Full"


class Prompt:
    """Stands for a megabyte."""


async def test_a_refused_call_leaves_nothing_to_the_garbage_collector() -> None:
    prompts: list[weakref.ref[Prompt]] = []

    async def refused(_: object, context: object) -> None:
        prompt = Prompt()
        prompts.append(weakref.ref(prompt))
        raise InvalidArgument("prompt", "is too long")

    full = {FULL: lambda tenant: ResourceExhausted("the queue is full", retry_after_s=1.0, queue_depth=1)}
    server = grpc.aio.server(interceptors=[CallGuard(Messages(1000, 10.0), Identities(), full)])
    handler = grpc.stream_stream_rpc_method_handler(refused)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pagoda.v1.Test", {"Refused": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in (REFUSED, FULL) * 20:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(method)(b"")
        await server.stop(None)
        assert len(prompts) == 20
        assert [each for each in prompts if each() is not None] == []
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, grpc.aio.AbortError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("error", "message", "is_logged"),
    [
        (grpc.aio.InternalError("failed"), "ExecuteBatchError raised in core by servicer method [/x]", False),
        (ValueError("failed"), "Unexpected [ValueError] raised by servicer method [/x]", True),
        (grpc.aio.InternalError("failed"), "something else", True),
        (None, "ExecuteBatchError raised in core by servicer method [/x]", True),
    ],
)
def test_the_log_says_nothing_of_a_status_that_a_gone_client_did_not_get(
    error: Any, message: str, is_logged: bool
) -> None:
    logger, records = logging.Logger(GRPC_LOGGER), []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.addFilter(is_worth_logging)
    logger.error(message, exc_info=error)
    assert len(records) == is_logged
