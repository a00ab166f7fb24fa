"""An exception in a mask, a grammar or a drafter ends one sequence at most; its neighbours and the engine go on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.core.sequence import EndReason, Sequence
from pagoda_server.engine.drafting import Drafter
from pagoda_server.engine.guidance import Grammars, masks_ahead
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.guidance.masks_ahead import LONG_S, Job, MasksAhead, Pace
from pagoda_server.grammars.compiling import grammar_of
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine

END = 257
PROMPT = [1, 2, 3]
TEXT = "[a-z]{5}-0123-[a-z]{15}"  # with forced tokens in it


class Panic(BaseException):
    """What a panic of a library in Rust becomes: it derives from nothing narrower."""


class Failing:
    """A matcher, and its copies, of which one method raises at its call number `at`."""

    def __init__(self, matcher: LLMatcher, method: str, at: int, error: type[BaseException]) -> None:
        self.calls = [0]
        self._matcher, self._method, self._at, self._error = matcher, method, at, error

    @property
    def has_raised(self) -> bool:
        return self.calls[0] >= self._at

    def __getattr__(self, name: str) -> Callable[..., object]:
        found = getattr(self._matcher, name)

        @functools.wraps(found)
        def call(*args: object) -> object:
            if name == self._method:
                self.calls[0] += 1
                if self.calls[0] == self._at:
                    raise self._error("injected")
            result = found(*args)
            if name != "deep_copy":
                return result
            copied = Failing(result, self._method, self._at, self._error)
            copied.calls = self.calls
            return copied

        return call


def grammar(found: Grammars, regex: str) -> functools.partial[GrammarMask]:
    make = found.mask_maker(inference_pb2.Guided(regex=regex))
    assert isinstance(make, functools.partial)
    return make


def served(make: Callable[..., GrammarMask], *, has_drafts: bool) -> tuple[SteppedEngine, Sequence, list[Sequence]]:
    """Serve a sequence of this grammar beside three others, with guesses that are half wrong if it has drafts."""
    oracle = Oracle(lambda seq, most: list(b"abcde-0123-abcdefghijklmno"[seq.output_len :][:most]), 0.7, VOCAB_SIZE)
    engine = SteppedEngine(speculation=AlwaysDrafts(oracle, 4, VOCAB_SIZE) if has_drafts else None)
    seq = engine.add(PROMPT, 60, make_mask=make, stop_token_ids=frozenset([END]))
    others = [engine.add([*PROMPT, at], 40) for at in range(2)]
    others.append(engine.add([7], 60, make_mask=grammar(Grammars(resolve("synthetic"), VOCAB_SIZE), "[x-z]{30}")))
    engine.run()
    return engine, seq, others


@pytest.mark.parametrize("has_drafts", [False, True], ids=["without drafts", "with drafts"])
@pytest.mark.parametrize("at", [1, 2, 3, 9])
@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize(
    "method",
    [
        "try_consume_tokens",
        "unsafe_compute_mask_ptr",
        "compute_ff_tokens",
        "is_stopped",
        "is_error",
        "is_accepting",
        "rollback",
        "validate_tokens",
    ],
)
def test_what_a_matcher_raises_ends_its_own_sequence_alone(
    method: str, error: type[BaseException], at: int, has_drafts: bool
) -> None:
    make = grammar(Grammars(resolve("synthetic"), VOCAB_SIZE), TEXT)
    compiled = make.args[0]
    failing = compiled._matcher = Failing(compiled._matcher, method, at, error)
    engine, seq, others = served(make, has_drafts=has_drafts)
    if failing.has_raised:
        ended = engine.ended[seq.id]
        assert (ended.reason, error.__name__ in ended.detail) == (EndReason.FAILED, True)
    else:
        assert engine.ended[seq.id].reason is EndReason.STOP
    for other in others[:2]:
        assert engine.outputs[other.id] == engine.expected(other)
    assert engine.ended[others[2].id].matched_grammar
    assert len([id for id in engine.outputs[others[2].id] if id != END]) == 30
    later = engine.add(PROMPT, 5)
    engine.run()
    assert engine.outputs[later.id] == engine.expected(later)


def test_the_masks_that_are_computed_together_fail_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Executor:
        def __init__(self, num_threads: int) -> None:
            self._executor = LLExecutor(num_threads)

        def unsafe_compute_mask_ptr(self, *args: object) -> None:
            raise Panic("injected")

    monkeypatch.setattr(masks_ahead, "LLExecutor", Executor)
    ahead = MasksAhead(VOCAB_SIZE)
    found = Grammars(resolve("synthetic"), VOCAB_SIZE)
    masks = [grammar(found, "[a-z]+")(prompt_len=0) for _ in range(6)]
    jobs = [Job(mask._matcher, mask._words, Pace(expected_s=LONG_S / 4)) for mask in masks]
    jobs[2].matcher = Failing(jobs[2].matcher, "unsafe_compute_mask_ptr", 1, Panic)  # type: ignore[assignment]
    for _ in range(2):  # the threads live on
        for job in jobs:
            ahead.ask(job)
        for at, job in enumerate(jobs):
            if job.is_started and job.error is None and at != 2:
                assert job.ends(10.0)
    assert jobs[2].wait(10.0)
    with pytest.raises(Panic):
        jobs[2].ends()


@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize("method", ["propose", "forget"])
def test_a_sequence_goes_on_without_drafts_where_its_drafter_fails(method: str, error: type[BaseException]) -> None:
    class Broken(Oracle):
        def propose(self, seq: Sequence, most: int) -> list[int]:
            if method == "propose" and seq.id == 0 and seq.output_len > 3:
                raise error("injected")
            return super().propose(seq, most)

        def forget(self, seq: Sequence) -> None:
            if seq.id == 0:
                raise error("injected")

    def future(seq: Sequence, most: int) -> list[int]:
        return engine.expected(seq)[seq.output_len :][:most]

    drafter: Drafter = Broken(future, 1.0, VOCAB_SIZE)
    engine = SteppedEngine(speculation=AlwaysDrafts(drafter, 4, VOCAB_SIZE))
    seqs = [engine.add([*PROMPT, at], 40) for at in range(3)]
    engine.run()
    for seq in seqs:
        assert engine.outputs[seq.id] == engine.expected(seq)
        assert engine.ended[seq.id].reason is EndReason.LENGTH
    assert seqs[1].account.accepted_tokens > 0


class Vocabulary:
    """A token for each byte, and as many more as make a vocabulary of this size."""

    bos_token_id = None

    def __init__(self, size: int) -> None:
        self.eos_token_id = size - 1
        self.special_token_ids = [size - 1]
        self.tokens = [bytes([id]) if id < 256 else b"%d" % id for id in range(size - 1)] + [b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("size", range(258, 258 + 64))
def test_masks_have_the_words_that_llguidance_writes_at_every_size_of_a_vocabulary(size: int) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary(size)))
    found = Grammars(Path(), size - 1)
    found._tokenizer, found._ahead = tokenizer, MasksAhead(tokenizer.vocab_size)
    make = grammar(found, "a[b-d]{3}")
    mask = make(prompt_len=0)
    for output, expected in ((b"", b"a"), (b"a", b"bcd"), (b"ab", b"bcd")):
        words = np.zeros(-(-(size - 1) // 32), dtype=np.uint32)
        mask.fill([*output], words.data)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert bytes(ids.tolist()) == expected, mask.fault
    matcher = LLMatcher(tokenizer, grammar_of("regex", "[a-z]+"), log_level=0)
    together = [Job(matcher.deep_copy(), mask._words.copy(), Pace(expected_s=LONG_S)) for _ in range(3)]
    found._ahead._compute_all([job.start() for job in together], np.zeros((3, found._ahead.num_words), dtype=np.int32))
    assert all(job.ends(10.0) and job.words.any() for job in together)
