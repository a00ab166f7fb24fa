"""Which fields a beam search may be combined with, and what its client receives."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import ParseDict

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda.v1.inference_pb2 import GenerateRequest
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.beam_search import BeamSearchStream
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.request.validation import GenerateParams, to_submit, validate_generate
from pagoda_server.router.tenants.caller import Caller

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)


def params_of(**fields: object) -> GenerateParams:
    return validate_generate(ParseDict({"prompt": "Hello", **fields}, GenerateRequest()), LIMITS, "m")


def search(**sampling: object) -> dict[str, object]:
    return {"sampling": {"beamSearch": {"width": 4}, **sampling}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"beamSearch": {}}}, "sampling.beam_search.width"),
        ({"sampling": {"beamSearch": {"lengthPenalty": 2.0}}}, "sampling.beam_search.width"),
        ({"sampling": {"beamSearch": {"width": 1}}}, "sampling.beam_search.width"),
        ({"sampling": {"beamSearch": {"width": 17}}}, "sampling.beam_search.width"),
        ({"sampling": {"beamSearch": {"width": 4, "lengthPenalty": 5.5}}}, "sampling.beam_search.length_penalty"),
        ({"sampling": {"beamSearch": {"width": 4, "lengthPenalty": "NaN"}}}, "sampling.beam_search.length_penalty"),
        ({"sampling": {"beamSearch": {"width": 4, "earlyStopping": 9}}}, "sampling.beam_search.early_stopping"),
        (search(n=5), "sampling.n"),
        (search(n=0), "sampling.n"),
        (search(temperature=0.5), "sampling.temperature"),
        (search(topK=5), "sampling.top_k"),
        (search(topP=0.5), "sampling.top_p"),
        (search(minP=0.5), "sampling.min_p"),
        (search(repetitionPenalty=1.5), "sampling.repetition_penalty"),
        (search(presencePenalty=0.5), "sampling.presence_penalty"),
        (search(frequencyPenalty=0.5), "sampling.frequency_penalty"),
        (search(logitBias={"3": 1.0}), "sampling.logit_bias"),
        (search(allowedTokenIds=[3]), "sampling.allowed_token_ids"),
        ({**search(), "stopping": {"stop": ["x"]}}, "stopping.stop"),
        ({**search(), "output": {"logprobs": 1}}, "output.logprobs"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        params_of(**fields)
    assert caught.value.field == field


def test_too_many_ids_that_end_a_sequence_are_refused_before_anything_is_submitted() -> None:
    params = params_of(sampling={"beamSearch": {"width": 16}}, stopping={"stopTokenIds": [1, 2, 3]})
    assert list(to_submit(params, [1], 5, [4]).stop_token_ids) == [1, 2, 3, 4]
    with pytest.raises(InvalidArgument, match=r"is 16, and 5 ids end a sequence .* together at most 20") as caught:
        to_submit(params, [1], 5, [4, 5])
    assert caught.value.field == "sampling.beam_search.width"
    ignoring = params_of(sampling={"beamSearch": {"width": 16}}, stopping={"ignoreEos": True})
    assert not to_submit(ignoring, [1], 5, range(9)).stop_token_ids


def test_the_engine_is_asked_for_one_token_of_the_prompt_and_then_of_each_beam() -> None:
    class Channel:
        def submit(self, submit: engine_pb2.Submit, on_start: object) -> None:
            self.sent = submit

    asked = params_of(**search(n=2, seed=3, temperature=0, topP=1), stopping={"minTokens": 3}, priority=7)
    assert asked.num_sequences == 4, "what admission reserves room for"
    submit = to_submit(asked, [1, 2], 5, (8, 9), timeout_s=3.0, caller=Caller("a", frozenset(), is_proven=False))
    assert submit.sampling.beam_search.length_penalty == 1
    channel = Channel()
    stream = BeamSearchStream(channel, submit)  # type: ignore[arg-type]
    assert len(stream.inboxes) == 2
    sent = channel.sent
    assert (sent.sampling.n, sent.max_tokens, sent.min_tokens, sent.logprobs) == (1, 1, 0, 4 + 2)
    assert not sent.sampling.HasField("beam_search")
    assert not sent.stop_token_ids
    assert (list(sent.prompt), sent.priority, sent.tenant, sent.timeout_s) == ([1, 2], 7, "a", 3.0)


def test_other_requests_have_no_score() -> None:
    assert not inference_pb2.Finished(index=0).HasField("score")
    assert not params_of().is_search
