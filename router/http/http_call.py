"""A request of HTTP as a call of the Inference service."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from starlette.types import Receive, Scope, Send

from pagoda.v1 import inference_pb2

from ..errors import InvalidArgument, Unimplemented
from ..request.fields import Limits
from ..request.inference import InferenceServicer
from ..request.receiving import Parse
from ..tenants.caller import caller
from .acceptor import Pace, SenderClock
from .errors import BodyTooLarge, Refusal, refusal, send_refusal

REQUEST_ID = "x-request-id"


class Answer(Protocol):
    """What becomes of a call's messages."""

    media_type: str = "application/json"

    def take(self, message: Any, prompt: int = 0) -> bytes:
        """The bytes to send now, which may be none. The message is the method's, and may change afterwards.

        prompt  which one of the request's prompts the message answers
        """

    def end(self) -> bytes:
        """The last bytes, once the call has ended well. Raises PagodaError if the answer is not complete."""

    def failed(self, refused: Refusal) -> bytes:
        """The last bytes of an answer that has begun and fails."""
        return b"data: " + refused.body + b"\n\n"


class Api(Protocol):
    """How one kind of request and answer looks, whose parts a call needs in this order."""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> Any:
        """Make the method's request; runs in a thread if the body is large.

        Raises InvalidArgument, Unimplemented, which name the client's own fields.
        """

    def answer(self) -> Answer:
        """Make what turns messages into the answer. Called for the first message, so the request is valid by then."""

    def own_name(self, field: str) -> str:
        """The client's name of a field that the protocol calls so."""

    def refusal(self, error: Exception) -> Refusal:
        """An error in the API's form."""
        return refusal(error)


class HttpCall:
    """A ClientCall that HTTP has brought, and its answer.

    The task that serves it is cancelled when the client goes: `is_gone` then distinguishes it from other cancels.

    api  makes the answer once, for the first message. No message is written before the request has passed validation,
         so nothing of an answer has a size that a client chose freely
    sender_clock  see client_call.py
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int, api: Api) -> None:
        self.is_gone = False
        self.has_begun = False
        self.sender_clock: Callable[[], float] = scope[SenderClock.KEY]
        self._api = api
        self._answer: Answer | None = None
        self._metadata = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._has_body = True
        self._watch: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()  # several prompts write to one answer, whose head goes first
        self.request_id = self.header(REQUEST_ID) or secrets.token_hex(16)

    def header(self, name: str) -> str:
        return next((value for key, value in self._metadata if key == name), "")

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None

    async def read(self) -> Any:
        """The body, then grpc.aio.EOF. Raises BodyTooLarge."""
        if not self._has_body:
            return grpc.aio.EOF
        self._has_body = False
        if self.header("content-encoding") not in ("", "identity"):
            raise InvalidArgument("content-encoding", "is not supported: send the body as it is")
        length = self.header("content-length")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        parts, size = [], 0
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                self.is_gone = True
                raise asyncio.CancelledError
            part = event.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                raise BodyTooLarge(self._max_bytes)
            parts.append(part)
            if not event.get("more_body", False):
                break
        task = asyncio.current_task()
        assert task is not None, "a server runs each request in a task"
        self._watch = asyncio.create_task(self._cancel_when_gone(task))
        return b"".join(parts)

    def take(self, message: Any, prompt: int = 0) -> bytes:
        """Give a message to the answer. Returns the bytes to send now."""
        if self._answer is None:
            self._answer = self._api.answer()
        return self._answer.take(message, prompt)

    async def write(self, message: inference_pb2.GenerateResponse, prompt: int = 0) -> None:
        if part := self.take(message, prompt):
            async with self._sending:
                if not self.has_begun:
                    await self._begin((b"x-accel-buffering", b"no"))  # a proxy must not hold events back
                await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def finish(self) -> None:
        """Send the rest of the answer. Raises PagodaError if it is not complete."""
        assert self._answer is not None, "the call has ended well"
        last = self._answer.end()
        self.close()
        if not self.has_begun:
            await self._begin((b"content-length", str(len(last)).encode()))
        await self._send({"type": "http.response.body", "body": last})

    async def fail(self, error: Exception) -> None:
        """Answer with an error; one that comes after the answer has begun is its last event."""
        self.close()
        refused = self._api.refusal(error)
        if not self.has_begun:
            await send_refusal(refused, self._send, (REQUEST_ID.encode(), self._told_id()))
            return
        assert self._answer is not None
        await self._send({"type": "http.response.body", "body": self._answer.failed(refused)})

    def close(self) -> None:
        """Stop watching for the client's end."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # it keeps this call, in the traceback of how it ended

    async def _begin(self, header: tuple[bytes, bytes]) -> None:
        assert self._answer is not None
        self.has_begun = True
        headers = [
            (b"content-type", self._answer.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (REQUEST_ID.encode(), self._told_id()),
            header,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _told_id(self) -> bytes:
        return self.request_id.encode("latin-1")

    async def _cancel_when_gone(self, task: asyncio.Task[object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        task.cancel()


Serve: TypeAlias = "Callable[[HttpCall, Parse[Any], str], Awaitable[None]]"


class Endpoint:
    """Serves requests of one API with a method of Inference. One begins in each turn of the event loop.

    method     its name
    serve      calls it with what parses a body, and the route
    make_api   makes the API's side of a request
    max_bytes  of a body
    computes   whether an engine does, so that a call is refused before it is read where none would take it
    """

    def __init__(
        self,
        inference: InferenceServicer,
        method: str,
        serve: Serve,
        make_api: Callable[[], Api],
        max_bytes: int,
        computes: bool = True,
    ) -> None:
        self._inference = inference
        self._method = method
        self._serve = serve
        self._make_api = make_api
        self._max_bytes = max_bytes
        self._computes = computes
        self._starts = Pace(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self._make_api()
        call = HttpCall(scope, receive, send, self._max_bytes, api)
        has_own_name = False  # the error names a field as the client does

        def parse(raw: bytes, limits: Limits) -> Any:
            nonlocal has_own_name
            has_own_name = True
            request = api.request(raw, limits, call)
            has_own_name = False
            return request

        route = f"{scope['method']} {scope['path']}"
        if self._computes and (why := self._inference.refusal(caller().tenant)) is not None:
            self._inference.refused(call, why, route, self._method)
            await call.fail(why)
            return
        try:
            await self._starts.turn()
            await self._serve(call, parse, route)
            await call.finish()
        except asyncio.CancelledError:
            if not call.is_gone:
                raise
        except Exception as error:
            await call.fail(error if has_own_name else _renamed(error, api))
        finally:
            call.close()


def _renamed(error: Exception, api: Api) -> Exception:
    """The error with the client's own name of the field."""
    if not isinstance(error, InvalidArgument | Unimplemented) or (name := api.own_name(error.field)) == error.field:
        return error
    return type(error)(name, error.description)
