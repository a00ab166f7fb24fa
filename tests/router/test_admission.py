from __future__ import annotations

import pytest

from pagoda_server.router.errors import ResourceExhausted, Unavailable
from pagoda_server.router.request.admission import Admission, Reservation


def reserved(admission: Admission, tokens: int) -> Reservation:
    reservation = admission.reserve("")
    try:
        reservation.grow(tokens)
    except ResourceExhausted:
        admission.give_back(reservation)
        raise
    return reservation


def test_what_is_given_back_can_be_reserved_again() -> None:
    admission = Admission(max_requests=1, max_tokens=100)
    for _ in range(3):
        with reserved(admission, 60) as reservation:
            reservation.grow(40)
            assert (admission.requests, admission.tokens) == (1, 100)
        assert (admission.requests, admission.tokens) == (0, 0)


def test_a_request_too_many_is_refused_with_delay_and_depth() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    with reserved(admission, 1), reserved(admission, 1):
        with pytest.raises(ResourceExhausted, match="2 requests are admitted, the limit is 2") as caught:
            reserved(admission, 1)
        assert len(caught.value.details) == 2
        assert admission.requests == 2


def test_tokens_beyond_the_limit_are_refused_at_reserving_and_at_growing() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with reserved(admission, 70), reserved(admission, 20) as second:
        with pytest.raises(ResourceExhausted, match="90 tokens are reserved, 11 more"):
            reserved(admission, 11)
        with pytest.raises(ResourceExhausted):
            second.grow(11)
        second.grow(10)
    assert (admission.requests, admission.tokens) == (0, 0)


def test_a_request_alone_is_let_in_however_large_it_grows() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with reserved(admission, 150) as reservation:
        reservation.grow(500)
        with pytest.raises(ResourceExhausted):
            reserved(admission, 1)


def test_a_fault_gives_everything_back() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with pytest.raises(ValueError, match="fault"), reserved(admission, 50):
        raise ValueError("fault")
    assert (admission.requests, admission.tokens) == (0, 0)


def test_nothing_is_admitted_while_draining() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    admission.is_draining = True
    with pytest.raises(Unavailable):
        reserved(admission, 1)


def test_the_retry_delay_follows_how_often_places_become_free() -> None:
    now = [0.0]
    admission = Admission(max_requests=1, max_tokens=100, clock=lambda: now[0])
    delays = []
    for interval_s in (5.0, 0.2):
        for _ in range(60):
            now[0] += interval_s
            with reserved(admission, 1):
                pass
        with reserved(admission, 1), pytest.raises(ResourceExhausted) as caught:
            reserved(admission, 1)
        delays.append(caught.value.details[1].retry_delay.ToTimedelta().total_seconds())  # type: ignore[attr-defined]
    assert delays == pytest.approx([5.0, 0.2], rel=0.1)


def test_a_call_that_was_wrong_says_nothing_about_how_often_places_become_free() -> None:
    now = [0.0]
    admission = Admission(max_requests=1, max_tokens=100, clock=lambda: now[0])
    for _ in range(60):
        now[0] += 0.01
        with admission.reserve(""):
            pass
    with admission.reserve(""), pytest.raises(ResourceExhausted) as caught:
        admission.reserve("")
    assert caught.value.retry_after_s == 1.0


def test_reserved_tokens_that_reach_the_limit_refuse_a_call_of_whatever_size() -> None:
    admission = Admission(max_requests=9, max_tokens=100)
    with reserved(admission, 100), pytest.raises(ResourceExhausted, match="100 tokens are reserved, the limit is 100"):
        admission.reserve("")
