"""The Inference service: text in, a stream of tokens out. One coroutine per request, from first to last message."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.router.engines.channel import Dispatcher
from pagoda_server.router.engines.stream import EngineStream, SequenceInbox, time_in_engine
from pagoda_server.router.errors import DeadlineExceeded, Internal, InvalidArgument, PagodaError, Unavailable
from pagoda_server.router.request.admission import Admission, LiveRequest, LiveRequests, Reservation
from pagoda_server.router.request.beam_search import BeamSearchStream
from pagoda_server.router.request.caller import caller
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.output import ClientWriter, GenerateContext, SequenceOutput, write_records
from pagoda_server.router.request.quotas import Quotas, Spending
from pagoda_server.router.request.receiving import Messages, Received
from pagoda_server.router.request.validation import (
    GenerateParams,
    check_prompt,
    to_submit,
    validate_detokenize,
    validate_generate,
    validate_tokenize,
)
from pagoda_server.router.text.tokenizer import Tokenizer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SERVICE = "pagoda.v1.Inference"
MAX_CONVERSIONS = 64  # calls of Tokenize and Detokenize at once
_IDS_AT_ONCE = 4096  # the interpreter can change threads between two chunks of a list, not within one


class InferenceServicer:
    """The Inference service. Its handlers read their messages themselves, after they have admitted the call."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        limits: Limits,
        admission: Admission,
        quotas: Quotas,
        messages: Messages,
        dispatcher: Dispatcher,
        live: LiveRequests,
        stall_timeout_s: float,
    ) -> None:
        self.limits = limits  # replaced when an engine reports its own
        self._model = model
        self._tokenizer = tokenizer
        self._admission = admission
        self._quotas = quotas
        self._conversions = Admission(MAX_CONVERSIONS, max_tokens=1)
        self._messages = messages
        self._dispatcher = dispatcher
        self._live = live
        self._stall_timeout_s = stall_timeout_s

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        """The methods' handlers by name. They take streams of bytes, whatever the protocol says: see receiving.py."""
        return {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._generate, None, inference_pb2.GenerateResponse.SerializeToString
            ),
            "Tokenize": grpc.stream_unary_rpc_method_handler(self._tokenize),
            "Detokenize": grpc.stream_unary_rpc_method_handler(
                self._detokenize, None, inference_pb2.DetokenizeResponse.SerializeToString
            ),
        }

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share the places between tenants by these weights from now on; None: admit whoever comes first."""
        self._admission.share(weights)
        self._conversions.share(weights)

    def refusal(self, tenant: str) -> PagodaError | None:
        """Why a tenant's Generate call would be refused now, whatever it asks for."""
        if not self._dispatcher.ready:
            return Unavailable("the engine is loading or being restarted")
        return self._admission.refusal(tenant) or self._quotas.refusal(tenant)

    async def _generate(self, _: object, context: GenerateContext) -> None:
        received = time.monotonic()
        asker = caller()
        self._dispatcher.pick()  # fail before anything is read if no engine is ready
        with (
            self._admission.reserve(asker.tenant) as reservation,
            self._quotas.enter(asker.tenant) as spending,
            await self._messages.read(context) as message,
        ):
            params = await message.parsed(
                inference_pb2.GenerateRequest,
                self.limits,
                lambda request: validate_generate(request, self.limits, self._model),
            )
            if self._admission.is_draining:  # since this call was admitted
                raise Unavailable("the server is draining")
            reservation.grow(params.num_sequences * (params.max_tokens or 1))
            live = self._live.add(asker.tenant, params.request_id)
            try:
                prompt = await self._tokenizer.encode_prompt(params.prompt, is_large=message.is_large)
                max_tokens = check_prompt(params, len(prompt), self.limits)
                reservation.grow(params.num_sequences * (len(prompt) + max_tokens) - reservation.tokens)
                spending.reserve(len(prompt) + params.num_sequences * max_tokens)
                remaining_s = context.time_remaining()
                if remaining_s is not None and remaining_s <= 0:
                    raise DeadlineExceeded("the deadline passed before the request was scheduled")
                submit = to_submit(params, prompt, max_tokens, self._tokenizer.eos_token_ids, remaining_s, asker)
                await self._stream(submit, params, live, reservation, spending, message, context, received)
            finally:
                self._live.remove(asker.tenant, params.request_id)

    async def _stream(
        self,
        submit: engine_pb2.Submit,
        params: GenerateParams,
        live: LiveRequest,
        reservation: Reservation,
        spending: Spending,
        message: Received,
        context: GenerateContext,
        received: float,
    ) -> None:
        engine = self._dispatcher.pick()
        call: GenerateCall | None = None

        def starts() -> None:
            reservation.starts()
            spending.used = len(submit.prompt)

        # Before all else, so that the engine can start.
        submitted = partial(BeamSearchStream, engine) if params.is_search else engine.submit
        stream = live.stream = submitted(submit, starts)
        try:
            if live.is_aborted:  # during tokenization
                stream.abort()
            await self._messages.check_end(context)  # while the engine computes
            message.release()
            async with ClientWriter(context, self._stall_timeout_s) as writer:
                call = GenerateCall(params, len(submit.prompt), self._tokenizer, writer, received)
                reservation.follow(call, params.n * submit.max_tokens)
                await call.run(stream, submit.prompt if params.has_prompt else ())
        finally:
            stream.close()
            if call is not None:
                spending.used += call.num_computed

    async def _tokenize(self, _: object, context: Context) -> bytes:
        tenant = caller().tenant
        with (
            self._conversions.reserve(tenant) as reservation,
            self._quotas.enter(tenant),
            await self._messages.read(context) as message,
        ):
            params = await message.parsed(
                inference_pb2.TokenizeRequest,
                self.limits,
                lambda request: validate_tokenize(request, self.limits, self._model),
            )
            await self._messages.check_end(context)
            reservation.starts()
            ids = await self._tokenizer.encode_prompt(
                params.prompt, params.add_special_tokens, is_large=message.is_large
            )
            return await self._messages.run(lambda: _serialized(ids), 4 * len(ids))

    async def _detokenize(self, _: object, context: Context) -> inference_pb2.DetokenizeResponse:
        tenant = caller().tenant
        with (
            self._conversions.reserve(tenant) as reservation,
            self._quotas.enter(tenant),
            await self._messages.read(context) as message,
        ):
            ids, keeps_special_tokens = await message.parsed(
                inference_pb2.DetokenizeRequest,
                self.limits,
                lambda request: (validate_detokenize(request, self.limits, self._model), request.special_tokens),
            )
            await self._messages.check_end(context)
            reservation.starts()
            text = await self._tokenizer.decode_ids(
                ids, skip_special_tokens=not keeps_special_tokens, is_large=message.is_large
            )
            return inference_pb2.DetokenizeResponse(text=text)


