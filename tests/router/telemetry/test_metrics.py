"""What a router counts, and the page that Prometheus reads."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2, inference_pb2
from pagoda_server.router.errors import (
    Internal,
    InvalidArgument,
    Passed,
    QuotaExceeded,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from pagoda_server.router.process.control import ControlServicer, ServingState
from pagoda_server.router.request.admission import Admission
from pagoda_server.router.request.failover import Failover
from pagoda_server.router.request.generate_call import GenerateCall
from pagoda_server.router.request.migration import Migrations
from pagoda_server.router.request.record import Observers, Record
from pagoda_server.router.request.token_times import TOKEN_BOUNDS, Histogram, TokenTimes
from pagoda_server.router.request.validation import validate_generate
from pagoda_server.router.telemetry.families import FAMILIES
from pagoda_server.router.telemetry.metrics import Page, Tally, engine_samples, parsed
from tests.router.fleets import fleet_of, one_model
from tests.router.test_generate_call import LENGTH, LIMITS, Engine, Letters, Writer, said

STOP, CANCELLED = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_CANCELLED
UNUSED: Any = None
VLLM = {  # as dashboards, autoscalers and endpoint pickers expect them
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("lora_requests_info", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
}


class Samples:
    """A page's samples by name and labels, which are those besides model_name."""

    def __init__(self, page: bytes, parse: Callable[[str], Any] = text_string_to_metric_families) -> None:
        self._found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in parse(page.decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name", None) == (None if sample.name.startswith("process_") else "m")
                assert (sample.name, frozenset(labels.items())) not in self._found
                self._found[sample.name, frozenset(labels.items())] = sample.value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._found}

    def __call__(self, name: str, **labels: str) -> float:
        return self._found[name, frozenset(labels.items())]

    def of(self, name: str) -> list[dict[str, str]]:
        """The labels of all series with this name."""
        return [dict(labels) for found, labels in self._found if found == name]


def tally(router: int = 0, num_engines: int = 1, model: str = "m") -> Tally:
    fleet = fleet_of(*(SimpleNamespace() for _ in range(num_engines)))
    return Tally(fleet, Admission(5, 500), Failover(continues=True, wait_s=0), Migrations(is_on=True), router, model)


def page_of(*tallies: Tally, accept: str = "") -> Samples:
    return Samples(Page("m", [sample for each in tallies for sample in each.samples()]).encoded(accept)[0])


def answer(*reasons: inference_pb2.FinishReason, tokens: int = 5, **timing: float) -> Any:
    usage = inference_pb2.Usage(prompt_tokens=30, completion_tokens=tokens)
    fields: dict[str, Any] = timing
    return SimpleNamespace(reasons=reasons, usage=lambda: usage, timing=lambda: inference_pb2.Timing(**fields))


def end(
    observers: Observers,
    error: BaseException | None = None,
    of: Any = None,
    method: str = "Generate",
    engine: str = "0",
) -> None:
    """A call that ends like this."""
    with contextlib.suppress(BaseException), observers.recording(Record(method, "", (), method)) as record:
        record.answer, record.engine = of, engine
        if error is not None:
            raise error


def counting(*tallies: Tally) -> Observers:
    observers = Observers()
    for each in tallies:
        observers.append(each)
        observers.on_refusal.append(each.refused)
    return observers


def engine(is_ready: bool = True, **load: float) -> Any:
    fields: dict[str, Any] = load
    cache = control_pb2.KvCacheInfo(block_size=16, num_blocks=100)
    ann = control_pb2.TenantLoad(name="ann", running=2, service=70, recent_service=70)
    tenants = engine_pb2.Tenants(listed=[ann], count=1, recent_service=70)
    return SimpleNamespace(
        is_ready=is_ready,
        takes_requests=is_ready,
        info=control_pb2.EngineInfo(kv_cache=cache) if is_ready else None,
        standing=SimpleNamespace(refusals={"weights": 2}),
        sequences=SimpleNamespace(load=control_pb2.EngineLoad(**fields), tenants=tenants),
    )


def page_of_engines(*engines: Any, shows_tenants: bool = True) -> Samples:
    admission, fleet = Admission(5, 5), fleet_of(*engines)
    control = ControlServicer(
        models=(models := one_model(fleet)), admission=admission, fleet=fleet,
        state=ServingState(fleet, admission, models), engine_restarts=UNUSED, max_message_bytes=1, settings={},
    )  # fmt: skip
    samples = engine_samples(fleet, control.load(), restarts=3, is_draining=False, shows_tenants=shows_tenants)
    return Samples(Page("m", samples).encoded("")[0])


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_name_that_others_expect_is_there_and_has_its_pagoda_name_too() -> None:
    names = {name for family in FAMILIES for name in family.full_names}
    assert {name for name in names if name.startswith("vllm:")} == {f"vllm:{name}" for name in VLLM}
    assert {f"pagoda_{name}" for name in VLLM} - names == {"pagoda_lora_requests_info"}
    for family in FAMILIES:
        if "vllm:" in family.prefixes:
            assert family.labels[0] == "engine"


