"""The sampling of a request: its fields, checked, on top of what the model recommends."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.v1 import inference_pb2

from ...settings.sampling import LOGIT_BIAS, PARAMETERS, UNRECOMMENDED
from ..errors import InvalidArgument, Unimplemented
from .fields import Limits, check_bytes, check_count, check_id, check_ids, check_integer, check_number

log = logging.getLogger("pagoda.router")

_DEFAULTS: dict[str, Any] = {each.name: each.default for each in PARAMETERS}


def sampling_from(given: inference_pb2.Sampling, limits: Limits) -> inference_pb2.Sampling:
    """Check sampling fields and fill in their defaults. Raises InvalidArgument."""
    if given.HasField("beam_search"):
        raise InvalidArgument("sampling.beam_search", "is set; beam search is in the Python client: Client.beam_search")
    if given.HasField("typical_p") and given.typical_p != 1:
        raise Unimplemented("sampling.typical_p")
    check_count(len(given.logit_bias), "sampling.logit_bias", limits.max_logit_bias)
    for id, bias in given.logit_bias.items():
        check_id(id, f"sampling.logit_bias[{id}]", limits.vocab_size)
        check_number(bias, f"sampling.logit_bias[{id}]", LOGIT_BIAS)
    check_ids(given.allowed_token_ids, "sampling.allowed_token_ids", limits.vocab_size, limits.vocab_size)
    _check_bad_words(given.bad_words, limits)
    resolved = inference_pb2.Sampling(n=1, seed=secrets.randbits(64), **_DEFAULTS)
    resolved.MergeFrom(limits.recommended)
    resolved.MergeFrom(given)
    resolved.ClearField("typical_p")
    resolved.ClearField("bad_words")  # the engine knows nothing of text
    resolved.DiscardUnknownFields()  # a client may send megabytes of them, and this message goes to the engine
    _check_parameters(resolved)
    check_integer(resolved.n, "sampling.n", 1, limits.max_n)
    if resolved.top_k >= limits.vocab_size:
        resolved.top_k = 0  # both keep every token
    return resolved


def _check_bad_words(words: Sequence[str], limits: Limits) -> None:
    check_count(len(words), "sampling.bad_words", limits.max_bad_words)
    for index, word in enumerate(words):
        if not word:
            raise InvalidArgument(f"sampling.bad_words[{index}]", "is empty")
        check_bytes(word, f"sampling.bad_words[{index}]", limits.max_bad_word_bytes)


def recommended_sampling(recommended: Mapping[str, Any]) -> inference_pb2.Sampling | None:
    """The model's recommended sampling; None if it has none, or recommends values that no request may set."""
    if not recommended:
        return None
    try:
        sampling = inference_pb2.Sampling(**recommended)
        _check_parameters(sampling)
    except (TypeError, ValueError, OverflowError, InvalidArgument) as error:
        log.warning("ignoring the sampling parameters in generation_config.json: %s", error)
        return None
    return sampling


def default_sampling(recommended: Mapping[str, Any]) -> inference_pb2.Sampling:
    """What a request leaves out: the model's recommendation, on top of UNRECOMMENDED if it lacks a temperature."""
    own = recommended_sampling(recommended) or inference_pb2.Sampling()
    if own.HasField("temperature"):
        return own
    sampling = inference_pb2.Sampling(**UNRECOMMENDED)  # type: ignore[arg-type]  # whole numbers where it needs them
    sampling.MergeFrom(own)
    return sampling


def _check_parameters(sampling: inference_pb2.Sampling) -> None:
    """Check the numbers that are set. Raises InvalidArgument."""
    for each in PARAMETERS:
        if sampling.HasField(each.name):
            check_number(getattr(sampling, each.name), f"sampling.{each.name}", each.interval)
