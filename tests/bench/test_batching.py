"""The four loops: equal tokens from all, and the differences between their recorded steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from matplotlib.image import imread

from bench.batching import timeline
from bench.batching.experiment import compare
from bench.batching.loops import MODES, Mode, Model
from bench.batching.recording import Recording, Work, record
from bench.workloads import Request, Workload, long_tail, uniform
from pagoda_server.engine.core import sequence as core
from pagoda_server.engine.core.errors import ConfigError
from pagoda_server.engine.core.sequence import SamplingParams, Sequence
from pagoda_server.engine.core.step import Chunk
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.engine.scheduling.scheduler import Scheduler
from tests.engine.harness import VOCAB_SIZE, synthetic_runner
from tests.engine.tiny_models import MODELS, ShuffledBlocks, generate, load_runner, random_prompt, save_model

TAIL = long_tail(VOCAB_SIZE, count=8, short_len=2, long_len=10, one_in=4)  # two of ten tokens, six of two


def recorded(mode: Mode, size: int = 4, workload: Workload = TAIL, num_blocks: int = 64) -> Recording:
    counted: Counter[str] = Counter()

    def count(tokens: int) -> None:
        counted["tokens"] += tokens

    recording, seqs = record(synthetic_runner(num_blocks, 16), workload, mode, size, count)
    assert counted["tokens"] == recording.run.output_tokens == workload.output_tokens
    for seq, request in zip(seqs, workload.requests, strict=True):
        assert seq.tokens[seq.request.prompt_len :] == expected_tokens(request.prompt, request.output_len, VOCAB_SIZE)
    return recording


def requests(*lengths: tuple[int, int]) -> Workload:
    """Requests with these prompt and output lengths."""
    return Workload(
        "", [Request(random_prompt(prompt, seed=at), output) for at, (prompt, output) in enumerate(lengths)]
    )


def work(recording: Recording) -> Counter[Work]:
    return Counter(cell.work for cells in recording.steps for cell in cells)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(MODELS["llama"], path)
    return path


@pytest.mark.parametrize("mode", MODES)
def test_a_real_model_generates_the_same_tokens_in_every_mode(folder: Path, mode: Mode) -> None:
    runner = load_runner(folder, max_num_seqs=4, token_budget=512, max_model_len=60)
    for kv in runner._cache:  # padding must leave nothing behind that a sequence could read
        kv.keys.fill_(float("nan"))
        kv.values.fill_(float("nan"))
    workload = requests((3, 20), (40, 20), (1, 9), (17, 1), (25, 12), (8, 15))
    _, seqs = record(runner, workload, mode, 4, lambda tokens: None)
    for seq in seqs:
        alone = ShuffledBlocks(runner).sequence(seq.tokens[: seq.request.prompt_len], seq.output_len)
        assert seq.tokens[seq.request.prompt_len :] == generate(runner, alone, seq.params.max_tokens, 512)


@pytest.mark.parametrize(
    ("mode", "steps", "padding"),
    [
        ("sequential", 10, 0),
        ("interleaved", 10, 0),
        ("static", 8, 4),  # the first two take 6 steps, the third 2; the second keeps its row for 4 of them
        ("continuous", 6, 0),  # the third takes the place of the second
    ],
)
def test_steps_of_two_places_and_outputs_of_6_2_and_2(mode: Mode, steps: int, padding: int) -> None:
    recording = recorded(mode, 2, requests((3, 6), (3, 2), (3, 2)))
    assert (len(recording.steps), recording.padding_rows) == (steps, padding)


def test_static_pads_every_prompt_to_the_longest_of_its_batch() -> None:
    recording = recorded("static", 3, requests((3, 1), (10, 1), (8, 1), (5, 1), (6, 1)))
    assert len(recording.steps) == 2
    assert recording.padding_rows == (7 + 2) + 1


def test_prompts_that_exceed_a_step_are_cut_and_static_decodes_none_before_all_are_computed() -> None:
    workload = requests((500, 3), (400, 3), (300, 3))
    recording = recorded("static", 3, workload, num_blocks=128)
    assert recording.padding_rows == 100 + 200
    assert [work(Recording("static", 3, [cells], 0, recording.run))[Work.DECODE] for cells in recording.steps] == [
        0, 0, 0, 3, 3,
    ]  # fmt: skip


def test_the_continuous_loop_takes_the_steps_of_the_engines_scheduler() -> None:
    workload = requests((3, 6), (9, 2), (20, 2), (4, 9), (7, 1), (2, 5))
    runner, pool = synthetic_runner(64, 16), BlockPool(64, 16)
    scheduler = Scheduler(
        pool, max_num_seqs=3, token_budget=512, max_model_len=100, prefix_caching=False, clock=lambda: 0.0
    )
    for id, request in enumerate(workload.requests):
        params = SamplingParams(max_tokens=request.output_len)
        scheduler.add(Sequence(id, list(request.prompt), core.Request(len(request.prompt)), params))
    expected = []
    while not (plan := scheduler.schedule()).is_empty:
        expected.append({chunk.seq.id: chunk.length for chunk in plan.chunks})
        scheduler.commit(plan, runner.launch(plan).result())
    found = []

    class Watch:
        def stepped(self, running: list[Sequence], chunks: list[Chunk], served: list[Sequence]) -> None:
            found.append({chunk.seq.id: chunk.length for chunk in chunks})

    seqs = [
        Sequence(id, list(request.prompt), core.Request(len(request.prompt)), SamplingParams(),
                 max_len=len(request.prompt) + request.output_len)
        for id, request in enumerate(workload.requests)
    ]  # fmt: skip
    model = Model(synthetic_runner(64, 16), Watch())
    MODES["continuous"](model, seqs, 3)
    assert found == expected
    assert model.pool.num_available == 64


@pytest.mark.parametrize("mode", MODES)
def test_every_block_comes_back(mode: Mode) -> None:
    class Watch:
        def stepped(self, running: list[Sequence], chunks: list[Chunk], served: list[Sequence]) -> None: ...

    model = Model(synthetic_runner(64, 16), Watch())
    seqs = [Sequence(id, [id], core.Request(1), SamplingParams(), max_len=3 + id) for id in range(5)]
    MODES[mode](model, seqs, 2)
    assert model.pool.num_available == 64


def test_a_batch_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the 4 KV blocks"):
        recorded("static", 3, requests((30, 2), (30, 2), (30, 2)), num_blocks=4)


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_holds_one_sequence_at_a_time_and_a_sequence_keeps_its_slot(mode: Mode) -> None:
    recording = recorded(mode)
    slot_of: dict[int, int] = {}
    for cells in recording.steps:
        assert len({cell.slot for cell in cells}) == len(cells) <= 4
        for cell in cells:
            assert slot_of.setdefault(cell.request, cell.slot) == cell.slot
    assert slot_of.keys() == set(range(8))


def test_sequential_has_one_slot_and_a_step_for_every_token() -> None:
    recording = recorded("sequential")
    assert recording.num_slots == 1
    assert len(recording.steps) == TAIL.output_tokens


def test_interleaved_computes_one_and_the_others_wait_in_their_slots() -> None:
    recording = recorded("interleaved")
    assert len(recording.steps) == TAIL.output_tokens
    for cells in recording.steps:
        assert sum(cell.work is not Work.HELD for cell in cells) == 1
    assert work(recording)[Work.HELD] > 0


def test_static_pads_each_batch_to_its_longest_member() -> None:
    recording = recorded("static")
    assert len(recording.steps) == 20  # two batches, ten steps each
    assert (
        work(recording)[Work.PADDING] == recording.padding_rows == 2 * 3 * 8
    )  # in each, three members idle for eight steps
    assert recording.slot_use == pytest.approx(32 / 80)


def test_continuous_never_pads_and_needs_the_fewest_steps() -> None:
    recording = recorded("continuous")
    assert work(recording).keys() == {Work.PREFILL, Work.DECODE}
    assert len(recording.steps) < min(len(recorded(other).steps) for other in MODES if other != "continuous")


def test_the_picture_has_a_pixel_for_each_slot_and_step_in_its_sequences_color() -> None:
    recording = recorded("static")
    pixels = timeline.image(recording)
    assert pixels.shape == (4, 20, 3)
    assert pixels[0, 0] == pytest.approx(timeline.shade(0, Work.PREFILL))
    assert pixels[0, 1] == pytest.approx(timeline.shade(0, Work.DECODE))
    assert pixels[0, 2] == pytest.approx(timeline.PADDING)
    assert pixels[3, 9] == pytest.approx(timeline.shade(3, Work.DECODE))


def test_neighbours_in_a_slot_differ_in_color() -> None:
    shades = {tuple(timeline.shade(request, Work.DECODE)) for request in range(12)}
    assert len(shades) == 12


def test_the_command_writes_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    equal = uniform(VOCAB_SIZE, 0, 3, 8, 4)
    compare(synthetic_runner(64, 16), equal, [1, 2, 4], TAIL, 4, repeat=2, threads=1, output=tmp_path)
    page = (tmp_path / "batching.md").read_text()
    assert page.count("| sequential |") == page.count("| continuous |") == 2
    for name in ("batching.png", "timeline.png", *(f"timeline-{mode}.png" for mode in MODES)):
        assert imread(tmp_path / name).shape[0] > 100
        assert name in page
    assert (tmp_path / "batching.json").exists()
