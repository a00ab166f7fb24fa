from __future__ import annotations

import pytest

from pagoda_server.router.errors import ResourceExhausted, Unavailable
from pagoda_server.router.request.admission import Admission, OutputLengths, Reservation


def reserved(admission: Admission, tokens: int) -> Reservation:
    reservation = admission.reserve("")
    try:
        reservation.grow(tokens)
    except ResourceExhausted:
        admission.give_back(reservation)
        raise
    return reservation


async def test_what_is_given_back_can_be_reserved_again() -> None:
    admission = Admission(max_requests=1, max_tokens=100)
    for _ in range(3):
        with reserved(admission, 60) as reservation:
            reservation.grow(40)
            assert (admission.requests, admission.tokens) == (1, 100)
        assert (admission.requests, admission.tokens) == (0, 0)


async def test_a_request_too_many_is_refused_with_delay_and_depth() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    with reserved(admission, 1), reserved(admission, 1):
        with pytest.raises(ResourceExhausted, match="2 requests are admitted, the limit is 2") as caught:
            reserved(admission, 1)
        assert len(caught.value.details) == 2
        assert admission.requests == 2


async def test_tokens_beyond_the_limit_are_refused_at_reserving_and_at_growing() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with reserved(admission, 70), reserved(admission, 20) as second:
        with pytest.raises(ResourceExhausted, match="no room for 11 more"):
            reserved(admission, 11)
        with pytest.raises(ResourceExhausted):
            second.grow(11)
        second.grow(10)
    assert (admission.requests, admission.tokens) == (0, 0)


async def test_a_request_alone_is_let_in_however_large_it_grows() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with reserved(admission, 150) as reservation:
        reservation.grow(500)
        with pytest.raises(ResourceExhausted):
            reserved(admission, 1)


async def test_a_fault_gives_everything_back() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with pytest.raises(ValueError, match="fault"), reserved(admission, 50):
        raise ValueError("fault")
    assert (admission.requests, admission.tokens) == (0, 0)


async def test_nothing_is_admitted_while_draining() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    admission.is_draining = True
    with pytest.raises(Unavailable):
        reserved(admission, 1)


class Output:
    """A request's progress: `num_tokens`, one every `itl_s` since its first one."""

    def __init__(self, now: list[float], num_tokens: int, itl_s: float) -> None:
        self.num_tokens = num_tokens
        self.first_written = now[0] - (num_tokens - 1) * itl_s


def refusal_delay(admission: Admission) -> float | None:
    with pytest.raises(ResourceExhausted) as caught:
        admission.reserve("")
    assert len(str(caught.value.retry_after_s)) <= 4, "few values"
    return caught.value.retry_after_s


async def test_the_retry_delay_is_the_time_that_the_next_running_request_still_takes() -> None:
    now = [100.0]
    admission = Admission(max_requests=3, max_tokens=100_000, clock=lambda: now[0])
    with reserved(admission, 1) as long, reserved(admission, 1) as short, reserved(admission, 1) as waiting:
        assert refusal_delay(admission) == 1.0, "nothing is known"
        long.starts()
        long.follow(Output(now, 100, 0.02), max_output=30_000)
        now[0] += 0.1
        assert refusal_delay(admission) == 30.0, "at most"
        short.starts()
        short.follow(Output(now, 21, 0.05), max_output=61)
        assert refusal_delay(admission) == 30.0, "an estimate is good for a while"
        now[0] += 0.1
        assert refusal_delay(admission) == 2.0
        short.follow(Output(now, 60, 0.05), max_output=61)
        now[0] += 0.1
        assert refusal_delay(admission) == 0.1, "at least"
        waiting.follow(Output(now, 1, 0.0), max_output=2)
        assert refusal_delay(admission) == 0.1


async def test_the_retry_delay_counts_on_requests_to_end_as_early_as_others_did() -> None:
    now = [100.0]
    admission = Admission(max_requests=1, max_tokens=100_000, clock=lambda: now[0])
    for _ in range(60):
        with reserved(admission, 1) as early:
            early.follow(Output(now, 25, 0.1), max_output=100)
    with reserved(admission, 1) as running:
        running.starts()
        running.follow(Output(now, 20, 0.1), max_output=100)
        assert refusal_delay(admission) == 2.0, "a quarter of the 80 tokens that are left, 0.1 s each"


async def test_reserved_tokens_that_reach_the_limit_refuse_a_call_of_whatever_size() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with (
        reserved(admission, 100),
        pytest.raises(ResourceExhausted, match="no room for 1 more tokens"),
    ):
        admission.reserve("")


async def test_a_request_that_runs_over_is_never_refused_and_new_ones_wait_for_it() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with reserved(admission, 60) as first, reserved(admission, 30):
        first.starts()
        first.extend(50)
        assert admission.tokens == 140
        assert admission.refusal("") is not None
    assert admission.tokens == 0


def test_the_likely_length_follows_those_that_ended() -> None:
    lengths = OutputLengths()
    first_guess = lengths.likely
    for _ in range(8):
        lengths.add(1000)
    assert lengths.likely == 1000 > first_guess, "a model that writes more than was guessed shows that soon"
    for length in range(1, 1001):
        lengths.add(length)
    assert 950 < lengths.likely < 1000, "most of the last ones fit, and old ones are forgotten"
    for _ in range(300):
        lengths.add(10)
    assert lengths.likely == 10
