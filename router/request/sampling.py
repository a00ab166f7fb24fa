"""How tokens are to be chosen: the sampling fields of a request, checked, with their defaults filled in."""

from __future__ import annotations

import secrets
from typing import Any

from pagoda.v1 import inference_pb2
from pagoda_server.router.request.beam_search import check_beam_search
from pagoda_server.router.request.fields import Limits, check_count, check_id, check_ids, check_integer, check_number
from pagoda_server.settings.sampling import LOGIT_BIAS, PARAMETERS

_DEFAULTS: dict[str, Any] = {each.name: each.default for each in PARAMETERS}


def sampling_from(given: inference_pb2.Sampling, limits: Limits) -> inference_pb2.Sampling:
    """The same with every field set. Raises InvalidArgument."""
    check_count(len(given.logit_bias), "sampling.logit_bias", limits.max_logit_bias)
    for id, bias in given.logit_bias.items():
        check_id(id, f"sampling.logit_bias[{id}]", limits.vocab_size)
        check_number(bias, f"sampling.logit_bias[{id}]", LOGIT_BIAS.low, LOGIT_BIAS.high)
    check_ids(given.allowed_token_ids, "sampling.allowed_token_ids", limits.vocab_size, limits.vocab_size)
    resolved = inference_pb2.Sampling(n=1, seed=secrets.randbits(64), **_DEFAULTS)
    resolved.MergeFrom(given)
    resolved.DiscardUnknownFields()  # a client may send megabytes of them, and this message goes on to the engine
    for each in PARAMETERS:
        low, high, is_low_allowed = each.interval.low, each.interval.high, each.interval.includes_low
        value = getattr(resolved, each.name)
        check_number(value, f"sampling.{each.name}", low, high, is_low_allowed=is_low_allowed)
    check_integer(resolved.n, "sampling.n", 1, limits.max_n)
    if resolved.top_k >= limits.vocab_size:
        resolved.top_k = 0  # both keep every token
    if resolved.HasField("beam_search"):
        check_beam_search(resolved, limits)
    return resolved
