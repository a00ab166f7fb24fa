"""How many engines the load asks for, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.fleet.policy import Load, Since, Targets, decide, predicted_ttft_s, taken

TARGETS = Targets()
PLACES = 64
RATE = 1000.0


def engines(count: int, num_sequences: float, uncomputed_tokens: float = 0) -> list[Load]:
    """Engines that share these sequences and prompt tokens equally."""
    return [Load(round(num_sequences / count), PLACES, round(uncomputed_tokens / count), RATE)] * count


def after(seconds: float, loads: Sequence[Load], num_coming: int = 0) -> int:
    """What is asked for after so long under this load, looked at once a second; the first change counts."""
    since = Since()
    for now in range(int(seconds) + 1):
        since, change = decide(since, TARGETS, float(now), loads, num_coming)
        if change:
            return change
    return 0


def test_the_wait_is_predicted_from_what_is_left_to_compute() -> None:
    assert predicted_ttft_s(engines(2, 10, 6000)) == 3.0
    assert predicted_ttft_s([Load(1, PLACES, 100, 0.0)]) == 0.0, "no engine knows its speed yet"
    assert taken(engines(2, 96)) == 0.75
    assert taken([]) == 0.0


def test_a_fleet_grows_once_the_wait_has_been_too_long_for_long_enough() -> None:
    late = engines(2, 10, 2.1 * 2 * RATE)
    assert after(TARGETS.up_after_s - 1, late) == 0
    assert after(TARGETS.up_after_s, late) == 1


def test_a_fleet_grows_once_most_places_have_been_taken_for_long_enough() -> None:
    full = engines(2, 0.85 * 2 * PLACES)
    assert after(TARGETS.up_after_s - 1, full) == 0
    assert after(TARGETS.up_after_s, full) == 1


def test_a_burst_that_passes_changes_nothing() -> None:
    since = Since()
    for now in range(100):
        loads = engines(2, 2 * PLACES) if now % 10 < 8 else engines(2, 0.7 * 2 * PLACES)
        since, change = decide(since, TARGETS, float(now), loads)
        assert not change


def test_a_fleet_awaits_an_engine_that_is_coming_before_it_asks_for_another() -> None:
    assert after(1000, engines(2, 2 * PLACES), num_coming=1) == 0


def test_a_fleet_shrinks_once_one_engine_fewer_has_been_enough_for_long_enough() -> None:
    idle = engines(3, 10)
    assert after(TARGETS.down_after_s - 1, idle) == 0
    assert after(TARGETS.down_after_s, idle) == -1
    assert after(1000, engines(3, 0.5 * 3 * PLACES)) == 0, "two would have three quarters of their places taken"
    assert after(1000, engines(3, 10, 0.7 * 3 * RATE)) == 0, "two would let prompts wait for half of the target"


def test_an_engine_that_does_not_come_is_given_up_once_it_is_not_needed() -> None:
    assert after(TARGETS.down_after_s - 1, engines(2, 10), num_coming=1) == 0
    assert after(TARGETS.down_after_s, engines(2, 10), num_coming=1) == -1
    assert after(1000, engines(2, 0.7 * 2 * PLACES), num_coming=1) == 0, "two have too many of their places taken"


def test_the_last_engine_stays_unless_it_may_end() -> None:
    assert after(1000, engines(1, 0)) == 0
    assert after(1000, []) == 0


def change_of_the_last(seconds: float, load: Callable[[int], Load]) -> int:
    """The change that is asked for after so long, if the last engine may end; its load in each second is given."""
    since = Since()
    for now in range(int(seconds) + 1):
        since, change = decide(since, TARGETS, float(now), [load(now)], may_be_none=True)
        if change:
            return change
    return 0


def test_the_last_engine_ends_once_it_has_computed_nothing_for_long_enough() -> None:
    def idle(now: int) -> Load:
        return Load(0, PLACES, 0, RATE, steps=7)

    assert change_of_the_last(TARGETS.idle_after_s, idle) == 0, "the first look does not know how long it has been so"
    assert change_of_the_last(TARGETS.idle_after_s + 1, idle) == -1


def test_the_last_engine_stays_while_requests_come_and_go_between_two_looks() -> None:
    rarely = TARGETS.idle_after_s / 2
    assert change_of_the_last(10 * rarely, lambda now: Load(0, PLACES, 0, RATE, steps=now // int(rarely))) == 0
    assert change_of_the_last(10 * rarely, lambda now: Load(1, PLACES, 0, RATE, steps=7)) == 0


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.floats(0, 20 * PLACES),
    st.floats(0, 40 * RATE),
)
def test_a_steady_load_makes_a_fleet_grow_or_shrink_but_never_both(
    count: int, num_sequences: float, uncomputed_tokens: float
) -> None:
    since, directions = Since(), set()
    for now in range(0, 8_000, 20):
        since, change = decide(since, TARGETS, float(now), engines(count, num_sequences, uncomputed_tokens))
        count += change
        directions |= {change} - {0}
        assert count >= 1
    assert len(directions) <= 1
