"""What a client gets of an answer with reasoning and calls: deltas, reasons and counts, whatever comes together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from pagoda import Unavailable
from pagoda.connection import Attempts
from pagoda.engine.v1 import engine_pb2
from pagoda.resume import Resumption
from pagoda.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    GenerateRequest,
    GenerateResponse,
)
from pagoda_server.checkpoints import resolve
from pagoda_server.router.answers.events import CallPart, Event, Reasoning, Text, joined
from pagoda_server.router.answers.formats import AnswerFormat, Harmony, Marked
from pagoda_server.router.answers.lark import Lark, Rule
from pagoda_server.router.engines.stream import SequenceInbox
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.generate_call import GenerateCall
from pagoda_server.router.request.guided import GrammarChecker
from pagoda_server.router.request.parsing import checked_grammar, guided_by, parsing_of
from pagoda_server.router.request.resuming import KeptStream, KeptStreams
from pagoda_server.router.request.validation import GenerateParams, to_submit, validate_generate
from pagoda_server.router.text import tokenizer as router_tokenizer
from pagoda_server.router.text.detokenizer import Detokenization, Detokenizer
from tests.router.test_generate_call import LIMITS, Engine, Writer
from tests.router.tokenizers_for_tests import byte_level

STOP, LENGTH = engine_pb2.END_REASON_STOP, engine_pb2.END_REASON_LENGTH
HERMES = Marked("hermes", "think")
HARMONY = Harmony(has_tools=True, has_reasoning=True)
ANSWER = (
    "<think>\nI add.</think>Sure: \n<tool_call>\n"
    '{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>\n<tool_call>{"arguments": {}, "name": "add"}</tool_call>'
)
CHAT: dict[str, Any] = {"messages": [{"role": "ROLE_USER", "content": "1+2?"}], "tools": [{"name": "add"}]}

UNUSED: Any = None


class Model:
    """The tokenizer of a model whose markers are special tokens."""

    def __init__(self) -> None:
        self.library = Tokenizer.from_str(byte_level())
        self.library.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
        self.library.add_tokens(
            [AddedToken("add.</think>Sure", special=False, normalized=False)]
        )  # a token of two parts
        self.library.add_special_tokens(["<think>", "</think>", *HARMONY.markers])
        added = self.library.get_added_tokens_decoder()
        self.added_ids = {token.content: id for id, token in added.items()}
        self._detokenization = Detokenization(self.library)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._detokenization.decode(ids, skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        return self._detokenization.token_bytes(id)

    def detokenizer(self, skip_special_tokens: bool = True, kept: Sequence[str] = ()) -> Detokenizer:
        return self._detokenization.detokenizer(skip_special_tokens, kept)


MODEL = Model()
END = MODEL.added_ids["<|im_end|>"]
PROMPT = MODEL.ids("<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n")


class OneSequence(Engine):
    async def wait(self) -> None:
        await super().wait()
        del self.inboxes[1:]


def params_of(**fields: Any) -> GenerateParams:
    request = ParseDict({"requestId": "r", "chat": CHAT, "sampling": {"seed": 7}} | fields, GenerateRequest())
    return validate_generate(request, LIMITS)


def inboxes(ids: Sequence[int], sizes: Sequence[int], ended: engine_pb2.Ended) -> list[dict[int, SequenceInbox]]:
    """The tokens in steps of these sizes, over and over, the end with the last of them."""
    steps, at = [], 0
    while at < len(ids):
        size = sizes[len(steps) % len(sizes)]
        last = ended if at + size >= len(ids) else None
        steps.append({0: SequenceInbox(list(ids[at : at + size]), [], last)})
        at += size
    return steps


def call_of(
    params: GenerateParams, writer: Writer, format: AnswerFormat, kept: KeptStream | None = None
) -> GenerateCall:
    parsing = parsing_of(params, format, MODEL, PROMPT)  # type: ignore[arg-type]
    return GenerateCall(params, len(PROMPT), MODEL, writer, 0.0, kept, parsing=parsing)  # type: ignore[arg-type]


async def responses_to(
    answer: str,
    params: GenerateParams | None = None,
    sizes: Sequence[int] = (1,),
    format: AnswerFormat = HERMES,
    reason: engine_pb2.EndReason = STOP,
) -> list[GenerateResponse]:
    ids = MODEL.ids(answer) + ([END] if reason == STOP else [])
    ended = engine_pb2.Ended(reason=reason, matched=END if reason == STOP else None)
    writer = Writer()
    await call_of(params or params_of(), writer, format).run(OneSequence(*inboxes(ids, sizes, ended)))  # type: ignore[arg-type]
    return writer.responses


def events(responses: Sequence[GenerateResponse]) -> list[Event]:
    found: list[Event] = []
    for response in responses:
        tokens = response.tokens
        match tokens.WhichOneof("delta"):
            case "text":
                found.append(Text(tokens.text))
            case "reasoning":
                found.append(Reasoning(tokens.reasoning))
            case "tool_call":
                part = tokens.tool_call
                found.append(CallPart(part.index, part.arguments, part.id, part.name))
    return joined(found)


def ids_in(responses: Sequence[GenerateResponse]) -> list[int]:
    return [token.id for response in responses for token in response.tokens.tokens]


async def test_an_answer_becomes_deltas_of_its_parts() -> None:
    responses = await responses_to(ANSWER)
    reasoning, text, first, second = events(responses)
    assert (reasoning, text) == (Reasoning("I add."), Text("Sure:"))
    assert isinstance(first, CallPart)
    assert isinstance(second, CallPart)
    assert (first.index, first.name, first.arguments) == (0, "add", '{"a": [1, 2]}')
    assert (second.index, second.name, second.arguments) == (1, "add", "{}")
    assert len({first.id, second.id}) == 2
    assert all(len(id) == 9 and id.isalnum() for id in (first.id, second.id)), "as Mistral's templates want it"
    end = responses[-1]
    assert (end.finished.reason, end.finished.stop_token_id) == (FINISH_REASON_TOOL_CALLS, END)
    assert ids_in(responses) == [*MODEL.ids(ANSWER), END]
    assert end.usage.reasoning_tokens == len(MODEL.ids("<think>\nI ")) + 1


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
async def test_deltas_follow_from_the_tokens_whatever_comes_together(sizes: list[int]) -> None:
    whole, parts = await responses_to(ANSWER), await responses_to(ANSWER, sizes=sizes)
    assert events(parts) == events(whole)
    assert ids_in(parts) == ids_in(whole)
    assert parts[-1].usage == whole[-1].usage
    for at in range(1, len(parts)):
        num_tokens = len(ids_in(parts[:at]))
        assert events(parts[:at]) == events(whole[:num_tokens]), "a client of so many tokens has the same parts"


TWO_PARTS_AT_ONCE = "<think>\nI add.</think>Sure"  # its last token ends the reasoning and begins the answer


@pytest.mark.parametrize("answer", [ANSWER, TWO_PARTS_AT_ONCE])
@pytest.mark.parametrize("reason", [STOP, LENGTH])
@pytest.mark.parametrize("sizes", [(1,), (5, 2), (1000,)])
async def test_a_stream_is_resumed_between_any_two_messages(
    answer: str, reason: engine_pb2.EndReason, sizes: Sequence[int]
) -> None:
    whole = await responses_to(answer, reason=reason)
    params = params_of(resumable=True)
    kept = KeptStreams(9.0).add("", params, 0.0, UNUSED)
    kept.submitted(to_submit(params, PROMPT, 100, ()))
    writer = Writer()
    ids, matched = MODEL.ids(answer) + [END] * (reason == STOP), END if reason == STOP else None
    engine = OneSequence(*inboxes(ids, sizes, engine_pb2.Ended(reason=reason, matched=matched)))
    async with kept:
        await call_of(params, writer, HERMES, kept).run(engine)  # type: ignore[arg-type]
    for at in range(len(writer.responses)):
        had, rest = writer.responses[:at], Writer()
        client = Resumption(GenerateRequest(), Attempts(1, None))
        async with kept:
            call = call_of(kept.params, rest, HERMES, kept)
            await call.replay(kept, [len(ids_in(had))], ())
        taken = [response for response in had if client.takes(response)]
        client.delay_after(Unavailable("broken", grpc.StatusCode.UNAVAILABLE))
        taken += [response for response in rest.responses if client.takes(response)]
        assert events(taken) == events(whole), "with the same ids of calls"
        assert rest.responses[-1].finished == whole[-1].finished
        assert rest.responses[-1].usage == whole[-1].usage


async def test_markers_that_are_special_tokens_are_seen_and_other_special_tokens_are_skipped() -> None:
    answer = (
        "<|channel|>analysis<|message|>Hm.<|endoftext|><|end|><|start|>assistant"
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"
    )
    responses = await responses_to(answer, format=HARMONY)
    reasoning, call = events(responses)
    assert reasoning == Reasoning("Hm.")
    assert isinstance(call, CallPart)
    assert (call.name, call.arguments) == ("add", "{}")
    kept = params_of(output={"specialTokens": True})
    assert events(await responses_to(answer, kept, format=HARMONY))[0] == Reasoning("Hm.<|endoftext|>")


async def test_an_answer_that_is_cut_off_does_not_end_with_calls() -> None:
    whole, end = ANSWER[: ANSWER.index("\n<tool_call>{")], '{"name": "add", "arguments": {"a": '
    for answer in (whole, f"<tool_call>{end}"):
        responses = await responses_to(answer, reason=LENGTH)
        assert responses[-1].finished.reason == FINISH_REASON_LENGTH
    responses = await responses_to(f"<tool_call>{end}")
    assert responses[-1].finished.reason == FINISH_REASON_STOP, "its call is not complete"


@pytest.mark.parametrize("sizes", [(1,), (3,), (1000,)])
async def test_an_answer_of_one_call_at_most_ends_with_it(sizes: Sequence[int]) -> None:
    single = params_of(chat=CHAT | {"toolChoice": {"atMostOne": True}})
    responses = await responses_to(ANSWER, single, sizes)
    _, text, call = events(responses)
    assert text == Text("Sure:")
    assert isinstance(call, CallPart)
    assert (call.index, call.arguments) == (0, '{"a": [1, 2]}')
    finished = responses[-1].finished
    assert (finished.reason, finished.WhichOneof("matched")) == (FINISH_REASON_TOOL_CALLS, None)
    assert len(ids_in(responses)) < len(MODEL.ids(ANSWER[: ANSWER.index("</tool_call>")]))
    assert events(await responses_to("No call.", single, sizes)) == [Text("No call.")]


def test_one_call_at_most_of_those_that_are_due_is_the_grammars_matter() -> None:
    choice = {"mode": "TOOL_CHOICE_MODE_REQUIRED", "atMostOne": True}
    params = params_of(chat=CHAT | {"toolChoice": choice})
    assert params.calls_due is not None
    assert (params.calls_due.may_repeat, params.ends_with_call) == (False, False)


async def test_stop_strings_are_looked_for_in_what_the_model_writes() -> None:
    responses = await responses_to(ANSWER, params_of(stopping={"stop": ["</tool_call>"]}))
    assert (responses[-1].finished.reason, responses[-1].finished.stop_string) == (
        FINISH_REASON_TOOL_CALLS, "</tool_call>"
    )  # fmt: skip
    assert [type(event) for event in events(responses)] == [Reasoning, Text, CallPart]
    responses = await responses_to(ANSWER, params_of(stopping={"stop": ["add."]}))
    assert (responses[-1].finished.reason, events(responses)) == (FINISH_REASON_STOP, [Reasoning("I ")])


@pytest.mark.parametrize(
    "fields",
    [{"output": {"unparsed": True}}, {"chat": None, "prompt": "x"}],
)
async def test_what_the_client_wants_unparsed_stays_text(fields: dict[str, Any]) -> None:
    params = params_of(**fields)
    assert parsing_of(params, HERMES, MODEL, PROMPT) is None  # type: ignore[arg-type]
    shown = MODEL.decode(MODEL.ids(ANSWER))
    responses = await responses_to(ANSWER, params)
    assert (events(responses), responses[-1].finished.reason) == ([Text(shown)], FINISH_REASON_STOP)


async def test_calls_stay_text_where_none_are_offered_and_reasoning_does_not() -> None:
    for chat in ({"messages": CHAT["messages"]}, CHAT | {"toolChoice": {"mode": "TOOL_CHOICE_MODE_NONE"}}):
        reasoning, text = events(await responses_to(ANSWER, params_of(chat=chat)))
        assert reasoning == Reasoning("I add.")
        assert isinstance(text, Text)
        assert "<tool_call>" in text.text


def guided(prompt: str = "", format: AnswerFormat | None = HERMES, **fields: Any) -> str:
    found = guided_by(params_of(**fields), format, MODEL, MODEL.ids(prompt))  # type: ignore[arg-type]
    return found.ebnf_grammar if found else ""


def test_calls_that_are_due_become_a_grammar() -> None:
    assert guided() == ""
    due = guided(chat=CHAT | {"toolChoice": {"tool": "add"}})
    assert '"name\\": \\"add' in due
    assert f"<[{MODEL.added_ids['</think>']}]>" in due
    assert f"<[{MODEL.added_ids['<think>']}]>" in due
    assert f"<[{MODEL.added_ids['<think>']}]>" not in guided("<think>\n", chat=CHAT | {"toolChoice": {"tool": "add"}})
    assert guided(chat=CHAT | {"toolChoice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}}, output={"text": False})


class Broken(Marked):
    """A format behind whose reasoning no grammar can follow."""

    def answer(self, lark: Lark, answer: Rule, prompt_end: str) -> Rule:
        return lark.regex("(")


async def test_a_grammar_behind_reasoning_is_checked_as_the_engine_gets_it() -> None:
    tokenizer = router_tokenizer.Tokenizer(resolve("synthetic"))
    checker = GrammarChecker(tokenizer)
    for fields, field in (
        ({"guided": {"regex": "a"}}, "guided.regex"),
        ({"guided": {"jsonSchema": "{}"}}, "guided.json_schema"),
        ({"chat": CHAT | {"toolChoice": {"tool": "add"}}}, "chat.tools"),
    ):
        params = params_of(**fields)
        assert await checked_grammar(params, HERMES, tokenizer, [0], checker)
        with pytest.raises(InvalidArgument) as refused:
            await checked_grammar(params, Broken("hermes", "think"), tokenizer, [0], checker)
        assert refused.value.field == field


async def test_a_call_that_is_due_and_cut_leaves_no_half_marker() -> None:
    chat = CHAT | {"toolChoice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"}}
    half = '<think>\nI add.</think>\n<tool_call>{"na'
    responses = await responses_to(half, params_of(chat=chat), reason=LENGTH)
    assert events(responses) == [Reasoning("I add.")]
    assert responses[-1].finished.reason == FINISH_REASON_LENGTH
    stopped = params_of(chat=chat, stopping={"stop": ["na"]})
    responses = await responses_to(half, stopped, reason=LENGTH)
    assert events(responses) == [Reasoning("I add.")]
    assert (responses[-1].finished.reason, responses[-1].finished.stop_string) == (FINISH_REASON_STOP, "na")
    assert events(await responses_to(half, reason=LENGTH))[-1] == Text('<tool_call>{"na'), "which is not due"
