"""Quotas of tenants, in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_server.router.errors import QuotaExceeded
from pagoda_server.router.tenants.quotas import Quota, Quotas


class Minutes:
    """Quotas of the tenant "a", and a clock that the test moves."""

    def __init__(self, quota: Quota) -> None:
        self.now = 0.0
        self.quotas = Quotas(clock=lambda: self.now)
        self.quotas.replace({"a": quota})

    def spend(self, reserved: int, used: int) -> None:
        with self.quotas.enter("a") as spending:
            spending.reserve(reserved)
            spending.used = used

    def retry_after_s(self, tokens: int) -> float | None:
        with self.quotas.enter("a") as spending, pytest.raises(QuotaExceeded) as caught:
            spending.reserve(tokens)
        return caught.value.retry_after_s


@given(st.integers(1, 10**6) | st.none(), st.integers(1, 100))
def test_the_parts_of_hosts_are_no_more_than_the_quota_or_one_each(whole: int | None, hosts: int) -> None:
    parts = Quota(whole, whole, whole).part(hosts)
    for part in (parts.max_requests, parts.requests_per_minute, parts.tokens_per_minute):
        if whole is None:
            assert part is None
        else:
            assert part is not None
            assert part >= 1
            assert whole - hosts < part * hosts <= max(whole, hosts)


def test_a_tenant_without_a_quota_is_not_limited() -> None:
    quotas = Minutes(Quota(max_requests=1)).quotas
    for _ in range(3):
        quotas.enter("b").reserve(10**12)
    assert quotas.refusal("b") is None


def test_requests_at_once_are_counted_until_they_end() -> None:
    quotas = Minutes(Quota(max_requests=2)).quotas
    with quotas.enter("a"):
        with quotas.enter("a"), pytest.raises(QuotaExceeded, match="quota max_requests is 2: 2 requests run"):
            quotas.enter("a")
        assert quotas.refusal("a") is None
    with quotas.enter("a"), quotas.enter("a"):
        assert quotas.refusal("a") is not None


def test_requests_a_minute_come_back_one_by_one() -> None:
    minutes = Minutes(Quota(requests_per_minute=6))
    for _ in range(6):
        minutes.spend(0, 0)
    refusal = minutes.quotas.refusal("a")
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(10)
    minutes.now += 10
    minutes.spend(0, 0)
    assert minutes.quotas.refusal("a") is not None


def test_the_delay_is_when_the_tokens_are_there_and_not_before() -> None:
    minutes = Minutes(Quota(tokens_per_minute=6000))
    minutes.spend(6000, 5500)
    delay_s = minutes.retry_after_s(1500)
    assert delay_s == pytest.approx(10)  # 500 are there, 100 more come each second
    minutes.now += 0.99 * delay_s
    assert minutes.retry_after_s(1500) is not None
    minutes.now += 0.01 * delay_s
    minutes.spend(1500, 1500)


def test_what_was_reserved_and_not_used_is_there_at_once() -> None:
    minutes = Minutes(Quota(tokens_per_minute=1000))
    for _ in range(9):
        minutes.spend(900, 10)
    minutes.spend(900, 900)
    assert minutes.retry_after_s(100) is not None


def test_what_an_answer_uses_beyond_its_reservation_is_paid_for_later() -> None:
    minutes = Minutes(Quota(tokens_per_minute=6000))

    def wait_s() -> float:
        refusal = minutes.quotas.refusal("a")
        assert refusal is not None
        assert refusal.retry_after_s is not None
        return refusal.retry_after_s

    with minutes.quotas.enter("a") as spending:
        spending.reserve(1000)
        for _ in range(4):
            spending.extend(2000)
        assert wait_s() == pytest.approx(30, rel=0.01)  # 9,000 are taken, 100 come back each second
        spending.used = 8000
    assert wait_s() == pytest.approx(20, rel=0.01)


def test_a_request_beyond_the_whole_quota_is_told_that_waiting_does_not_help() -> None:
    minutes = Minutes(Quota(tokens_per_minute=1000))
    with minutes.quotas.enter("a") as spending, pytest.raises(QuotaExceeded, match="a smaller max_tokens") as caught:
        spending.reserve(1001)
    assert caught.value.retry_after_s is None
    minutes.spend(1000, 0)


def test_a_new_quota_counts_what_was_used_under_the_old_one() -> None:
    minutes = Minutes(Quota(max_requests=2, tokens_per_minute=1000))
    minutes.spend(900, 900)
    with minutes.quotas.enter("a"):
        minutes.quotas.replace({"a": Quota(max_requests=1, tokens_per_minute=1500)})
        assert minutes.quotas.refusal("a") is not None
    assert minutes.retry_after_s(700) == pytest.approx(60 * 100 / 1500)
    minutes.quotas.replace({})
    minutes.spend(10**9, 10**9)


@dataclass
class Request:
    """A request in a simulation: when it comes, how long it runs, what it reserves and which part of that it uses."""

    pause_s: float
    length_s: float
    reserves: int
    part: float


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            Request,
            pause_s=st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0, 61.0]),
            length_s=st.sampled_from([0.0, 0.5, 3.0, 20.0, 60.0, 300.0]),
            reserves=st.integers(1, 600),
            part=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        ),
        max_size=60,
    )
)
def test_no_interval_sees_more_used_than_its_length_allows_and_one_minutes_worth(requests: Sequence[Request]) -> None:
    limit = 600
    minutes = Minutes(Quota(tokens_per_minute=limit))
    running: list[tuple[float, int, object]] = []
    used: list[tuple[float, int]] = []  # counted when the request was admitted
    arrival = 0.0
    for request in requests:
        arrival += request.pause_s
        for ends, tokens, spending in sorted(running, key=lambda each: each[0]):
            if ends <= arrival:
                minutes.now = ends
                spending.used = tokens  # type: ignore[attr-defined]
                spending.__exit__(None, None, None)  # type: ignore[attr-defined]
        running = [each for each in running if each[0] > arrival]
        minutes.now = arrival
        try:
            spending = minutes.quotas.enter("a")
        except QuotaExceeded:
            continue
        try:
            spending.reserve(request.reserves)
        except QuotaExceeded:
            spending.__exit__(None, None, None)
            continue
        tokens = int(request.part * request.reserves)
        running.append((arrival + request.length_s, tokens, spending))
        used.append((arrival, tokens))
    for first in range(len(used)):
        total = 0
        for at, tokens in used[first:]:
            total += tokens
            assert total <= limit + limit / 60 * (at - used[first][0]) + 1e-6
