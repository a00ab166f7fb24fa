"""Which model a request means, and what holds for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.v1 import control_pb2
from pagoda_server.router.engines.fleet import Fleet
from pagoda_server.router.errors import NotFound, Unavailable
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.models import ServedModels
from tests.router.fleets import fleet_of, one_model, served

LIMITS = Limits(max_model_len=100, vocab_size=50, kv_token_capacity=1000, has_chat_template=False)


def engines(is_ready: bool = True) -> Fleet:
    engine: Any = SimpleNamespace(takes_requests=is_ready, retry_after_s=None)
    return fleet_of(engine)


def two(first_is_ready: bool = True, second_is_ready: bool = True) -> ServedModels:
    wide = replace(LIMITS, max_model_len=900, vocab_size=20, has_chat_template=True)
    return ServedModels(
        [
            served(engines(first_is_ready), "one", limits=LIMITS),
            served(engines(second_is_ready), "two", limits=wide),
        ]
    )


def test_a_request_that_names_no_model_means_the_first() -> None:
    models = two()
    assert models.named("").model is models.first
    assert [models.named(name).name for name in ("one", "two")] == ["one", "two"]


def test_an_unknown_model_is_not_found_and_not_repeated_and_the_known_ones_are_named() -> None:
    with pytest.raises(NotFound) as refused:
        two().named("/secret/path")
    assert refused.value.message == "model: not served here; the served models are one, two"
    with pytest.raises(NotFound) as refused:
        one_model(engines(), limits=LIMITS).named("/secret/path")
    assert refused.value.message == "model: not served here; the served model is m"


def test_a_gguf_file_is_found_by_its_folder_too() -> None:
    models = one_model(engines(), limits=replace(LIMITS, other_name="m-1234"))
    assert models.named("m-1234").model is models.first


def test_until_its_model_is_known_a_message_has_the_widest_limits() -> None:
    widest = two().limits
    assert (widest.max_model_len, widest.vocab_size, widest.has_chat_template) == (900, 50, True)
    models = two()
    models.named("two").model.architecture = ""  # no engine has reported its limits yet
    assert models.limits.max_model_len == 100


def test_calls_are_refused_unread_only_if_no_model_has_an_engine() -> None:
    assert two().refusal() is None
    assert two(second_is_ready=False).refusal() is None
    refusal = two(False, False).refusal()
    assert isinstance(refusal, Unavailable)
    assert refusal.message == "no engine of any model is ready"
    with pytest.raises(Unavailable):
        two(second_is_ready=False).named("two").check_ready()


def test_a_model_adopts_the_smallest_limits_of_its_engines_and_keeps_them_without_one() -> None:
    model = served(engines(), limits=LIMITS, architecture="")
    cache = control_pb2.KvCacheInfo(token_capacity=70)
    info = control_pb2.EngineInfo(architecture="llama", max_model_len=90, vocab_size=40, hidden_size=8, kv_cache=cache)
    other = control_pb2.EngineInfo(max_model_len=80, vocab_size=60, hidden_size=8, kv_cache=cache)
    model.adopt([info, other])
    model.adopt([])
    assert model.architecture == "llama"
    found = model.limits
    assert (found.max_model_len, found.vocab_size, found.hidden_size, found.kv_token_capacity) == (80, 40, 8, 70)
