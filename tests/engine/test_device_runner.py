"""The runner of a device computes one step ahead of the step that is read.

These tests use the reference kernels on a CPU, and the GPU's own on a GPU (`make test-gpu`).
"""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pagoda.v1 import inference_pb2
from pagoda_server.channel.strides import chain_root
from pagoda_server.checkpoints import resolve
from pagoda_server.engine.core.adapter import Adapter
from pagoda_server.engine.core.sequence import (
    BlockTable,
    EndReason,
    Pooling,
    Readout,
    Request,
    SamplingParams,
    Sequence,
    TokenMask,
)
from pagoda_server.engine.core.step import Chunk, Ended, Reading, Sampled, StepPlan, TokenLogprobs
from pagoda_server.engine.drafting import Speculation
from pagoda_server.engine.guidance import Grammars
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.loop.steps_in_flight import Computed, Launched, Runner, StepsInFlight
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.cuda import DeviceRunner
from pagoda_server.engine.runners.cuda.graphs import MIXED_TOKENS, StepGraphs, StepShape, decode_sizes
from pagoda_server.engine.runners.cuda.rehearsal import prompts_of_all_sizes
from pagoda_server.engine.runners.cuda.step_inputs import places_of
from pagoda_server.engine.runners.loaded_model import choose_backend, load_for_serving
from pagoda_server.engine.runners.sampling import AllowedTokens
from pagoda_server.engine.scheduling.scheduler import Scheduler
from pagoda_server.kernels import UNQUANTIZED, load_backend
from pagoda_server.kernels.triton.configs import IS_INTERPRETED
from pagoda_server.settings.engine import EngineConfig
from tests.engine.drafters import AlwaysDrafts, Oracle
from tests.engine.late_mask import LateMask
from tests.engine.next_to_last import NextToLast
from tests.engine.tiny_models import VOCAB_SIZE, load_runner, random_prompt, saved_model
from tests.kernels.triton.device import DEVICE, compute_each_element_alone

BACKEND = "reference" if IS_INTERPRETED else "triton"
SLOW_IF_INTERPRETED = pytest.mark.slow if IS_INTERPRETED else pytest.mark.gpu
SETTINGS = {"max_num_seqs": 6, "token_budget": 19, "block_size": 4, "kv_cache_gb": 2e-4, "max_model_len": 120}


@pytest.fixture(scope="module", params=["llama", "olmo2", "qwen2 with a sliding window on its upper layer"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory)


def device_runner(folder: Path, backend: str = BACKEND, **settings: object) -> DeviceRunner:
    config = EngineConfig(str(folder), **({"dtype": "float32"} | SETTINGS | settings))  # type: ignore[arg-type]
    weights = {"int8": "int8-weight", "int4": "groups"}.get(config.quantization, UNQUANTIZED)
    return DeviceRunner(config, load_for_serving(config, torch.device(DEVICE), backend=(backend, weights)))


class Served:
    """A scheduler and a runner, stepped like the loop, as far ahead as the runner allows."""

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        block_size: int = 4,
        speculation: Speculation | None = None,
        max_num_seqs: int = 6,
        num_adapter_slots: int = 0,
    ) -> None:
        info = getattr(runner, "info", None)
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            token_budget=19,
            max_model_len=120,
            clock=lambda: 0.0,
            prefix_caching=prefix_caching,
            num_host_blocks=host_blocks,
            speculation=speculation,
            windows=info.kv_cache.groups.windows if info else (None,),
            num_adapter_slots=num_adapter_slots,
        )
        self.steps = StepsInFlight(self.scheduler, runner)
        self.ended: list[Ended] = []
        self.told: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.readings: list[tuple[int, Reading]] = []
        self._lookahead = runner.lookahead
        self._ids = itertools.count()

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        mask: TokenMask | None = None,
        readout: Readout | None = None,
        adapter: Adapter | None = None,
    ) -> Sequence:
        tokens = list(prompt)
        root = chain_root("", adapter.identity) if adapter else b""
        request = Request(len(prompt), readout=readout, cache_root=root, adapter=adapter)
        seq = Sequence(next(self._ids), tokens, request, params, token_mask=mask)
        self.scheduler.add(seq)
        return seq

    def step(self) -> bool:
        was_busy = len(self.steps) > 0
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.steps.launch(plan)
        if len(self.steps) > (0 if plan.is_empty else self._lookahead):
            self.steps.commit_oldest()
        self.scheduler.check_integrity()
        output = self.scheduler.take_output()
        self.ended += output.ended
        self.readings += output.readings
        for id, token, logprobs in zip(output.sequences, output.tokens, output.logprobs, strict=True):
            self.told.setdefault(id, []).append(token)
            if logprobs is not None:
                self.logprobs.setdefault(id, []).append(logprobs)
        return was_busy or not plan.is_empty

    def run(self) -> None:
        while self.step():
            pass


