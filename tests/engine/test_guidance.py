"""Grammars in the engine: masks that follow a sequence's tokens, forced tokens, and answers that match."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints import resolve
from pagoda_server.checkpoints.synthetic import letters_of_bytes
from pagoda_server.engine.core.sequence import EndReason, Readout, Sequence
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance import vocabulary as vocabulary_of_grammars
from pagoda_server.engine.guidance.grammar_mask import MOST_SLOW, SLOW_S, GrammarMask
from pagoda_server.engine.guidance.vocabulary import Vocabulary
from pagoda_server.engine.runners.sampling import AllowedTokens, fill_mask, num_mask_words
from pagoda_server.grammars.compiling import GrammarError
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.random_schemas import assert_matches, random_schema

END = 257  # the synthetic model's; its ids below 256 are bytes
PROMPT = [1, 2, 3]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["alpha", "beta"]}},
        "required": ["name", "kind"],
    }
)


@cache
def grammars() -> Grammars:
    return Grammars(resolve("synthetic"), VOCAB_SIZE)


def maker(**format: object) -> Callable[..., GrammarMask]:
    return grammars().mask_maker(inference_pb2.Guided(**format))  # type: ignore[arg-type]


def choices(*options: str) -> Callable[..., GrammarMask]:
    return maker(choice=inference_pb2.Choice(options=options))


def mask_of(make: Callable[..., GrammarMask], **options: object) -> GrammarMask:
    return make(prompt_len=len(PROMPT), **{"stop_ids": [END], **options})


def allowed(mask: GrammarMask, output: bytes | list[int]) -> set[int]:
    words = np.full(num_mask_words(VOCAB_SIZE), -1, dtype=np.int32)
    fill_mask(mask, [*PROMPT, *output], words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("option", ["a\x7fb", "\x00", "\x85", 'quote " and \\\n', "é 😀"])
def test_a_choice_may_hold_any_character(option: str) -> None:
    mask = mask_of(choices(option, "other"))
    assert allowed(mask, list(option.encode()))


def test_a_mask_allows_what_the_grammar_can_go_on_with() -> None:
    mask = mask_of(choices("cat", "cow", "dog"))
    assert allowed(mask, b"") == {ord("c"), ord("d")}
    assert allowed(mask, b"c") == {ord("a"), ord("o")}
    assert allowed(mask, b"co") == {ord("w")}


def test_stop_ids_are_allowed_only_where_the_output_may_end() -> None:
    mask = mask_of(maker(regex="ab*"))
    assert allowed(mask, b"") == {ord("a")}
    assert allowed(mask, b"a") == {ord("b"), END}
    assert allowed(mask_of(maker(regex="ab*"), stop_ids=[]), b"a") == {ord("b")}  # as with ignore_eos


def test_no_id_beyond_the_tokens_is_allowed() -> None:
    small, large = (Grammars(resolve("synthetic"), rows) for rows in (258, 1000))
    guided = inference_pb2.Guided(regex="[^x]*")
    for found, rows in ((small, 258), (large, 1000)):
        words = np.zeros(num_mask_words(rows), dtype=np.int32)
        fill_mask(found.mask_maker(guided)(prompt_len=0), [], words)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert ids.max() < 256
        assert ord("x") not in ids


def test_other_allowed_tokens_and_the_grammar_hold_together() -> None:
    mask = mask_of(maker(regex="[a-z]+"), also=AllowedTokens([ord("a"), ord("1"), END]))
    assert allowed(mask, b"") == {ord("a")}
    assert allowed(mask, b"a") == {ord("a"), END}
    assert mask.fault == ""
    none_left = mask_of(maker(regex="[a-z]+"), also=AllowedTokens([ord("1")]))
    assert allowed(none_left, b"") == set()
    assert "other rules" in none_left.fault


def test_a_mask_tells_why_it_allows_nothing() -> None:
    mask = mask_of(maker(regex="ab*"))
    assert allowed(mask, b"x") == set()
    assert "output that exists" in mask.fault
    assert allowed(mask, b"a") == {ord("b"), END}
    assert mask.fault == ""
    held_back = mask_of(maker(regex="a<?"), stop_ids=[ord("<"), END], min_tokens=3)
    assert allowed(held_back, b"a") == {ord("<"), END}
    assert "min_tokens" in held_back.fault


@given(st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=3), st.sampled_from(["", "followed", "asked"]))))
def test_a_mask_follows_from_the_tokens_alone(moves: list[tuple[int, bytes, str]]) -> None:
    """Forward, back, and to what the grammar does not allow: always the mask that a new one gives."""
    make, text = maker(json_schema=SCHEMA), b'{"name": "Ada", "kind": "alpha"}'
    mask = mask_of(make)
    for length, others, use in moves:
        output = text[:length] + others
        if use == "followed":
            mask.follow([*PROMPT, *output])
        elif use == "asked":
            mask.surely_allows([*PROMPT, *output], ord("a"))
        assert allowed(mask, output) == allowed(mask_of(make), output)


@pytest.mark.parametrize(
    "grammar", [{"json_schema": SCHEMA}, {"regex": "a<?[^x]{0,3}"}, {"regex": "(ab|ac)d{2}"}], ids=str
)
def test_a_token_needs_no_mask_to_be_found_allowed(grammar: dict[str, str]) -> None:
    """It is allowed exactly where the mask allows it, but for stop ids, which the mask alone tells."""
    make = maker(**grammar)
    mask, random = mask_of(make), Random(1)
    output: list[int] = []
    for _ in range(20):
        ids = allowed(mask_of(make), output)
        assert not mask.fault
        new = mask_of(make)  # one whose matcher goes on, and one that has its mask
        for token in range(VOCAB_SIZE):
            assert mask.surely_allows([*PROMPT, *output], token) == (token in ids - {END})
            assert new.surely_allows([*PROMPT, *output], token) == (token in ids - {END})
            allowed(new, output)
        if not ids - {END}:
            break
        output.append(random.choice(sorted(ids - {END})))


def test_what_the_grammar_alone_does_not_decide_takes_a_mask() -> None:
    also = mask_of(maker(regex="[a-z]+"), also=AllowedTokens([ord("a")]))
    assert not also.surely_allows(PROMPT, ord("a"))
    assert allowed(also, b"") == {ord("a")}
    stop = mask_of(maker(regex="ab*"))
    assert not stop.surely_allows([*PROMPT, ord("a")], END)
    assert END in allowed(stop, b"a")


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_grammar_that_takes_long_to_follow_again_and_again_ends_its_sequence(is_asked: bool) -> None:
    class Matcher:
        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> object:
            return getattr(self._matcher, name)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            until = time.thread_time() + 1.1 * SLOW_S
            while time.thread_time() < until:
                pass
            return self._matcher.try_consume_tokens(tokens)

    mask = mask_of(maker(regex="a*"))
    mask._matcher = mask._job.matcher = Matcher(mask._matcher)  # type: ignore[assignment]
    output: list[int] = []
    while not mask.fault and len(output) < 20:
        if is_asked:
            mask.surely_allows([*PROMPT, *output], ord("a"))
        output.append(ord("a"))
        allowed(mask, output)
    assert mask.fault == "takes too long to follow"
    assert MOST_SLOW <= len(output) <= MOST_SLOW + 3
    assert not mask.surely_allows([*PROMPT, *output], ord("a"))


def test_forced_tokens_are_told_and_a_complete_output_too() -> None:
    mask = mask_of(maker(json_schema=SCHEMA))
    assert bytes(mask.follow([*PROMPT]) or []) == b'{"name": "'
    assert mask.follow([*PROMPT, *b'{"name": "Ada']) == []
    assert bytes(mask.follow([*PROMPT, *b'{"name": "Ada",']) or []) == b' "kind": "'
    assert mask.follow([*PROMPT, *b'{"name": "Ada", "kind": "beta"}']) is None


def test_a_mask_may_be_asked_for_while_it_is_computed() -> None:
    """Whatever is called while another thread uses the matcher waits for it, or does not need it."""
    make = maker(regex="([a-z]{1,30} ){1,40}")
    mask, text = mask_of(make), b""
    for _ in range(200):
        text += b"ab "[len(text) % 3 :][:1]
        tokens = [*PROMPT, *text]
        if mask.follow(tokens) is None:
            break
        mask.follow(tokens)
        assert allowed(mask, text) == allowed(mask_of(make), text)


def test_a_grammar_that_meets_a_limit_behind_its_first_token_is_refused() -> None:
    with pytest.raises(GrammarError, match="is too complex"):
        maker(regex="(?:a?){500}a{500}")


def test_a_grammar_that_fails_does_not_count_as_complete() -> None:
    mask = mask_of(maker(ebnf_grammar='start: a\na: a a a a a | "x" | b\nb: a b | "x" a'))
    output: list[int] = []
    while not mask.fault:
        output.append(ord("x"))
        assert mask.follow([*PROMPT, *output]) == []
        allowed(mask, output)
    assert "too complex" in mask.fault or "too long" in mask.fault
    assert mask.follow([*PROMPT, *output]) == []


@pytest.mark.parametrize("options", [{"jumps": False}, {"also": AllowedTokens(range(256))}])
def test_no_token_is_forced_where_each_is_to_be_chosen(options: dict[str, object]) -> None:
    assert mask_of(maker(json_schema=SCHEMA), **options).follow([*PROMPT]) == []


def text_of(engine: SteppedEngine, seq: Sequence) -> str:
    return bytes(id for id in engine.outputs[seq.id] if id != END).decode()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_forced_tokens_take_no_step_each(lookahead: int) -> None:
    engine = SteppedEngine(lookahead=lookahead)
    seq = engine.add(PROMPT, 50, make_mask=choices("a very long text", "b"), stop_token_ids=frozenset([END]))
    steps = engine.run()
    ended = engine.ended[seq.id]
    assert (ended.reason, ended.matched_grammar, ended.matched) == (EndReason.STOP, True, None)
    assert text_of(engine, seq) in ("a very long text", "b")
    assert seq.account.forced_tokens == len(text_of(engine, seq)) - 1 == engine.scheduler.counters.forced_tokens
    assert steps <= 3


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_first_forced_tokens_are_computed_with_the_prompt(lookahead: int) -> None:
    engine = SteppedEngine(lookahead=lookahead)
    seq = engine.add(PROMPT, 50, make_mask=choices("what both begin with, a", "what both begin with, b"))
    for _ in range(2):  # of 16 tokens each: 3 of the prompt and 22 that are forced
        assert engine.outputs[seq.id] == [], "nothing is told before a token is chosen"
        assert seq.account.first_token is None
        engine.step()
    engine.run()
    assert seq.account.forced_tokens == 22
    assert text_of(engine, seq)[:-1] == "what both begin with, "
    assert engine.ended[seq.id].matched_grammar
    assert engine.scheduler.counters.prompt_tokens == len(PROMPT)
    assert engine.scheduler.counters.output_tokens == 23
    assert engine.scheduler.counters.steps == 2


def test_a_token_is_left_to_choose_behind_the_first_forced_ones() -> None:
    engine = SteppedEngine()
    whole = engine.add(PROMPT, 50, make_mask=choices("the only answer"))
    (first, *others) = engine.add_siblings(3, PROMPT, 50, make_mask=choices("the only answer"))
    read = engine.add(PROMPT, 50, make_mask=choices("the only answer"), readout=Readout(logprobs_from=1))
    engine.run()
    for seq in (whole, first, *others, read):
        assert text_of(engine, seq) == "the only answer"
        assert engine.ended[seq.id].matched_grammar
        assert 0 < seq.account.forced_tokens < len("the only answer")
    assert [reading.start for reading in engine.readings[read.id]] == [1], "the prompt is read all the same"


def test_a_sequence_that_is_preempted_or_aborted_before_it_chose_has_told_nothing() -> None:
    engine = SteppedEngine(token_budget=9)
    make = choices("what both begin with, a", "what both begin with, b")
    seq, gone = (engine.add(PROMPT, 50, make_mask=make) for _ in range(2))
    engine.step()
    engine.scheduler._preempt(seq)
    engine.abort(gone.id)
    assert engine.outputs[seq.id] == engine.outputs[gone.id] == []
    assert engine.ended[gone.id].seq.account.forced_tokens == 0
    engine.run()
    assert text_of(engine, seq)[:-1] == "what both begin with, "
    assert (seq.account.forced_tokens, seq.account.preemptions) == (22, 1)


def test_forced_tokens_end_at_the_longest_length_and_before_a_stop_id_does() -> None:
    engine = SteppedEngine()
    cut = engine.add(PROMPT, 5, make_mask=choices("abcdefgh"))
    stopped = engine.add(PROMPT, 50, make_mask=choices("abcdefgh"), stop_token_ids=frozenset([ord("d")]))
    late = engine.add(PROMPT, 50, make_mask=choices("abcdefgh"), stop_token_ids=frozenset([ord("d")]), min_tokens=6)
    just = engine.add(PROMPT, 8, make_mask=choices("abcdefgh"))
    engine.run()
    assert (text_of(engine, cut), engine.ended[cut.id].reason) == ("abcde", EndReason.LENGTH)
    assert (text_of(engine, stopped), engine.ended[stopped.id].matched) == ("abcd", ord("d"))
    assert (text_of(engine, late), engine.ended[late.id].matched_grammar) == ("abcdefgh", True)
    assert (text_of(engine, just), engine.ended[just.id].matched_grammar) == ("abcdefgh", True)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sequence_without_a_token_to_choose_ends_alone(lookahead: int) -> None:
    engine = SteppedEngine(lookahead=lookahead)

    def make(**options: object) -> GrammarMask:
        return maker(regex="[a-z]{2}1")(**options, also=AllowedTokens(range(97, 123)))

    seq, neighbour = engine.add(PROMPT, 20, make_mask=make), engine.add(PROMPT, 20)
    engine.run()
    ended = engine.ended[seq.id]
    assert (ended.reason, ended.field) == (EndReason.REJECTED, "guided")
    assert "other rules" in ended.detail
    assert engine.outputs[neighbour.id] == engine.expected(neighbour)


def test_a_sequence_goes_on_from_output_that_it_arrives_with() -> None:
    engine = SteppedEngine()
    make = maker(json_schema=SCHEMA)
    whole = engine.add(PROMPT, 150, make_mask=make, stop_token_ids=frozenset([END]))
    engine.run()
    for count in (1, 12, 20):
        rest = engine.outputs[whole.id][:count]
        seq = engine.add(PROMPT, 150, make_mask=make, stop_token_ids=frozenset([END]), output=rest)
        engine.run()
        assert rest + engine.outputs[seq.id] == engine.outputs[whole.id]


def check_schemas(count: int, seed: int) -> None:
    """Serve random schemas in a cache that holds few sequences at once, and check that each text matches.

    Each batch is served again with drafts, most of which are right: that changes no token.
    """
    random = Random(seed)
    preemptions = forced = accepted = 0
    for at in range(0, count, 10):
        asked = [(random_schema(random), random.choice([1, 1, 3]), random.random() < 0.7) for _ in range(10)]
        prompts = [[random.randrange(256) for _ in range(random.randint(1, 20))] for _ in asked]
        found: dict[int, list[int]] = {}
        for drafts in (False, True):
            oracle = Oracle(lambda seq, most: found[seq.id][seq.output_len :][:most], 0.8, VOCAB_SIZE)  # noqa: B023
            engine = SteppedEngine(
                num_blocks=40,
                lookahead=at // 10 % 2,
                max_model_len=160,
                token_budget=24,
                speculation=AlwaysDrafts(oracle, 4, VOCAB_SIZE) if drafts else None,
            )
            served: list[tuple[Sequence, dict[str, object]]] = []
            for (schema, siblings, may_end), prompt in zip(asked, prompts, strict=True):
                make, stops = maker(json_schema=json.dumps(schema)), frozenset([END] if may_end else [])
                seqs = engine.add_siblings(siblings, prompt, 120, make_mask=make, stop_token_ids=stops)
                served += [(seq, schema) for seq in seqs]
            engine.run()
            for seq, schema in served:
                check_answer(engine, seq, schema)
                preemptions += seq.account.preemptions
                forced += seq.account.forced_tokens
                accepted += seq.account.accepted_tokens
            if drafts:
                assert engine.outputs == found
            found = engine.outputs
    assert preemptions
    assert forced
    assert accepted


def check_answer(engine: SteppedEngine, seq: Sequence, schema: dict[str, object]) -> None:
    ended = engine.ended[seq.id]
    if ended.reason is EndReason.STOP:
        assert_matches(text_of(engine, seq), schema)
        assert ended.matched_grammar or ended.matched == END
    else:
        assert ended.reason is EndReason.LENGTH, ended
        mask = mask_of(maker(json_schema=json.dumps(schema)))
        assert allowed(mask, engine.outputs[seq.id]), "it is not the beginning of a text that matches"


def test_answers_to_random_schemas_match() -> None:
    check_schemas(30, seed=1)


@pytest.mark.slow
def test_answers_to_a_thousand_random_schemas_match() -> None:
    check_schemas(1000, seed=2)


HOSTILE = {
    "ambiguous": {"ebnf_grammar": 'start: a\na: a a | "x"'},
    "very ambiguous": {"ebnf_grammar": 'start: a\na: a a a a a | "x" | b\nb: a b | "x" a'},
    "repetition": {"ebnf_grammar": 'start: a{1,1000000}\na: b{1,100000}\nb: "x"'},
    "exponential regex": {"regex": "(a|b)*a(a|b){40}"},
    "powers": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "parentheses": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "alternatives": {"ebnf_grammar": "start: " + " | ".join(f'"{at}"' for at in range(25_000))},
    "items": {"json_schema": '{"type": "array", "minItems": 1000000000, "items": {"type": "integer"}}'},
    "length": {"json_schema": '{"type": "string", "minLength": 1000000000}'},
    "depth": {"json_schema": '{"items": ' * 20_000 + "{}" + "}" * 20_000},
    "itself": {"json_schema": '{"$ref": "#"}'},
    "products": {
        "json_schema": json.dumps(
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(9)]}
        )
    },
}


@pytest.mark.parametrize("format", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_ends_at_most_its_own_request(format: dict[str, str]) -> None:
    try:
        make = maker(**format)
    except GrammarError:
        return
    engine = SteppedEngine(num_blocks=200, max_model_len=400)
    seq = engine.add(PROMPT, 300, make_mask=make, stop_token_ids=frozenset([END]))
    neighbour = engine.add(PROMPT, 300)
    engine.run()
    ended = engine.ended[seq.id]
    assert ended.reason in (EndReason.STOP, EndReason.LENGTH) or (ended.field, bool(ended.detail)) == ("guided", True)
    assert engine.outputs[neighbour.id] == engine.expected(neighbour)


@pytest.mark.parametrize(
    "error", [ValueError("no trie"), BaseException("no trie")]
)  # llguidance's panics are the latter
def test_a_tokenizer_that_grammars_cannot_use_is_read_once(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def refuse(*arguments: object, **options: object) -> None:
        read.append(arguments)
        raise error

    monkeypatch.setattr(vocabulary_of_grammars, "LLTokenizer", refuse)
    fresh = Grammars(resolve("synthetic"), VOCAB_SIZE)
    for _ in range(2):
        with pytest.raises(GrammarError, match="of another kind: no trie"):
            fresh.mask_maker(inference_pb2.Guided(regex="a"))
    assert len(read) == 1


def test_asking_what_is_compiled_does_not_wait_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop asks, for each guided request that arrives."""
    is_read, goes_on = Event(), Event()

    def read(content: bytes, vocab_size: int) -> Vocabulary:
        is_read.set()
        assert goes_on.wait(30)
        return Vocabulary(content, vocab_size)

    monkeypatch.setattr("pagoda_server.engine.guidance.grammars.Vocabulary", read)
    found, guided = Grammars(resolve("synthetic"), VOCAB_SIZE), inference_pb2.Guided(regex="a")
    with ThreadPoolExecutor(2) as threads:
        made = threads.submit(found.mask_maker, guided)
        assert is_read.wait(30)
        try:
            assert threads.submit(found.knows, guided).result(timeout=10) is False
        finally:
            goes_on.set()
        made.result(timeout=30)
    assert found.knows(guided)


