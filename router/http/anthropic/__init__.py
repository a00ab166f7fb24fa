"""Anthropic's Messages API: its routes, and a request of each."""

from __future__ import annotations

import json
from functools import partial

from starlette.routing import BaseRoute, Route

from pagoda.v1 import inference_pb2

from ...request.fields import Limits
from ...request.inference import InferenceServicer
from ...request.models import ServedModels
from ..errors import Refusal, refusal
from ..http_call import Answer, Api, Endpoint, HttpCall
from ..tokens import tokenizes
from .answers import StreamedMessage, TokenCount, WholeMessage
from .requests import Asked, generate_request, own_name, tokenize_request

_ERRORS = {  # by status, where its name is another than in the OpenAI API
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Api(Api):
    """What both kinds of request have in common."""

    def __init__(self) -> None:
        self._asked = Asked()

    def own_name(self, field: str) -> str:
        return own_name(field, self._asked)

    def refusal(self, error: Exception) -> Refusal:
        refused = refusal(error)
        known = json.loads(refused.body)["error"]
        kind = _ERRORS.get(refused.status, known["type"])
        body = json.dumps({"type": "error", "error": {"type": kind, "message": known["message"]}}).encode()
        headers = [(name, value) for name, value in refused.headers if name != b"content-length"]
        return Refusal(refused.status, [*headers, (b"content-length", str(len(body)).encode())], body)


class _Messages(_Api):
    """One request of /v1/messages."""

    def __init__(self, models: ServedModels) -> None:
        super().__init__()
        self._models = models
        self._model = ""  # the name of the one that is asked for
        self._request_id = ""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.GenerateRequest:
        request = generate_request(raw, limits, self._asked)
        self._model = self._models.named(request.model).name
        request.request_id = self._request_id = call.request_id
        return request

    def answer(self) -> Answer:
        return (StreamedMessage if self._asked.is_stream else WholeMessage)(self._request_id, self._model)


class _CountTokens(_Api):
    """One request of /v1/messages/count_tokens."""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.TokenizeRequest:
        return tokenize_request(raw, limits, self._asked)

    def answer(self) -> Answer:
        return TokenCount()


def routes(inference: InferenceServicer, max_bytes: int) -> list[BaseRoute]:
    """The API's routes. max_bytes: of a body."""
    messages = Endpoint(inference, "Generate", inference.generate, partial(_Messages, inference.models), max_bytes)
    count = Endpoint(inference, "Tokenize", tokenizes(inference), _CountTokens, max_bytes, computes=False)
    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
