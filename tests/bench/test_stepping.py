"""What the schedules do, read from the record of their steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from matplotlib.image import imread

from bench import timeline
from bench.schedules import schedules
from bench.stepping import Recording, Work, record
from bench.workloads import long_tail, uniform
from pagoda_server.engine.scheduling.schedules import SCHEDULES, ScheduleName
from tests.engine.harness import VOCAB_SIZE, synthetic_runner

TAIL = long_tail(VOCAB_SIZE, count=8, short_len=2, long_len=10, one_in=4)  # two of ten tokens, six of two


def recorded(schedule: ScheduleName, max_num_seqs: int = 4) -> Recording:
    counted: Counter[str] = Counter()

    def count(tokens: int) -> None:
        counted["tokens"] += tokens

    recording = record(synthetic_runner(64, 16), TAIL, schedule, max_num_seqs, count)
    assert counted["tokens"] == recording.run.output_tokens == TAIL.output_tokens
    return recording


def work(recording: Recording) -> Counter[Work]:
    return Counter(cell.work for cells in recording.steps for cell in cells)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slot_holds_one_sequence_at_a_time_and_a_sequence_keeps_its_slot(schedule: ScheduleName) -> None:
    recording = recorded(schedule)
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
    assert work(recording)[Work.PADDING] == 2 * 3 * 8  # in each, three members idle for eight steps
    assert recording.slot_use == pytest.approx(32 / 80)


def test_continuous_never_pads_and_needs_the_fewest_steps() -> None:
    recording = recorded("continuous")
    assert work(recording).keys() == {Work.PREFILL, Work.DECODE}
    assert len(recording.steps) < min(len(recorded(other).steps) for other in SCHEDULES if other != "continuous")


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
    schedules(synthetic_runner(64, 16), equal, [1, 2, 4], TAIL, 4, repeat=2, threads=1, output=tmp_path)
    page = (tmp_path / "schedules.md").read_text()
    assert page.count("| sequential |") == page.count("| continuous |") == 2
    for name in ("schedules.png", "timeline.png", *(f"timeline-{schedule}.png" for schedule in SCHEDULES)):
        assert imread(tmp_path / name).shape[0] > 100
        assert name in page
    assert (tmp_path / "schedules.json").exists()
