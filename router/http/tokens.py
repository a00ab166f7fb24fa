"""/tokenize and /detokenize, as vLLM's users know them."""

from __future__ import annotations

import json

from starlette.routing import BaseRoute, Route

from pagoda.v1 import inference_pb2

from ..errors import InvalidArgument, Unimplemented
from ..request.conversions import Tokenized
from ..request.fields import Limits
from ..request.inference import InferenceServicer
from ..request.json_body import Fields, json_object, translating
from ..request.receiving import Parse
from .field_names import FieldNames
from .http_call import Answer, Api, Endpoint, HttpCall, Serve
from .openai.chats import add_chat
from .openai.requests import Asked, own_name

_DETOKENIZE = FieldNames((r"^token_ids\b", "tokens"))


class _Tokenize(Api, Answer):
    """A text or a conversation, and the ids that it becomes."""

    def __init__(self) -> None:
        self._asked = Asked(is_chat=True)
        self._wants_texts = False
        self._answer = b""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.TokenizeRequest:
        given, request = Fields(json_object(raw, limits)), inference_pb2.TokenizeRequest()
        request.model = given.text("model")
        self._wants_texts = given.flag("return_token_strs")
        adds = given.take("add_special_tokens", bool, "true or false")
        prompt = given.take("prompt", str, "a string")
        with translating():
            if prompt is not None:
                request.prompt = prompt
                request.add_special_tokens = adds is not False
            else:
                self._chat(given, request, adds, limits)
        given.none_left()
        return request

    def _chat(self, given: Fields, request: inference_pb2.TokenizeRequest, adds: bool | None, limits: Limits) -> None:
        if adds:
            raise InvalidArgument("add_special_tokens", "must be false for messages: their template adds them")
        is_continued = given.flag("continue_final_message")
        add_chat(given, request.chat, limits, self._asked.places)
        request.chat.continue_last |= is_continued
        if given.take("add_generation_prompt", bool, "true or false") is request.chat.continue_last:
            raise Unimplemented("add_generation_prompt")  # it follows from whether the last message goes on

    def answer(self) -> Answer:
        return self

    def own_name(self, field: str) -> str:
        return own_name(field, self._asked)

    def take(self, tokenized: Tokenized, prompt: int = 0) -> bytes:
        """Write the whole answer, which `end` returns. Long ones are written in a thread."""
        ids, tokenizer = tokenized.ids, tokenized.model.tokenizer
        texts = [tokenizer.token_bytes(id).decode(errors="replace") for id in ids] if self._wants_texts else None
        most = tokenized.model.limits.max_model_len
        answer = {"count": len(ids), "max_model_len": most, "tokens": [*ids], "token_strs": texts}
        self._answer = json.dumps(answer, ensure_ascii=False).encode()
        return b""

    def end(self) -> bytes:
        return self._answer


class _Detokenize(Api, Answer):
    """Ids, and the text that they are."""

    def __init__(self) -> None:
        self._answer = b""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.DetokenizeRequest:
        given = Fields(json_object(raw, limits))
        ids = given.integers("tokens", limits.max_model_len)
        request = inference_pb2.DetokenizeRequest(model=given.text("model"), token_ids=ids, special_tokens=True)
        given.none_left()
        return request

    def answer(self) -> Answer:
        return self

    def own_name(self, field: str) -> str:
        return _DETOKENIZE.of(field)

    def take(self, message: inference_pb2.DetokenizeResponse, prompt: int = 0) -> bytes:
        self._answer = json.dumps({"prompt": message.text}, ensure_ascii=False).encode()
        return b""

    def end(self) -> bytes:
        return self._answer


def tokenizes(inference: InferenceServicer) -> Serve:
    """What serves a call whose parsed body is a TokenizeRequest."""

    async def tokenize(call: HttpCall, parse: Parse[inference_pb2.TokenizeRequest], route: str) -> None:
        await inference.conversions.tokenize(call, call.take, parse)

    return tokenize


def routes(inference: InferenceServicer, max_bytes: int) -> list[BaseRoute]:
    """The routes. max_bytes: of a body."""

    async def detokenize(call: HttpCall, parse: Parse[inference_pb2.DetokenizeRequest], route: str) -> None:
        call.take(await inference.conversions.detokenize(call, parse))

    return [
        Route(
            "/tokenize",
            Endpoint(inference, "Tokenize", tokenizes(inference), _Tokenize, max_bytes, computes=False),
            methods=["POST"],
        ),
        Route(
            "/detokenize",
            Endpoint(inference, "Detokenize", detokenize, _Detokenize, max_bytes, computes=False),
            methods=["POST"],
        ),
    ]
