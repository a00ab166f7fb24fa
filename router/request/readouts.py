"""Embed and Score: what a model makes of given tokens. The engine reads it while it computes them as prompts.

Each vector and each continuation is a sequence of its own. A few of a call's sequences are with the engine at once, so
that a call of many long ones takes little memory there. Each chooses one token, which is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ...settings.sampling import PARAMETERS
from ..engines.channel import EngineChannel
from ..engines.choosing import Asked
from ..engines.fleet import Engines
from ..engines.stream import EngineStream, SequenceInbox, Wake
from ..errors import Aborted, EngineLost, InvalidArgument
from ..tenants.caller import Caller
from .client_call import ClientCall, time_left
from .fields import Limits
from .generate_call import raise_if_failed, timing_of
from .models import ServedModel, Target
from .output import write_bytes, write_logprobs
from .readout_validation import EmbedParams, ReadoutParams, ScoreParams, validate_embed, validate_score
from .receiving import Parse, Received, from_protobuf
from .services import SERVICE, AdmittedCall, Services

AT_ONCE = 64  # sequences of one call
_EMBED = from_protobuf(inference_pb2.EmbedRequest)
_SCORE = from_protobuf(inference_pb2.ScoreRequest)
_GREEDY = {each.name: each.default for each in PARAMETERS} | {"temperature": 0}
_TOKEN_BYTES = 16  # of a token's record in a response


# -- the sequences on an engine ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Job:
    """A request's tokens. Sequence `index` is the shared ones and parts[index]; the engine reads `readout` of each.

    adapter  the identity of the one that they are computed with; empty: none
    """

    params: ReadoutParams
    shared: list[int]
    parts: list[list[int]]
    readout: engine_pb2.Readout
    adapter: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts, those that are shared counted once."""
        return len(self.shared) + sum(map(len, self.parts))

    @property
    def num_reserved(self) -> int:
        return sum(len(self.shared) + len(part) + 1 for part in self.parts)

    def check(self, limits: Limits) -> None:
        """Raise InvalidArgument unless every sequence fits."""
        longest = min(limits.max_model_len, limits.kv_token_capacity)
        room = longest - 1 - len(self.shared)  # one token follows the prompt
        if self.params.shared_field and not self.shared:
            raise InvalidArgument(self.params.shared_field, "becomes a prompt of 0 tokens, must be at least 1")
        if self.params.shared_field and room < 1:
            raise InvalidArgument(
                self.params.shared_field, f"is {len(self.shared)} tokens, at most {longest - 2} are allowed"
            )
        for part, path in zip(self.parts, self.params.part_fields, strict=True):
            if not 1 <= len(part) <= room:
                raise InvalidArgument(path, f"is {len(part)} tokens, must be from 1 to {room}")

    def submit(self, index: int, asker: Caller, timeout_s: float | None) -> engine_pb2.Submit:
        params = self.params
        return engine_pb2.Submit(
            prompt=[*self.shared, *self.parts[index]],
            sampling=inference_pb2.Sampling(n=1, seed=0, **_GREEDY),  # type: ignore[arg-type]
            max_tokens=1,
            cache=inference_pb2.Cache(salt=asker.cache_salt(params.cache.salt), bypass=params.cache.bypass),
            priority=params.priority,
            timeout_s=timeout_s,
            tenant=asker.tenant,
            request_id=params.request_id,
            readout=self.readout,
            adapter=self.adapter,
        )


