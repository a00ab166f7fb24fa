"""Several prompts in one request of /v1/completions: each is a call of Generate, and together they make one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from pagoda.v1 import inference_pb2

from ...errors import InvalidArgument
from ...request.fields import Limits
from ...request.inference import InferenceServicer
from ...request.receiving import SMALL_BYTES, Parse
from ..http_call import HttpCall
from .requests import Asked, Prompt, set_prompt


@dataclass(frozen=True, slots=True)
class Completion:
    """A request with one or several prompts.

    request  that of the first prompt
    """

    request: inference_pb2.GenerateRequest
    asked: Asked

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.asked.prompts

    def request_of(self, index: int) -> inference_pb2.GenerateRequest:
        """The request of the nth prompt, which differs from the first one's in its prompt and its id."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        set_prompt(request, self.prompts[index])
        request.request_id = f"{request.request_id}-{index}"
        return request


async def complete(inference: InferenceServicer, call: HttpCall, parse: Parse[Any], route: str) -> None:
    """Serve a completion. The first error of any prompt ends all of them.

    This task serves the first prompt, so that a request with one costs nothing more. The others begin once the first
    one's message has been parsed, and nothing of them is left when this returns.
    """
    loop, others = asyncio.get_running_loop(), _Others(inference, call, route)

    def first(raw: bytes, limits: Limits) -> inference_pb2.GenerateRequest:
        completion: Completion = parse(raw, limits)
        if len(completion.prompts) > 1:
            loop.call_soon_threadsafe(others.start, completion, len(raw))
        return completion.request

    try:
        await inference.generate(call, first, route)
        await others.wait()
    except asyncio.CancelledError:
        others.raise_error()
        raise
    finally:
        await others.stop()


class _Others:
    """The prompts of a request behind its first one."""

    def __init__(self, inference: InferenceServicer, call: HttpCall, route: str) -> None:
        self._inference = inference
        self._call = call
        self._route = route
        self._first = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._is_stopped = False

    def start(self, completion: Completion, num_bytes: int) -> None:
        """Begin them, unless the first prompt has failed since it was parsed. num_bytes: of the whole body."""
        if not self._is_stopped:
            self._task = asyncio.create_task(self._run(completion, num_bytes))

    async def wait(self) -> None:
        if self._task is not None:
            await self._task

    def raise_error(self) -> None:
        """Raise the error that has ended the first prompt, if it was one of these."""
        if self._error is not None and self._first is not None:
            self._first.uncancel()
            raise self._error from None

    async def stop(self) -> None:
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, completion: Completion, num_bytes: int) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(1, len(completion.prompts)):
                    group.create_task(self._serve(completion, index, num_bytes))
                    await asyncio.sleep(0)  # so that each is validated in a turn of its own
        except* Exception as failed:
            self._error = failed.exceptions[0]
            if self._first is not None and not self._is_stopped:
                self._first.cancel()

    async def _serve(self, completion: Completion, index: int, num_bytes: int) -> None:
        prompt = completion.prompts[index]
        size = min(max(len(prompt), SMALL_BYTES + 1), num_bytes)

        def parse(raw: bytes, limits: Limits) -> inference_pb2.GenerateRequest:
            return completion.request_of(index)

        try:
            await self._inference.generate(_PromptCall(self._call, index, size), parse, self._route)
        except InvalidArgument:
            completion.asked.failed_prompt = index
            raise


class _PromptCall:
    """The part of an HttpCall that serves one of its prompts.

    size  bytes of the message that it reads, which is parsed already: how long it takes to check
    """

    def __init__(self, call: HttpCall, index: int, size: int) -> None:
        self._call = call
        self._index = index
        self._messages: list[Any] = [bytes(size), grpc.aio.EOF]

    async def read(self) -> Any:
        return self._messages.pop(0)

    async def write(self, message: inference_pb2.GenerateResponse, /) -> None:
        await self._call.write(message, self._index)

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._call.invocation_metadata()
