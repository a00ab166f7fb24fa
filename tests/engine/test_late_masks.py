"""Late masks: which sequences wait for them, and which threads compute them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest

from pagoda.v1 import inference_pb2
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.core.guarded_mask import GuardedMask
from pagoda_server.engine.core.sequence import EndReason, SamplingParams, Sequence
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.guidance.grammar_mask import GrammarMask
from pagoda_server.engine.guidance.masks_ahead import LONG_S, MOST_HERE_S, SLOW_S, Job, MasksAhead, Pace
from pagoda_server.engine.runners.late_masks import LONE_MASKS_WAIT_S, MASKS_WAIT_S, read_masks
from pagoda_server.engine.runners.sampling import AllowedTokens, fill_mask, num_mask_words
from pagoda_server.grammars.forced_text import longest_forced
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.harness import VOCAB_SIZE, SteppedEngine
from tests.engine.late_mask import LateMask
from tests.engine.random_schemas import random_schema

PROMPT = [1, 2, 3]
TEXT = "[a-z]{20}"


def grammars() -> Grammars:
    return Grammars(resolve("synthetic"), VOCAB_SIZE)


def words_of(mask: GrammarMask, output: bytes = b"") -> list[int]:
    words = np.zeros(num_mask_words(VOCAB_SIZE), dtype=np.int32)
    fill_mask(mask, [*PROMPT, *output], words)
    return words.tolist()


def grammar_mask_of(seq: Sequence) -> GrammarMask:
    assert isinstance(seq.token_mask, GuardedMask)
    mask = seq.token_mask._mask
    assert isinstance(mask, GrammarMask)
    return mask


def opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, pace: Pace) -> Iterator[threading.Event]:
    """Within, the masks of a grammar take until the event is set; they are known to be slow."""
    gate, compute = threading.Event(), Job.compute

    def computed(job: Job) -> float:
        if job.pace is pace:
            gate.wait()
        return compute(job)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "compute", computed)
        pace.longest_s = 1.0
        yield gate
        gate.set()


# Which sequences wait


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_step_waits_shortly_for_a_quick_mask_and_not_at_all_for_a_slow_one(is_slow: bool) -> None:
    mask = LateMask(AllowedTokens([1]), threading.Event())
    mask.is_slow = is_slow
    assert read_masks([(mask, lambda timeout_s: mask.is_ready([], timeout_s))], has_others=True) == [0]
    assert mask.waited[0] == 0.0
    assert all(0.0 < each <= MASKS_WAIT_S for each in mask.waited[1:])
    assert len(mask.waited) == (1 if is_slow else 2)


def test_masks_share_the_time_that_a_step_waits() -> None:
    masks = [LateMask(AllowedTokens([1]), threading.Event()) for _ in range(5)]
    here = LateMask(AllowedTokens([1]), opened())
    readers = [(mask, lambda timeout_s, mask=mask: mask.is_ready([], timeout_s)) for mask in [*masks, here]]
    assert read_masks(readers, has_others=False) == [0, 1, 2, 3, 4]
    assert here.waited == [0.0]
    waited = [mask.waited[1] for mask in masks]
    assert waited == sorted(waited, reverse=True)
    assert waited[0] <= MASKS_WAIT_S
    assert waited[-1] == 0.0


def test_sequences_that_have_the_step_for_themselves_wait_longer() -> None:
    mask = LateMask(AllowedTokens([1]), threading.Event())
    mask.is_slow = True
    assert read_masks([(mask, lambda timeout_s: mask.is_ready([], timeout_s))], has_others=False) == [0]
    assert MASKS_WAIT_S < mask.waited[1] <= LONE_MASKS_WAIT_S


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_late_mask_delays_its_own_sequence_alone(lookahead: int) -> None:
    engine, make = SteppedEngine(lookahead=lookahead), grammars().mask_maker(inference_pb2.Guided(regex=TEXT))
    undelayed = engine.add(PROMPT, 20, make_mask=make)
    engine.run()
    gate = opened()
    late = engine.add(PROMPT, 20, make_mask=lambda **options: LateMask(make(**options), gate))
    neighbour = engine.add([4, 5], 25)
    while late.output_len < 3:
        engine.step()
    gate.clear()
    engine.step()
    length = late.output_len
    for _ in range(10):
        engine.step()
    assert late.output_len == length
    assert neighbour.output_len >= 10
    gate.set()
    engine.run()
    assert engine.outputs[late.id] == engine.outputs[undelayed.id]
    assert engine.outputs[neighbour.id] == engine.expected(neighbour)


def test_a_late_mask_can_be_aborted_and_preempted() -> None:
    engine = SteppedEngine()
    gate, mask = opened(), AllowedTokens(range(VOCAB_SIZE))
    late = [engine.add(PROMPT, 20, make_mask=lambda **_: LateMask(mask, gate)) for _ in range(2)]
    while late[0].output_len < 3:
        engine.step()
    gate.clear()
    engine.step()
    engine.abort(late[0].id)
    engine.scheduler._preempt(late[1])
    engine.step()
    gate.set()
    engine.run()
    assert engine.ended[late[0].id].reason is EndReason.ABORTED
    assert engine.outputs[late[1].id] == engine.expected(late[1])


@pytest.mark.parametrize("modulus", [2, 3, 5])
def test_a_draft_whose_mask_is_late_ends_the_run(modulus: int) -> None:
    found: list[dict[int, list[int]]] = []
    for drafts in (0, 4):
        oracle = Oracle(lambda seq, most: found[0][seq.id][seq.output_len :][:most], 1.0, VOCAB_SIZE)
        engine, gate = SteppedEngine(speculation=AlwaysDrafts(oracle, drafts, VOCAB_SIZE) if drafts else None), opened()
        steps = [0]

        def is_late(tokens: list[int], steps: list[int] = steps, drafts: int = drafts) -> bool:
            return drafts > 0 and steps[0] % 2 == 0 and len(tokens) % modulus == 0

        def make(is_late: Callable[[list[int]], bool] = is_late, **_: object) -> LateMask:
            return LateMask(AllowedTokens(range(97, 123)), gate, is_late)  # noqa: B023

        seq, neighbour = engine.add(PROMPT, 20, make_mask=make), engine.add([4], 25)
        while engine.scheduler.running or engine.scheduler.num_waiting:
            assert steps[0] < 100
            engine.step()
            steps[0] += 1
        found.append(engine.outputs)
        assert engine.outputs[neighbour.id] == engine.expected(neighbour)
    assert found[0] == found[1]
    assert seq.account.accepted_tokens
    assert seq.account.accepted_tokens < seq.account.drafted_tokens


# Where masks are computed


def test_one_slow_grammar_does_not_delay_the_masks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = grammars()
    slow_maker, quick_maker = (made.mask_maker(inference_pb2.Guided(regex=regex)) for regex in ("a[ab]*", "c[cd]*"))
    monkeypatch.setattr(Pace, "took", lambda self, seconds: None)  # however busy this machine is
    slow = [slow_maker(prompt_len=len(PROMPT)) for _ in range(6)]  # more than there are threads for them
    with held_up(monkeypatch, slow[0]._pace) as gate:
        for mask in slow:
            assert mask.is_slow
            assert not mask.is_ready([*PROMPT, ord("a")], 0.0)
        quick = [quick_maker(prompt_len=len(PROMPT)) for _ in range(50)]
        for mask in quick:
            mask.follow([*PROMPT, ord("c")])
        assert any(mask._job.is_started for mask in quick), "together they take long"
        assert all(mask.is_ready([*PROMPT, ord("c")], 10.0) for mask in quick)
        gate.set()
        assert all(mask.is_ready([*PROMPT, ord("a")], 10.0) for mask in slow)
    assert words_of(slow[0], b"a") == words_of(slow_maker(prompt_len=len(PROMPT)), b"a")


@pytest.mark.parametrize("is_held_up", [False, True])
def test_when_a_mask_is_there_does_not_decide_what_follows(is_held_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = grammars().mask_maker(inference_pb2.Guided(regex="ab(cd)?efg|ab"))
    masks = {text: make(prompt_len=len(PROMPT)) for text in (b"", b"a", b"abc", b"abcdefg")}
    with held_up(monkeypatch, masks[b"a"]._pace) as gate:
        if not is_held_up:
            gate.set()
        for text, mask in masks.items():  # asked for before `follow`, as behind drafts
            mask.is_ready([*PROMPT, *text], 0.0 if is_held_up else 10.0)
            assert mask._job.is_started == (is_held_up and text != b"")
        told = [mask.follow([*PROMPT, *text]) for text, mask in masks.items()]
        assert told == [[ord("a"), ord("b")], [ord("b")], list(b"defg"), None]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_neighbours_go_on_while_a_mask_is_computed(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, make = SteppedEngine(lookahead=lookahead), grammars().mask_maker(inference_pb2.Guided(regex=TEXT))
    undelayed = engine.add(PROMPT, 20, make_mask=make)
    engine.run()
    late, neighbour = engine.add(PROMPT, 20, make_mask=make), engine.add([4, 5], 25)
    while late.output_len < 3:
        engine.step()
    mask = grammar_mask_of(late)
    with held_up(monkeypatch, mask._pace):
        engine.step()
        length = late.output_len
        for _ in range(10):
            engine.step()
        assert late.output_len <= length + 1
        assert neighbour.output_len >= 10
    engine.run()
    assert engine.outputs[late.id] == engine.outputs[undelayed.id]
    assert engine.outputs[neighbour.id] == engine.expected(neighbour)


def test_a_mask_that_is_overdue_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_server.engine.guidance.masks_ahead.OVERDUE_S", 0.0)
    engine, make = SteppedEngine(), grammars().mask_maker(inference_pb2.Guided(regex=TEXT))
    late, neighbour = engine.add(PROMPT, 20, make_mask=make), engine.add([4, 5], 25)
    while late.output_len < 3:
        engine.step()
    mask, begun = grammar_mask_of(late), threading.Event()
    compute = Job.compute

    def computed(job: Job) -> float:
        job.began = 1e-9
        begun.set()
        over.wait()
        return compute(job)

    over = threading.Event()
    monkeypatch.setattr(Job, "compute", computed)
    mask._pace.longest_s = 1.0
    engine.step()
    engine.step()
    assert begun.wait(10.0)
    engine.run()
    over.set()
    ended = engine.ended[late.id]
    assert (ended.reason, ended.field, ended.detail) == (EndReason.REJECTED, "guided", "takes too long to follow")
    assert engine.outputs[neighbour.id] == engine.expected(neighbour)


def test_a_step_computes_masks_on_its_own_thread_for_a_short_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found, computed_here, compute = Grammars(resolve("synthetic"), VOCAB_SIZE, needs_all_masks=False), [], Job.compute

    def computed(job: Job) -> float:
        if threading.current_thread() is threading.main_thread():
            computed_here.append(job)
        return compute(job)

    monkeypatch.setattr(Job, "compute", computed)
    monkeypatch.setattr(Pace, "took", lambda self, seconds: None)  # however busy this machine is
    make = found.mask_maker(inference_pb2.Guided(regex="[ab]*"))
    masks = [make(prompt_len=len(PROMPT)) for _ in range(20)]
    masks[0]._pace.expected_s = MOST_HERE_S / 8
    for tokens in ([*PROMPT, ord("a")], [*PROMPT, ord("a"), ord("b")]):
        for mask in masks:
            mask.follow(tokens)
        assert not any(mask._job.is_started for mask in masks), "which are needed is not known yet"
        assert all(mask.is_ready(tokens, 10.0) for mask in masks)
        assert computed_here == [mask._job for mask in masks[:8]]
        computed_here.clear()


def job(pace: Pace) -> Job:
    mask = grammars().mask_maker(inference_pb2.Guided(regex="a*"))(prompt_len=0)
    return Job(mask._matcher, mask._words, pace)


def test_masks_are_started_ahead_if_they_take_long_together() -> None:
    ahead = MasksAhead(VOCAB_SIZE + 30)
    jobs = [job(Pace(expected_s=LONG_S / 4)) for _ in range(5)]
    for each in jobs[:4]:
        ahead.ask(each)
    assert not any(each.is_started for each in jobs)
    ahead.drop(jobs[0])
    ahead.ask(jobs[4])
    assert not any(each.is_started for each in jobs), "one was taken back"
    ahead.compute(jobs[1])
    assert jobs[1].began
    assert not jobs[2].is_started, "the step's masks are being computed here"
    one_by_one = [job(Pace(expected_s=LONG_S / 4)) for _ in range(5)]
    for each in one_by_one:
        ahead.ask(each)
    assert all(each.is_started and each.wait(10.0) for each in one_by_one)


ENDING = """
import threading, time
import numpy as np
from pagoda_server.engine.guidance.masks_ahead import Job, MasksAhead, Pace