class ReadoutStream:
    """The sequences of a call on an engine, a few at a time.

    count   of all sequences
    submit  makes a sequence's message
    leads   the first sequence goes alone, and leaves what it shares with the others in the prefix cache
    starts  called when a sequence starts to be computed
    """

    def __init__(
        self,
        engine: EngineChannel,
        count: int,
        submit: Callable[[int], engine_pb2.Submit],
        leads: bool,
        starts: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._count = count
        self._submit = submit
        self._starts = starts
        self._leads = leads
        self._num_submitted = 0
        self._started: set[int] = set()
        self._is_aborted = False
        self._wake = Wake()
        self._live: dict[int, EngineStream] = {}
        self._fill(1 if leads else AT_ONCE)  # now, so that the engine can start

    def _fill(self, most: int) -> None:
        while len(self._live) < most and self._num_submitted < self._count:
            index = self._num_submitted
            self._num_submitted += 1
            self._live[index] = stream = self._engine.submit(self._submit(index), partial(self._start, index))
            stream.wake = self._wake

    def _start(self, index: int) -> None:
        if index not in self._started:  # an engine reports each start and the end
            self._started.add(index)
            self._starts(index)

    async def outputs(self) -> AsyncIterator[tuple[int, SequenceInbox]]:
        """Yield each sequence with its whole output when it has ended. Raises EngineLost."""
        while self._live:
            await self._wake.wait()
            for index, stream in list(self._live.items()):
                if stream.error is not None:
                    raise stream.error
                if stream.inboxes[0].ended is not None:
                    del self._live[index]
                    yield index, stream.inboxes[0]
            if not (self._is_aborted or (self._leads and self._num_submitted == 1 and self._live)):
                self._fill(AT_ONCE)

    def abort(self) -> None:
        """Ask the engine to end the sequences; their ends still arrive, and no others follow."""
        self._is_aborted = True
        for stream in self._live.values():
            stream.abort()

    def close(self) -> None:
        """End the sequences that still run, and stop delivery."""
        for stream in self._live.values():
            stream.close()


@dataclass(slots=True, eq=False)
class ReadoutAnswer:
    """What the engine has done for a call so far: an Answer, as observers know it."""

    job: _Job
    received: float
    ends: dict[int, engine_pb2.Ended] = field(default_factory=dict)
    num_tokens: int = 0
    first_written: float | None = None

    @property
    def reasons(self) -> list[inference_pb2.FinishReason]:
        return [inference_pb2.FINISH_REASON_LENGTH] * len(self.ends)

    def usage(self) -> inference_pb2.Usage:
        if self.job.shared:  # later sequences find what the first one has computed
            cached_tokens = min(self.ends[0].cached_tokens, len(self.job.shared)) if 0 in self.ends else 0
        else:
            cached_tokens = sum(ended.cached_tokens for ended in self.ends.values())
        return inference_pb2.Usage(prompt_tokens=self.job.num_tokens, cached_tokens=cached_tokens)

    def timing(self) -> inference_pb2.Timing:
        total_s = time.monotonic() - self.received
        return timing_of(self.ends.values(), total_s, total_s)


# -- the calls --------------------------------------------------------------------------------------------------------


class Readouts:
    """Serves Embed and Score: they are admitted, limited and counted as Generate is."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def embed(
        self,
        call: ClientCall,
        parse: Parse[inference_pb2.EmbedRequest] = _EMBED,
        route: str = f"{SERVICE}/Embed",
        write: Callable[[inference_pb2.EmbedResponse], bytes] = inference_pb2.EmbedResponse.SerializeToString,
    ) -> bytes:
        """Serve a call of Embed that came by any protocol, as InferenceServicer.generate does one of Generate.

        write  makes the answer; runs in a thread if the answer is large

        Return the answer. Raises the PagodaError that ends the call.
        """

        return await self._serve("Embed", route, call, parse, validate_embed, write)

    async def score(self, call: ClientCall) -> bytes:
        """Return a ScoreResponse, serialized. Raises the PagodaError that ends the call."""

        route, write = f"{SERVICE}/Score", inference_pb2.ScoreResponse.SerializeToString
        return await self._serve("Score", route, call, _SCORE, validate_score, write)

    async def _serve(
        self,
        method: str,
        route: str,
        call: ClientCall,
        parse: Parse[Any],
        validate: Callable[[Any, Limits], EmbedParams | ScoreParams],
        write: Callable[[Any], bytes],
    ) -> bytes:
        """Serve a call, whose answer `write` makes of its response."""
        async with self._services.admitted(method, route, call) as admitted:
            models, message, reservation = self._services.models, admitted.message, admitted.reservation

            def checked(raw: bytes) -> tuple[Target, EmbedParams | ScoreParams]:
                request = parse(raw, models.limits)
                target = models.named(request.model, request.lora_name)
                return target, validate(request, target.model.limits)

            async def judged(target: Target, params: EmbedParams | ScoreParams) -> None:
                (await self._tokenized(target.model, params, message)).check(target.model.limits)

            target, params = await admitted.wanted(checked, judged)
            model = target.model
            admitted.check_draining()
            admitted.begin(params.request_id)
            reservation.grow(len(params.parts))
            job = await self._tokenized(model, params, message)
            job.check(model.limits)
            admitted.record.prompt_len = job.num_tokens
            reservation.grow(job.num_reserved - reservation.tokens)
            admitted.spending.reserve(job.num_tokens)
            answer = ReadoutAnswer(job, admitted.received)
            job.adapter = target.identity  # as late as possible: the name may mean another one by now
            outputs = await self._compute(model.engines.holding(job.adapter), job, admitted, answer)
            if isinstance(params, EmbedParams):
                return await self._embeddings(params, outputs, answer, write)
            return await self._scores(model, params, job, outputs, answer, write)

    async def _tokenized(self, model: ServedModel, params: EmbedParams | ScoreParams, message: Received) -> _Job:
        is_score = isinstance(params, ScoreParams)
        encode = model.tokenizer.encode_prompt
        shared = await encode(params.shared, is_large=message.is_large) if is_score else []
        parts = [await encode(part, not is_score, is_large=message.is_large) for part in params.parts]
        if isinstance(params, EmbedParams):
            return _Job(params, shared, parts, engine_pb2.Readout(pooling=params.pooling))
        return _Job(params, shared, parts, engine_pb2.Readout(logprobs_from=len(shared)))

    async def _compute(
        self, engines: Engines, job: _Job, admitted: AdmittedCall, answer: ReadoutAnswer
    ) -> list[list[engine_pb2.Reading]]:
        """Compute all sequences. Returns what was read from each."""
        reservation, spending = admitted.reservation, admitted.spending

        def starts(index: int) -> None:
            reservation.starts()
            spending.used += len(job.parts[index]) + (0 if spending.used else len(job.shared))

        def submit(index: int) -> engine_pb2.Submit:
            return job.submit(index, admitted.asker, time_left(admitted.call))

        def begin(engine: EngineChannel) -> ReadoutStream:
            admitted.record.engine = engine.name
            assert engine.info is not None, "an engine that is ready has said hello"
            leads = len(job.shared) >= engine.info.kv_cache.block_size and not job.params.cache.bypass
            stream = admitted.live.stream = ReadoutStream(engine, len(job.parts), submit, leads, starts)
            if admitted.live.is_aborted:  # during tokenization, or while its engine was lost
                stream.abort()
            return stream

        admitted.record.answer = answer
        engine = engines.pick(asked=Asked.of(submit(0)))
        stream = begin(engine)
        outputs: list[list[engine_pb2.Reading]] = [[] for _ in job.parts]
        try:
            await self._services.messages.check_end(admitted.call)  # while the engine computes
            admitted.message.release()
            while True:
                try:
                    async for index, inbox in stream.outputs():
                        assert inbox.ended is not None, "a sequence's output is given once it has ended"
                        raise_if_failed(inbox.ended, job.params.part_fields[index])
                        if inbox.ended.reason != engine_pb2.END_REASON_ABORTED:
                            answer.ends[index], outputs[index] = inbox.ended, inbox.readings
                    break
                except EngineLost as lost:  # nothing was sent, so another engine begins anew
                    stream.close()
                    engine = await admitted.elsewhere(engines, engine, lost, has_begun=False)
                    answer.ends.clear()
                    spending.used = 0
                    stream = begin(engine)
        finally:
            stream.close()
        if len(answer.ends) < len(outputs):
            raise Aborted("the request was aborted")
        return outputs

    async def _embeddings(
        self,
        params: EmbedParams,
        outputs: list[list[engine_pb2.Reading]],
        answer: ReadoutAnswer,
        write: Callable[[inference_pb2.EmbedResponse], bytes],
    ) -> bytes:
        def response() -> bytes:
            made = inference_pb2.EmbedResponse(request_id=params.request_id, usage=answer.usage())
            for readings in outputs:
                made.embeddings.add(values=_vector(readings, params))
            return write(made)

        return await self._services.messages.run(
            response, sum(len(each.embedding) * 4 for of in outputs for each in of)
        )

    async def _scores(
        self,
        model: ServedModel,
        params: ScoreParams,
        job: _Job,
        outputs: list[list[engine_pb2.Reading]],
        answer: ReadoutAnswer,
        write: Callable[[inference_pb2.ScoreResponse], bytes],
    ) -> bytes:
        def response() -> bytes:
            made = inference_pb2.ScoreResponse(request_id=params.request_id, usage=answer.usage())
            for ids, readings in zip(job.parts, outputs, strict=True):
                score = made.scores.add()
                found = {each.at: each for reading in readings for each in reading.logprobs}
                for index, id in enumerate(ids, len(job.shared)):
                    write_logprobs(score.tokens.add(id=id), found[index])
                score.logprob = math.fsum(token.logprob for token in score.tokens)
                if params.has_token_bytes:
                    write_bytes(score.tokens, model.tokenizer.token_bytes)
            return write(made)

        return await self._services.messages.run(response, _TOKEN_BYTES * sum(map(len, job.parts)))


def _vector(readings: Sequence[engine_pb2.Reading], params: EmbedParams) -> Sequence[float]:
    """The embedding that a client gets: cut, then scaled. A vector of zeros stays one."""
    values = next(reading.embedding for reading in reversed(readings) if reading.embedding)[: params.dimensions]
    length = math.hypot(*values) if params.normalizes else 0.0
    return [value / length for value in values] if length else values
