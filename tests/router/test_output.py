"""What becomes of the engine's tokens: text, records, and the end, as the client sees them."""

from __future__ import annotations

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2
from pagoda_server.router.engines.stream import SequenceInbox
from pagoda_server.router.request.output import SequenceOutput, write_records
from pagoda_server.router.text.detokenizer import Detokenization
from tests.router.test_detokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS["byte-level"]
DETOKENIZATION = Detokenization(TOKENIZER)
END = TOKENIZER.token_to_id("<|im_end|>")
STOP, LENGTH = engine_pb2.END_REASON_STOP, engine_pb2.END_REASON_LENGTH


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_and_end(
    output: SequenceOutput, ids: list[int], ended: engine_pb2.Ended, step: int = 1
) -> tuple[str, inference_pb2.Finished]:
    """The ids come `step` at a time, the last of them with the end."""
    text, into = "", inference_pb2.Tokens()
    for at in range(0, len(ids), step):
        is_last = at + step >= len(ids)
        inbox = SequenceInbox(tokens=ids[at : at + step], ended=ended if is_last else None)
        if output.take(inbox, into):
            text += into.text
    output.ended = output.ended or ended
    return text, output.finished()


def output(*stops: str, includes_stop: bool = True, keeps_special: bool = False, min_tokens: int = 0) -> SequenceOutput:
    detokenizer = DETOKENIZATION.detokenizer(skip_special_tokens=not keeps_special)
    return SequenceOutput(0, detokenizer, stops, min_tokens, includes_stop)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(("includes_stop", "expected"), [(True, "the lazy dog"), (False, "the lazy ")])
def test_a_stop_string_is_a_part_of_the_text_where_it_is_asked_for(
    step: int, includes_stop: bool, expected: str
) -> None:
    ended = engine_pb2.Ended(reason=LENGTH)
    text, end = text_and_end(
        output("dog", "cat", includes_stop=includes_stop), ids_of("the lazy dogs sleep"), ended, step
    )
    assert (text, end.reason, end.stop_string) == (expected, inference_pb2.FINISH_REASON_STOP, "dog")


@pytest.mark.parametrize("stops", [(), ("zebra",), ("d",)])
@pytest.mark.parametrize(
    ("includes_stop", "keeps_special", "expected"),
    [(True, True, "the fox<|im_end|>"), (True, False, "the fox"), (False, True, "the fox")],
)
def test_a_stop_tokens_text_is_told_where_it_is_asked_for_and_no_stop_string_is_looked_for_in_it(
    stops: tuple[str, ...], includes_stop: bool, keeps_special: bool, expected: str
) -> None:
    ended = engine_pb2.Ended(reason=STOP, matched=END)
    of = output(*stops, includes_stop=includes_stop, keeps_special=keeps_special)
    text, end = text_and_end(of, [*ids_of("the fox"), END], ended)
    assert (text, end.reason, end.stop_token_id) == (expected, inference_pb2.FINISH_REASON_STOP, END)


def test_text_held_back_for_a_stop_string_comes_before_the_stop_tokens_text() -> None:
    text, _ = text_and_end(
        output("fox!", keeps_special=True), [*ids_of("the fox"), END], engine_pb2.Ended(reason=STOP, matched=END)
    )
    assert text == "the fox<|im_end|>"


def test_tokens_that_add_no_text_yet_leave_the_delta_unset() -> None:
    into = inference_pb2.Tokens()
    of = output()
    first, second = (TOKENIZER.token_to_id(char) for char in "Ã©")  # the two bytes of é
    assert of.take(SequenceInbox(tokens=[first]), into)
    assert into.WhichOneof("delta") is None
    assert of.take(SequenceInbox(tokens=[second]), into)
    assert (into.WhichOneof("delta"), into.text) == ("text", "é")
    assert of.take(SequenceInbox(tokens=[first]), into), "the message is used again"
    assert into.WhichOneof("delta") is None


def test_records_carry_bytes_of_token_and_alternatives_where_they_are_asked_for() -> None:
    half, end = TOKENIZER.token_to_id("Ã"), END
    logprobs = [engine_pb2.Logprobs(logprob=-1, top_ids=[end, half], top_logprobs=[-0.5, -1])]
    tokens = inference_pb2.Tokens()
    for _ in range(2):  # a message that is used again
        write_records(tokens.tokens, [half], logprobs, DETOKENIZATION.token_bytes)
        (record,) = tokens.tokens
        assert (record.id, record.bytes, record.logprob) == (half, b"\xc3", -1)
        assert [(top.id, top.bytes) for top in record.top] == [(end, b"<|im_end|>"), (half, b"\xc3")]
    write_records(tokens.tokens, [half, half])
    write_records(tokens.tokens, [half])
    assert (len(tokens.tokens), tokens.tokens[0].bytes) == (1, b"")