def test_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_server.engine.guidance.grammars.MOST_KEPT", 2)
    found = Grammars(resolve("synthetic"), VOCAB_SIZE)
    formats = [inference_pb2.Guided(regex=regex) for regex in "abc"]
    for each in formats:
        assert not found.knows(each)
        found.mask_maker(each)
    assert [found.knows(each) for each in formats] == [False, True, True]


@pytest.mark.parametrize("model", [models.BPE({"a": 0, "b": 1}, []), models.Unigram([("a", 0.0), ("b", -1.0)])])
def test_the_vocabulary_of_grammars_hides_named_text_and_keeps_every_id(model: models.Model) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["b", "<tool>"])
    tokenizer.add_special_tokens(["<s>"])
    vocabulary = Vocabulary(tokenizer.to_str().encode(), 7)
    assert vocabulary.tokens == [b"a", b"b", b"<[2]>", b"<s>", b"", b"", b"", vocabulary_of_grammars.END.encode()]
    assert (vocabulary.special_token_ids, vocabulary.eos_token_id) == ([2, 3, 7], 7)
    assert vocabulary("ba") == [1, 0]


def test_forced_text_gets_no_prefix_and_no_special_tokens() -> None:
    """As SentencePiece's models write it, whose tokens begin with a space or are a byte. "ab" is joined, "b" is not."""
    pieces = ["\u2581", "a", "b", "\u2581a", "ab", "<0x0A>", "<s>", "<0xE2>", "<0x82>", "<0xAC>"]
    merges = [("\u2581", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(pieces)}, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 6)])
    vocabulary = Vocabulary(tokenizer.to_str().encode(), 0)
    assert vocabulary.tokens[:6] == [b" ", b"a", b"b", b" a", b"ab", b"\n"]
    assert vocabulary("ab a") == [4, 3]
    assert vocabulary("\u20ac\n") == [7, 8, 9, 5]


