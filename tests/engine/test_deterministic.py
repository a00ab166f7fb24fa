"""--deterministic on a CPU: the logits after a token follow from the tokens before it, to the last bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.progress import no_progress
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import BlockTable, Request, SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk, StepPlan, TokenLogprobs
from pagoda_server.engine.runners.cpu.runner import ModelRunner
from pagoda_server.engine.runners.cpu.sampler import Choice
from pagoda_server.engine.runners.loaded_model import choose_backend
from pagoda_server.kernels import UNQUANTIZED, has_native, set_num_threads
from pagoda_server.settings.engine import Quantization
from tests.checkpoints.tiny_gguf import tiny_model
from tests.engine.test_tensor_parallel import settings_of
from tests.engine.test_tensor_parallel_processes import Group
from tests.engine.tiny_models import MODELS, ShuffledBlocks, load_runner, next_chunk, random_prompt, save_model
from tests.kernels.backends import INSTRUCTION_SETS, using

LOADED_MODEL = "pagoda_server.engine.runners.loaded_model"
SPLIT = 256  # tokens of a context that attention sums before it adds the next ones
RUNNER: dict[str, Any] = {"kv_cache_gb": 0.02, "host_kv_gb": 0.002}
LENGTH = SPLIT + 44  # of every sequence
NUM_SEQS = 3
COMMON = 40  # tokens at the start of the first two sequences

# What a runner is loaded with, by the name of the model that it loads.
CASES = {
    "float32": ("mistral with a sliding window", {"dtype": "float32"}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16", "quantization": "none"}),
    "int8": ("smollm", {"dtype": "bfloat16", "quantization": "int8"}),
    "a cache of int8": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "int4": ("gguf", {"dtype": "bfloat16", "quantization": "int4"}),
    "int4 in float32": ("gguf", {"dtype": "float32", "quantization": "int4"}),
}

pytestmark = pytest.mark.skipif(not has_native(), reason="needs compiled code")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a model that has room for LENGTH tokens, and heads of a size with compiled attention."""
    folders: dict[tuple[str, int], Path] = {}

    def save(name: str, head_dim: int = 16) -> Path:
        if (name, head_dim) not in folders:
            folder = folders[name, head_dim] = tmp_path_factory.mktemp("model")
            if name == "gguf":
                tiny = tiny_model("llama")
                tiny.quantisation = gguf.GGMLQuantizationType.Q4_1
                import_gguf(tiny.write(folder / "model.gguf"), folder, no_progress)
            else:
                config = copy.deepcopy(MODELS[name])
                config.head_dim = head_dim
                config.max_position_embeddings = 2 * LENGTH
                if getattr(config, "sliding_window", None):
                    config.sliding_window = 100
                save_model(config, folder)
        return folders[name, head_dim]

    return save


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    set_num_threads(before)


def load(folder: Path, *, deterministic: bool = True, **how: str) -> ModelRunner:
    return load_runner(folder, deterministic=deterministic, **(RUNNER | how))


def logits_of(runner: ModelRunner, plan: StepPlan) -> Tensor:
    """Execute a plan; return the logits that its tokens are chosen from."""
    seen: list[Tensor] = []
    sample = runner._sampler.sample

    def look(seqs: list[Sequence], logits: Tensor, *arguments: Any, **keywords: Any) -> list[Choice]:
        seen.append(logits.clone())
        return sample(seqs, logits, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._sampler, "sample", look)
        assert not runner.execute(plan).faults
    return seen[0]


def one_by_one(runner: ModelRunner, seq: Sequence) -> Tensor:
    """The logits after every token of a sequence that is computed alone, one token a step."""
    return torch.cat([logits_of(runner, StepPlan([Chunk(seq, at, 1, True)])) for at in range(seq.num_tokens)])


@dataclass(frozen=True)
class Part:
    """What one sequence does in a step.

    restart  what happens to it first: its blocks are lost, copied to host memory and back, or partly those of another
    """

    seq: int
    length: int
    samples: bool
    restart: str


