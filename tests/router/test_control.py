"""Control over several engines, which the test plays."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, inference_pb2, trace_pb2
from pagoda_server.router.engines.refusals import Standing
from pagoda_server.router.errors import InvalidArgument, ResourceExhausted
from pagoda_server.router.process.control import (
    MAX_TENANTS_LISTED,
    ControlServicer,
    ServingState,
    add_tenants,
)
from pagoda_server.router.request.admission import Admission
from pagoda_server.router.request.fields import Limits
from pagoda_server.router.telemetry.load_feed import MAX_TRACES, LoadFeed, watch_interval_s
from pagoda_server.router.tenants.caller import ANYONE, set_caller
from pagoda_server.router.text.chat_template import ChatTemplate
from tests.router.fleets import fleet_of, one_model

READS = (control_pb2.CAPABILITY_EMBED, control_pb2.CAPABILITY_SCORE)
LIMITS = Limits(max_model_len=100, vocab_size=50, kv_token_capacity=1000)
UNUSED: Any = None


@pytest.fixture(autouse=True)
def anyone() -> None:
    set_caller(ANYONE)


def engine(is_ready: bool = True, has_been_ready: bool = True, role: str = "both", **load: float) -> Any:
    async def trace(last_s: float | None) -> list[trace_pb2.StepTracePart]:
        return [trace_pb2.StepTracePart()]

    fields: dict[str, Any] = load
    return SimpleNamespace(
        is_ready=is_ready,
        takes_requests=is_ready,
        is_suspect=False,
        role=role,
        retry_after_s=None,
        model="m",
        has_been_ready=is_ready or has_been_ready,
        standing=Standing(),
        info=control_pb2.EngineInfo(architecture="llama") if is_ready else None,
        sequences=SimpleNamespace(load=control_pb2.EngineLoad(**fields), tenants=engine_pb2.Tenants()),
        num_sequences=0,
        questions=SimpleNamespace(trace=trace),
    )


def tokenizer(template: str | None = None, **recommended: float) -> Any:
    return SimpleNamespace(
        chat_template=template and ChatTemplate(template), eos_token_ids=(7,), recommended=recommended, has_bytes=True
    )


def control(*engines: Any, tokenizer: Any = UNUSED) -> ControlServicer:
    admission, fleet = Admission(5, 5), fleet_of(*engines)
    return ControlServicer(
        models=(models := one_model(fleet, tokenizer, LIMITS)), admission=admission, fleet=fleet,
        state=ServingState(fleet, admission, models), engine_restarts=lambda: 3, max_message_bytes=1,
        settings={},
    )  # fmt: skip


def test_load_has_an_entry_for_each_engine_that_is_ready() -> None:
    away = engine(False, running=100)
    first = engine(running=1, kv_slots=8, kv_slots_unused=2, prompt_tokens=10, cached_tokens=5)
    load = control(away, first, engine(running=2)).load()
    assert [(entry.engine, entry.running) for entry in load.engines] == [(1, 1), (2, 2)]
    assert [(entry.kv_waste, entry.prefix_hit_rate) for entry in load.engines] == [(0.25, 0.5), (0, 0)]
    assert not first.sequences.load.kv_waste, "the channel's own figures stay as the engine reported them"


async def test_server_info_has_an_entry_for_each_engine_in_whatever_state() -> None:
    engines = (engine(), engine(False), engine(False, has_been_ready=False))
    info = await control(*engines).GetServerInfo(control_pb2.GetServerInfoRequest(), UNUSED)
    assert [(each.engine, each.state, each.HasField("info")) for each in info.engines] == [
        (0, control_pb2.ENGINE_STATE_READY, True),
        (1, control_pb2.ENGINE_STATE_UNAVAILABLE, False),
        (2, control_pb2.ENGINE_STATE_LOADING, False),
    ]
    assert [each.restarts for each in info.engines] == [3, 3, 3]
    assert info.uptime_s > 0


@pytest.mark.parametrize(
    ("engines", "is_draining", "expected"),
    [
        ((engine(),), False, control_pb2.SERVER_STATE_SERVING),
        ((engine(), engine(False)), False, control_pb2.SERVER_STATE_SERVING),
        ((engine(role="prefill"), engine(role="decode")), False, control_pb2.SERVER_STATE_SERVING),
        ((engine(role="prefill"),), False, control_pb2.SERVER_STATE_UNAVAILABLE),
        ((engine(False),), False, control_pb2.SERVER_STATE_UNAVAILABLE),
        ((engine(False, has_been_ready=False),), False, control_pb2.SERVER_STATE_STARTING),
        ((engine(),), True, control_pb2.SERVER_STATE_DRAINING),
    ],
)
def test_the_servers_state_is_that_of_its_engines_unless_it_drains(
    engines: tuple[Any, ...], is_draining: bool, expected: control_pb2.ServerState
) -> None:
    admission = Admission(5, 5)
    admission.is_draining = is_draining
    fleet = fleet_of(*engines)
    assert ServingState(fleet, admission, one_model(fleet)).state == expected


async def listed(tokenizer: Any) -> control_pb2.ModelInfo:
    servicer = control(engine(), tokenizer=tokenizer)
    (model,) = (await servicer.ListModels(control_pb2.ListModelsRequest(), UNUSED)).models
    return model


async def test_a_model_tells_what_it_can_do_and_what_its_template_reads() -> None:
    plain = await listed(tokenizer())
    assert (plain.name, plain.architecture, plain.vocab_size, plain.max_model_len) == ("m", "llama", 50, 100)
    assert list(plain.eos_token_ids) == [7]
    always = [control_pb2.CAPABILITY_GENERATE, control_pb2.CAPABILITY_GUIDED]
    assert list(plain.capabilities) == [*always, *READS]
    chats = await listed(tokenizer("{{ messages[0].content }}{{ style }}"))
    assert list(chats.capabilities) == [*always, control_pb2.CAPABILITY_CHAT, *READS]
    assert list(chats.template_kwargs) == ["style"]
    assert control_pb2.CAPABILITY_TOOLS in (await listed(tokenizer("{{ tools }}"))).capabilities


async def test_models_are_listed_without_an_engine() -> None:
    servicer = control(engine(False), tokenizer=tokenizer())
    (model,) = (await servicer.ListModels(control_pb2.ListModelsRequest(), UNUSED)).models
    assert (model.name, model.ready) == ("m", False)


async def test_recommended_sampling_is_passed_on_where_a_request_could_ask_for_it() -> None:
    model = await listed(tokenizer(temperature=0.5, top_k=20))
    assert model.recommended_sampling == inference_pb2.Sampling(temperature=0.5, top_k=20)
    for wrong in ({"temperature": -1}, {"top_k": -1}, {"top_p": "high"}, {"top_p": 7}, {"top_k": 0.5}):
        assert not (await listed(tokenizer(**wrong))).HasField("recommended_sampling")
    assert not (await listed(tokenizer())).HasField("recommended_sampling")


async def test_a_trace_tells_engines_by_number_and_name() -> None:
    written: list[tuple[int, str]] = []

    class Context:
        async def write(self, part: trace_pb2.StepTracePart) -> None:
            written.append((part.engine, part.name))

    context: Any = Context()
    await control(engine(), engine(False), engine()).GetStepTrace(trace_pb2.GetStepTraceRequest(), context)
    assert written == [(0, "0"), (2, "2")]


async def test_few_step_traces_are_taken_at_once() -> None:
    taken = asyncio.Event()

    async def trace(last_s: float | None) -> list[trace_pb2.StepTracePart]:
        await taken.wait()
        return []

    slow = engine()
    slow.questions.trace = trace
    servicer, request = control(slow), trace_pb2.GetStepTraceRequest()
    calls = [asyncio.create_task(servicer.GetStepTrace(request, UNUSED)) for _ in range(MAX_TRACES)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match=r"^4 calls of GetStepTrace are running, the limit is 4$"):
        await servicer.GetStepTrace(request, UNUSED)
    calls[0].cancel()
    taken.set()
    await asyncio.gather(*calls, return_exceptions=True)
    await servicer.GetStepTrace(request, UNUSED)


@pytest.mark.usefixtures("virtual_time")
async def test_watchers_share_one_load_which_outlives_the_first_of_them() -> None:
    made: list[control_pb2.Load] = []
    written: list[control_pb2.Load] = []
    asked = asyncio.Event()

    async def make() -> control_pb2.Load:
        made.append(control_pb2.Load())
        await asked.wait()
        return made[-1]

    class Context:
        async def write(self, load: control_pb2.Load) -> None:
            written.append(load)

    feed, context = LoadFeed(make), Context()
    watchers = [
        asyncio.create_task(feed.watch(control_pb2.WatchLoadRequest(), context))  # type: ignore[arg-type]
        for _ in range(5)
    ]
    await asyncio.sleep(0.01)
    watchers[0].cancel()
    asked.set()
    await asyncio.sleep(0.01)
    assert len(made) == 1
    assert len(written) == 4
    assert all(load is made[0] for load in written)
    for watcher in watchers:
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)


@pytest.mark.parametrize("seconds", [1e15, -1e15, 3600.5, 0, 0.049, math.nan, math.inf])
def test_an_interval_that_cannot_be_waited_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match=r"^interval_s: is .*, must be in \[0.05, 3600\]$"):
        watch_interval_s(control_pb2.WatchLoadRequest(interval_s=seconds))


def test_an_interval_has_parts_of_a_second() -> None:
    assert watch_interval_s(control_pb2.WatchLoadRequest()) == 1.0
    assert watch_interval_s(control_pb2.WatchLoadRequest(interval_s=1.25)) == 1.25


def tenants(count: int = 0, **services: int) -> engine_pb2.Tenants:
    listed = [
        control_pb2.TenantLoad(name=name, running=1, waiting=2, service=3 * service, recent_service=service)
        for name, service in services.items()
    ]
    return engine_pb2.Tenants(
        listed=listed, count=count or len(listed), recent_service=sum(services.values()) + 10 * (count > len(listed))
    )


def added(*engines: engine_pb2.Tenants) -> control_pb2.Load:
    load = control_pb2.Load()
    add_tenants(load, engines)
    return load


def test_a_tenant_of_two_engines_is_summed_and_shares_are_of_all_service() -> None:
    load = added(tenants(a=30, b=10), tenants(b=40, c=20))
    assert [(tenant.name, tenant.share) for tenant in load.tenants] == [("b", 0.5), ("a", 0.3), ("c", 0.2)]
    b = load.tenants[0]
    assert (b.running, b.waiting, b.service, b.recent_service) == (2, 4, 150, 50)
    assert load.num_tenants == 3


def test_service_of_tenants_that_are_not_listed_counts_in_the_shares() -> None:
    load = added(tenants(count=7, a=30))
    assert load.tenants[0].share == 0.75
    assert load.num_tenants == 7


def test_no_more_are_listed_for_several_engines_than_for_one() -> None:
    load = added(*(tenants(**{f"{at} {number}": number for number in range(40)}) for at in range(2)))
    assert (len(load.tenants), load.num_tenants) == (MAX_TENANTS_LISTED, 80)
    assert load.tenants[0].recent_service == 39
    assert load.tenants[-1].recent_service == 8


def test_an_engine_that_has_served_no_tenant_has_no_shares() -> None:
    assert added(tenants(a=0)).tenants[0].share == 0
    assert added(engine_pb2.Tenants()).num_tenants == 0
