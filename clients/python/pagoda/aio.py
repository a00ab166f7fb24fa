"""The client for asyncio, with the calls of the blocking client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from pagoda.answer import Answer, answer_of
from pagoda.beams import BeamSearch, EarlyStopping, Hypothesis
from pagoda.chunk import Chunk, Score, chunk_from, score_from
from pagoda.connection import CHANNEL_OPTIONS, Attempts, call_metadata, credentials
from pagoda.conversation import ChatMessage
from pagoda.errors import Cancelled, client_closed, error_from
from pagoda.request import (
    ChatOptions,
    EmbedOptions,
    GenerateOptions,
    Input,
    ScoreOptions,
    abort_request,
    detokenize_request,
    embed_request,
    generate_request,
    load_lora_request,
    one_answer,
    score_request,
    step_trace_request,
    tokenize_request,
    unload_lora_request,
    watch_load_request,
)
from pagoda.resume import Resumption
from pagoda.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    trace_pb2,
)

T = TypeVar("T")


class AsyncClient:
    """A connection to a server, for the current event loop. Arguments and errors are those of Client.

    A stream starts when it is first read. Closing its iterator, or cancelling the task that reads it, cancels the call,
    and the server frees everything that the call held. Leaving an `async for` loop early closes the iterator once
    nothing refers to it; `contextlib.aclosing` closes it at a definite moment.
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
            grpc.aio.secure_channel(address, secret, CHANNEL_OPTIONS)
            if secret
            else grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        )
        self._timeout_s = timeout_s
        self._retries = retries
        self._is_closed = False
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def generate(
        self,
        message: str | None = None,
        *,
        prompt: str | None = None,
        chat: str | Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Answer or continue one of four inputs.

        message    a user's message, answered through the model's chat template
        prompt     a text to continue as it stands
        chat       a conversation; or a user's message, if it needs tools or template_kwargs
        token_ids  token ids to continue as they are
        """
        request = generate_request(Input(message, prompt, chat, token_ids), options)
        attempts = self._attempts(timeout_s)
        if request.resumable:
            return self._resumable(Resumption(request, attempts), attempts)
        return self._stream(self._inference.Generate, request, attempts, chunk_from)

    def chat(
        self,
        messages: str | Sequence[ChatMessage],
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Answer a conversation: `generate(chat=messages)`."""
        return self.generate(chat=messages, timeout_s=timeout_s, **options)

    async def answer(
        self,
        message: str | None = None,
        *,
        prompt: str | None = None,
        chat: str | Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Wait for the whole answer to one of four inputs, as `generate` takes them.

        With the option `json_schema`, `Answer.parsed` is the answer as an object. Raises InvalidArgument for n above 1.
        """
        chunks = self.generate(
            message, prompt=prompt, chat=chat, token_ids=token_ids, timeout_s=timeout_s, **one_answer(options)
        )
        return answer_of([chunk async for chunk in chunks], options.get("json_schema"))

    async def beam_search(
        self,
        message: str | None = None,
        *,
        prompt: str | None = None,
        chat: str | Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
        beams: int = 4,
        max_tokens: int,
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = "estimated",
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        priority: int | None = None,
        cache_salt: str | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[Hypothesis]:
        """Find the most likely continuations of an input, which is given as for `generate`, best first.

        The arguments are those of `pagoda.beams.BeamSearch`. Each step asks the server for one token of every beam,
        whose text the server's prefix cache holds; a step asks for all beams at once.

        timeout_s  for each step
        """
        if token_ids is None:
            token_ids = await self.tokenize(message, prompt=prompt, chat=chat, model=model)
        models = await self.models()
        info = next((each for each in models if each.name == model), models[0])
        search = BeamSearch(
            beams,
            max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_ids={*stop_token_ids, *(() if ignore_eos else info.eos_token_ids)},
            min_tokens=min_tokens,
        )
        step: GenerateOptions = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "text": False}
        step |= {"priority": priority, "cache_salt": cache_salt, "model": model or None}
        step["logprobs"] = min(search.num_candidates, info.vocab_size)
        while not search.is_over:
            texts = [[*token_ids, *beam.tokens] for beam in search.beams]
            streams = [self.generate(token_ids=text, timeout_s=timeout_s, **step) for text in texts]
            asked = [self._likeliest(stream) for stream in streams]
            search.advance(await asyncio.gather(*asked))
        written = [self.detokenize(each.body, model=model) for each in search.hypotheses]
        hypotheses = zip(search.hypotheses, await asyncio.gather(*written), strict=True)
        return [replace(each, text=text) for each, text in hypotheses]

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[list[float]]:
        """A vector of the model's last hidden states for each input: a text, or token ids."""
        request = embed_request(inputs, options)
        response: inference_pb2.EmbedResponse = await self._call(self._inference.Embed, request, timeout_s)
        return [list(embedding.values) for embedding in response.embeddings]

    async def score(
        self,
        continuations: Sequence[str | Sequence[int]],
        message: str | None = None,
        *,
        prompt: str | None = None,
        chat: str | Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[Score]:
        """The log-probabilities of continuations of one input, which is given as for `generate`.

        continuations  texts, each tokenized by itself, or token ids
        """
        request = score_request(Input(message, prompt, chat, token_ids), continuations, options)
        response: inference_pb2.ScoreResponse = await self._call(self._inference.Score, request, timeout_s)
        return [score_from(score) for score in response.scores]

    async def tokenize(
        self,
        message: str | None = None,
        *,
        prompt: str | None = None,
        chat: str | Sequence[ChatMessage] | None = None,
        add_special_tokens: bool = True,
        model: str = "",
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """The token ids that `generate` would use for the same input.

        add_special_tokens  False: leave out the tokenizer's own special tokens; for a prompt only
        """
        request = tokenize_request(Input(message, prompt, chat), options, add_special_tokens, model)
        response: inference_pb2.TokenizeResponse = await self._call(self._inference.Tokenize, request)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, special_tokens: bool = False, model: str = "") -> str:
        request = detokenize_request(token_ids, special_tokens, model)
        response: inference_pb2.DetokenizeResponse = await self._call(self._inference.Detokenize, request)
        return response.text

    async def server_info(self) -> control_pb2.ServerInfo:
        info: control_pb2.ServerInfo = await self._call(self._control.GetServerInfo, control_pb2.GetServerInfoRequest())
        return info

    async def models(self) -> list[control_pb2.ModelInfo]:
        """The models that a request may name, and what each can do."""
        request = control_pb2.ListModelsRequest()
        response: control_pb2.ListModelsResponse = await self._call(self._control.ListModels, request)
        return list(response.models)

    async def load(self) -> control_pb2.Load:
        load: control_pb2.Load = await self._call(self._control.GetLoad, control_pb2.GetLoadRequest())
        return load

    def watch_load(self, interval_s: float = 1.0) -> AsyncGenerator[control_pb2.Load, None]:
        """Stream the load every `interval_s`, until the iterator is closed. `timeout_s` does not apply."""
        request = watch_load_request(interval_s)
        return self._stream(self._control.WatchLoad, request, Attempts(self._retries, None), lambda load: load)

    async def abort(self, request_id: str, *, tenant: str | None = None) -> None:
        """End a live request; its stream finishes as CANCELLED.

        tenant  whose request it is; None: this client's
        """
        await self._call(self._admin.Abort, abort_request(request_id, tenant))

    async def drain(self, *, timeout_s: float | None = None) -> None:
        """Make the server refuse new requests, and return when none is live."""
        await self._call(self._admin.Drain, admin_pb2.DrainRequest(), timeout_s)

    async def flush_cache(self) -> int:
        """Forget every cached prefix that no sequence uses. Returns the number of freed blocks."""
        response: admin_pb2.FlushCacheResponse = await self._call(self._admin.FlushCache, admin_pb2.FlushCacheRequest())
        return response.freed_blocks

    async def load_lora(
        self, name: str, path: str, *, model: str = "", replace: bool = False, pinned: bool = False
    ) -> control_pb2.LoraAdapter:
        """Have every engine load a LoRA adapter, which requests can then name.

        path     in the server's --lora-dir
        model    that it adapts; "" is the first one
        replace  take the place of an adapter of this name
        pinned   keep it on the device, even while no request uses it
        """
        request = load_lora_request(name, path, model, replace, pinned)
        response: admin_pb2.LoadLoraResponse = await self._call(self._admin.LoadLora, request)
        return response.adapter

    async def unload_lora(self, name: str) -> None:
        """Have every engine unload an adapter. Requests that run finish with it."""
        await self._call(self._admin.UnloadLora, unload_lora_request(name))

    async def loras(self) -> list[control_pb2.LoraAdapter]:
        """The adapters of all models, and which engines hold them."""
        response: admin_pb2.ListLorasResponse = await self._call(self._admin.ListLoras, admin_pb2.ListLorasRequest())
        return list(response.adapters)

    def step_trace(self, last_s: float | None = None) -> AsyncGenerator[trace_pb2.StepTracePart, None]:
        """Stream the engines' step traces of the last `last_s` seconds, in parts; None: all that they keep."""
        request = step_trace_request(last_s)
        return self._stream(self._control.GetStepTrace, request, self._attempts(None), lambda part: part)

    async def close(self) -> None:
        """Cancel running calls; later calls raise Cancelled."""
        self._is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @staticmethod
    async def _likeliest(chunks: AsyncGenerator[Chunk, None]) -> tuple[tuple[int, float], ...]:
        """The most likely tokens of a sequence of one token."""
        found = [logprob.top async for chunk in chunks for logprob in chunk.logprobs]
        if not found:
            raise Cancelled("a beam was ended by the server", grpc.StatusCode.CANCELLED)
        return found[0]

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retries, self._timeout_s if timeout_s is None else timeout_s)

    def _begin(self, method: Any, request: object, attempts: Attempts) -> Any:
        if self._is_closed:
            raise client_closed()
        try:
            return method(request, timeout=attempts.remaining_s(), metadata=self._metadata)
        except grpc.aio.UsageError:  # another task has closed the channel
            if self._is_closed:
                raise client_closed() from None
            raise

    async def _call(self, method: Any, request: object, timeout_s: float | None = None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return await self._begin(method, request, attempts)
            except grpc.RpcError as failure:
                delay_s = attempts.delay_after(error_from(failure), has_begun=False)
            await asyncio.sleep(delay_s)

    async def _stream(
        self, method: Any, request: object, attempts: Attempts, received: Callable[[Any], T]
    ) -> AsyncGenerator[T, None]:
        has_begun = False
        while True:
            call = self._begin(method, request, attempts)
            try:
                async for response in call:
                    has_begun = True
                    yield received(response)
                return
            except grpc.RpcError as failure:
                delay_s = attempts.delay_after(error_from(failure), has_begun=has_begun)
            finally:
                call.cancel()
            await asyncio.sleep(delay_s)

    async def _resumable(self, stream: Resumption, attempts: Attempts) -> AsyncGenerator[Chunk, None]:
        while True:
            method = self._inference.Resume if stream.resumes else self._inference.Generate
            call = self._begin(method, stream.request(), attempts)
            try:
                async for response in call:
                    if stream.takes(response):
                        yield chunk_from(response)
                return
            except grpc.RpcError as failure:
                delay_s = stream.delay_after(error_from(failure))
            finally:
                call.cancel()
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)
