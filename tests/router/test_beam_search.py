"""What a beam search may be combined with, and what its client is told."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import ParseDict

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagoda_server.router.engines.engine_stream import SequenceInbox
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.inference import GenerateCall
from pagoda_server.router.request.limits import Limits
from pagoda_server.router.request.validation import GenerateParams, to_submit, validate_generate

LIMITS = Limits(max_model_len=2048, vocab_size=1000, kv_token_capacity=8192)


class Letters:
    """A detokenizer: id 1 is "a"."""

    def push(self, ids: tuple[int, ...] | list[int]) -> str:
        return "".join(chr(ord("`") + id) for id in ids)

    def flush(self) -> str:
        return ""

    def detokenizer(self, skips_special_tokens: bool) -> Letters:
        return self


class Writer:
    def __init__(self) -> None:
        self.responses: list[GenerateResponse] = []

    async def write(self, response: GenerateResponse) -> None:
        copy = GenerateResponse()
        copy.CopyFrom(response)
        self.responses.append(copy)


def texts(responses: list[GenerateResponse]) -> list[str]:
    """By index; each is told in full before the next."""
    ends = [response.finished.index for response in responses if response.HasField("finished")]
    assert ends == list(range(len(ends)))
    told = [response.tokens for response in responses if response.HasField("tokens")]
    return ["".join(tokens.text for tokens in told if tokens.index == at) for at in ends]


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


def test_the_engine_is_asked_for_all_beams_with_every_default_filled_in() -> None:
    submit = to_submit(params_of(**search(n=2, seed=3, temperature=0, topP=1)), [1], 5, ())
    assert submit.sampling.n == 4
    assert submit.sampling.beam_search.length_penalty == 1
    assert not submit.HasField("logprobs")
    asked = params_of(**search(), output={"logprobs": 0})
    assert to_submit(asked, [1], 5, ()).HasField("logprobs")


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_the_first_n_hypotheses_are_returned_with_their_scores(n: int) -> None:
    """The engine has ranked them, and by scores that need not be means."""

    class Stream:
        def __init__(self) -> None:
            self.inboxes = [SequenceInbox() for _ in range(3)]

        async def wait(self) -> None:
            for index, (tokens, logprob) in enumerate((([1, 2], -3.0), ([3], -0.5), ([4], -0.1))):
                inbox = self.inboxes[index]
                inbox.tokens += tokens
                inbox.logprobs += [engine_pb2.Logprobs(logprob=logprob) for _ in tokens]
                inbox.ended = engine_pb2.Ended(reason=engine_pb2.END_REASON_LENGTH, score=-float(index))

    params = params_of(sampling={"beamSearch": {"width": 3}, "n": n}, output={"logprobs": 0})
    writer = Writer()
    await GenerateCall(params, 1, Letters(), writer, 0.0).run(Stream())  # type: ignore[arg-type]
    assert texts(writer.responses) == ["ab", "c", "d"][:n]
    ends = [response.finished for response in writer.responses if response.HasField("finished")]
    assert [end.score for end in ends] == [0.0, -1.0, -2.0][:n]
    assert [token.logprob for token in writer.responses[0].tokens.tokens] == [-3.0, -3.0]
    assert writer.responses[-1].usage.completion_tokens == 4, "of all hypotheses"
    assert not any(response.HasField("usage") for response in writer.responses[:-1])


def test_other_requests_have_no_score() -> None:
    assert not inference_pb2.Finished(index=0).HasField("score")
    assert not params_of().is_search
