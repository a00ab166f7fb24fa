"""Control over several engines, which the test plays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.router.engines.dispatch import Dispatcher
from pagoda_server.router.errors import InvalidArgument
from pagoda_server.router.request.admission import Admission
from pagoda_server.router.request.control import ControlServicer, watch_interval_s


def engine(is_ready: bool = True, **load: float) -> Any:
    async def trace(request: control_pb2.TraceRequest) -> list[control_pb2.TracePart]:
        return [control_pb2.TracePart()]

    fields: dict[str, Any] = load
    return SimpleNamespace(
        is_ready=is_ready, load=control_pb2.Load(**fields), tenants=engine_pb2.Tenants(), num_live_sequences=0,
        trace=trace,
    )  # fmt: skip


def control(*engines: Any) -> ControlServicer:
    unused: Any = None
    return ControlServicer(
        model="m", tokenizer=unused, limits=unused, admission=Admission(5, 5), dispatcher=Dispatcher(engines),
        live=unused, state=unused, engine_restarts=unused, max_message_bytes=1, settings={},
    )  # fmt: skip


def test_load_is_summed_but_for_the_step_which_is_the_first_engines_that_is_ready() -> None:
    away = engine(False, running=100, step_tokens=100)
    load = control(away, engine(running=1, step_tokens=7, step_s=0.5), engine(running=2, step_tokens=9)).load()
    assert (load.running, load.step_tokens, load.step_s) == (3, 7, 0.5)
    assert control(engine(running=1), engine(step_tokens=9)).load().step_tokens == 0


async def test_a_trace_names_engines_by_their_place_among_the_addresses() -> None:
    written: list[int] = []

    class Context:
        async def write(self, part: control_pb2.TracePart) -> None:
            written.append(part.engine)

    context: Any = Context()
    await control(engine(), engine(False), engine()).Trace(control_pb2.TraceRequest(), context)
    assert written == [0, 2]


@pytest.mark.parametrize("seconds", [10**15, -(10**15), 3601, 0])
def test_an_interval_that_cannot_be_waited_is_refused(seconds: int) -> None:
    request = control_pb2.WatchLoadRequest()
    request.interval.seconds = seconds
    with pytest.raises(InvalidArgument, match=r"interval: .* is outside \[0.05, 3600\] s"):
        watch_interval_s(request)


def test_an_interval_has_parts_of_a_second() -> None:
    request = control_pb2.WatchLoadRequest()
    assert watch_interval_s(request) == 1.0
    request.interval.FromMilliseconds(1250)
    assert watch_interval_s(request) == 1.25
