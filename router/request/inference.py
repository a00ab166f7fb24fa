"""The Inference service: text in, a stream of tokens out. One coroutine per request, from first to last message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import grpc

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ..engines.choosing import Asked
from ..errors import PagodaError, Unavailable, Unimplemented
from ..tenants.caller import caller
from .client_call import ClientCall, time_left
from .conversions import Conversions
from .generate_call import GenerateCall, OutputRoom
from .models import ServedModels, Target
from .output import ClientWriter
from .parsing import checked_grammar, parsing_of
from .placement import Placement
from .readouts import Readouts
from .receiving import SMALL_BYTES, Parse, from_protobuf
from .record import Record
from .resuming import KeptStream, KeptStreams, has_begun, not_kept
from .services import SERVICE, AdmittedCall, Services
from .token_times import TokenTimes
from .validation import (
    GenerateParams,
    check_prompt,
    to_submit,
    validate_generate,
    validate_resume,
)

# Writes a stream that another router keeps for this tenant, within so many seconds. Returns False if none does.
ResumeElsewhere: TypeAlias = Callable[
    [inference_pb2.ResumeRequest, str, float | None, Callable[[inference_pb2.GenerateResponse], Awaitable[None]]],
    Awaitable[bool],
]
_GENERATE = from_protobuf(inference_pb2.GenerateRequest)
_RESUME = from_protobuf(inference_pb2.ResumeRequest)
_NOT_KEPT = contextlib.nullcontext()
_IDS_AT_ONCE = 4096  # the interpreter can change threads between two chunks of a list, not within one


class InferenceServicer:
    """The Inference service. Its handlers read their messages themselves, after they have admitted the call."""

    service: str = SERVICE
    admitted: Sequence[str] = ("Generate", "Resume", "Embed", "Score")

    def __init__(
        self,
        services: Services,
        *,
        stall_timeout_s: float,
        resume_s: float,
        times: Callable[[str], TokenTimes] | None = None,
    ) -> None:
        """
        times  of an engine, by its name; None: nothing counts them
        """
        self.services = services
        self.readouts = Readouts(services)
        self.conversions = Conversions(services)
        self._times = times
        self._stall_timeout_s = stall_timeout_s
        self.resume_elsewhere: ResumeElsewhere | None = None  # set if several routers share the port
        self._kept = KeptStreams(resume_s)

    @property
    def models(self) -> ServedModels:
        return self.services.models

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
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
            "Embed": grpc.stream_unary_rpc_method_handler(self._embed),
            "Score": grpc.stream_unary_rpc_method_handler(self._score),
        }

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share the places between tenants by these weights from now on; None: admit in order of arrival."""
        self.services.admission.share(weights)
        self.conversions.share(weights)

    def refusal(self, tenant: str) -> PagodaError | None:
        """Why a tenant's call that needs an engine would be refused now, whatever it asks for."""
        services = self.services
        no_engine = None if services.waiting.is_on else services.models.refusal()
        return no_engine or services.admission.refusal(tenant) or services.quotas.refusal(tenant)

    def refused(self, call: ClientCall, why: PagodaError, route: str, method: str = "Generate") -> None:
        """Notify the observers that a call by another protocol has been refused, before it was read."""
        metadata = call.invocation_metadata() or ()
        self.services.observers.notify(Record(method, caller().tenant, metadata, route, code=why.code, error=why))

    async def _generate(self, _: object, call: ClientCall) -> None:
        await self.generate(call, _GENERATE)

    async def generate(
        self, call: ClientCall, parse: Parse[inference_pb2.GenerateRequest], route: str = f"{SERVICE}/Generate"
    ) -> None:
        """Serve a call of Generate that came by any protocol: `parse` makes its request from its message.

        route  what the client has called: see Record

        The task's caller is set. Raises the PagodaError that ends the call.
        """
        async with self.services.admitted("Generate", route, call) as admitted:
            message, record = admitted.message, admitted.record

            def checked(raw: bytes) -> tuple[Target, GenerateParams]:
                request = parse(raw, self.models.limits)
                target = self.models.named(request.model, request.lora_name)
                return target, validate_generate(request, target.model.limits, record.metadata)

            target, params = await admitted.wanted(checked, partial(self._judge, is_large=message.is_large))
            model = target.model
            tokenizer, grammars = model.tokenizer, model.grammars
            if params.guided is not None:
                params = replace(params, guided=await grammars.check(params.guided))
            admitted.check_draining()
            admitted.begin(params.request_id)
            record.is_chat = params.is_chat
            admitted.reservation.grow(params.n * (params.max_tokens or 1))
            async with self._keeping(admitted, params, target) as kept:
                prompt = await tokenizer.encode_prompt(params.prompt, is_large=message.is_large)
                record.prompt_len = len(prompt)
                bad_words = await tokenizer.encode_bad_words(params.bad_words) if params.bad_words else ()
                max_tokens = check_prompt(params, len(prompt), model.limits)
                output = params.n * self._likely_length(params, max_tokens)
                needed = params.n * len(prompt) + output
                admitted.reservation.grow(needed - admitted.reservation.tokens)
                admitted.spending.reserve(len(prompt) + output)
                timeout_s = time_left(call)
                guided = await checked_grammar(params, model.format, tokenizer, prompt, grammars)
                eos_token_ids, asker = tokenizer.eos_token_ids, admitted.asker
                submit = to_submit(params, prompt, max_tokens, eos_token_ids, timeout_s, asker, guided, bad_words)
                submit.adapter = target.identity  # as late as possible: the name may mean another one by now
                if kept is not None:
                    kept.submitted(submit)
                asked = Asked.of(submit, prompt)
                await self._stream(target, submit, asked, params, admitted, output, admitted.received, kept)

    async def _judge(self, target: Target, params: GenerateParams, *, is_large: bool) -> None:
        """Check a request's texts and formats as far as that needs no engine. Raises the PagodaError that ends it."""
        model = target.model
        if params.guided is not None:
            params = replace(params, guided=await model.grammars.check(params.guided))
        prompt = await model.tokenizer.encode_prompt(params.prompt, is_large=is_large)
        check_prompt(params, len(prompt), model.limits)
        await model.tokenizer.encode_bad_words(params.bad_words)
        await checked_grammar(params, model.format, model.tokenizer, prompt, model.grammars)

    def _likely_length(self, params: GenerateParams, max_tokens: int) -> int:
        """Tokens to reserve for each sequence of a request, at first."""
        if not params.has_open_length:
            return max_tokens
        return min(max(self.services.admission.output_lengths.likely, params.min_tokens), max_tokens)

    def _keeping(
        self, admitted: AdmittedCall, params: GenerateParams, target: Target
    ) -> contextlib.AbstractAsyncContextManager[KeptStream | None]:
        """Keep a stream that its client may resume. Raises Unimplemented if this server keeps none."""
        if not params.is_resumable:
            return _NOT_KEPT
        if not self._kept.keep_s:
            raise Unimplemented("resumable")
        return self._kept.add(admitted.asker.tenant, params, admitted.received, target)

    async def _resume(self, _: object, call: ClientCall) -> None:
        await self._resume_from(call, self.resume_elsewhere)

    async def resume(self, call: ClientCall, parse: Parse[inference_pb2.ResumeRequest], route: str) -> None:
        """Serve a call of Resume that came by another protocol: see `generate`."""
        await self._resume_from(call, self.resume_elsewhere, parse, route, most=None)

    async def resume_here(self, _: object, call: ClientCall) -> None:
        """The Resume method for other routers, which have asked themselves before."""
        await self._resume_from(call, None)

    async def _resume_from(
        self,
        call: ClientCall,
        elsewhere: ResumeElsewhere | None,
        parse: Parse[inference_pb2.ResumeRequest] = _RESUME,
        route: str = f"{SERVICE}/Resume",
        most: int | None = SMALL_BYTES,
    ) -> None:
        async with self.services.admitted("Resume", route, call, most=most) as admitted:
            limits, tenant, record = self.models.limits, admitted.asker.tenant, admitted.record
            request = await admitted.message.parsed(lambda raw: validate_resume(parse(raw, limits), limits))
            record.request_id = request.request_id
            kept = self._kept.find(tenant, request.request_id)
            if kept is None:
                await self.services.messages.check_end(call)
                admitted.message.release()
                async with ClientWriter(call, self._stall_timeout_s) as writer:
                    if elsewhere and await elsewhere(request, tenant, time_left(call), writer.write):
                        return
                raise not_kept()
            admitted.note_target(kept.target)
            counts = kept.check(request.received)
            await admitted.engine_for(kept.target)
            admitted.check_draining()
            async with kept:  # no refusal above has ended the call that still writes it
                submit = kept.submit
                assert submit is not None, "a stream without it is not kept once its call has ended"
                kept.target.model.adapters.check_kept(submit.adapter)
                record.prompt_len, record.is_chat = len(submit.prompt), kept.params.is_chat
                output = kept.num_unfinished * self._likely_length(kept.params, submit.max_tokens)
                admitted.reservation.grow(kept.num_unfinished * len(submit.prompt) + output)
                admitted.spending.reserve(output)
                admitted.begin(request.request_id)
                asked = Asked.of(submit)
                await self._stream(
                    kept.target, submit, asked, kept.params, admitted, output, kept.received, kept, counts
                )

    async def _stream(
        self,
        target: Target,
        submit: engine_pb2.Submit,
        asked: Asked,
        params: GenerateParams,
        admitted: AdmittedCall,
        reserved: int,
        received: float,
        kept: KeptStream | None,
        counts: Sequence[int] = (),
    ) -> None:
        """Stream a request to its end.

        asked     what decides which engine gets it
        reserved  tokens for its output, beside what is kept of it
        kept      what is kept of the stream, if it is resumable
        counts    of a stream that is resumed: the tokens that the client has of each sequence
        """

        def starts() -> None:
            admitted.reservation.starts()
            admitted.spending.used = 0 if counts else len(submit.prompt)  # a stream that is resumed has paid for it

        model = target.model
        engines, tokenizer = model.engines.holding(submit.adapter), model.tokenizer
        submitted_at = time.monotonic() if kept is None else kept.submitted_at
        is_resumed = kept is not None and has_begun(kept.progress)
        place = Placement(admitted, engines, submit, submitted_at, starts)
        try:
            place.begin(asked, None if kept is None else kept.progress)  # before all else, so that the engine can start
            num_before = kept.num_tokens if kept is not None else 0
            answer: GenerateCall | None = None
            room: OutputRoom | None = None
            if params.has_open_length:
                reservation = admitted.reservation
                grow = (reservation.extend, admitted.spending.extend)
                room = OutputRoom(num_before + reserved, params.n * submit.max_tokens, *grow)
            try:
                with place:
                    if admitted.live.is_aborted:  # during tokenization
                        place.stream.abort()
                    await self.services.messages.check_end(admitted.call)  # while the engine computes
                    admitted.message.release()
                    async with ClientWriter(admitted.call, self._stall_timeout_s) as writer:
                        parsing = parsing_of(params, model.format, tokenizer, submit.prompt)
                        answer = GenerateCall(
                            params, len(submit.prompt), tokenizer, writer, received, kept, None, parsing, room
                        )
                        admitted.record.answer = answer
                        admitted.reservation.follow(answer, room.num_tokens if room else params.n * submit.max_tokens)
                        prompt = submit.prompt if params.has_prompt else ()
                        if kept is not None and is_resumed:
                            await answer.replay(kept, counts, prompt)
                            prompt = ()
                        await self._run(place, answer, prompt)
                        if params.has_open_length:
                            for length in answer.lengths:
                                self.services.admission.output_lengths.add(length)
            finally:
                if answer is not None:
                    admitted.spending.used += max(0, answer.num_tokens - num_before)  # it may break during the replay
        except Unavailable as error:
            if kept is None or not kept.is_kept:
                raise
            raise kept.resumable(error, engines.retry_after_s) from error

    async def _run(self, place: Placement, answer: GenerateCall, prompt: Sequence[int]) -> None:
        """Write an answer to its end, from one engine after another.

        prompt  token ids to write before all else
        """
        while True:
            answer.times = self._times(place.engine.name) if self._times else None
            if await place.run(answer, prompt):
                return
            if has_begun(answer.progress):
                prompt = ()

    async def _embed(self, _: object, call: ClientCall) -> bytes:
        return await self.readouts.embed(call)

    async def _score(self, _: object, call: ClientCall) -> bytes:
        return await self.readouts.score(call)

    async def _tokenize(self, _: object, call: ClientCall) -> bytes:
        return await self.conversions.tokenize(call, lambda tokenized: _serialized(tokenized.ids))

    async def _detokenize(self, _: object, call: ClientCall) -> inference_pb2.DetokenizeResponse:
        return await self.conversions.detokenize(call)


def _serialized(ids: Sequence[int]) -> bytes:
    response = inference_pb2.TokenizeResponse()
    for index in range(0, len(ids), _IDS_AT_ONCE):
        response.token_ids.extend(ids[index : index + _IDS_AT_ONCE])
    return response.SerializeToString()
