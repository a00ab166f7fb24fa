"""What a router submits, as the engine sees it."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.engine.core.sequence import SamplingParams, Sequence
from pagoda_server.engine.serving.codec import InvalidMessage, Rejected, check_submit, sequences_from_submit
from pagoda_server.settings.sampling import PARAMETERS

FOR_THE_ROUTER = {"n", "typical_p"}


def received(sampling: inference_pb2.Sampling, index: int = 0) -> Sequence:
    submit = engine_pb2.Submit(prompt=[1, 2], sampling=sampling, max_tokens=16)
    return sequences_from_submit(submit, range(sampling.n or 1), now=0.0, vocab_size=258)[index]


def test_every_number_of_the_protocol_is_a_parameter_and_reaches_the_engine() -> None:
    numbers = {
        field.name
        for field in inference_pb2.Sampling.DESCRIPTOR.fields
        if field.has_presence and field.type != FieldDescriptor.TYPE_MESSAGE
    }
    assert numbers - FOR_THE_ROUTER - {"seed"} == {each.name for each in PARAMETERS}
    values = {each.name: 3 if each.is_integer else 0.25 for each in PARAMETERS}
    params = received(inference_pb2.Sampling(seed=9, **values)).params  # type: ignore[arg-type]
    assert params == SamplingParams(seed=9, **values)  # type: ignore[arg-type]


def test_what_is_not_set_has_the_default_of_the_specification() -> None:
    seq = received(inference_pb2.Sampling(n=2, temperature=0.5), index=1)
    assert seq.params == SamplingParams(temperature=0.5, seed=1)
    assert seq.token_mask is None


def test_allowed_token_ids_become_a_mask() -> None:
    mask = received(inference_pb2.Sampling(allowed_token_ids=[0, 33, 33, 95])).token_mask
    assert mask is not None
    assert not mask.depends_on_tokens
    for num_words in (2, 3, 4):
        words = memoryview(bytearray(4 * num_words)).cast("I")
        mask.fill([1, 2], words)
        assert words.tolist() == [1, 1 << 1, 1 << 31, 0][:num_words]


def test_bans_become_a_mask_of_the_output_that_follows_the_tokens() -> None:
    submit = engine_pb2.Submit(prompt=[1, 2], sampling={"allowed_token_ids": range(32)}, max_tokens=16)
    submit.sampling.no_repeat_ngram_size = 2
    submit.bad_words.add(ids=[5, 6])
    first, second = sequences_from_submit(submit, range(2), now=0.0, vocab_size=258)
    assert first.token_mask is not None
    assert first.token_mask.depends_on_tokens
    assert first.token_mask is not second.token_mask, "each follows its own sequence"
    words = memoryview(bytearray(4)).cast("I")
    first.token_mask.fill([1, 2, 1, 5], words)
    assert words[0] == 0xFFFF_FFFF & ~(1 << 6)
    first.token_mask.fill([1, 2, 1], words)
    assert words[0] == 0xFFFF_FFFF & ~(1 << 2)


@pytest.mark.parametrize("words", [[[1]] * 129, [[]], [[1], [258]]], ids=["too many", "empty", "unknown"])
def test_bad_words_that_no_router_sends_are_refused(words: list[list[int]]) -> None:
    submit = engine_pb2.Submit(prompt=[1, 2], max_tokens=16, bad_words=[{"ids": ids} for ids in words])
    with pytest.raises((InvalidMessage, Rejected), match=r"bad_words|token id 258"):
        check_submit(submit, vocab_size=258, max_model_len=100)
