"""The Inference service: text in, a stream of tokens out. One coroutine per request, from first to last message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.router.engines.channel import Dispatcher
from pagoda_server.router.errors import (
    DeadlineExceeded,
    PagodaError,
    Unavailable,
    Unimplemented,
)
from pagoda_server.router.request.admission import Admission, LiveRequest, LiveRequests, Reservation
from pagoda_server.router.request.beam_search import BeamSearchStream
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.generate_call import GenerateCall, Stream
from pagoda_server.router.request.output import ClientWriter, GenerateContext
from pagoda_server.router.request.receiving import SMALL_BYTES, Messages, Received
from pagoda_server.router.request.resuming import (
    KeptStream,
    KeptStreams,
    not_kept,
    resumed,
)
from pagoda_server.router.request.validation import (
    GenerateParams,
    check_prompt,
    to_submit,
    validate_detokenize,
    validate_generate,
    validate_resume,
    validate_tokenize,
)
from pagoda_server.router.tenants.caller import caller
from pagoda_server.router.tenants.quotas import Quotas, Spending
from pagoda_server.router.text.tokenizer import Tokenizer

# Writes a stream that another router keeps for this tenant, within so many seconds. Returns False if none does.
ResumeElsewhere: TypeAlias = Callable[
    [inference_pb2.ResumeRequest, str, float | None, Callable[[inference_pb2.GenerateResponse], Awaitable[None]]],
    Awaitable[bool],
]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SERVICE = "pagoda.v1.Inference"
MAX_CONVERSIONS = 64  # calls of Tokenize and Detokenize at once
_NOT_KEPT = contextlib.nullcontext()
_IDS_AT_ONCE = 4096  # the interpreter can change threads between two chunks of a list, not within one


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A call of Generate or Resume: what it holds, and the context that its answer goes to."""

    context: GenerateContext
    reservation: Reservation
    spending: Spending
    message: Received
    live: LiveRequest


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
        resume_s: float,
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
        self.resume_elsewhere: ResumeElsewhere | None = None  # set if several routers share the port
        self._kept = KeptStreams(resume_s)

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        """The methods' handlers by name. They take streams of bytes, whatever the protocol says: see receiving.py."""
        return {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._generate, None, inference_pb2.GenerateResponse.SerializeToString
            ),
            "Resume": grpc.stream_stream_rpc_method_handler(
                self._resume, None, inference_pb2.GenerateResponse.SerializeToString
            ),
            "Tokenize": grpc.stream_unary_rpc_method_handler(self._tokenize),
            "Detokenize": grpc.stream_unary_rpc_method_handler(
                self._detokenize, None, inference_pb2.DetokenizeResponse.SerializeToString
            ),
        }

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share the places between tenants by these weights from now on; None: admit in order of arrival."""
        self._admission.share(weights)
        self._conversions.share(weights)

    def refusal(self, tenant: str) -> PagodaError | None:
        """Why a tenant's call of Generate or Resume would be refused now, whatever it asks for."""
        return self._dispatcher.refusal() or self._admission.refusal(tenant) or self._quotas.refusal(tenant)

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
                async with self._keeping(asker.tenant, params, received) as kept:
                    prompt = await self._tokenizer.encode_prompt(params.prompt, is_large=message.is_large)
                    max_tokens = check_prompt(params, len(prompt), self.limits)
                    reservation.grow(params.num_sequences * (len(prompt) + max_tokens) - reservation.tokens)
                    spending.reserve(len(prompt) + params.num_sequences * max_tokens)
                    timeout_s = _time_left(context)
                    submit = to_submit(params, prompt, max_tokens, self._tokenizer.eos_token_ids, timeout_s, asker)
                    if kept is not None:
                        kept.submitted(submit)
                    call = _Admitted(context, reservation, spending, message, live)
                    await self._stream(submit, params, call, received, kept)
            finally:
                self._live.remove(asker.tenant, params.request_id)

    def _keeping(
        self, tenant: str, params: GenerateParams, received: float
    ) -> contextlib.AbstractAsyncContextManager[KeptStream | None]:
        """Keep a stream that its client may resume. Raises Unimplemented if this server keeps none."""
        if not params.is_resumable:
            return _NOT_KEPT
        if not self._kept.keep_s:
            raise Unimplemented("resumable")
        return self._kept.add(tenant, params, received)

    async def _resume(self, _: object, context: GenerateContext) -> None:
        await self._resume_from(context, self.resume_elsewhere)

    async def resume_here(self, _: object, context: GenerateContext) -> None:
        """The Resume method for other routers, which have asked themselves before."""
        await self._resume_from(context, None)

    async def _resume_from(self, context: GenerateContext, elsewhere: ResumeElsewhere | None) -> None:
        tenant = caller().tenant
        self._dispatcher.pick()  # fail before anything is read if no engine is ready
        with (
            self._admission.reserve(tenant) as reservation,
            self._quotas.enter(tenant) as spending,
            await self._messages.read(context, most=SMALL_BYTES) as message,
        ):
            request = await message.parsed(
                inference_pb2.ResumeRequest, self.limits, lambda request: validate_resume(request, self.limits)
            )
            kept = self._kept.find(tenant, request.request_id)
            if kept is None:
                await self._messages.check_end(context)
                async with ClientWriter(context, self._stall_timeout_s) as writer:
                    if elsewhere and await elsewhere(request, tenant, _time_left(context), writer.write):
                        return
                raise not_kept()
            counts = kept.check(request.received)
            if self._admission.is_draining:  # since this call was admitted
                raise Unavailable("the server is draining")
            async with kept:  # no refusal above has ended the call that still writes it
                submit = kept.submit
                assert submit is not None, "a stream without it is not kept once its call has ended"
                reservation.grow(kept.num_unfinished * (len(submit.prompt) + submit.max_tokens))
                spending.reserve(kept.num_unfinished * submit.max_tokens)
                live = self._live.add(tenant, request.request_id)
                try:
                    call = _Admitted(context, reservation, spending, message, live)
                    await self._stream(submit, kept.params, call, kept.received, kept, counts)
                finally:
                    self._live.remove(tenant, request.request_id)

    async def _stream(
        self,
        submit: engine_pb2.Submit,
        params: GenerateParams,
        call: _Admitted,
        received: float,
        kept: KeptStream | None,
        counts: Sequence[int] = (),
    ) -> None:
        """Stream a request to its end.

        kept    what is kept of the stream, if it is resumable
        counts  of a stream that is resumed: the tokens that the client has of each sequence
        """

        def starts() -> None:
            call.reservation.starts()
            call.spending.used = 0 if counts else len(submit.prompt)  # a stream that is resumed has paid for it

        try:
            engine = self._dispatcher.pick()
            # Before all else, so that the engine can start.
            stream: Stream
            if kept is not None:
                stream = resumed(engine, kept, _time_left(call.context), starts)
            else:
                submitted = partial(BeamSearchStream, engine) if params.is_search else engine.submit
                stream = submitted(submit, starts)
            call.live.stream = stream
            num_before = kept.num_tokens if kept is not None else 0
            answer: GenerateCall | None = None
            try:
                if call.live.is_aborted:  # during tokenization
                    stream.abort()
                await self._messages.check_end(call.context)  # while the engine computes
                call.message.release()
                async with ClientWriter(call.context, self._stall_timeout_s) as writer:
                    answer = GenerateCall(params, len(submit.prompt), self._tokenizer, writer, received, kept)
                    call.reservation.follow(answer, params.n * submit.max_tokens)
                    prompt = submit.prompt if params.has_prompt else ()
                    if kept is not None and kept.has_begun:
                        await answer.replay(kept, counts, prompt)
                        prompt = ()
                    await answer.run(stream, prompt)
            finally:
                stream.close()
                if answer is not None:
                    call.spending.used += max(0, answer.num_computed - num_before)  # it may break during the replay
        except Unavailable as error:
            if kept is None or not kept.is_kept:
                raise
            raise kept.resumable(error, self._dispatcher.retry_after_s) from error

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


def _time_left(context: GenerateContext) -> float | None:
    """Seconds until the client's deadline; None: there is none. Raises DeadlineExceeded."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was scheduled")
    return remaining_s


def _serialized(ids: Sequence[int]) -> bytes:
    response = inference_pb2.TokenizeResponse()
    for at in range(0, len(ids), _IDS_AT_ONCE):
        response.token_ids.extend(ids[at : at + _IDS_AT_ONCE])
    return response.SerializeToString()