@pytest.mark.parametrize(
    ("splits", "space", "decoder"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "\u0120", decoders.ByteLevel()),
        (pre_tokenizers.Metaspace(prepend_scheme="always"), "\u2581", decoders.ByteFallback()),
        (pre_tokenizers.Sequence([pre_tokenizers.Metaspace()]), "\u2581", decoders.ByteFallback()),
    ],
)
def test_forced_text_gets_no_space_in_front_and_has_one_spelling(
    splits: pre_tokenizers.PreTokenizer, space: str, decoder: decoders.Decoder
) -> None:
    pieces = {"a": 0, "b": 1, space: 2, "ab": 3}
    tokenizer = Tokenizer(models.BPE(pieces, [("a", "b")], dropout=0.5))
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoder
    vocabulary = Vocabulary(tokenizer.to_str().encode(), 0)
    assert [vocabulary("ab b") for _ in range(20)] == [[3, 2, 1]] * 20


def test_the_end_of_an_output_is_none_of_a_vocabularys_ids_where_some_have_no_token(tmp_path: Path) -> None:
    """A digit may be the end. The token behind the hole, which a model may choose, is not allowed there."""
    vocabulary = {letter: id for id, letter in enumerate(letters_of_bytes())} | {"xy": 258, "yx": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    for vocab_size in (259, 320, 330):
        for needs_all_masks in (True, False):
            found = Grammars(tmp_path, vocab_size, needs_all_masks=needs_all_masks)
            digits, more = (found.mask_maker(inference_pb2.Guided(regex=regex)) for regex in ("[0-9]+", "[0-9]+xy"))
            digit = vocabulary["1"]
            mask = digits(prompt_len=0)
            assert mask.surely_allows([], digit)
            assert not mask.surely_allows([digit], 258)
            assert more(prompt_len=0).surely_allows([digit], 258)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "id": st.integers(0, 1 << 31),
                "content": st.sampled_from(["a", "b", "<s>", "<tool>", "", vocabulary_of_grammars.END]),
                "special": st.booleans(),
            }
        ),
        max_size=6,
    )
)
def test_the_ids_of_added_tokens_are_the_librarys_whatever_the_file_says(stated: list[dict[str, object]]) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [{**token, **flags} for token in stated]
    content = json.dumps(document)
    known = Tokenizer.from_str(content).get_added_tokens_decoder()
    vocabulary = Vocabulary(content.encode(), 0)
    end = vocabulary.eos_token_id
    named = {id: vocabulary.tokens[id].decode() for id in vocabulary.special_token_ids}
    assert end == max([1, *known]) + 1
    assert named == {end: vocabulary_of_grammars.END} | {
        id: token.content if token.special else f"<[{id}]>" for id, token in known.items() if token.special or id > 1
    }