def fill_cache(runner: DeviceRunner | ModelRunner, value: float) -> None:
    """Fill all pages, and wait: the runner's stream does not wait for a test's own."""
    for kv in runner._cache:
        kv.keys.fill_(value)
        kv.values.fill_(value)
    synchronize()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def launched_ahead(runner: Runner) -> set[int]:
    """Gather the ids of sequences that are launched while their last token is pending."""
    ahead: set[int] = set()
    launch = runner.launch

    def watched(plan: StepPlan) -> Launched:
        ahead.update(chunk.seq.id for chunk in plan.chunks if chunk.seq.num_pending > 1)
        return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    return ahead


PARAMS = [
    SamplingParams(max_tokens=25),
    SamplingParams(max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, seed=3),
    SamplingParams(max_tokens=20, temperature=1.3, min_p=0.05, top_n_sigma=2.5, seed=-7),
    SamplingParams(max_tokens=30, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(max_tokens=9, logprobs=3),
    SamplingParams(max_tokens=15, logit_bias=((5, 8.0), (17, -100.0)), temperature=0.7, seed=1 << 62),
    SamplingParams(max_tokens=22, min_tokens=9, stop_token_ids=frozenset(range(0, VOCAB_SIZE, 3))),
    SamplingParams(max_tokens=18, temperature=0.5, repetition_penalty=1.1, logprobs=0, seed=12),
]


def ask(served: Served, count: int, max_tokens: int = 100) -> list[Sequence]:
    """Make requests of many kinds; each ends by its own parameters, after `max_tokens` at most."""
    seqs = []
    for at, params in zip(range(count), itertools.cycle(PARAMS)):
        limited = replace(params, max_tokens=min(params.max_tokens, max_tokens))
        mask = AllowedTokens(range(at, VOCAB_SIZE, 7)) if at % 3 == 1 else None
        seqs.append(served.add(random_prompt(3 + 11 * at % 37, seed=at), limited, mask))
    return seqs


def outputs(seqs: Iterable[Sequence]) -> list[list[int]]:
    return [seq.tokens[seq.request.prompt_len :] for seq in seqs]


@cache
def one_by_one(folder: Path, count: int, max_tokens: int = 100) -> list[list[int]]:
    """Return what the plain runner generates for the same requests, one step at a time, with room for all."""
    runner = load_runner(folder, max_num_seqs=6, token_budget=19, max_model_len=120)
    served = Served(runner, runner.info.num_blocks)
    seqs = ask(served, count, max_tokens)
    served.run()
    return outputs(seqs)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_it_generates_what_a_step_by_step_runner_does_though_sequences_are_preempted(
    folder: Path, overlap: str
) -> None:
    runner = device_runner(folder, overlap=overlap)
    assert runner.lookahead == (overlap == "on")
    fill_cache(runner, math.nan)
    served = Served(runner, 36)
    seqs = ask(served, 16)
    served.run()
    assert not [ended.detail for ended in served.ended if ended.reason is EndReason.FAILED]
    assert served.scheduler.counters.preemptions > 0, "the cache is too small for all of them"
    assert outputs(seqs) == one_by_one(folder, 16)
    assert served.pool.num_referenced == 0


def knowing(runner: DeviceRunner, expected: list[list[int]], accuracy: float = 0.7) -> AlwaysDrafts:
    """A rule that always drafts what is expected of each sequence, by its number, with mistakes."""

    def future(seq: Sequence, count: int) -> list[int]:
        return expected[seq.id][seq.output_len : seq.output_len + count]

    return AlwaysDrafts(Oracle(future, accuracy, VOCAB_SIZE), 5, VOCAB_SIZE, runner.max_choices)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_drafts_change_no_token_though_sequences_are_preempted(folder: Path, overlap: str) -> None:
    runner = device_runner(folder, overlap=overlap)
    fill_cache(runner, math.nan)
    expected = one_by_one(folder, 16)
    served = Served(runner, 36, speculation=knowing(runner, expected))
    ahead = launched_ahead(runner)
    seqs = ask(served, 16)
    served.run()
    assert not [ended.detail for ended in served.ended if ended.reason is EndReason.FAILED]
    assert outputs(seqs) == expected
    counters = served.scheduler.counters
    assert counters.preemptions > 0
    assert 50 < counters.accepted_tokens < counters.drafted_tokens
    assert bool(ahead) == (overlap == "on"), "some are computed ahead beside those that draft"


def test_a_step_with_drafts_is_as_large_as_the_runner_has_room_for(llama: Path) -> None:
    expected = one_by_one(llama, 8)
    runner = device_runner(llama, max_num_seqs=2, max_draft_tokens=5)
    assert runner.max_choices == 6, "a lone stream has all its drafts"
    served = Served(runner, 36, speculation=knowing(runner, expected, accuracy=1.0))
    served.scheduler.max_num_seqs = 2
    launch, sizes = runner.launch, []

    def watched(plan: StepPlan) -> Launched:
        sizes.append(StepShape.of(plan.chunks).num_seqs)
        return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    seqs = ask(served, 8)
    served.run()
    assert outputs(seqs) == expected
    assert max(sizes) == 6
    assert device_runner(llama, max_num_seqs=2, speculation="off").max_choices == 2


def test_logprobs_of_accepted_drafts_come_back_with_their_tokens(llama: Path) -> None:
    cpu = Served(load_runner(llama), 60)
    ask(cpu, 8)
    cpu.run()
    runner = device_runner(llama)
    served = Served(runner, 60, speculation=knowing(runner, one_by_one(llama, 8)))
    ask(served, 8)
    served.run()
    assert served.logprobs.keys() == cpu.logprobs.keys() == {4, 7}
    assert all(ended.seq.account.accepted_tokens > 0 for ended in served.ended if ended.seq.id in (4, 7))
    for id, expected in cpu.logprobs.items():
        for ours, theirs in zip(served.logprobs[id], expected, strict=True):
            assert ours.top_ids == theirs.top_ids
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert ours.top == pytest.approx(theirs.top, abs=1e-4)


def test_drafts_follow_masks_that_depend_on_tokens_and_count_for_penalties(llama: Path) -> None:
    cpu = load_runner(llama, max_num_seqs=6, token_budget=19, max_model_len=120)
    grammars = Grammars(resolve("synthetic"), VOCAB_SIZE)
    found: list[list[list[int]]] = []
    runner = device_runner(llama)
    for each in (cpu, runner):
        speculation = knowing(runner, found[0]) if found else None
        served, seqs = Served(each, 60, speculation=speculation), []
        for at in range(6):
            params = SamplingParams(
                max_tokens=20, temperature=0.9 * (at % 2), seed=at, repetition_penalty=1.5, frequency_penalty=0.3
            )
            grammar = grammars.mask_maker(inference_pb2.Guided(regex="same ([a-e]{3} ){9}"))
            masks = (NextToLast(VOCAB_SIZE), grammar(prompt_len=5 + at), None)
            seqs.append(served.add(random_prompt(5 + at, seed=at), params, masks[at % 3]))
        served.run()
        found.append(outputs(seqs))
        assert not [ended.detail for ended in served.ended if ended.detail]
    assert found[1] == found[0]
    for seq in seqs:
        assert seq.account.accepted_tokens > 0


def test_it_reads_prompts_as_a_step_by_step_runner_does(llama: Path) -> None:
    found = []
    cpu = load_runner(llama, max_num_seqs=6, token_budget=19, max_model_len=120)
    for runner, num_blocks in ((device_runner(llama), 36), (cpu, cpu.info.num_blocks)):
        served = Served(runner, num_blocks)
        decoding = ask(served, 2)
        poolings: tuple[Pooling, ...] = ("last", "mean", "cls")
        for at, length in enumerate((30, 1, 41, 18)):
            readouts = [Readout(logprobs_from=1 + at, num_top=3 * at)] if length > 1 else []
            for readout in (*readouts, *(Readout(pooling=pooling) for pooling in poolings)):
                served.add(random_prompt(length, seed=at), SamplingParams(max_tokens=1), readout=readout)
        served.run()
        values: dict[tuple[int, int], list[float]] = {}
        for id, reading in served.readings:
            rows = [[each.chosen, *each.top] for each in reading.logprobs] + [reading.hidden] * bool(reading.hidden)
            values |= {(id, reading.start + row): each for row, each in enumerate(rows)}
        found.append((values, outputs(decoding)))
    (on_device, told), (expected, expected_told) = found
    assert told == expected_told
    assert on_device.keys() == expected.keys()
    assert len(expected) == 12 + 29 + 38 + 14
    for key, each in expected.items():
        assert on_device[key] == pytest.approx(each, abs=1e-4), key


class Split:
    """Computes the decodes of a step and its chunks of prompts one after the other."""

    lookahead = 0

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self.num_mixed = 0

    def recover(self) -> None:
        self._runner.recover()

    def launch(self, plan: StepPlan) -> Launched:
        decodes = [chunk for chunk in plan.chunks if chunk.is_decode]
        prompts = [chunk for chunk in plan.chunks if not chunk.is_decode]
        self.num_mixed += bool(decodes and prompts)
        parts = [StepPlan(decodes, plan.copies), StepPlan(prompts)]
        done = {}
        for part in parts:
            if part.chunks:
                sampled = self._runner.execute(part)
                outcomes = zip(sampled.tokens, sampled.logprobs, strict=True)
                done |= {id(chunk): outcome for chunk, outcome in zip(part.chunks, outcomes, strict=True)}
        tokens, logprobs = zip(*(done[id(chunk)] for chunk in plan.chunks), strict=True)
        return Computed(Sampled(list(tokens), list(logprobs)))


def test_a_mixed_step_chooses_what_its_decodes_and_its_prompts_do_alone(llama: Path) -> None:
    split = Split(device_runner(llama))
    found = []
    for runner in (device_runner(llama), split):
        served = Served(runner, 36)
        seqs = ask(served, 16)
        served.run()
        found.append(outputs(seqs))
    assert split.num_mixed > 10
    assert found[0] == found[1]


def test_a_mixed_step_is_one_pass_over_the_model(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(llama)
    runner._graphs._graphs.clear()
    forward, launch, passes, kinds = runner._model.forward, runner.launch, [], []
    monkeypatch.setattr(runner._model, "forward", lambda *inputs: passes.append(1) or forward(*inputs))

    def watched(plan: StepPlan) -> Launched:
        kinds.append({chunk.is_decode for chunk in plan.chunks})
        return launch(plan)

    monkeypatch.setattr(runner, "launch", watched)
    served = Served(runner, 36)
    ask(served, 16)
    served.run()
    assert kinds.count({True, False}) > 10
    assert len(passes) == len(kinds)


def test_a_padded_step_computes_what_the_step_does_and_nothing_that_is_not_a_number(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding reads nothing: the cache holds NaN wherever no token is."""
    monkeypatch.setattr(StepGraphs, "capture", lambda *_: None)  # the steps run kernel by kernel
    monkeypatch.setattr(DeviceRunner, "warm_up", lambda *_: None)
    runner = device_runner(llama, "triton")
    found, chunks = [], []
    fill_cache(runner, math.nan)
    for at, (start, end) in enumerate(((5, 6), (9, 10), (0, 7), (3, 8))):  # two decodes and two chunks
        blocks = BlockTable(range(4 * at, 4 * at + -(-end // 4)))
        seq = Sequence(at, random_prompt(end, seed=at), Request(end), SamplingParams(), blocks=blocks)
        chunks.append(Chunk(seq, start, end - start, samples=True))
    runner.execute(StepPlan([Chunk(chunk.seq, 0, chunk.start, samples=False) for chunk in chunks if chunk.start]))
    pages = [page for kv in runner._cache for page in (kv.keys, kv.values)]
    before = [page.clone() for page in pages]
    for shape in (StepShape(2, 12, 2), StepShape(2, 12, 4), StepShape(6, 16, 7)):
        for page, values in zip(pages, before, strict=True):
            page.copy_(values)
        synchronize()
        with torch.cuda.stream(runner._stream), torch.inference_mode():
            entries, _ = places_of(chunks, shape.decodes)
            runner._inputs.send(chunks, runner._rows.place(chunks, entries), shape)
            logits = runner._model.forward(runner._inputs.of_model(shape), runner._cache).cpu()
        runner.recover()
        assert logits.isfinite().all()
        found.append(logits[entries])
    for padded in found[1:]:
        torch.testing.assert_close(padded, found[0])


def test_a_deterministic_engine_takes_the_kernels_whose_sums_have_a_fixed_order() -> None:
    for quantization, weights in (("auto", UNQUANTIZED), ("int8", "int8-weight")):
        chosen = choose_backend(torch.device("cuda"), torch.bfloat16, quantization, is_deterministic=True)
        assert chosen == ("triton", weights)
        assert load_backend(*chosen, True).is_deterministic


@SLOW_IF_INTERPRETED
def test_deterministic_logits_are_the_same_beside_others_from_the_cache_and_after_a_preemption(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_each_element_alone(monkeypatch)
    if IS_INTERPRETED:  # a card captures its steps
        monkeypatch.setattr(StepGraphs, "capture", lambda *_: None)
        monkeypatch.setattr(DeviceRunner, "warm_up", lambda *_: None)
    runner = device_runner(llama, "triton", deterministic=True)
    prompts = [random_prompt(length, seed=length) for length in (7, 9, 6)]

    def logprobs(served: Served, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
        seqs = [served.add(prompt, SamplingParams(max_tokens=5, logprobs=5)) for prompt in prompts]
        served.run()
        return [served.logprobs[seq.id] for seq in seqs]

    alone = [logprobs(Served(runner, 36), [prompt])[0] for prompt in prompts]
    together = Served(runner, 9)
    assert logprobs(together, prompts) == alone
    assert together.scheduler.counters.preemptions > 0, "the cache is too small for all of them"
    again = Served(runner, 36)
    assert [logprobs(again, [prompt])[0] for prompt in (prompts[1], prompts[1])] == [alone[1]] * 2
    assert again.scheduler.counters.cached_tokens > 0


class FailsAt:
    """Fails some steps, at launch or when they are read, after the device has computed them."""

    def __init__(self, runner: DeviceRunner, launches: set[int], reads: set[int]) -> None:
        self.lookahead = runner.lookahead
        self._runner, self._launches, self._reads = runner, launches, reads
        self._count = 0

    def recover(self) -> None:
        self._runner.recover()

    def launch(self, plan: StepPlan) -> Launched:
        number, launched, reads = self._count, self._runner.launch(plan), self._reads
        self._count += 1
        if number in self._launches:
            raise FloatingPointError("as told")

        class Step:
            def result(self) -> Sampled:
                if number in reads:
                    raise FloatingPointError("as told")
                return launched.result()

        return Step()


@pytest.mark.parametrize("drafts", [False, True])
def test_steps_that_fail_once_change_no_token(llama: Path, drafts: bool) -> None:
    device = device_runner(llama)
    runner = FailsAt(device, launches={3, 40}, reads={9, 10, 60})
    served = Served(runner, 60, speculation=knowing(device, one_by_one(llama, 16)) if drafts else None)
    seqs = ask(served, 16)
    served.run()
    assert outputs(seqs) == one_by_one(llama, 16)


def test_many_that_need_more_than_their_row_start_in_one_step(llama: Path) -> None:
    """Their parameters are sent in turns from the same host memory."""
    params = SamplingParams(max_tokens=6, temperature=0.7, frequency_penalty=0.3)
    found = []
    for runner in (device_runner(llama), load_runner(llama, max_num_seqs=6, token_budget=19, max_model_len=120)):
        served = Served(runner, 60)
        seqs = [
            served.add(random_prompt(3, seed=at), replace(params, seed=at, logit_bias=((7 * at, 9.0), (5, -4.0))))
            for at in range(6)
        ]
        served.run()
        found.append(outputs(seqs))
    assert found[0] == found[1]


def test_a_sequence_whose_mask_depends_on_its_tokens_waits_for_its_last_token_and_no_other_does(llama: Path) -> None:
    found = []
    for runner in (device_runner(llama), load_runner(llama, max_num_seqs=6, token_budget=19, max_model_len=120)):
        served = Served(runner, 60)
        masks = [NextToLast(VOCAB_SIZE) for _ in range(3)]
        params = SamplingParams(max_tokens=12, temperature=0.8)
        seqs = [
            served.add(random_prompt(5 + at, seed=at), replace(params, seed=at), mask)
            for at, mask in enumerate([*masks, None])
        ]
        ahead = launched_ahead(runner)
        served.run()
        assert ahead == ({seqs[3].id} if runner.lookahead else set()), "only this one is computed ahead"
        for seq, mask in zip(seqs, masks, strict=False):
            last = seq.tokens[seq.request.prompt_len - 1 :]
            assert all(abs(after - before) == 1 for before, after in itertools.pairwise(last))
            assert mask.asked == [seq.request.prompt_len + at for at in range(12)]
        found.append(outputs(seqs))
    assert found[0] == found[1]


def test_sequences_follow_their_grammars_and_forced_tokens_are_computed_together(llama: Path) -> None:
    grammars = Grammars(resolve("synthetic"), VOCAB_SIZE)  # whose tokens are bytes
    regexes = ["[a-c]{4}", "the same beginning of (this|that)", "[0-9]+"]
    found = []
    for runner in (device_runner(llama), load_runner(llama, max_num_seqs=6, token_budget=19, max_model_len=120)):
        served, seqs = Served(runner, 60), []
        for at, regex in enumerate(regexes):
            mask = grammars.mask_maker(inference_pb2.Guided(regex=regex))(prompt_len=5 + at)
            params = SamplingParams(max_tokens=40, temperature=0.8 * (at % 2), seed=at)
            seqs.append(served.add(random_prompt(5 + at, seed=at), params, mask))
        seqs.append(served.add(random_prompt(9, seed=9), SamplingParams(max_tokens=20)))
        served.run()
        texts = [bytes(seq.tokens[seq.request.prompt_len :]).decode() for seq in seqs[:3]]
        assert all(re.fullmatch(regex, text) for regex, text in zip(regexes, texts, strict=True))
        assert seqs[1].account.forced_tokens > 20
        found.append(outputs(seqs))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=14),
        SamplingParams(max_tokens=14, temperature=0.9, seed=7, repetition_penalty=1.3, logprobs=2),
    ],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("where", ["device", "device step by step", "CPU"])
def test_a_late_mask_delays_its_own_sequence_alone_and_changes_no_token(
    llama: Path, where: str, params: SamplingParams
) -> None:
    settings = {"max_num_seqs": 6, "token_budget": 19, "max_model_len": 120}
    found = []
    for is_late in (False, True):
        if where == "CPU":
            runner: Runner = load_runner(llama, **settings)
        else:
            runner = device_runner(llama, overlap="on" if where == "device" else "off")
        served, gate = Served(runner, 60), threading.Event()
        gate.set()
        late = served.add(random_prompt(7, seed=1), params, LateMask(NextToLast(VOCAB_SIZE), gate))
        others = [
            served.add(random_prompt(5, seed=2), SamplingParams(max_tokens=30)),
            served.add(random_prompt(6, seed=3), SamplingParams(max_tokens=30), NextToLast(VOCAB_SIZE)),
        ]
        while late.output_len < 4:
            served.step()
        if is_late:
            gate.clear()
            served.step()
            served.step()  # what was launched before has been read
            before = [seq.output_len for seq in (late, *others)]
            for _ in range(8):
                served.step()
            assert late.output_len == before[0]
            assert all(seq.output_len >= count + 4 for seq, count in zip(others, before[1:], strict=True))
            gate.set()
        served.run()
        found.append((outputs([late, *others]), served.logprobs))
        assert served.pool.num_referenced == 0
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    assert [len(each) for each in found[0][1].values()] == [len(each) for each in found[1][1].values()]


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("chance", [0.2, 0.4])
def test_drafts_whose_masks_are_late_change_no_token(llama: Path, overlap: str, chance: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=7, repetition_penalty=1.3)
    expected: list[list[int]] = []
    for drafts in (False, True):
        runner, gate = device_runner(llama, overlap=overlap), threading.Event()
        served = Served(runner, 60, speculation=knowing(runner, expected, accuracy=1.0) if drafts else None)
        gate.set()
        dice = random.Random(8)

        def is_late(tokens: list[int], drafts: bool = drafts, dice: random.Random = dice) -> bool:
            return drafts and dice.random() < chance

        seqs = [
            served.add(random_prompt(7, seed=at), params, LateMask(NextToLast(VOCAB_SIZE), gate, is_late))
            for at in range(3)
        ]
        seqs.append(served.add(random_prompt(5, seed=9), params))
        served.run()
        expected = expected or outputs(seqs)
        assert outputs(seqs) == expected
    accounts = [seq.account for seq in seqs[:3]]
    assert any(0 < each.accepted_tokens < each.drafted_tokens for each in accounts)


def test_more_masks_than_are_sent_at_once_reach_their_rows(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_server.engine.runners.cuda.rows._MASKS_SENT", 2)
    served = Served(device_runner(llama), 60)
    seqs = [
        served.add(random_prompt(3, seed=at), SamplingParams(max_tokens=4), AllowedTokens([7 * at, 7 * at + 1]))
        for at in range(6)
    ]
    served.run()
    assert all(set(tokens) <= {7 * at, 7 * at + 1} for at, tokens in enumerate(outputs(seqs)))


def test_logprobs_come_back_with_the_tokens(llama: Path) -> None:
    here, there = Served(device_runner(llama), 36), Served(load_runner(llama), 36)
    for served in (here, there):
        ask(served, 8)
        served.run()
    assert here.logprobs.keys() == there.logprobs.keys() == {4, 7}
    for id, expected in there.logprobs.items():
        assert len(here.logprobs[id]) == len(expected) == PARAMS[id].max_tokens
        for ours, theirs in zip(here.logprobs[id], expected, strict=True):
            assert ours.top_ids == theirs.top_ids
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert ours.top == pytest.approx(theirs.top, abs=1e-4)


def test_a_sequence_whose_parameters_are_wrong_fails_alone(llama: Path) -> None:
    served = Served(device_runner(llama), 36)
    good = served.add(random_prompt(9, seed=1), SamplingParams(max_tokens=10))
    bad = served.add(random_prompt(9, seed=2), SamplingParams(max_tokens=10, logit_bias=((VOCAB_SIZE, 1.0),)))
    many = served.add(random_prompt(9, seed=3), SamplingParams(max_tokens=10, stop_token_ids=frozenset(range(150))))
    served.run()
    reasons = {ended.seq.id: (ended.reason, ended.detail) for ended in served.ended}
    assert reasons[good.id][0] is EndReason.LENGTH
    assert reasons[bad.id] == (
        EndReason.FAILED,
        f"logit_bias names token {VOCAB_SIZE}; the vocabulary has {VOCAB_SIZE}",
    )
    assert reasons[many.id] == (EndReason.FAILED, "150 stop token ids, the limit is 96")


def test_parameters_are_checked_when_a_sequence_starts_and_not_at_every_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, checked = Served(device_runner(llama), 36), []
    monkeypatch.setattr("pagoda_server.engine.runners.cuda.rows.find_fault", lambda params, _: checked.append(params))
    served.add(random_prompt(9, seed=1), SamplingParams(max_tokens=10))
    served.step()
    at_start = len(checked)
    served.run()
    assert len(checked) == at_start > 0


def test_a_sequence_whose_logits_break_fails_alone(llama: Path) -> None:
    runner = device_runner(llama)
    served = Served(runner, 36)
    seqs = [served.add(random_prompt(9, seed=at), SamplingParams(max_tokens=20)) for at in range(3)]
    for _ in range(4):
        served.step()
    runner._cache[1].values[seqs[1].blocks[0]].fill_(math.nan)
    synchronize()
    served.run()
    assert [ended.seq.id for ended in served.ended if ended.reason is EndReason.FAILED] == [seqs[1].id]
    assert len(outputs(seqs)[0]) == len(outputs(seqs)[2]) == 20


def test_a_step_is_padded_to_a_captured_shape_unless_it_is_large() -> None:
    graphs = StepGraphs(lambda _: None, lambda _: None, max_decodes=256, token_budget=8192, stream=None)
    assert len(graphs.shapes) == 53
    assert graphs.shapes[0] == max(graphs.shapes, key=lambda shape: shape.num_tokens), "its memory holds the others"
    for decodes, tokens, chunks in itertools.product(
        (0, 1, 7, 16, 63, 200, 255), (1, 15, 33, 64, 150, 257, 900), (1, 3, 16)
    ):
        needed = StepShape(decodes, max(tokens, chunks), chunks)
        shape = graphs.fit(needed)
        if shape == needed:
            assert needed.num_tokens > MIXED_TOKENS - 128
        else:
            assert shape in graphs.shapes
            assert shape.decodes >= decodes
            assert shape.tokens >= tokens
            assert shape.chunks > chunks, "the last one has the padded tokens"
    assert graphs.fit(many := StepShape(3, 40, 17)) == many
    assert graphs.fit(StepShape(41)) == StepShape(48)


def test_batch_sizes_end_with_the_largest_and_pad_by_half_at_most() -> None:
    for most in (1, 5, 64, 100, 256, 1000, 2000):
        sizes = decode_sizes(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
        assert all(after - before <= 128 for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_cache_in_8_bits_takes_half_the_memory_and_changes_logprobs_little(llama: Path, kv_cache_dtype: str) -> None:
    exact, small = device_runner(llama), device_runner(llama, kv_cache_dtype=kv_cache_dtype)
    assert small.info.kv_cache.bytes_per_token == 2 * 2 * 2 * (8 + 4)  # layers, keys and values, heads
    assert small.info.num_blocks > 2 * exact.info.num_blocks
    prompt, params = random_prompt(60, seed=1), SamplingParams(max_tokens=1, logprobs=20)
    found = []
    for runner in (exact, small):
        served = Served(runner, 60)
        served.add(prompt, params)
        served.run()
        (of_token,) = served.logprobs[0]
        found.append(dict(zip(of_token.top_ids, of_token.top, strict=True)))
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 14
    errors = [abs(found[0][id] - found[1][id]) for id in shared]
    assert 0 < sum(errors) / len(errors) < 0.3


def test_steps_of_all_sizes_are_rehearsed_though_no_prompt_is_so_long() -> None:
    plans = list(prompts_of_all_sizes(num_tokens=50, longest=20, block_size=8))
    assert [plan.num_tokens for plan in plans] == [2, 4, 8, 16, 32, 50]
    assert [[chunk.length for chunk in plan.chunks] for plan in plans[-2:]] == [[20, 12], [20, 20, 10]]
    assert all(len(chunk.seq.blocks) == -(-chunk.length // 8) for plan in plans for chunk in plan.chunks)


def test_a_rehearsal_leaves_nothing_behind(llama: Path) -> None:
    runner = device_runner(llama)
    runner.warm_up(19)
    served = Served(runner, 36)
    seqs = ask(served, 8)
    served.run()
    assert outputs(seqs) == one_by_one(llama, 8)


def test_a_step_that_does_not_fit_into_memory_names_the_flags_that_help(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device_runner(llama)
    served = Served(runner, 36)
    served.add(random_prompt(9, seed=1), SamplingParams(max_tokens=10))
    rows = 0

    def forward(*_: object) -> None:
        nonlocal rows
        rows += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB. And more")

    monkeypatch.setattr(runner._model, "forward", forward)
    runner._graphs._graphs.clear()
    served.run()
    (ended,) = served.ended
    assert (ended.reason, rows) == (EndReason.FAILED, 2), "it is tried again, alone"
    assert ended.detail == (
        "not enough device memory for a step (CUDA out of memory); "
        "--max-num-seqs, --token-budget, --kv-cache-gb can help"
    )