def _serialized(ids: Sequence[int]) -> bytes:
    response = inference_pb2.TokenizeResponse()
    for at in range(0, len(ids), _IDS_AT_ONCE):
        response.token_ids.extend(ids[at : at + _IDS_AT_ONCE])
    return response.SerializeToString()


class GenerateCall:
    """One Generate call after submission: takes the engine's output and writes what the client asked for."""

    def __init__(
        self,
        params: GenerateParams,
        prompt_len: int,
        tokenizer: Tokenizer,
        writer: ClientWriter,
        received: float,
    ) -> None:
        self._prompt_len = prompt_len
        self._writer = writer
        self._received = received
        self.first_written: float | None = None
        self._token_bytes = tokenizer.token_bytes if params.has_token_bytes else None
        skips_special_tokens = not params.keeps_special_tokens
        self._outputs = [
            SequenceOutput(
                index,
                tokenizer.detokenizer(skips_special_tokens) if params.has_text else None,
                params.stop,
                params.min_tokens,
                params.includes_stop,
                self._token_bytes,
            )
            for index in range(params.n)
        ]
        self._unfinished = params.n
        self._num_beams = params.num_sequences if params.is_search else 0
        self._response = inference_pb2.GenerateResponse(request_id=params.request_id)  # reused

    @property
    def num_tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    @property
    def num_computed(self) -> int:
        """Tokens computed for the output so far, those of beams that are not returned included."""
        return self._num_beams * max(output.num_tokens for output in self._outputs) or self.num_tokens

    async def _write_prompt(self, ids: Sequence[int]) -> None:
        response = inference_pb2.GenerateResponse(request_id=self._response.request_id, prompt={})
        write_records(response.prompt.tokens, ids, token_bytes=self._token_bytes)
        await self._writer.write(response)

    async def run(self, stream: EngineStream | BeamSearchStream, prompt: Sequence[int] = ()) -> None:
        """Stream until every sequence has ended. Raises an error if the engine ended one irregularly.

        prompt  token ids to write before all else. Nothing is written while the request waits: it may be evicted then
        """
        while self._unfinished:
            await stream.wait()
            if prompt:
                await self._write_prompt(prompt)
                prompt = ()
            for output, inbox in zip(self._outputs, stream.inboxes, strict=True):
                if inbox.tokens or inbox.ended is not None:
                    await self._advance(output, inbox, stream)

    async def _advance(
        self, output: SequenceOutput, inbox: SequenceInbox, stream: EngineStream | BeamSearchStream
    ) -> None:
        if output.take(inbox, self._response.tokens):
            if self.first_written is None:
                self.first_written = time.monotonic()
            await self._writer.write(self._response)
        if output.ended is not None:
            raise_if_failed(output.ended)
            self._unfinished -= 1
            await self._write_finished(output, is_last=not self._unfinished)
        elif output.stop is not None:
            stream.abort(output.index)  # only the router knows stop strings; tokens arrive until the engine reads this

    async def _write_finished(self, output: SequenceOutput, *, is_last: bool) -> None:
        response = inference_pb2.GenerateResponse(request_id=self._response.request_id, finished=output.finished())
        if is_last:
            response.usage.CopyFrom(self._usage())
            response.timing.CopyFrom(self._timing())
        await self._writer.write(response)

    def _usage(self) -> inference_pb2.Usage:
        return inference_pb2.Usage(
            prompt_tokens=self._prompt_len,
            completion_tokens=self.num_tokens,
            cached_tokens=max(output.ended.cached_tokens for output in self._outputs if output.ended),
        )

    def _timing(self) -> inference_pb2.Timing:
        ends = [output.ended for output in self._outputs if output.ended]
        slowest = max(ends, key=time_in_engine)
        now = time.monotonic()
        return inference_pb2.Timing(
            queue_s=slowest.queue_s,
            prefill_s=slowest.prefill_s,
            decode_s=slowest.decode_s,
            preempted_s=slowest.preempted_s,
            preemptions=slowest.preemptions,
            preempted_tokens=slowest.preempted_tokens,
            recomputed_tokens=slowest.recomputed_tokens,
            saved_tokens=slowest.saved_tokens,
            loaded_tokens=slowest.loaded_tokens,
            time_to_first_token_s=(self.first_written or now) - self._received,
            total_s=now - self._received,
        )


def raise_if_failed(ended: engine_pb2.Ended) -> None:
    """Raise the error that ends the whole call, if the engine ended a sequence irregularly."""
    match ended.reason:
        case engine_pb2.END_REASON_DEADLINE:
            raise DeadlineExceeded("the deadline passed or can no longer be met")
        case engine_pb2.END_REASON_REJECTED:
            raise InvalidArgument("input", ended.detail)
        case engine_pb2.END_REASON_FAILED:
            raise Internal(f"sequence failed in the engine: {ended.detail}")
