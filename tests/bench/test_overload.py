"""`bench.micro.overload`: a client that sends whatever the server does, and what it counts."""

from __future__ import annotations

import math

import pytest

from bench.micro.overload import OUTPUT_LEN, Capacity, Load, Outcome, open_loop
from pagoda.v1 import inference_pb2
from tests.servers import Server

FINISHED = inference_pb2.GenerateResponse(finished=inference_pb2.Finished(index=0)).SerializeToString()


def finished(due: float, ttft_s: float, itl_s: float) -> Outcome:
    arrivals = [due + ttft_s + at * itl_s for at in range(OUTPUT_LEN)]
    return Outcome(due, due, [*arrivals, arrivals[-1]], FINISHED, arrivals[-1])


def refused(due: float, after_s: float) -> Outcome:
    return Outcome(due, due, ended=due + after_s)


def test_goodput_counts_requests_that_finish_in_time_and_refusals_apart() -> None:
    capacity = Capacity(rate=10.0, tpot_s=0.01)
    outcomes = [
        refused(0.0, 0.0),
        *(finished(2.0 + at, 0.5, 0.01) for at in range(4)),
        finished(3.0, 2.5, 0.01),  # its TTFT is longer than twice the time for 10 places
        finished(4.0, 0.5, 0.03),
        refused(5.0, 0.004),
        finished(9.9, 0.5, 0.01),  # ends too late
    ]
    load = Load.of(outcomes, 2.0, 10.0, capacity, places=10)
    assert load.goodput == pytest.approx(4 / 9)
    assert load.refused == pytest.approx(1 / 9)
    assert load.refusal_ms == pytest.approx((4.0, 4.0))
    assert load.ttft_ms[0] == pytest.approx(500.0)
    assert load.itl_ms[0] == pytest.approx(10.0)
    assert math.isnan(Load.of(outcomes[:2], 2.0, 100.0, capacity, 10).ttft_ms[0])


def test_every_request_is_sent_and_ends(synthetic_server: Server) -> None:
    outcomes = open_loop(synthetic_server.address, rate=40.0, seconds=0.5)
    assert 8 < len(outcomes) < 40
    assert all(outcome.is_finished and outcome.ttft_s > 0 and outcome.tpot_s > 0 for outcome in outcomes)
