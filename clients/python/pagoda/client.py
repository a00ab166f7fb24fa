"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from pagoda.chunk import Chunk, chunk_from
from pagoda.connection import CHANNEL_OPTIONS, call_metadata, credentials
from pagoda.conversation import ChatMessage
from pagoda.errors import client_closed, error_from
from pagoda.request import (
    GenerateOptions,
    abort_request,
    chat_request,
    detokenize_request,
    generate_request,
    model_info_request,
    tokenize_request,
    trace_request,
    watch_load_request,
)
from pagoda.retry import Attempts
from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

T = TypeVar("T")


class Client:
    """A connection to a server. Safe to use from several threads; `close` it, or use it in a `with` block.

    address    HOST:PORT or unix:PATH
    token      sent as `authorization: Bearer …`
    tenant     who the calls are for, sent as `x-pagoda-tenant`: tenants share a server whose policy is fair
    tls        True: TLS with the system's authorities; a path: TLS with the authorities in that PEM file
    timeout_s  deadline of each call that is not given its own, all its attempts included; None: none
    retries    of a call that failed before its first message because the server was unavailable or overloaded

    Every call raises a PagodaError, for a wrong argument InvalidArgument; so does the constructor, and OSError if the
    PEM file cannot be read. An unknown option is a TypeError. A stream starts when it is first read, and closing its
    iterator (leaving the `for` loop is enough) cancels the call, on which the server frees all that the call held.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tenant: str | None = None,
        tls: bool | str | Path = False,
        timeout_s: float | None = None,
        retries: int = 3,
    ) -> None:
        self._metadata = call_metadata(token, tenant)
        secret = credentials(tls)
        self._channel = (
            grpc.secure_channel(address, secret, CHANNEL_OPTIONS)
            if secret
            else grpc.insecure_channel(address, CHANNEL_OPTIONS)
        )
        self._timeout_s = timeout_s
        self._retries = retries
        self._is_closed = False
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[Chunk, None, None]:
        """Answers text, or with `raw=True` continues it as it stands; token ids are always continued."""
        request = generate_request(prompt, options)
        return self._stream(self._inference.Generate, request, self._attempts(timeout_s), chunk_from)

    def chat(
        self,
        messages: str | Sequence[ChatMessage],
        *,
        continue_last: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Chunk, None, None]:
        """Answers a conversation, or one message of a user, through the model's chat template.

        continue_last  go on with the last message, which must be the assistant's
        """
        request = chat_request(messages, continue_last, options)
        return self._stream(self._inference.Generate, request, self._attempts(timeout_s), chunk_from)

    def tokenize(
        self,
        content: str | Sequence[ChatMessage],
        *,
        raw: bool = False,
        add_special_tokens: bool = True,
        model: str = "",
    ) -> list[int]:
        """The ids that `generate` of a text with the same `raw`, or `chat` of a conversation, would compute on.

        add_special_tokens  False: of raw text alone, without what the tokenizer puts around it
        """
        request = tokenize_request(content, raw, add_special_tokens, model)
        response: inference_pb2.TokenizeResponse = self._call(self._inference.Tokenize, request)
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, special_tokens: bool = False, model: str = "") -> str:
        request = detokenize_request(token_ids, special_tokens, model)
        response: inference_pb2.DetokenizeResponse = self._call(self._inference.Detokenize, request)
        return response.text

    def server_info(self) -> control_pb2.ServerInfo:
        info: control_pb2.ServerInfo = self._call(self._control.GetServerInfo, control_pb2.GetServerInfoRequest())
        return info

    def model_info(self, model: str = "") -> control_pb2.ModelInfo:
        request = model_info_request(model)
        info: control_pb2.ModelInfo = self._call(self._control.GetModelInfo, request)
        return info

    def load(self) -> control_pb2.Load:
        load: control_pb2.Load = self._call(self._control.GetLoad, control_pb2.GetLoadRequest())
        return load

    def watch_load(self, interval_s: float = 1.0) -> Generator[control_pb2.Load, None, None]:
        """How busy the server is, every `interval_s`, until the iterator is closed. `timeout_s` does not apply."""
        request = watch_load_request(interval_s)
        return self._stream(self._control.WatchLoad, request, Attempts(self._retries, None), lambda load: load)

    def abort(self, request_id: str) -> None:
        """Ends a live request; its stream finishes as CANCELLED."""
        self._call(self._control.Abort, abort_request(request_id))

    def drain(self, *, timeout_s: float | None = None) -> None:
        """Has the server admit nothing more, and returns when nothing is live."""
        self._call(self._control.Drain, control_pb2.DrainRequest(), timeout_s)

    def flush_cache(self) -> int:
        """Forgets every cached prefix that nobody uses; the number of blocks that are free by that."""
        response: control_pb2.FlushCacheResponse = self._call(self._control.FlushCache, control_pb2.FlushCacheRequest())
        return response.freed_blocks

    def trace(self, last_s: float | None = None) -> Generator[control_pb2.TracePart, None]:
        """What the engine's steps of the last so many seconds did, in parts; None: all that it keeps."""
        request = trace_request(last_s)
        return self._stream(self._control.Trace, request, self._attempts(None), lambda part: part)

    def close(self) -> None:
        """Cancels whatever is under way; later calls raise Cancelled."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retries, self._timeout_s if timeout_s is None else timeout_s)

    def _begin(self, method: Any, request: object, attempts: Attempts) -> Any:
        if self._is_closed:
            raise client_closed()
        try:
            return method(request, timeout=attempts.remaining_s(), metadata=self._metadata)
        except ValueError:  # another thread has closed the channel
            if self._is_closed:
                raise client_closed() from None
            raise

    def _call(self, method: Any, request: object, timeout_s: float | None = None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return self._begin(method, request, attempts)
            except grpc.RpcError as failure:
                delay_s = attempts.delay_after(error_from(failure), has_begun=False)
            time.sleep(delay_s)

    def _stream(
        self, method: Any, request: object, attempts: Attempts, received: Callable[[Any], T]
    ) -> Generator[T, None, None]:
        has_begun = False
        while True:
            call = self._begin(method, request, attempts)
            try:
                for response in call:
                    has_begun = True
                    yield received(response)
                return
            except grpc.RpcError as failure:
                delay_s = attempts.delay_after(error_from(failure), has_begun=has_begun)
            finally:
                call.cancel()
            time.sleep(delay_s)