def test_docs_tell_every_name_once() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    told = re.findall(r"^\| `([a-z0-9_:]+)`(?:, `([a-z0-9_:]+)`)?", docs, re.MULTILINE)
    assert sorted(name for pair in told for name in pair if name) == sorted(
        name for family in FAMILIES for name in family.full_names
    )


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"])
def test_both_formats_have_every_series_with_its_colon(accept: str) -> None:
    load = control_pb2.Load(engines=[control_pb2.EngineLoad(name="0", prefill_tokens_per_s=1.0)])
    samples = (*tally().samples(), *engine_samples(fleet_of(engine()), load, 0, False, True))
    content, content_type = Page("m", samples).encoded(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0" if accept else "text/plain")
    names = Samples(content, openmetrics_families if accept else text_string_to_metric_families).names
    for family in FAMILIES:
        for name in family.full_names:
            has_value = {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if family.kind == "histogram" else {name}
            assert has_value <= names or family.name == "tenant_share_ratio"


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_value_counts_in_every_bucket_that_holds_it() -> None:
    counts = tally()
    end(counting(counts), of=answer(STOP, total_s=0.02, prefill_s=0.001, decode_s=7, preempted_s=1, tokens=5))
    page = page_of(counts)
    bucket = "vllm:e2e_request_latency_seconds_bucket"
    counted = [page(bucket, engine="0", method="Generate", le=le) for le in ("0.01", "0.02", "0.05", "+Inf")]
    assert counted == [0, 1, 1, 1]
    assert page("pagoda_e2e_request_latency_seconds_sum", engine="0", method="Generate") == 0.02
    assert page("vllm:request_prefill_time_seconds_bucket", engine="0", method="Generate", le="0.001") == 1
    assert page("vllm:request_decode_time_seconds_sum", engine="0", method="Generate") == 8
    assert page("vllm:request_time_per_output_token_seconds_sum", engine="0", method="Generate") == 2
    assert page("vllm:request_prompt_tokens_sum", engine="0", method="Generate") == 30
    assert page("vllm:request_generation_tokens_sum", engine="0", method="Generate") == 5


def test_calls_count_by_the_way_they_end() -> None:
    counts = tally()
    observers = counting(counts)
    length = inference_pb2.FINISH_REASON_LENGTH
    end(observers, of=answer(STOP, length, length))
    end(observers, of=answer(CANCELLED))  # Admin.Abort
    end(observers, asyncio.CancelledError(), of=answer())
    end(observers, grpc.aio.InternalError("the client has gone"), of=answer())
    end(observers, Internal("a fault"), of=answer(STOP))
    end(observers, UnicodeDecodeError("utf-8", b"", 0, 1, "its reason is for people"), of=answer(STOP))
    end(observers, InvalidArgument("prompt", "is empty"))
    end(observers, ResourceExhausted("full", reason="EVICTED"), of=answer())
    page = page_of(counts)
    assert {each["code"]: page("pagoda_calls_total", **each) for each in page.of("pagoda_calls_total")} == {
        "OK": 2, "CANCELLED": 2, "INTERNAL": 2, "INVALID_ARGUMENT": 1, "RESOURCE_EXHAUSTED": 1,
    }  # fmt: skip
    assert page("pagoda_calls_total", method="Generate", code="RESOURCE_EXHAUSTED", reason="EVICTED") == 1
    ends = [page("vllm:request_success_total", engine="0", finished_reason=r) for r in ("stop", "length", "abort")]
    assert ends == [3, 2, 3]
    assert page("vllm:e2e_request_latency_seconds_count", engine="0", method="Generate") == 2


def test_a_call_counts_at_the_engine_that_served_it() -> None:
    counts = tally(num_engines=2)
    end(counting(counts), of=answer(STOP), engine="1")
    page = page_of(counts)
    assert [page("vllm:e2e_request_latency_seconds_count", engine=at, method="Generate") for at in "01"] == [0, 1]


@pytest.mark.parametrize("method", ["Embed", "Score"])
def test_calls_that_generate_nothing_have_series_of_their_own(method: str) -> None:
    counts = tally()
    before = page_of(counts)
    end(counting(counts), of=answer(*[inference_pb2.FINISH_REASON_LENGTH] * 2, tokens=0, total_s=0.3), method=method)
    page = page_of(counts)
    assert page("pagoda_calls_total", method=method, code="OK", reason="") == 1
    assert page("vllm:e2e_request_latency_seconds_sum", engine="0", method=method) == 0.3
    assert page("vllm:request_prompt_tokens_sum", engine="0", method=method) == 30
    for name in before.names - {"pagoda_calls_total", "pagoda_request_success_total", "vllm:request_success_total"}:
        if not name.startswith(("process_", "pagoda_event_loop")):
            assert all(page(name, **labels) == before(name, **labels) for labels in before.of(name)), name
    for name in ("decode_time_seconds", "time_per_output_token_seconds", "generation_tokens"):
        assert page.of(f"vllm:request_{name}_count") == [{"engine": "0", "method": "Generate"}]


def test_what_another_router_has_served_counts_there_alone() -> None:
    counts = tally()
    observers = counting(counts)
    gone: Any = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, details=str, trailing_metadata=tuple)
    end(observers, method="Resume")
    end(observers, Passed(gone), method="Resume")
    page = page_of(counts)
    assert page.of("pagoda_calls_total") == [{"method": "Generate", "code": "OK", "reason": ""}]


def test_with_several_models_each_series_has_the_model_that_it_is_about() -> None:
    counting_all = tally(num_engines=2, model="")
    observers = counting(counting_all)
    for engine, model in (("0", "one"), ("1", "two")):
        with observers.recording(Record("Generate", "", (), "Generate")) as record:
            record.answer, record.engine, record.model = answer(STOP), engine, model
    observers.refused("/pagoda.v1.Inference/Generate", ResourceExhausted("the queue is full"))
    page = Page("", counting_all.samples(), {"0": "one", "1": "two"}).encoded("")[0].decode()
    lines = page.splitlines()
    assert 'pagoda_request_success_total{engine="0",finished_reason="stop",model_name="one"} 1.0' in lines
    assert 'pagoda_request_success_total{engine="1",finished_reason="stop",model_name="two"} 1.0' in lines
    calls = [line for line in lines if line.startswith("pagoda_calls_total{") and line.endswith(" 1.0")]
    assert [line.partition("model_name=")[2] for line in calls] == ['"one"} 1.0', '"two"} 1.0', '""} 1.0']
    (admitted,) = [line for line in lines if line.startswith("pagoda_admitted_requests{")]
    assert admitted == "pagoda_admitted_requests{} 0.0", "it is that of all models"


def test_calls_that_no_handler_took_up_count_with_bounded_labels() -> None:
    counts = tally()
    observers = counting(counts)
    for _ in range(3):
        observers.refused("/pagoda.v1.Inference/Generate", ResourceExhausted("the queue is full"))
    observers.refused("/inference.GRPCInferenceService/ModelInfer", ResourceExhausted("full"))
    observers.refused("/pagoda.v1.Inference/Resume", QuotaExceeded("max_requests", 1, "it is used up"))
    for at in range(100):
        observers.refused(f"/pagoda.guessed/{at}", Unauthenticated())
    observers.refused("/pagoda.v1.Inference/Generate", Unavailable("the server is draining"))
    page = page_of(counts)
    assert page("pagoda_calls_total", method="Generate", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL") == 4
    assert page("pagoda_calls_total", method="Resume", code="RESOURCE_EXHAUSTED", reason="QUOTA_EXCEEDED") == 1
    assert page("pagoda_calls_total", method="other", code="UNAUTHENTICATED", reason="") == 100
    assert page("pagoda_calls_total", method="Generate", code="UNAVAILABLE", reason="") == 1
    assert len(page.of("pagoda_calls_total")) == 5


def test_a_record_lets_go_of_its_error() -> None:
    seen: list[Record] = []
    observers = Observers()
    observers.append(SimpleNamespace(ended=seen.append))
    end(observers, InvalidArgument("prompt", "is empty"))
    assert seen[0].error is None, "its traceback holds the frame that holds the record"


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_each_token_after_a_sequences_first_counts_with_its_share_of_the_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([1.0, 1.0, 1.0, 3.0, 3.0, 9.0])
    now = 0.0

    def tick() -> float:
        nonlocal now
        now = next(clock, now)
        return now

    monkeypatch.setattr("pagoda_server.router.request.generate_call.time.monotonic", tick)
    times = TokenTimes()
    request = inference_pb2.GenerateRequest(prompt="x", sampling=inference_pb2.Sampling(n=3))
    writer: Any = Writer()
    letters: Any = Letters()
    call = GenerateCall(validate_generate(request, LIMITS), 1, letters, writer, 0.25, times=times)
    stream: Any = Engine(
        {0: said([1]), 1: said([1]), 2: said([1], reason=LENGTH)},
        {0: said([2]), 1: said([2, 3])},
        {0: said([3], reason=LENGTH)},
        {1: said([], reason=LENGTH)},
    )
    await call.run(stream)
    assert (sum(times.first.counts), times.first.total) == (1, 0.75)
    assert sum(times.between.counts) == 1 + 2 + 1
    assert times.between.total == pytest.approx(2 + 2 + 6)


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 2.5):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.5)
    assert list(TOKEN_BOUNDS) == sorted(set(TOKEN_BOUNDS))


