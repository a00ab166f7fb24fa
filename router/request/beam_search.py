"""The fields of a beam search, checked, with their defaults filled in; and which other fields it leaves no room for."""

from __future__ import annotations

from collections.abc import Collection

from pagoda.v1 import inference_pb2
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.fields import check_integer, check_number
from pagoda_server.router.request.limits import Limits

MOST_LIKELY = 20  # tokens that an engine tells of, for each beam and step
_DEFAULTS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def check_beam_search(sampling: inference_pb2.Sampling, limits: Limits) -> None:
    """Fills in what the request leaves open; every other field of `sampling` is set. Raises InvalidArgument."""
    search = sampling.beam_search
    check_integer(search.width, "sampling.beam_search.width", 2, limits.max_beams)
    if not search.HasField("length_penalty"):
        search.length_penalty = 1
    check_number(search.length_penalty, "sampling.beam_search.length_penalty", -5, 5)
    if search.early_stopping not in inference_pb2.EarlyStopping.values():
        raise InvalidArgument(
            "sampling.beam_search.early_stopping", f"is {search.early_stopping}, which is no value of it"
        )
    if sampling.n > search.width:
        raise InvalidArgument("sampling.n", f"is {sampling.n}, more than beam_search.width, which is {search.width}")
    for field, default in _DEFAULTS.items():
        if getattr(sampling, field) != default:
            raise InvalidArgument(f"sampling.{field}", f"is set; a beam search needs its default, {default:g}")
    if sampling.logit_bias:
        raise InvalidArgument("sampling.logit_bias", "is set; a beam search ranks by the model's own log-probabilities")


def check_stopping(stopping: inference_pb2.Stopping, output: inference_pb2.Output) -> None:
    """Raises InvalidArgument for what a beam search cannot look for or tell."""
    if stopping.stop:
        raise InvalidArgument(
            "stopping.stop", "is set; a beam search looks for no stop strings, only for stop_token_ids"
        )
    if output.logprobs > 0:
        raise InvalidArgument("output.logprobs", f"is {output.logprobs}, must be 0 with a beam search")


def check_stop_ids(stop_ids: Collection[int], width: int) -> None:
    """So that each beam has `width` continuations that do not end it. Raises InvalidArgument."""
    if width + len(stop_ids) > MOST_LIKELY:
        raise InvalidArgument(
            "sampling.beam_search.width",
            f"is {width}, and {len(stop_ids)} ids end a sequence (stopping.stop_token_ids and the model's own); "
            f"together at most {MOST_LIKELY} are allowed",
        )
