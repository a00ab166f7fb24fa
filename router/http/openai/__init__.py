"""The OpenAI API: its routes, and a request of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from pagoda.v1 import inference_pb2

from ...errors import NotFound
from ...request.fields import Limits
from ...request.inference import InferenceServicer
from ...request.loras import adapters_of
from ...request.models import ServedModels, Target
from ...request.receiving import Parse
from ..errors import HttpError
from ..http_call import Answer, Api, Endpoint, HttpCall, Serve
from .answers import answer_to
from .embeddings import EmbeddingsApi
from .prompts import Completion, complete
from .requests import Asked, own_name, translated
from .resuming import LAST_EVENT_ID, ByLastEventId, EventId, ResumableAnswer


class _Api(Api):
    """One request of the OpenAI API, and what its answer is made by."""

    def __init__(self, models: ServedModels, is_chat: bool) -> None:
        self._models = models
        self._model = ""  # the name of the one that is asked for
        self._asked = Asked(is_chat)
        self._request_id = ""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.GenerateRequest:
        request = translated(raw, limits, self._asked)
        self._model = self._models.named(request.model).name
        request.request_id = self._request_id = call.request_id
        return request

    def answer(self) -> Answer:
        if self._asked.is_resumable:
            return ResumableAnswer(self._asked, self._request_id, self._model)
        return answer_to(self._asked, self._request_id, self._model)

    def own_name(self, field: str) -> str:
        return own_name(field, self._asked)


class _Completions(_Api):
    """The same for /v1/completions, which take several prompts."""

    def __init__(self, models: ServedModels) -> None:
        super().__init__(models, is_chat=False)

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> Completion:  # type: ignore[override]
        return Completion(super().request(raw, limits, call), self._asked)


class _Resumed(_Api):
    """The same for a request that was sent again with the id of the last event that its client has."""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.ResumeRequest:  # type: ignore[override]
        self._received = EventId.read(call.header(LAST_EVENT_ID))
        self._model = self._models.named(translated(raw, limits, self._asked).model).name
        self._asked.created, call.request_id = self._received.created, self._received.request_id
        return self._received.resume_request(self._asked)

    def answer(self) -> Answer:
        return ResumableAnswer(self._asked, self._received.request_id, self._model, self._received)


def routes(inference: InferenceServicer, max_bytes: int) -> list[BaseRoute]:
    """The API's routes.

    max_bytes  of a body
    """
    started, models = int(time.time()), inference.models

    def described(target: Target) -> dict[str, object]:
        model = target.model
        most = model.limits.max_model_len if model.architecture else None  # an engine reports it
        card = {"id": target.name, "object": "model", "created": started, "owned_by": "pagoda", "max_model_len": most}
        return card | ({"parent": model.name} if target.adapter else {})

    async def all_models(request: Request) -> Response:
        waits = inference.services.waiting.is_on
        if not waits:
            models.check_listable()
        adapters = [
            Target(model, each.name)
            for model in models
            for each in adapters_of(model)
            if each.ready or (waits and not model.adapters.fault(each.name))
        ]
        found = [*map(Target, models), *adapters]
        return JSONResponse({"object": "list", "data": [described(target) for target in found]})

    async def one_model(request: Request) -> Response:
        target = models.named(request.path_params["name"])
        inference.services.check_takes(target)
        return JSONResponse(described(target))

    async def embed(call: HttpCall, parse: Parse[inference_pb2.EmbedRequest], route: str) -> None:
        await inference.readouts.embed(call, parse, route, call.take)

    async def resume(call: HttpCall, parse: Parse[inference_pb2.ResumeRequest], route: str) -> None:
        try:
            await inference.resume(call, parse, route)
        except NotFound:
            why = f"{LAST_EVENT_ID}: no stream is kept under this id; see --resume-s"
            raise HttpError(404, why, "stream_not_found") from None

    def resumable(serve: Serve, make_api: Callable[[], _Api], is_chat: bool) -> ASGIApp:
        begun = Endpoint(inference, "Generate", serve, make_api, max_bytes)
        resumed = Endpoint(inference, "Resume", resume, partial(_Resumed, models, is_chat), max_bytes)
        return ByLastEventId(begun, resumed)

    chats = resumable(inference.generate, partial(_Api, models, is_chat=True), is_chat=True)
    completions = resumable(partial(complete, inference), partial(_Completions, models), is_chat=False)
    embeddings = Endpoint(inference, "Embed", embed, partial(EmbeddingsApi, models), max_bytes)
    return [
        Route("/v1/models", all_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]
