"""A body of HTTP, taken as that of a chat, of a completion, of a response and of a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from pagoda_server.router.errors import InvalidArgument, PagodaError, Unimplemented
from pagoda_server.router.http.anthropic import requests as anthropic
from pagoda_server.router.http.openai.requests import Asked, own_name, translated
from pagoda_server.router.http.responses import requests as responses
from pagoda_server.router.request import json_body
from pagoda_server.router.request.json_body import json_object
from pagoda_server.router.request.validation import check_prompt, to_submit, validate_generate
from tests.fuzz.common import check_line
from tests.fuzz.targets.wire import EOS_IDS, LIMITS

PATHS = ("sampling.", "stopping.", "output.", "chat.", "cache.", "token_ids.")  # the protocol's names


def check(data: bytes) -> bool:
    _check_decoders(data)
    taken = [
        _is_taken(data, True),
        _is_taken(data, False),
        *(_is_translated(data, api) for api in (responses, anthropic)),
    ]
    return any(taken)


def _check_decoders(data: bytes) -> None:
    """The decoder in Python must take what the fast one takes, except what it finds too deep."""
    fast = _decoded(data)
    with patch.object(json_body, "FEW_VALUES", 0):
        counting = _decoded(data)
    assert repr(counting) == repr(fast) or counting == "body: is nested too deep", (fast, counting)
    if not isinstance(fast, str):
        assert repr(fast) == repr(json.loads(data.decode()))


def _decoded(data: bytes) -> dict[str, Any] | str:
    """The object, or the text of the error."""
    try:
        return json_object(data, LIMITS)
    except InvalidArgument as error:
        return error.message


def _is_taken(data: bytes, is_chat: bool) -> bool:
    asked = Asked(is_chat)
    try:
        params = validate_generate(translated(data, LIMITS, asked), LIMITS)
        ids = params.prompt if isinstance(params.prompt, tuple) else (1, 2, 3)
        to_submit(params, ids, check_prompt(params, len(ids), LIMITS), EOS_IDS, 1.5)
    except PagodaError as error:
        check_line(error)
        _check_name(error, partial(own_name, asked=asked))
        return False
    assert (asked.n, asked.logprobs) == (params.n, params.logprobs), "the answer would have another shape"
    return True


def _is_translated(data: bytes, api: Any) -> bool:
    asked = api.Asked()
    try:
        params = validate_generate(api.generate_request(data, LIMITS, asked), LIMITS)
        to_submit(params, (1, 2, 3), check_prompt(params, 3, LIMITS), EOS_IDS, 1.5)
    except PagodaError as error:
        check_line(error)
        _check_name(error, partial(api.own_name, asked=asked))
        return False
    return True


def _check_name(error: PagodaError, named: Callable[[str], str]) -> None:
    if isinstance(error, InvalidArgument | Unimplemented):
        assert not named(error.field).startswith(PATHS), error.field
