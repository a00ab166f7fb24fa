"""Embeddings of the OpenAI API: a body as an EmbedRequest, and its vectors as JSON."""

from __future__ import annotations

import base64
import json
import sys
from array import array

from pagoda.v1 import inference_pb2

from ...errors import InvalidArgument
from ...request.fields import Limits, check_count
from ...request.json_body import Fields, Json, integers_of, json_object, translating
from ...request.models import ServedModels
from ..field_names import FieldNames
from ..http_call import Answer, Api, HttpCall

_POOLINGS = {
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
    "cls": inference_pb2.POOLING_CLS,
}
_ENCODINGS = ("float", "base64")
_NAMES = FieldNames((r"(\.text|\.token_ids\.ids)\b", ""), (r"^inputs\b", "input"))
_NAMES_OF_ONE = FieldNames((r"(\.text|\.token_ids\.ids)\b", ""), (r"^inputs(\[0\])?", "input"))


class EmbeddingsApi(Api, Answer):
    """One request for embeddings, and its answer."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._model = ""  # the name of the one that is asked for
        self._is_base64 = False
        self._is_one = False  # the input is one text or one list of token ids
        self._answer = b""

    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> inference_pb2.EmbedRequest:
        given = Fields(json_object(raw, limits))
        request = inference_pb2.EmbedRequest(request_id=call.request_id)
        with translating():
            self._fill(request, given, limits)
        given.none_left()
        self._model = self._models.named(request.model).name
        return request

    def _fill(self, request: inference_pb2.EmbedRequest, given: Fields, limits: Limits) -> None:
        given.take("user")  # it changes no answer
        request.model = given.text("model")
        self._inputs(request, given, limits)
        encoding = given.take("encoding_format") or "float"
        if encoding not in _ENCODINGS:
            raise InvalidArgument("encoding_format", f"must be one of {', '.join(_ENCODINGS)}")
        self._is_base64 = encoding == "base64"
        if (dimensions := given.integer("dimensions")) is not None:
            request.dimensions = dimensions
        if pooling := given.text("pooling"):
            if pooling not in _POOLINGS:
                raise InvalidArgument("pooling", f"must be one of {', '.join(_POOLINGS)}")
            request.pooling = _POOLINGS[pooling]
        if (normalize := given.take("normalize", bool, "true or false")) is not None:
            request.normalize = normalize
        request.cache.salt = given.text("cache_salt")
        request.priority = given.integer("priority", -limits.max_priority, limits.max_priority) or 0

    def _inputs(self, request: inference_pb2.EmbedRequest, given: Fields, limits: Limits) -> None:
        wanted = given.take("input", (str, list), "a string, a list of token ids, or a list of these")
        if wanted is None:
            raise InvalidArgument("input", "is missing")
        self._is_one = isinstance(wanted, str) or (bool(wanted) and not isinstance(wanted[0], str | list))
        entries = [wanted] if self._is_one else wanted
        check_count(len(entries), "input", limits.max_readouts)
        for index, entry in enumerate(entries):
            path = "input" if self._is_one else f"input[{index}]"
            if isinstance(entry, str):
                request.inputs.add(text=entry)
            elif isinstance(entry, list):
                check_count(len(entry), path, limits.max_model_len - 1)
                request.inputs.add().token_ids.ids.extend(integers_of(entry, path))
                request.inputs[-1].token_ids.SetInParent()  # an empty list is refused as empty, not as missing
            else:
                raise InvalidArgument(path, "must be a string or a list of token ids")

    def own_name(self, field: str) -> str:
        """The API's name of a field that an error names as the protocol does."""
        return (_NAMES_OF_ONE if self._is_one else _NAMES).of(field)

    def answer(self) -> Answer:
        return self

    def take(self, message: inference_pb2.EmbedResponse, prompt: int = 0) -> bytes:
        """Write the whole answer, which `end` returns. Long ones are written in a thread."""
        tokens = message.usage.prompt_tokens
        data = ",".join(
            f'{{"object":"embedding","index":{index},"embedding":{self._vector(each.values)}}}'
            for index, each in enumerate(message.embeddings)
        )
        usage = f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}'
        model = json.dumps(self._model)
        self._answer = f'{{"object":"list","data":[{data}],"model":{model},"usage":{usage}}}'.encode()
        return b""

    def _vector(self, values: Json) -> str:
        if not self._is_base64:
            return json.dumps([*values])
        floats = array("f", values)
        if sys.byteorder == "big":
            floats.byteswap()
        return f'"{base64.b64encode(floats.tobytes()).decode()}"'

    def end(self) -> bytes:
        return self._answer
