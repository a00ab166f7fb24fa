"""OpenAI's Responses API: its route, and a request. Nothing of a response is kept, so each request is a whole one."""

from __future__ import annotations

from functools import partial

from starlette.routing import BaseRoute, Route

from pagoda.v1 import inference_pb2

from ...request.fields import Limits
from ...request.inference import InferenceServicer
from ...request.models import ServedModels
from ..http_call import Answer, Api, Endpoint, HttpCall
from .answers import StreamedResponse, WholeResponse
from .requests import Asked, generate_request, own_name


class _Responses(Api):
    """One request."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._model = ""  # the name of the one that is asked for
        self._asked = Asked()
        self._request_id = ""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.GenerateRequest:
        request = generate_request(raw, limits, self._asked)
        self._model = self._models.named(request.model).name
        request.request_id = self._request_id = call.request_id
        return request

    def answer(self) -> Answer:
        kind = StreamedResponse if self._asked.is_stream else WholeResponse
        return kind(self._asked, self._request_id, self._model)

    def own_name(self, field: str) -> str:
        return own_name(field, self._asked)


def routes(inference: InferenceServicer, max_bytes: int) -> list[BaseRoute]:
    """The API's route. max_bytes: of a body."""
    serve = Endpoint(inference, "Generate", inference.generate, partial(_Responses, inference.models), max_bytes)
    return [Route("/v1/responses", serve, methods=["POST"])]
