"""What is read from prompts is what the model computes there, however the prompts are computed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_server.engine.core.sequence import EndReason, Pooling, Readout, Request, SamplingParams, Sequence, State
from pagoda_server.engine.core.step import Chunk, Reading, StepPlan
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import Runner, StepsInFlight, compute_one_by_one
from pagoda_server.engine.runners import readings
from pagoda_server.engine.runners.synthetic import advance, expected_hidden, expected_logprobs
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels import has_native
from tests.engine.harness import VOCAB_SIZE as SYNTHETIC_VOCAB
from tests.engine.harness import SteppedEngine
from tests.engine.tiny_models import MODELS, VOCAB_SIZE, ShuffledBlocks, load_runner, random_prompt, save_model

POOLINGS: list[Pooling] = ["last", "mean", "cls"]


# By hand, with the synthetic model


def checksums(prompt: list[int]) -> list[int]:
    return list(itertools.accumulate(prompt, advance, initial=0))[1:]


def expected_vector(prompt: list[int], pooling: Pooling) -> list[float]:
    states = [expected_hidden(each) for each in checksums(prompt)]
    rows = {"last": states[-1:], "mean": states, "cls": states[:1]}[pooling]
    return [sum(values) / len(rows) for values in zip(*rows, strict=True)]


def check_scores(engine: SteppedEngine, seq: Sequence, prompt: list[int], first: int, num_top: int = 0) -> None:
    """Compare all log-probabilities with those computed by hand; what was read twice must be the same."""
    found: dict[int, Any] = {}
    for reading in engine.readings.get(seq.id, []):
        for at, logprobs in enumerate(reading.logprobs, reading.start):
            assert found.setdefault(at, logprobs) == logprobs
    rows = checksums(prompt)
    assert found == {
        at: expected_logprobs(rows[at - 1], num_top, SYNTHETIC_VOCAB, prompt[at]) for at in range(first, len(prompt))
    }


@pytest.mark.parametrize("lookahead", [0, 1])
def test_log_probabilities_of_a_long_prompt_arrive_in_parts(lookahead: int) -> None:
    engine = SteppedEngine(token_budget=7, max_num_seqs=6, lookahead=lookahead)
    prompt = list(range(40))
    seq = engine.add(prompt, 1, readout=Readout(logprobs_from=9, num_top=3))
    other = engine.add([200] * 25, 12)
    engine.run()
    check_scores(engine, seq, prompt, 9, num_top=3)
    assert len(engine.readings[seq.id]) > 4
    assert engine.outputs[seq.id] == engine.expected(seq)
    assert engine.outputs[other.id] == engine.expected(other)
    assert other.id not in engine.readings


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 30])
def test_a_vector_is_complete_once(pooling: Pooling, length: int) -> None:
    engine = SteppedEngine(token_budget=7, max_num_seqs=6)
    prompt = list(range(length))
    first, again = (engine.add(prompt, 1, readout=Readout(pooling=pooling)) for _ in range(2))
    engine.run()
    later = engine.add(prompt, 1, readout=Readout(pooling=pooling))
    engine.run()
    for seq in (first, again, later):
        (reading,) = engine.readings[seq.id]
        assert reading.hidden == expected_vector(prompt, pooling)
        assert engine.ended[seq.id].reason is EndReason.LENGTH


def test_cached_tokens_are_used_up_to_the_first_row_that_is_read() -> None:
    engine = SteppedEngine(block_size=8)
    prompt = list(range(33))
    engine.add(prompt, 1)
    engine.run()
    cached = {}
    readouts = [Readout(logprobs_from=at) for at in (1, 9, 14, 29, 32)] + [Readout(pooling=each) for each in POOLINGS]
    for readout in readouts:
        seq = engine.add(prompt, 1, readout=readout)
        engine.run()
        cached[readout] = seq.account.cached_tokens
        if readout.logprobs_from is not None:
            check_scores(engine, seq, prompt, readout.logprobs_from)
    assert list(cached.values()) == [0, 8, 13, 28, 31, 32, 0, 0]


def test_several_sequences_of_a_prompt_read_it_once() -> None:
    engine = SteppedEngine()
    prompt = list(range(21))
    seqs = engine.add_siblings(3, prompt, 4, readout=Readout(logprobs_from=1))
    engine.run()
    assert set(engine.readings) == {seqs[0].id}
    check_scores(engine, seqs[0], prompt, 1)


@pytest.mark.parametrize("host_blocks", [0, 40])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_preempted_prompts_are_read_as_if_undisturbed(host_blocks: int, lookahead: int) -> None:
    engine = SteppedEngine(num_blocks=14, token_budget=10, max_num_seqs=6, host_blocks=host_blocks, lookahead=lookahead)
    for number, pooling in enumerate([None, *POOLINGS]):
        prompt = [number, 8, 9] * 13
        readout = Readout(logprobs_from=None if pooling else 6, pooling=pooling)
        seq = engine.add(prompt, 1, readout=readout)
        engine.step()
        engine.step()
        engine.add([number] * 24, 2, priority=1)  # there are too few blocks for both
        engine.run()
        assert seq.account.preemptions > 0
        if pooling is None:
            check_scores(engine, seq, prompt, 6)
        else:
            vectors = [each.hidden for each in engine.readings[seq.id]]
            assert all(vector == expected_vector(prompt, pooling) for vector in vectors)


def test_a_sequence_that_ended_before_its_step_did_sends_no_reading() -> None:
    engine = SteppedEngine(lookahead=1)
    seq = engine.add(list(range(10)), 1, readout=Readout(logprobs_from=1))
    engine.step()
    engine.abort(seq.id)
    engine.run()
    assert seq.id not in engine.readings
    assert engine.pool.num_referenced == 0


# Against transformers


class Pair:
    """One model, here and in transformers, with a scheduler in front of ours."""

    def __init__(self, folder: Path) -> None:
        self.theirs = save_model(MODELS["qwen3"], folder)
        self.ours = load_runner(folder)

    def scores(self, prompt: list[int]) -> torch.Tensor:
        """[len(prompt) - 1, vocab]"""
        with torch.inference_mode():
            return self.theirs(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)

    def vector(self, prompt: list[int], pooling: Pooling) -> torch.Tensor:
        with torch.inference_mode():
            states = self.theirs(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("model"))


class Served:
    """A scheduler and a runner, stepped until all is done."""

    def __init__(self, runner: Runner, num_blocks: int = 200, token_budget: int = 23) -> None:
        self.scheduler = Scheduler(
            BlockPool(num_blocks, 4),
            max_num_seqs=6,
            token_budget=token_budget,
            max_model_len=200,
            clock=lambda: 0.0,
        )
        self.steps = StepsInFlight(self.scheduler, runner)
        self.readings: dict[int, list[Reading]] = {}
        self._ids = itertools.count()

    def add(self, prompt: list[int], readout: Readout | None, max_tokens: int = 1, **rules: Any) -> Sequence:
        request = Request(len(prompt), readout=readout, **rules)
        seq = Sequence(next(self._ids), list(prompt), request, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(seq)
        return seq

    def run(self) -> None:
        while not (plan := self.scheduler.schedule()).is_empty:
            self.steps.launch(plan)
            self.steps.commit_oldest()
            output = self.scheduler.take_output()
            assert all(ended.reason is EndReason.LENGTH for ended in output.ended), output.ended
            for id, reading in output.readings:
                self.readings.setdefault(id, []).append(reading)

    def check(self, seq: Sequence, pair: Pair) -> None:
        readout, prompt = seq.request.readout, seq.tokens[: seq.request.prompt_len]
        assert readout is not None
        found = self.readings[seq.id]
        if readout.pooling is not None:
            expected = pair.vector(prompt, readout.pooling)
            for reading in found:
                torch.testing.assert_close(torch.tensor(reading.hidden), expected, atol=1e-4, rtol=1e-4)
            return
        assert readout.logprobs_from is not None
        expected = pair.scores(prompt)
        told = {at: each for reading in found for at, each in enumerate(reading.logprobs, reading.start)}
        assert sorted(told) == list(range(readout.logprobs_from, len(prompt)))
        for at, each in told.items():
            row = expected[at - 1]
            assert each.chosen == pytest.approx(row[prompt[at]].item(), abs=2e-4)
            assert each.top == pytest.approx(row.topk(readout.num_top).values.tolist(), abs=2e-4)
            assert each.top == pytest.approx(row[each.top_ids].tolist(), abs=2e-4)


READOUTS = [Readout(logprobs_from=1, num_top=4), Readout(logprobs_from=17), *(Readout(pooling=p) for p in POOLINGS)]


def test_readings_equal_those_of_transformers_in_chunks_beside_other_sequences_and_behind_cached_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "_MAX_LOGITS", 5 * VOCAB_SIZE)  # several slices for a chunk
    served = Served(pair.ours)
    shared = random_prompt(31, seed=1)
    others = [served.add(random_prompt(9, seed=at), None, 40) for at in range(2)]
    seqs = []
    for turn in range(3):
        for at, readout in enumerate(READOUTS):
            prompt = shared + random_prompt(11 + at, seed=at)
            seqs.append(served.add(prompt, readout, bypass_cache=turn == 2))
        served.run()
    for seq in seqs:
        served.check(seq, pair)
    cached = [seq.account.cached_tokens for seq in seqs]
    assert cached[5:10] == [0, 16, 40, 0, 0]
    assert cached[10:] == [0] * 5
    alone = Served(pair.ours)
    for other in others:
        again = alone.add(other.tokens[:9], None, 40)
        alone.run()
        assert again.tokens == other.tokens


def test_readings_equal_those_of_transformers_after_preemptions(pair: Pair) -> None:
    served = Served(pair.ours, num_blocks=20)
    seqs = [
        served.add(random_prompt(20 + 3 * at, seed=at), READOUTS[at % 5], 1 if READOUTS[at % 5].pooling else 14)
        for at in range(15)
    ]
    served.run()
    assert sum(seq.account.preemptions for seq in seqs) > 0
    for seq in seqs:
        served.check(seq, pair)


def test_a_prompt_of_one_token_is_read(pair: Pair) -> None:
    served = Served(pair.ours)
    seqs = [served.add([at], Readout(pooling="last")) for at in range(3)]
    served.run()
    for seq in seqs:
        served.check(seq, pair)


def test_a_reading_that_is_not_finite_fails_its_sequence_alone(pair: Pair) -> None:
    blocks = ShuffledBlocks(pair.ours)
    broken, sound = (blocks.sequence(random_prompt(8, seed=at), 1) for at in range(2))
    for seq in (broken, sound):
        seq.request, seq.state = Request(8, readout=Readout(logprobs_from=6)), State.RUNNING
    for kv in pair.ours._cache:
        kv.values[broken.blocks[0]] = float("nan")
        kv.values[sound.blocks[0]] = 0.0
    chunks = [Chunk(seq, 4, 4, samples=True) for seq in (broken, sound)]
    for sampled in (pair.ours.execute(StepPlan(chunks)), compute_one_by_one(pair.ours, StepPlan(chunks))):
        assert set(sampled.faults) == {0}
        assert sampled.readings[1].start == 6
        assert len(sampled.readings[1].logprobs) == 2


@pytest.mark.skipif(not has_native(), reason="steps are recorded where products run in compiled code")
def test_decodes_after_a_prompt_that_was_read_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(MODELS["qwen3"], tmp_path)
    runner = load_runner(tmp_path, quantization="int8")
    assert runner._recorded is not None
    served = Served(runner)
    seq = served.add(random_prompt(5, seed=3), Readout(logprobs_from=1), 10)
    served.steps.launch(served.scheduler.schedule())
    served.steps.commit_oldest()
    monkeypatch.setattr(runner, "_hidden_states", None)  # a recorded step does not need it
    served.run()
    assert seq.output_len == 10
