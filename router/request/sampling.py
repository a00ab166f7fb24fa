"""How tokens are to be chosen: the sampling fields of a request, checked, with their defaults filled in."""

from __future__ import annotations

import secrets

from pagoda.v1 import inference_pb2
from pagoda_server.router.request.beam_search import check_beam_search
from pagoda_server.router.request.fields import check_count, check_id, check_integer, check_number
from pagoda_server.router.request.limits import Limits


def sampling_from(given: inference_pb2.Sampling, limits: Limits) -> inference_pb2.Sampling:
    """The same with every field set. Raises InvalidArgument."""
    check_count(len(given.logit_bias), "sampling.logit_bias", limits.max_logit_bias)
    for id, bias in given.logit_bias.items():
        check_id(id, f"sampling.logit_bias[{id}]", limits.vocab_size)
        check_number(bias, f"sampling.logit_bias[{id}]", -100, 100)
    resolved = inference_pb2.Sampling(
        temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, n=1
    )
    resolved.seed = secrets.randbits(64)
    resolved.MergeFrom(given)
    resolved.DiscardUnknownFields()  # a client may send megabytes of them, and this message goes on to the engine
    check_number(resolved.temperature, "sampling.temperature", 0, 100)
    check_number(resolved.top_p, "sampling.top_p", 0, 1, is_low_allowed=False)
    check_number(resolved.min_p, "sampling.min_p", 0, 1)
    check_number(resolved.repetition_penalty, "sampling.repetition_penalty", 0, 10, is_low_allowed=False)
    check_number(resolved.presence_penalty, "sampling.presence_penalty", -10, 10)
    check_number(resolved.frequency_penalty, "sampling.frequency_penalty", -10, 10)
    check_integer(resolved.n, "sampling.n", 1, limits.max_n)
    if resolved.top_k >= limits.vocab_size:
        resolved.top_k = 0  # both keep every token
    if resolved.HasField("beam_search"):
        check_beam_search(resolved, limits)
    return resolved
