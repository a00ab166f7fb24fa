"""Prefixes that were found once are in a file, and change no token: after a kill, damage, another engine's writes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from pagoda_server.engine.core.sequence import Sequence, State
from pagoda_server.engine.loop.steps_in_flight import StepsInFlight
from pagoda_server.engine.runners.synthetic import StepTime
from tests.engine.harness import SteppedEngine
from tests.engine.test_scheduler import prompt
from tests.engine.unreliable import UnreliableRunner

LONG = 33  # tokens, eight full blocks


def small(path: Path, host_blocks: int = 32, **settings: object) -> SteppedEngine:
    """A cache for one long prompt."""
    return SteppedEngine(
        num_blocks=12, block_size=4, token_budget=64, host_blocks=host_blocks, store_path=path, **settings
    )  # type: ignore[arg-type]


def served(engine: SteppedEngine, seed: int, **fields: object) -> Sequence:
    """A long prompt that is served alone."""
    seq = engine.add(prompt(LONG, seed), max_tokens=3, **fields)  # type: ignore[arg-type]
    engine.run()
    engine.scheduler.check_integrity()
    assert engine.outputs[seq.id] == engine.expected(seq)
    return seq


def num_stored(engine: SteppedEngine) -> int:
    return engine.scheduler.host.load().stored_blocks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "blocks"


@pytest.fixture
def filled(path: Path) -> Path:
    """A file with the blocks of prompts 0 and 1."""
    engine = small(path)
    for seed in (0, 0, 1, 1):
        served(engine, seed)
    assert num_stored(engine) == 16
    return path


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_came_twice_is_in_the_file_and_one_that_came_once_is_not(path: Path, lookahead: int) -> None:
    engine = small(path, lookahead=lookahead)
    served(engine, 0)
    assert num_stored(engine) == 0
    served(engine, 0)
    assert num_stored(engine) == 8


def test_an_engine_that_starts_again_has_the_last_used_prompt_cached(filled: Path) -> None:
    engine = small(filled)
    assert engine.num_restored == 6, "half of its cache"
    assert served(engine, 1).account.cached_tokens >= 24


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_only_the_file_has_is_read_and_not_computed(filled: Path, lookahead: int) -> None:
    engine = small(filled, lookahead=lookahead)
    seq = served(engine, 0)
    assert seq.account.cached_tokens == 32
    load = engine.scheduler.host.load()
    assert (load.read_tokens, load.failed_blocks) == (32, 0)
    assert served(engine, 0).account.cached_tokens == 32


def test_a_sequence_waits_for_the_file_and_others_run_meanwhile(filled: Path) -> None:
    engine = small(filled, step_time=StepTime(0.01))
    engine.jobs_a_step = 0
    waits, runs = engine.add(prompt(LONG, 0), 3), engine.add(prompt(5, 7), 3)
    plan = engine.step()
    assert [chunk.seq for chunk in plan.chunks] == [runs]
    assert engine.scheduler.num_waiting == 1
    assert engine.scheduler.next_deadline > 0.0
    engine.jobs_a_step = 1
    engine.run()
    assert waits.account.cached_tokens == 32
    assert engine.outputs[waits.id] == engine.expected(waits)


def test_a_disk_that_hangs_delays_a_sequence_for_two_seconds_at_most(filled: Path) -> None:
    engine = small(filled)
    engine.jobs_a_step = 0
    seq = engine.add(prompt(LONG, 0), 3)
    assert engine.step().is_empty
    engine.now = engine.scheduler.next_deadline
    assert engine.now <= 2.0
    engine.run()
    assert seq.account.cached_tokens == 0
    assert engine.outputs[seq.id] == engine.expected(seq)
    engine.jobs_a_step = 1
    engine.run()
    assert engine.scheduler.host.load().read_tokens == 32, "what came late is cached"


def test_a_sequence_leaves_the_file_in_time_to_be_computed_by_its_deadline(filled: Path) -> None:
    engine = small(filled, step_time=StepTime(0.0, 0.0, 0.01))
    for seed in (2, 3, 4):
        served(engine, seed)
    engine.jobs_a_step = 0
    seq = engine.add(prompt(LONG, 0), 3, timeout_s=0.8)
    while seq.state is not State.FINISHED:
        if engine.step().is_empty:
            engine.now = max(engine.now, min(engine.scheduler.next_deadline, engine.now + 0.05))
    assert engine.outputs[seq.id] == engine.expected(seq)


def test_two_sequences_wait_for_one_read(filled: Path) -> None:
    engine = small(filled)
    seqs = [engine.add(prompt(LONG, 0), 3) for _ in range(2)]
    engine.run()
    assert [seq.account.cached_tokens for seq in seqs] == [32, 32]
    assert engine.scheduler.host.load().read_tokens == 32


def test_the_siblings_of_a_request_wait_with_the_first(filled: Path) -> None:
    engine = small(filled)
    seqs = engine.add_siblings(3, prompt(LONG, 0), 3)
    engine.run()
    assert seqs[0].account.cached_tokens == 32
    for seq in seqs:
        assert engine.outputs[seq.id] == engine.expected(seq)


@pytest.mark.parametrize("aborts", ["aborted", "late"])
def test_a_sequence_that_ends_while_it_waits_leaves_nothing_behind(filled: Path, aborts: str) -> None:
    engine = small(filled)
    engine.jobs_a_step = 0
    seq = engine.add(prompt(LONG, 0), 3, timeout_s=0.25)
    engine.step()
    if aborts == "aborted":
        engine.abort(seq.id)
    else:
        engine.now += 10.0
        engine.step()
    assert seq.state is State.FINISHED
    assert engine.scheduler.num_waiting == 0
    engine.jobs_a_step = 1
    engine.run()
    engine.scheduler.check_integrity()


def test_another_salt_finds_nothing(filled: Path) -> None:
    assert served(small(filled), 0, salt="two").account.cached_tokens == 0


def test_a_request_that_bypasses_the_cache_reads_nothing(filled: Path) -> None:
    engine = small(filled)
    assert served(engine, 0, bypass=True).account.cached_tokens == 0
    assert engine.scheduler.host.load().read_tokens == 0


def test_a_flush_empties_the_file_whatever_is_under_way(filled: Path) -> None:
    engine = small(filled)
    served(engine, 2)
    engine.jobs_a_step = 0
    seqs = [engine.add(prompt(LONG, 2), 3), engine.add(prompt(LONG, 0), 3)]
    engine.step()
    engine.scheduler.flush_cache()
    engine.scheduler.check_integrity()
    engine.jobs_a_step = 1
    engine.run()
    for seq in seqs:
        assert engine.outputs[seq.id] == engine.expected(seq)
    assert num_stored(engine) == 0
    assert small(filled).num_restored == 0


def test_engines_share_what_each_has_written(path: Path) -> None:
    one, two = small(path), small(path)
    served(one, 0)
    served(one, 0)
    two.store._refreshed_at -= 60.0  # type: ignore[union-attr]  # as if that long had passed
    assert served(two, 0).account.cached_tokens == 0, "it did not know yet"
    served(two, 1)
    served(two, 2)
    two.scheduler.host._cache.flush()  # type: ignore[union-attr]
    assert served(two, 0).account.cached_tokens == 32


@pytest.mark.parametrize("failure", ["at launch", "when read", "computed"])
def test_what_a_failed_step_saved_is_not_written(path: Path, failure: str) -> None:
    engine = small(path, lookahead=1)
    engine.runner = unreliable = UnreliableRunner(engine.runner)
    engine.steps = StepsInFlight(engine.scheduler, unreliable)
    served(engine, 0)
    unreliable.failures = [failure]
    served(engine, 0)
    assert num_stored(engine) < 8
    again = small(path)
    assert served(again, 0).account.cached_tokens < 32


def test_a_full_disk_fails_no_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    served(engine, 0)
    monkeypatch.setattr(engine.store._file, "_write", full)  # type: ignore[union-attr]
    served(engine, 0)
    load = engine.scheduler.host.load()
    assert (load.stored_blocks, load.failed_blocks) == (0, 8)
    engine.scheduler.check_integrity()


def test_copies_that_fail_end_no_loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(path, host_blocks=8)

    def fail(_: object) -> None:
        raise RuntimeError("as the test asks")

    served(engine, 0)
    monkeypatch.setattr(engine.runner, "copy", fail)
    served(engine, 0)
    assert num_stored(engine) < 8, "only what steps have saved"
    monkeypatch.undo()
    served(engine, 0)
    assert num_stored(engine) == 8


def test_writes_never_take_more_than_an_eighth_of_host_memory(path: Path) -> None:
    engine = small(path, host_blocks=16)
    engine.jobs_a_step = 0
    served(engine, 0)
    served(engine, 0)
    stored = engine.scheduler.host.stored
    assert stored is not None
    assert len(stored.hosts()) == 2
    engine.jobs_a_step = 1
    engine.run()
    assert num_stored(engine) == 8


def test_damage_changes_no_token(filled: Path) -> None:
    check_damage(filled, range(60))


@pytest.mark.nightly
def test_ten_thousand_kinds_of_damage_change_no_token(filled: Path) -> None:
    check_damage(filled, range(10_000))


def check_damage(path: Path, seeds: range) -> None:
    """Damage copies of a file, before an engine opens them or under its hands; each serves all its prompts rightly."""
    whole = path.read_bytes()
    found = 0
    for seed in seeds:
        dice = Random(seed)
        content = bytearray(whole)
        damaged = path.with_name("damaged")
        damaged.unlink(missing_ok=True)
        is_open = dice.random() < 0.5
        kind = dice.choice(["flip", "cut", "zeros", "swap"])
        at = dice.randrange(len(content)) if dice.random() < 0.5 else dice.randrange(4096, len(content))
        if kind == "flip":
            content[at] ^= 1 << dice.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "zeros":
            content[at : at + 512] = bytes(len(content[at : at + 512]))
        else:
            other = dice.randrange(4096, len(content) - 32)
            content[at : at + 32] = content[other : other + 32][: len(content[at : at + 32])]
        damaged.write_bytes(whole if is_open else content)
        engine = small(damaged)
        if is_open:
            with damaged.open("r+b") as file:
                file.write(content)
                file.truncate()
        for prompt_seed in (0, 1):
            found += served(engine, prompt_seed).account.cached_tokens
        assert engine.store is not None
        engine.store._file.close()
    assert found > len(seeds) * 32, "most blocks are whole"