# -- several routers ---------------------------------------------------------------------------------------------------


def test_routers_counts_are_summed_and_their_processes_told_apart() -> None:
    first, second = tally(0), tally(1)
    for counts, calls in ((first, 2), (second, 3)):
        for _ in range(calls):
            end(counting(counts), of=answer(STOP, total_s=1))
        counts.times("0").between.add(0.02, 10)
    whole = Page("m", [*first.samples(), *parsed(second.serialized())]).encoded("")[0]
    page = Samples(whole)
    assert page("pagoda_calls_total", method="Generate", code="OK", reason="") == 5
    assert page("vllm:e2e_request_latency_seconds_bucket", engine="0", method="Generate", le="1.0") == 5
    assert page("vllm:e2e_request_latency_seconds_sum", engine="0", method="Generate") == 5
    assert page("vllm:inter_token_latency_seconds_count", engine="0") == 20
    assert page("pagoda_admitted_requests_limit") == 10
    assert [each["router"] for each in page.of("process_cpu_seconds_total")] == ["0", "1"]


# -- engines -----------------------------------------------------------------------------------------------------------


def test_engines_are_told_as_of_their_last_step() -> None:
    page = page_of_engines(
        engine(
            running=3, waiting=4, blocks_total=100, blocks_free=50, blocks_evictable=30, blocks_referenced=20,
            kv_slots=320, kv_slots_unused=32, prompt_tokens=1000, cached_tokens=250, output_tokens=70, preemptions=2,
            step_time_s=0.5, host_blocks_total=8, host_blocks_used=3, drafts=5, drafted_tokens=20, accepted_tokens=12,
            forced_tokens=9, uncomputed_tokens=600, prefill_tokens_per_s=400.0,
        ),
        engine(is_ready=False),
    )  # fmt: skip
    assert page("vllm:num_requests_running", engine="0") == 3
    assert page("vllm:num_requests_waiting", engine="0") == 4
    assert page("vllm:kv_cache_usage_perc", engine="0") == 0.2
    assert page("vllm:cache_config_info", engine="0", block_size="16", num_gpu_blocks="100") == 1
    assert page("vllm:prefix_cache_queries_total", engine="0") == 1000
    assert page("vllm:prefix_cache_hits_total", engine="0") == 250
    assert page("vllm:generation_tokens_total", engine="0") == 70
    assert page("vllm:num_preemptions_total", engine="0") == 2
    names = [f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    for prefix in ("vllm:", "pagoda_"):
        assert [page(f"{prefix}{name}", engine="0") for name in names] == [5, 20, 12]
    assert page("pagoda_forced_tokens_total", engine="0") == 9
    assert page("pagoda_kv_blocks", engine="0", state="evictable") == 30
    assert page("pagoda_kv_waste_ratio", engine="0") == 0.1
    assert page("pagoda_host_blocks", engine="0", state="free") == 5
    assert page("pagoda_step_seconds", engine="0") == 0.5
    assert page("pagoda_uncomputed_prompt_tokens", engine="0") == 600
    assert page("pagoda_predicted_time_to_first_token_seconds", engine="0") == 1.5
    assert [page("pagoda_engine_up", engine=at) for at in "01"] == [1, 0]
    assert page("pagoda_engine_restarts_total", engine="0") == 3
    assert page("pagoda_engine_refusals_total", engine="0", reason="weights") == 2
    assert page.of("vllm:num_requests_running") == [{"engine": "0"}], "the other one has said nothing"


def test_an_engine_that_has_computed_nothing_yet_predicts_nothing() -> None:
    page = page_of_engines(engine(uncomputed_tokens=600))
    assert page("pagoda_uncomputed_prompt_tokens", engine="0") == 600
    assert page.of("pagoda_predicted_time_to_first_token_seconds") == []


def test_counts_of_an_engine_start_over_when_it_does() -> None:
    channel = engine(output_tokens=500)
    assert page_of_engines(channel)("vllm:generation_tokens_total", engine="0") == 500
    channel.sequences.load = control_pb2.EngineLoad(output_tokens=1)
    assert page_of_engines(channel)("vllm:generation_tokens_total", engine="0") == 1


def test_tenants_can_be_left_out() -> None:
    page = page_of_engines(engine())
    assert page("pagoda_tenant_service_total", engine="0", tenant="ann") == 70
    assert page("pagoda_tenant_sequences", engine="0", tenant="ann", state="running") == 2
    assert page("pagoda_tenant_share_ratio", tenant="ann") == 1
    hidden = page_of_engines(engine(), shows_tenants=False)
    assert not [name for name in hidden.names if name.startswith("pagoda_tenant_")]
    assert hidden("pagoda_tenants") == 1
