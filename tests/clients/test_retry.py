"""The retry rules in simulated time."""

from __future__ import annotations

import grpc
import pytest

from pagoda import Overloaded, Unavailable
from pagoda.connection import Attempts


def unavailable(retry_after_s: float | None = None) -> Unavailable:
    return Unavailable("gone", grpc.StatusCode.UNAVAILABLE, retry_after_s)


def test_backoff_doubles_up_to_two_seconds_and_jitter_only_shortens_it() -> None:
    longest = Attempts(7, None, jitter=lambda: 1.0)
    delays = [longest.delay_after(unavailable(), has_begun=False) for _ in range(7)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    shortest = Attempts(1, None, jitter=lambda: 0.0)
    assert shortest.delay_after(unavailable(), has_begun=False) == pytest.approx(0.05)


@pytest.mark.parametrize(("jitter", "factor"), [(0.0, 1.0), (1.0, 1.25)])
def test_a_suggested_delay_replaces_the_backoff_and_is_spread(jitter: float, factor: float) -> None:
    attempts = Attempts(3, None, jitter=lambda: jitter)
    assert attempts.delay_after(unavailable(1.25), has_begun=False) == factor * 1.25
    assert attempts.delay_after(Overloaded("full", 2.5), has_begun=False) == factor * 2.5


def test_a_suggested_delay_of_more_than_30_s_is_left_to_the_caller() -> None:
    with pytest.raises(Overloaded):
        Attempts(3, None).delay_after(Overloaded("full", 30.1), has_begun=False)


def test_the_deadline_is_one_for_all_attempts() -> None:
    now = [100.0]
    attempts = Attempts(5, 1.0, clock=lambda: now[0], jitter=lambda: 1.0)
    assert attempts.remaining_s() == 1.0
    now[0] += 0.75
    assert attempts.remaining_s() == 0.25
    assert attempts.delay_after(unavailable(), has_begun=False) == pytest.approx(0.1)
    with pytest.raises(Unavailable):
        attempts.delay_after(unavailable(0.25), has_begun=False)
    now[0] += 5.0
    assert attempts.remaining_s() == 0.0
