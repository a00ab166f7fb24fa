"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's users know them. Both need the right admin."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.routing import BaseRoute, Route

from pagoda.v1 import admin_pb2, control_pb2

from ..errors import NotFound
from ..request.fields import Limits
from ..request.inference import InferenceServicer
from ..request.json_body import Fields, json_object, translating
from ..request.loras import Loras
from ..request.receiving import SMALL_BYTES, Parse
from ..tenants.caller import Right, caller
from .errors import HttpError, Refusal, refusal
from .http_call import Answer, Api, Endpoint, HttpCall


class _Change(Api, Answer):
    """A load or an unload, and its answer."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}

    def answer(self) -> Answer:
        return self

    def own_name(self, field: str) -> str:
        return {"replace": "load_inplace", "request": "body"}.get(field, field)

    def refusal(self, error: Exception) -> Refusal:
        return refusal(HttpError(404, error.message, "not_found") if isinstance(error, NotFound) else error)

    def take(self, message: control_pb2.LoraAdapter, prompt: int = 0) -> bytes:
        names = ("name", "model", "identity", "rank", "num_bytes", "pinned")
        self._answer = {name: value for name in names if (value := getattr(message, name))}
        return b""

    def end(self) -> bytes:
        return json.dumps(self._answer).encode()


class _Load(_Change):
    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> admin_pb2.LoadLoraRequest:
        given = Fields(json_object(raw, limits))
        with translating():
            request = admin_pb2.LoadLoraRequest(
                lora_name=given.text("lora_name"),
                lora_path=given.text("lora_path"),
                model=given.text("model"),
                replace=given.flag("load_inplace"),
                pinned=given.flag("pinned"),
            )
        given.none_left()
        return request


class _Unload(_Change):
    def request(self, raw: bytes, limits: Limits, call: HttpCall) -> admin_pb2.UnloadLoraRequest:
        given = Fields(json_object(raw, limits))
        given.take("lora_int_id")  # vLLM's own number of it
        with translating():
            request = admin_pb2.UnloadLoraRequest(lora_name=given.text("lora_name"))
        given.none_left()
        return request


def routes(inference: InferenceServicer, loras: Loras) -> list[BaseRoute]:
    """The routes."""
    services = inference.services

    async def load(request: admin_pb2.LoadLoraRequest) -> control_pb2.LoraAdapter:
        return await loras.load(request)

    async def unload(request: admin_pb2.UnloadLoraRequest) -> control_pb2.LoraAdapter:
        await loras.unload(request.lora_name)
        return control_pb2.LoraAdapter(name=request.lora_name)

    def endpoint(change: Callable[[Any], Awaitable[control_pb2.LoraAdapter]], api: Callable[[], _Change]) -> Endpoint:
        async def serve(call: HttpCall, parse: Parse[Any], route: str) -> None:
            caller().require(Right.ADMIN)
            with await services.messages.read(call, most=SMALL_BYTES) as message:
                request = await message.parsed(lambda raw: parse(raw, services.models.limits))
            call.take(await change(request))

        return Endpoint(inference, "", serve, api, SMALL_BYTES, computes=False)

    return [
        Route("/v1/load_lora_adapter", endpoint(load, _Load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoint(unload, _Unload), methods=["POST"]),
    ]