@dataclass(frozen=True)
class Step:
    parts: list[Part]
    threads: int


RESTARTS = ["no"] * 12 + ["recompute", "swap", "prefix"]
PARTS = st.builds(
    Part,
    seq=st.integers(0, NUM_SEQS - 1),
    length=st.one_of(st.just(1), st.integers(2, 9), st.integers(10, LENGTH)),
    samples=st.booleans(),
    restart=st.sampled_from(RESTARTS),
)
DECODES = st.builds(Part, st.integers(0, NUM_SEQS - 1), st.just(1), st.just(True), st.just("no"))
STEPS = st.builds(
    Step,
    st.one_of(
        st.lists(parts, min_size=1, max_size=NUM_SEQS, unique_by=lambda part: part.seq) for parts in (PARTS, DECODES)
    ),
    threads=st.integers(1, 3),
)
SCHEDULES = st.lists(STEPS, min_size=4, max_size=14)


class Company:
    """Sequences whose tokens are known, computed in any order, cut and company.

    expected  what `one_by_one` gives for each
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tokens = [random_prompt(LENGTH, seed) for seed in range(NUM_SEQS)]
        self._tokens[1][:COMMON] = self._tokens[0][:COMMON]
        self._start()
        self.expected = [one_by_one(runner, seq) for seq in self._seqs]

    def differs_in(self, schedule: list[Step]) -> str:
        """Run a schedule; say where its logits first differ from the expected ones, or return an empty text."""
        self._start()
        for number, each in enumerate(schedule):
            set_num_threads(each.threads)
            torch.set_num_threads(each.threads)
            plan, computed = StepPlan([]), []
            for part in each.parts:
                seq = self._seqs[part.seq]
                self._restart(part, plan)
                length = min(part.length, LENGTH - seq.num_computed, 512 - plan.num_tokens)
                if length > 0:
                    plan.chunks.append(Chunk(seq, seq.num_computed, length, part.samples))
                    computed.append(part.seq)
            if not plan.chunks:
                continue
            logits = logits_of(self._runner, plan)
            sampling = [(at, chunk) for at, chunk in zip(computed, plan.chunks, strict=True) if chunk.samples]
            for row, (at, chunk) in enumerate(sampling):
                if not torch.equal(logits[row], self.expected[at][chunk.end - 1]):
                    return f"step {number}: {chunk.length} tokens of sequence {at} up to {chunk.end}"
            for chunk in plan.chunks:
                chunk.seq.num_computed = chunk.end
        return ""

    def _start(self) -> None:
        info = self._runner.info
        self._free = random.Random(0).sample(range(info.num_blocks), info.num_blocks)
        self._seqs = [Sequence(at, tokens, Request(LENGTH), SamplingParams()) for at, tokens in enumerate(self._tokens)]
        for seq in self._seqs:
            seq.blocks = self._new_blocks()

    def _new_blocks(self) -> BlockTable:
        return BlockTable(self._free.pop() for _ in range(-(-LENGTH // self._runner.info.kv_cache.block_size)))

    def _restart(self, part: Part, plan: StepPlan) -> None:
        seq, size = self._seqs[part.seq], self._runner.info.kv_cache.block_size
        old = seq.blocks
        if seq.num_computed == LENGTH or part.restart == "recompute":
            seq.blocks, seq.num_computed = self._new_blocks(), 0
        elif part.restart == "swap" and not plan.saves:
            seq.blocks = self._new_blocks()
            for row, (source, target) in enumerate(zip(old, seq.blocks, strict=True)):
                plan.saves.append((source, row))
                plan.loads.append((row, target))
        elif part.restart == "prefix" and part.seq == 1:
            shared = min(self._seqs[0].num_computed, COMMON) // size
            seq.blocks = BlockTable([*self._seqs[0].blocks[:shared], *self._new_blocks()[shared:]])
            seq.num_computed = shared * size


def check_schedules(company: Company, count: int) -> None:
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(SCHEDULES)
    def check(schedule: list[Step]) -> None:
        assert not company.differs_in(schedule)

    check()


@pytest.mark.parametrize("case", ["float32", "bfloat16", "int8", "int4"])
def test_logits_are_the_same_bits_in_any_company_and_cut(saved: Callable[..., Path], case: str) -> None:
    name, how = CASES[case]
    check_schedules(Company(load(saved(name), **how)), 6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", ["float32", "int8", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("bfloat16", "int4"))]
)
def test_ranks_compute_the_same_bits_in_any_company_and_cut(saved: Callable[..., Path], case: str) -> None:
    name, how = CASES[case]
    group = Group(settings_of(saved(name), deterministic=True, tensor_parallel=2, **(RUNNER | how)))
    try:
        check_schedules(Company(group.runner), 4)
    finally:
        group.leader.close()


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_bits_with_every_instruction_set(
    saved: Callable[..., Path], case: str, instruction_set: str
) -> None:
    name, how = CASES[case]
    with using(instruction_set):
        check_schedules(Company(load(saved(name), **how)), 40)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_mode_a_prompt_computed_at_once_has_other_logits(saved: Callable[..., Path], dtype: str) -> None:
    def differs(*, deterministic: bool) -> bool:
        runner = load(saved("qwen3", 128), deterministic=deterministic, dtype=dtype, quantization="none")
        blocks, prompt = ShuffledBlocks(runner), random_prompt(100, seed=0)
        at_once = runner.logits(Chunk(blocks.sequence(prompt, 1), 0, 100, True))
        return not torch.equal(at_once, one_by_one(runner, blocks.sequence(prompt, 1)))

    assert differs(deterministic=False)
    assert not differs(deterministic=True)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_continuations_that_share_a_prompts_blocks_have_the_logits_that_each_has_alone(
    saved: Callable[..., Path], kv_cache_dtype: str
) -> None:
    runner = load(saved("qwen3", 64), deterministic=False, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    blocks, prompt = ShuffledBlocks(runner), random_prompt(SPLIT + 240, seed=0)
    first = blocks.sequence(prompt, 1)
    logits_of(runner, StepPlan([next_chunk(first)]))
    shared = len(prompt) // runner.info.kv_cache.block_size
    seqs = [blocks.sequence(prompt + random_prompt(4, seed=1 + number), 1) for number in range(12)]
    for seq in seqs:
        seq.blocks[:shared] = first.blocks[:shared]

    def decode(seqs: list[Sequence], at: int) -> Tensor:
        return logits_of(runner, StepPlan([Chunk(seq, at, 1, True) for seq in seqs]))

    for at in range(len(prompt), len(prompt) + 4):
        alone = torch.cat([decode([seq], at) for seq in seqs])
        assert torch.equal(decode(seqs, at), alone)


def test_draws_and_logprobs_are_the_same_alone_and_in_a_batch(saved: Callable[..., Path]) -> None:
    runner = load(saved("qwen3"), dtype="bfloat16", quantization="none")
    params = SamplingParams(
        temperature=0.9, top_p=0.9, top_n_sigma=3.0, repetition_penalty=1.1, logprobs=5, max_tokens=20, seed=4
    )

    def run(num_others: int, chunk_size: int) -> list[tuple[int, TokenLogprobs | None]]:
        blocks = ShuffledBlocks(runner)
        others = [
            blocks.sequence(random_prompt(5 * at + 1, at), 60, SamplingParams(temperature=1.0, seed=at))
            for at in range(num_others)
        ]
        seq = blocks.sequence(random_prompt(70, seed=1), 20, params)
        found = []
        while seq.output_len < 20:
            chunks = [next_chunk(each, chunk_size) for each in (*others, seq)]
            sampled = runner.execute(StepPlan(chunks))
            for chunk, token in zip(chunks, sampled.tokens, strict=True):
                chunk.seq.num_computed = chunk.end
                chunk.seq.tokens += [token] * (token >= 0)
            if sampled.tokens[-1] >= 0:
                found.append((sampled.tokens[-1], sampled.logprobs[-1]))
        return found

    alone = run(0, 1000)
    for num_others, chunk_size in ((3, 1000), (9, 7)):
        assert run(num_others, chunk_size) == alone


@pytest.mark.parametrize(
    ("dtype", "quantization", "has_grouped_weights", "expected"),
    [
        (torch.float32, "auto", True, UNQUANTIZED),
        (torch.bfloat16, "none", True, UNQUANTIZED),
        (torch.bfloat16, "int8", True, "int8"),
        (torch.float32, "int4", True, "int4"),
    ],
)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_mode_takes_products_of_compiled_code(
    dtype: torch.dtype, quantization: Quantization, has_grouped_weights: bool, expected: str, instruction_set: str
) -> None:
    with using(instruction_set):
        chosen = choose_backend(torch.device("cpu"), dtype, quantization, has_grouped_weights, True)
    assert chosen == ("native", expected)


def test_amx_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LOADED_MODEL}.has_native_int8_weight", lambda: True)
    cpu = torch.device("cpu")
    assert choose_backend(cpu, torch.bfloat16, "int8", has_grouped_weights=True) == ("native", "int8-weight")
    assert choose_backend(cpu, torch.bfloat16, "int8", True, is_deterministic=True) == ("native", "int8")
    with using(INSTRUCTION_SETS[0]):
        assert choose_backend(cpu, torch.bfloat16, "auto", True, is_deterministic=True) == ("native", "int4")


def test_what_cannot_be_computed_so_is_refused(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--deterministic: .* not in float16"):
        load(saved("qwen3"), dtype="float16")
    save_model(MODELS["llama"], tmp_path)
    with pytest.raises(ConfigError, match="--deterministic: there is no compiled attention for heads of 8"):
        load(tmp_path)
    monkeypatch.setattr(f"{LOADED_MODEL}.has_native", lambda: False)
    with pytest.raises(ConfigError, match=r"--deterministic needs .* C\+\+ compiler"):
        load(saved("qwen3"), dtype="bfloat16")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_the_default_model_has_the_same_logits_alone_and_in_a_batch_of_32(
    default_model_folder: Path, dtype: str, quantization: str
) -> None:
    runner = load_runner(
        default_model_folder, dtype=dtype, quantization=quantization, deterministic=True, kv_cache_gb=1.0
    )
    set_num_threads(2)
    compared = (0, 13, 31)
    rng = random.Random(0)
    prompts = [rng.choices(range(runner.info.vocab_size), k=rng.randint(1, 400)) for _ in range(32)]

    def run(asked: list[int], chunk_size: int) -> dict[int, Tensor]:
        """Generate 200 tokens for each of these prompts; return the logits of each token of those that are compared."""
        blocks = ShuffledBlocks(runner)
        seqs = {at: blocks.sequence(prompts[at], 200) for at in asked}
        logits: dict[int, list[Tensor]] = {at: [] for at in compared}
        while todo := [at for at in asked if seqs[at].output_len < 200]:
            chunks, taken = [], []
            for at in todo:
                if (room := 512 - sum(chunk.length for chunk in chunks)) > 0:
                    chunks.append(next_chunk(seqs[at], min(chunk_size, room)))
                    taken.append(at)
            rows = iter(logits_of(runner, StepPlan(chunks)))
            for at, chunk in zip(taken, chunks, strict=True):
                chunk.seq.num_computed = chunk.end
                if chunk.samples:
                    row = next(rows)
                    chunk.seq.tokens.append(int(row.argmax()))
                    if at in compared:
                        logits[at].append(row.clone())
        return {at: torch.stack(rows) for at, rows in logits.items() if rows}

    together = run(list(range(32)), chunk_size=100)
    for at in compared:
        assert torch.equal(run([at], chunk_size=512)[at], together[at])
