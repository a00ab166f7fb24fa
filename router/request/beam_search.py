"""Beam search: find the most likely continuations of a prompt with an engine that knows only sequences.

The rules are those of transformers' `generate(num_beams=…)`. In each step the `width` best beams are continued by every
token. The best `width` of all continuations that do not end are the next beams; those that end are hypotheses if they
are among the best `width`. A hypothesis scores its sum of log-probabilities divided by length ** length_penalty, and
the best `width` hypotheses are kept.

`BeamSearch` is these rules, on tokens and numbers alone. `BeamSearchStream` runs them on an engine: each step is one
request with a sequence per beam, which adds one token to the beam's and reports the log-probabilities. The prefix cache
holds what the previous step computed, so each sequence computes one token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ...settings.request import MAX_LOGPROBS
from ...settings.sampling import PARAMETERS
from ..engines.channel import EngineChannel
from ..engines.stream import SequenceInbox, time_in_engine
from ..errors import InvalidArgument
from .fields import Limits, check_integer, check_number

_DEFAULTS = {each.name: each.default for each in PARAMETERS}
_SUMS = (
    "queue_s",
    "decode_s",
    "preempted_s",
    "preemptions",
    "preempted_tokens",
    "recomputed_tokens",
    "saved_tokens",
    "loaded_tokens",
)


# -- the request ------------------------------------------------------------------------------------------------------


def check_beam_search(sampling: inference_pb2.Sampling, limits: Limits) -> None:
    """Check a search and fill in its defaults; all other fields of `sampling` are set. Raises InvalidArgument."""
    search = sampling.beam_search
    check_integer(search.width, "sampling.beam_search.width", 2, limits.max_beams)
    if not search.HasField("length_penalty"):
        search.length_penalty = 1
    check_number(search.length_penalty, "sampling.beam_search.length_penalty", -5, 5)
    if search.early_stopping not in inference_pb2.EarlyStopping.values():
        raise InvalidArgument(
            "sampling.beam_search.early_stopping", f"is {search.early_stopping}, which is not a known value"
        )
    if sampling.n > search.width:
        raise InvalidArgument("sampling.n", f"is {sampling.n}, more than beam_search.width, which is {search.width}")
    for field, default in _DEFAULTS.items():
        if getattr(sampling, field) != default:
            raise InvalidArgument(f"sampling.{field}", f"is set; a beam search needs its default, {default:g}")
    if sampling.logit_bias:
        raise InvalidArgument("sampling.logit_bias", "is set; a beam search ranks by the model's own log-probabilities")
    if sampling.allowed_token_ids:
        raise InvalidArgument("sampling.allowed_token_ids", "is set; a beam search considers every token")


def check_stopping(stopping: inference_pb2.Stopping, output: inference_pb2.Output) -> None:
    """Refuse stop strings and top logprobs, which a beam search does not support. Raises InvalidArgument."""
    if stopping.stop:
        raise InvalidArgument(
            "stopping.stop", "is set; a beam search looks for no stop strings, only for stop_token_ids"
        )
    if output.logprobs > 0:
        raise InvalidArgument("output.logprobs", f"is {output.logprobs}, must be 0 with a beam search")


def check_stop_ids(stop_ids: Collection[int], width: int) -> None:
    """Make sure that each beam has `width` continuations that do not end it. Raises InvalidArgument."""
    if width + len(stop_ids) > MAX_LOGPROBS:
        raise InvalidArgument(
            "sampling.beam_search.width",
            f"is {width}, and {len(stop_ids)} ids end a sequence (stopping.stop_token_ids and the model's own); "
            f"together at most {MAX_LOGPROBS} are allowed",
        )


# -- the rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt: its parent and one more token; without a parent it has no tokens.

    score    the sum of its tokens' log-probabilities
    logprob  the log-probability of its last token
    """

    score: float = 0.0
    parent: Beam | None = None
    token: int = -1
    logprob: float = 0.0

    def path(self) -> tuple[list[int], list[float]]:
        """The beam's tokens and their log-probabilities."""
        tokens, logprobs, beam = [], [], self
        while beam.parent is not None:
            tokens.append(beam.token)
            logprobs.append(beam.logprob)
            beam = beam.parent
        return tokens[::-1], logprobs[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation: the stop id `matched` ended it, or its length did (None)."""

    score: float
    beam: Beam
    matched: int | None


class BeamSearch:
    """The rules of one search.

    params      every field is set
    stop_ids    end a beam as its token number min_tokens + 1 or later; before that they are no candidates
    max_tokens  length at which every beam ends

    length      number of tokens in each beam
    beams       unfinished beams, best first; initially the prompt alone
    hypotheses  finished beams, best first
    """

    def __init__(
        self, params: inference_pb2.BeamSearch, stop_ids: Collection[int], min_tokens: int, max_tokens: int
    ) -> None:
        self.length = 0
        self.beams = [Beam()]
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False
        self._params = params
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens

    def advance(self, found: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Make every beam longer by one token.

        found  for each beam, its most likely next tokens and their log-probabilities, best first: at least `width` and
               one for each stop id, so that `width` of them do not end it

        Among equals, the continuation of the better beam comes first, then the more likely token.
        """
        self.length += 1
        width = self._params.width
        candidates = [
            Beam(beam.score + logprob, beam, token, logprob)
            for beam, (ids, logprobs) in zip(self.beams, found, strict=True)
            for token, logprob in zip(ids, logprobs, strict=True)
            if self.length > self._min_tokens or token not in self._stop_ids
        ]
        candidates.sort(key=lambda beam: beam.score, reverse=True)
        self.beams = []
        for rank, beam in enumerate(candidates):
            stops = beam.token in self._stop_ids
            if stops or self.length == self._max_tokens:
                if rank < width:
                    self._add(beam, beam.token if stops else None)
            else:
                self.beams.append(beam)
                if len(self.beams) == width:
                    break
        self.is_over = not self.beams or not self._can_improve()

    def _add(self, beam: Beam, matched: int | None) -> None:
        score: float = beam.score / self.length**self._params.length_penalty
        self.hypotheses.append(Hypothesis(score, beam, matched))
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.hypotheses[self._params.width :]

    def _can_improve(self) -> bool:
        params, length = self._params, self.length
        if len(self.hypotheses) < params.width:
            return True
        if params.early_stopping == inference_pb2.EARLY_STOPPING_ENOUGH:
            return False
        if params.early_stopping == inference_pb2.EARLY_STOPPING_BEST and params.length_penalty > 0:
            length = self._max_tokens
        best: float = self.beams[0].score / length**params.length_penalty
        return best > self.hypotheses[-1].score


# -- on an engine -----------------------------------------------------------------------------------------------------


class BeamSearchStream:
    """A search on an engine, with an EngineStream's interface. Its inboxes fill when the search ends, best first.

    submit    the request as `to_submit` makes it, with beam_search set; n counts the hypotheses to return
    on_start  called when the search starts to be computed, or ends before that

    Raises Unavailable unless the engine is ready.
    """

    def __init__(
        self,
        channel: EngineChannel,
        submit: engine_pb2.Submit,
        on_start: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sampling = submit.sampling
        self.inboxes = [SequenceInbox() for _ in range(sampling.n)]
        self._channel = channel
        self._search = BeamSearch(sampling.beam_search, submit.stop_token_ids, submit.min_tokens, submit.max_tokens)
        self._tells_logprobs = submit.HasField("logprobs")
        self._is_aborted = False
        self._clock = clock
        self._began = clock()
        self._timeout_s = submit.timeout_s if submit.HasField("timeout_s") else None
        self._total = engine_pb2.Ended()  # the steps' cached tokens, counts and times
        self._step = step = engine_pb2.Submit()
        step.CopyFrom(submit)
        step.logprobs = sampling.beam_search.width + len(submit.stop_token_ids)
        step.max_tokens, step.min_tokens = 1, 0
        step.sampling.n = 1
        step.sampling.ClearField("beam_search")
        step.ClearField("stop_token_ids")
        if step.cache.bypass:  # the steps need the cache; a salt of their own keeps them apart from other requests
            step.cache.Clear()
            step.cache.salt = secrets.token_hex(32)
        self._stream = channel.submit(step, on_start)

    async def wait(self) -> None:
        """Run the search to its end. Raises Unavailable when the engine is gone."""
        while True:
            ends = await self._ends()
            self._account(max(ends, key=time_in_engine))
            irregular = [end for end in ends if end.reason != engine_pb2.END_REASON_LENGTH]
            if irregular or self._is_aborted:  # it may be aborted between two steps
                return self._fail(irregular[0] if irregular else engine_pb2.Ended(reason=engine_pb2.END_REASON_ABORTED))
            found = [inbox.logprobs[0] for inbox in self._stream.inboxes]
            self._search.advance([(each.top_ids, each.top_logprobs) for each in found])
            if self._search.is_over:
                return self._deliver()
            self._submit_beams()

    def abort(self, index: int | None = None) -> None:
        """Ask the engine to end the search; every hypothesis then ends as ABORTED, without tokens."""
        self._is_aborted = True
        self._stream.abort()

    def close(self) -> None:
        """End the sequences that still run, and stop delivery."""
        self._stream.close()

    async def _ends(self) -> list[engine_pb2.Ended]:
        """Wait until every sequence of the step has ended."""
        while any(inbox.ended is None for inbox in self._stream.inboxes):
            await self._stream.wait()
        return [inbox.ended for inbox in self._stream.inboxes if inbox.ended]

    def _account(self, slowest: engine_pb2.Ended) -> None:
        """Add a step to the total: the prompt counts as prefill, and every later step as decode."""
        if self._search.length == 0:
            self._total.CopyFrom(slowest)
            return
        slowest.decode_s += slowest.prefill_s
        for name in _SUMS:
            setattr(self._total, name, getattr(self._total, name) + getattr(slowest, name))

    def _submit_beams(self) -> None:
        step = self._step
        del step.outputs[:]
        for beam in self._search.beams:
            step.outputs.add(ids=beam.path()[0])
        step.sampling.n = len(self._search.beams)
        step.max_tokens = self._search.length + 1
        step.age_s = self._clock() - self._began
        if self._timeout_s is not None:
            step.timeout_s = max(0.0, self._timeout_s - step.age_s)
        self._stream = self._channel.submit(step)

    def _deliver(self) -> None:
        """Fill the inboxes; a vocabulary smaller than n leaves the last ones without tokens."""
        for inbox, hypothesis in zip(self.inboxes, self._search.hypotheses, strict=False):
            inbox.tokens, logprobs = hypothesis.beam.path()
            if self._tells_logprobs:
                inbox.logprobs = [engine_pb2.Logprobs(logprob=logprob) for logprob in logprobs]
            inbox.score = hypothesis.score
            if hypothesis.matched is not None:
                inbox.ended = self._end(engine_pb2.END_REASON_STOP, matched=hypothesis.matched)
        for inbox in self.inboxes:
            inbox.ended = inbox.ended or self._end(engine_pb2.END_REASON_LENGTH)

    def _fail(self, why: engine_pb2.Ended) -> None:
        for inbox in self.inboxes:
            inbox.ended = self._end(why.reason, detail=why.detail)

    def _end(self, reason: engine_pb2.EndReason, *, matched: int | None = None, detail: str = "") -> engine_pb2.Ended:
        ended = engine_pb2.Ended()
        ended.CopyFrom(self._total)
        ended.reason, ended.detail = reason, detail
        if matched is not None:
            ended.matched = matched
        return ended
