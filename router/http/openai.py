"""The OpenAI API: /v1/models, /v1/chat/completions, /v1/completions, /v1/embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pagoda.v1 import inference_pb2

from ..errors import PagodaError
from ..request.fields import Limits
from ..request.inference import InferenceServicer
from ..request.receiving import Parse
from ..request.validation import check_model
from .http_call import Answer, Endpoint, HttpCall
from .openai_answers import answer_to
from .openai_embeddings import EmbeddingsApi
from .openai_prompts import Completion, complete
from .openai_requests import Asked, own_name, translated


class _Api:
    """One request of the OpenAI API, and what its answer is made by."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._model = model
        self._asked = Asked(is_chat)
        self._request_id = ""

    def request(self, raw: bytes, limits: Limits, request_id: str) -> inference_pb2.GenerateRequest:
        request = translated(raw, limits, self._asked)
        request.request_id = self._request_id = request_id
        return request

    def answer(self) -> Answer:
        return answer_to(self._asked, self._request_id, self._model)

    def own_name(self, field: str) -> str:
        return own_name(field, self._asked)


class _Completions(_Api):
    """The same for /v1/completions, which take several prompts."""

    def __init__(self, model: str) -> None:
        super().__init__(model, is_chat=False)

    def request(self, raw: bytes, limits: Limits, request_id: str) -> Completion:  # type: ignore[override]
        return Completion(super().request(raw, limits, request_id), self._asked)


def routes(
    inference: InferenceServicer, model: str, refusal: Callable[[], PagodaError | None], max_bytes: int
) -> list[BaseRoute]:
    """The API's routes.

    model      the name of the model that is served
    refusal    why no engine can serve it now
    max_bytes  of a body
    """
    started = int(time.time())

    def listed() -> dict[str, object]:
        if (why := refusal()) is not None:
            raise why
        most = inference.limits.max_model_len
        return {"id": model, "object": "model", "created": started, "owned_by": "pagoda", "max_model_len": most}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [listed()]})

    async def one_model(request: Request) -> Response:
        check_model(request.path_params["name"], model, inference.limits)
        return JSONResponse(listed())

    async def embed(call: HttpCall, parse: Parse[inference_pb2.EmbedRequest], route: str) -> None:
        await inference.readouts.embed(call, parse, route, call.take)

    chats = Endpoint(inference, "Generate", inference.generate, partial(_Api, model, is_chat=True), max_bytes)
    completions = Endpoint(inference, "Generate", partial(complete, inference), partial(_Completions, model), max_bytes)
    embeddings = Endpoint(inference, "Embed", embed, partial(EmbeddingsApi, model), max_bytes)
    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]