class Matcher:
    def unsafe_compute_mask_ptr(self, address, num_bytes):
        begun.set()
        time.sleep(0.1)
        print("the mask is there", flush=True)

begun = threading.Event()
MasksAhead(32).ask(Job(Matcher(), np.zeros(1, dtype=np.int32), Pace(longest_s=1.0)))
begun.wait()
"""


def test_a_process_ends_after_the_masks_that_its_threads_compute() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "the mask is there\n"), ended.stderr


def test_a_grammar_is_slow_until_its_masks_have_been_quick_for_a_while() -> None:
    pace = Pace()
    assert not pace.is_slow
    pace.took(2.5 * SLOW_S)
    quick = 0
    while pace.is_slow:
        pace.took(SLOW_S / 20)
        quick += 1
    assert 8 <= quick <= 22


# What a grammar may force at once


@pytest.mark.thorough
def test_forced_texts_are_never_longer_than_their_bound() -> None:
    random, made, longest = Random(5), grammars(), 0
    for _ in range(60):
        schema = json.dumps(random_schema(random))
        mask = made.mask_maker(inference_pb2.Guided(json_schema=schema))(prompt_len=0, stop_ids=[257])
        bound, output = longest_forced("json_schema", schema), list[int]()
        for _ in range(60):
            forced = mask.follow(output)
            if forced is None:
                break
            assert len(forced) <= bound
            longest = max(longest, len(forced))
            words = np.zeros(num_mask_words(VOCAB_SIZE), dtype=np.int32)
            fill_mask(mask, [*output, *forced], words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            output += [*forced, int(random.choice(allowed))]
            if output[-1] == 257:
                break
    assert longest > 10


LONG = "ab cd ef " * 400
MANY = {"type": "array", "minItems": 1000, "items": {"const": LONG[:200]}}


@pytest.mark.parametrize(
    "format",
    [
        {"ebnf_grammar": f'start: ("y" | "z") A{{4}}\nA: "{LONG}"'},
        {"ebnf_grammar": f'start: ("y" | "z") a\na: b b\nb: c c\nc: "{LONG}"'},
        {"json_schema": json.dumps({"anyOf": [MANY, {"type": "null"}]})},
        {
            "json_schema": json.dumps(
                {
                    "$defs": {"a": {"prefixItems": [{"$ref": "#/$defs/b"}] * 50}, "b": {"const": LONG[:300]}},
                    "$ref": "#/$defs/a",
                }
            )
        },
        {"regex": "[yz](abcdefghij){1000}"},
    ],
    ids=["repeated", "doubled", "items", "references", "regex"],
)
def test_a_grammar_that_may_force_a_long_text_forces_none_on_the_loops_thread(format: dict[str, str]) -> None:
    ((name, value),) = format.items()
    assert longest_forced(name, value) > 8192
    mask = grammars().mask_maker(inference_pb2.Guided(**format))(prompt_len=0)  # type: ignore[arg-type]
    assert mask.is_slow
    assert mask.follow([]) == []


@pytest.mark.parametrize(
    "format",
    [
        {"type": "object", "properties": {f"name_{at}": {"type": "string"} for at in range(500)}},
        {"type": "object", "properties": {f"n{at}": {"enum": ["alpha", "beta"]} for at in range(300)}},
        {"type": "array", "minItems": 100, "items": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {
            "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
            "type": "object",
            "properties": {f"place_{at}": {"$ref": "#/$defs/place"} for at in range(200)},
        },
    ],
)
def test_large_schemas_with_free_values_force_short_texts(format: dict[str, object]) -> None:
    assert longest_forced("json_schema", json.dumps(format)) < 1000


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, temperature=0.8, seed=3)]
)
def test_the_sampler_leaves_out_rows_whose_masks_are_late(params: SamplingParams, tmp_path: Path) -> None:
    import torch

    from pagoda_server.engine.core.sequence import Request, Sequence
    from pagoda_server.engine.runners.cpu.sampler import Sampler
    from pagoda_server.kernels import load_backend

    gate = threading.Event()
    seqs = [
        Sequence(0, [1, 2], Request(2), params, LateMask(AllowedTokens(range(5, 9)), gate)),
        Sequence(1, [1, 2], Request(2), params),
        Sequence(2, [1, 2], Request(2), params, AllowedTokens(range(5, 9))),
    ]
    sampler = Sampler(load_backend("reference"), 40)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).repeat(1, 1)
    late = sampler.sample(seqs, logits.clone())
    gate.set()
    there = sampler.sample(seqs, logits.clone())
    assert [choice.is_late for choice in late] == [True, False, False]
    assert late[0].token == -1
    assert [choice.token for choice in late[1:]] == [choice.token for choice in there[1:]]
    assert 5 <= there[0].token < 9
    drafts = {0: (there[0].token, 6)}
    rows = logits[[0, 0, 0, 1, 2]]
    seqs[0] = Sequence(
        3, [1, 2], Request(2), params, LateMask(AllowedTokens(range(5, 9)), gate, lambda all: len(all) > 2)
    )
    cut = sampler.sample(seqs, rows.clone(), drafts)
    assert [choice.is_late for choice in cut] == [False, True, True, False, False]
    assert cut[0].token == there[0].token


def test_a_row_whose_mask_was_late_draws_as_if_it_had_not_been() -> None:
    import torch

    from pagoda_server.engine.core.sequence import Request, Sequence
    from pagoda_server.engine.runners.cpu.sampler import Sampler
    from pagoda_server.kernels import load_backend

    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(1))
    gate = threading.Event()
    masks = [LateMask(AllowedTokens([int(row.argmax()), *range(20)]), gate) for row in logits]
    seqs = [
        Sequence(at, [1, 2], Request(2), SamplingParams(temperature=2.0, seed=at), mask)
        for at, mask in enumerate(masks)
    ]
    once_late, other = (Sampler(load_backend("cpu"), 40) for _ in range(2))
    assert all(choice.is_late for choice in once_late.sample(seqs, logits.clone()))
    gate.set()
    drawn = [choice.token for choice in other.sample(seqs, logits.clone())]
    assert [choice.token for choice in once_late.sample(seqs, logits.clone())] == drawn
    assert drawn != logits.argmax(dim=-1).tolist()
