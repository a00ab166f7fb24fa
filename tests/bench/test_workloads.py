from __future__ import annotations

import numpy as np
import pytest

from bench.workloads import (
    SHARED_PREFIX_LEN,
    WORKLOADS,
    Workload,
    mixed,
    poisson,
    prefill,
    rag,
    shared_prefix,
)

VOCAB_SIZE = 49152


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_requests_and_another_seed_others(name: str) -> None:
    make = WORKLOADS[name]
    assert make(VOCAB_SIZE, 7) == make(VOCAB_SIZE, 7)
    assert make(VOCAB_SIZE, 7) != make(VOCAB_SIZE, 8)
    assert make(VOCAB_SIZE, 7).name == name


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_request_fits_the_default_model(name: str) -> None:
    for vocab_size in (258, VOCAB_SIZE):
        workload: Workload = WORKLOADS[name](vocab_size, 3)
        assert workload.longest <= 8192
        for request in workload.requests:
            assert request.output_len >= 1
            assert request.arrival_s >= 0
            assert 0 <= min(request.prompt) <= max(request.prompt) < vocab_size


def test_mixed_is_what_earlier_measurements_ran() -> None:
    workload = mixed(VOCAB_SIZE, 0)
    assert (len(workload.requests), workload.prompt_tokens, workload.output_tokens) == (64, 5719, 4713)
    assert all(8 <= len(request.prompt) <= 256 and 8 <= request.output_len <= 192 for request in workload.requests)
    assert {request.arrival_s for request in workload.requests} == {0.0}


def test_poisson_arrives_at_the_rate_that_was_asked_for() -> None:
    arrivals = [request.arrival_s for request in poisson(VOCAB_SIZE, 1, count=4000, rate=5.0).requests]
    gaps = np.diff(arrivals)
    assert arrivals == sorted(arrivals)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() == pytest.approx(0.2, rel=0.08)  # exponential: its deviation equals its mean


def test_rag_sends_short_requests_one_by_one_beside_long_prompts() -> None:
    requests = rag(VOCAB_SIZE, 0).requests
    long = [request for request in requests if request.kind == "long"]
    short = [request for request in requests if request.kind == "short"]
    assert {(len(request.prompt), request.output_len, request.arrival_s) for request in long} == {(4096, 64, 0.0)}
    assert max(len(request.prompt) for request in short) < 64
    assert len({request.arrival_s for request in short}) == len(short)


def test_shared_prefix_has_prompts_that_begin_alike_and_end_apart() -> None:
    workload = shared_prefix(VOCAB_SIZE, 0)
    assert workload.reuses_prefixes
    assert len({tuple(request.prompt[:SHARED_PREFIX_LEN]) for request in workload.requests}) == 1
    assert len({tuple(request.prompt[SHARED_PREFIX_LEN:]) for request in workload.requests}) == len(workload.requests)


def test_prefill_sends_prompts_that_differ_one_at_a_time() -> None:
    workload = prefill(VOCAB_SIZE, 0)
    assert {(len(request.prompt), request.output_len) for request in workload.requests} == {(512, 1)}
    assert len({tuple(request.prompt) for request in workload.requests}) == len(workload.requests) >= 15
    assert not workload.reuses_prefixes
    assert workload.most_at_once == 1
    assert mixed(VOCAB_SIZE, 0).most_at_once == 64


def test_burst_comes_in_waves_of_the_same_size() -> None:
    arrivals = [request.arrival_s for request in WORKLOADS["burst"](VOCAB_SIZE, 0, count=30, waves=3).requests]
    assert [arrivals.count(moment) for moment in sorted(set(arrivals))] == [10, 10, 10]
