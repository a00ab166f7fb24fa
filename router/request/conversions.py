"""Tokenize and Detokenize: calls that no engine computes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagoda.v1 import inference_pb2

from ..tenants.caller import caller
from .admission import Admission, Reservation
from .client_call import ClientCall
from .models import ServedModel
from .receiving import Parse, Received, from_protobuf
from .services import Services
from .validation import TokenizeParams, validate_detokenize, validate_tokenize

MAX_CONVERSIONS = 64  # calls at once
_TOKENIZE = from_protobuf(inference_pb2.TokenizeRequest)
_DETOKENIZE = from_protobuf(inference_pb2.DetokenizeRequest)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The ids that a text or a chat becomes, and the model whose tokenizer made them."""

    model: ServedModel
    ids: Sequence[int]


class Conversions:
    """Both methods, for all protocols. They have places of their own, and count against the tenant's requests."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._admission = Admission(MAX_CONVERSIONS, max_tokens=1)

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share the places between tenants by these weights from now on; None: admit in order of arrival."""
        self._admission.share(weights)

    async def tokenize(
        self,
        call: ClientCall,
        answer: Callable[[Tokenized], Result],
        parse: Parse[inference_pb2.TokenizeRequest] = _TOKENIZE,
    ) -> Result:
        """Serve a call. `answer` makes its answer of the ids, in a thread if they are many."""
        services = self._services
        async with self._converting(call) as (message, reservation):

            def checked(raw: bytes) -> tuple[ServedModel, TokenizeParams]:
                request = parse(raw, services.models.limits)
                model = services.models.named(request.model).model
                return model, validate_tokenize(request, model.limits)

            model, params = await message.parsed(checked)
            await services.messages.check_end(call)
            reservation.starts()
            encode = model.tokenizer.encode_prompt
            ids = await encode(params.prompt, params.add_special_tokens, is_large=message.is_large)
            return await services.messages.run(lambda: answer(Tokenized(model, ids)), 4 * len(ids))

    async def detokenize(
        self, call: ClientCall, parse: Parse[inference_pb2.DetokenizeRequest] = _DETOKENIZE
    ) -> inference_pb2.DetokenizeResponse:
        """Serve a call."""
        models = self._services.models
        async with self._converting(call) as (message, reservation):

            def ids_of(raw: bytes) -> tuple[ServedModel, Sequence[int], bool]:
                request = parse(raw, models.limits)
                model = models.named(request.model).model
                return model, validate_detokenize(request, model.limits), request.special_tokens

            model, ids, keeps_special_tokens = await message.parsed(ids_of)
            await self._services.messages.check_end(call)
            reservation.starts()
            text = await model.tokenizer.decode_ids(
                ids, skip_special_tokens=not keeps_special_tokens, is_large=message.is_large
            )
            return inference_pb2.DetokenizeResponse(text=text)

    @contextlib.asynccontextmanager
    async def _converting(self, call: ClientCall) -> AsyncIterator[tuple[Received, Reservation]]:
        """Admit a call and read its message."""
        tenant = caller().tenant
        with (
            self._admission.reserve(tenant) as reservation,
            self._services.quotas.enter(tenant),
            await self._services.messages.read(call) as message,
        ):
            yield message, reservation
