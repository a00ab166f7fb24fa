"""Traces and metrics as an OpenTelemetry collector receives them: OTLP over HTTP, in the protocol's own messages."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from tests.end_to_end.asking import Answer, chat, request
from tests.servers import Server, running_server

pytestmark = pytest.mark.counterpart

CANARY = "canary-7f3a"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METHOD = "pagoda.v1.Inference/Generate"
MODEL = ("--model", "synthetic", "--step-ms", "1")
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}


class Collector:
    """Receives OTLP, and keeps every byte."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, str], bytes]] = []
        received = self.bodies

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append((self.path, dict(self.headers), body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def requests(self, path: str, kind: type[Any]) -> list[Any]:
        return [kind.FromString(body) for received, _, body in self.bodies if received == path]

    def spans(self) -> list[Span]:
        return [
            span
            for message in self.requests("/v1/traces", ExportTraceServiceRequest)
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def call(self, request_id: str) -> tuple[Span, Span]:
        """The spans of a call: the server's, and below it that of the request."""

        def found() -> tuple[Span, Span] | None:
            for below in self.spans():
                if attributes(below).get("gen_ai.request.id") == request_id:
                    for above in self.spans():
                        if above.span_id == below.parent_span_id:
                            return above, below
            return None

        return waited_for(found)

    def metrics(self) -> dict[str, Any]:
        """The newest of each metric."""
        return {
            metric.name: metric
            for message in self.requests("/v1/metrics", ExportMetricsServiceRequest)
            for resource in message.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def attributes(told: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in told.attributes}


def _value(pair: KeyValue) -> Any:
    kind = pair.value.WhichOneof("value")
    if kind == "array_value":
        return [each.string_value for each in pair.value.array_value.values]
    return getattr(pair.value, str(kind))


def waited_for(found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (what := found()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return what


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    threading.Thread(target=collector.server.serve_forever, daemon=True).start()
    yield collector
    collector.server.shutdown()


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=secret-of-the-collector"}
    with (
        environment(**FAST, **headers),
        running_server(*MODEL, "--http", "127.0.0.1:0", "--otlp-endpoint", collector.endpoint) as server,
    ):
        yield server


@pytest.fixture
def stub(server: Server) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def named(message: inference_pb2.GenerateRequest, request_id: str) -> inference_pb2.GenerateRequest:
    message.request_id = request_id
    return message


def parent(flags: str, trace: str = TRACE, span: str = PARENT) -> tuple[str, str]:
    return ("traceparent", f"00-{trace}-{span}-{flags}")


def test_a_call_is_two_spans_below_its_clients(collector: Collector, stub: inference_pb2_grpc.InferenceStub) -> None:
    metadata = [parent("01"), ("tracestate", "vendor=value"), ("x-pagoda-tenant", "acme")]
    began = time.time_ns()
    list(stub.Generate(named(request(f"{CANARY} hello", 7), "whole"), metadata=metadata, timeout=60))
    ended = time.time_ns()
    above, below = collector.call("whole")
    assert (above.name, above.kind) == (METHOD, Span.SPAN_KIND_SERVER)
    assert (above.trace_id.hex(), above.parent_span_id.hex()) == (TRACE, PARENT)
    assert above.trace_state == below.trace_state == "vendor=value"
    assert attributes(above) == {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
        "pagoda.tenant": "acme",
    }
    assert (below.name, below.kind, below.trace_id.hex()) == ("llm_request", Span.SPAN_KIND_INTERNAL, TRACE)
    told = attributes(below)
    latency = {name: told.pop(name) for name in list(told) if name.startswith("gen_ai.latency.")}
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pagoda",
        "gen_ai.request.model": "synthetic",
        "gen_ai.request.id": "whole",
        "gen_ai.usage.input_tokens": len(CANARY) + 6,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert {name.removeprefix("gen_ai.latency.") for name in latency} == {
        "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    }  # fmt: skip
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert 0.006 < sum(latency[f"gen_ai.latency.{part}"] for part in parts) < latency["gen_ai.latency.e2e"]
    for span in (above, below):
        assert began - 1e7 < span.start_time_unix_nano < span.end_time_unix_nano < ended + 1e7
        assert span.status.code == Status.STATUS_CODE_UNSET


def test_a_call_by_http_is_named_by_its_route(collector: Collector, server: Server) -> None:
    body = {"model": "synthetic", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 3, "stream": True}
    headers = {"traceparent": parent("01")[1], "x-request-id": "by-http", "content-type": "application/json"}
    request = urllib.request.Request(f"{server.http}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
    above, below = collector.call("by-http")
    assert (above.name, above.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert (above.trace_id.hex(), above.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(above) == {"http.request.method": "POST", "http.route": "/v1/chat/completions"}
    assert attributes(below)["gen_ai.operation.name"] == "chat"
    assert attributes(below)["gen_ai.usage.output_tokens"] == 3


def test_embed_and_score_are_operations_of_their_own(
    collector: Collector, stub: inference_pb2_grpc.InferenceStub
) -> None:
    inputs = [inference_pb2.EmbedInput(text="hello")]
    ends = [inference_pb2.Continuation(text="lo")]
    stub.Embed(inference_pb2.EmbedRequest(request_id="read", inputs=inputs), timeout=60)
    stub.Score(inference_pb2.ScoreRequest(request_id="scored", prompt="hel", continuations=ends), timeout=60)
    for method, request_id, operation in (("Embed", "read", "embeddings"), ("Score", "scored", "score")):
        above, below = collector.call(request_id)
        assert above.name == f"pagoda.v1.Inference/{method}"
        told = attributes(below)
        assert told["gen_ai.operation.name"] == operation
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (5, 0)
        assert told["gen_ai.latency.e2e"] > told["gen_ai.latency.time_in_model_prefill"] > 0


def test_the_process_is_named_and_the_environment_overrules_it(collector: Collector) -> None:
    def resources() -> list[dict[str, Any]]:
        messages = collector.requests("/v1/traces", ExportTraceServiceRequest)
        return [attributes(each.resource) for message in messages for each in message.resource_spans]

    (service,) = {(each["service.name"], each["service.version"]) for each in waited_for(resources)}
    assert service == ("pagoda", "0.1.0")
    assert {headers.get("x-api-key") for _, headers, _ in collector.bodies} == {"secret-of-the-collector"}
    named = {"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    with environment(**FAST, **named), running_server(*MODEL, "--otlp-endpoint", collector.endpoint) as server:
        with grpc.insecure_channel(server.address) as channel:
            list(inference_pb2_grpc.InferenceStub(channel).Generate(request("x", 1), timeout=60))
        assert server.stop() == 0
    (mine,) = [each for each in resources() if each["service.name"] == "mine"]  # sent before the end at the latest
    assert mine["deployment.environment.name"] == "test"


def test_a_call_without_a_parent_begins_a_trace_that_the_log_names(
    collector: Collector, server: Server, stub: inference_pb2_grpc.InferenceStub
) -> None:
    list(stub.Generate(named(chat(CANARY, 2), "root"), metadata=[("traceparent", f"00-{TRACE}-01")], timeout=60))
    above, below = collector.call("root")
    assert above.parent_span_id == b""
    assert above.trace_id.hex() != TRACE
    assert attributes(below)["gen_ai.operation.name"] == "chat"
    assert f"request_id=root trace_id={above.trace_id.hex()} " in server.log.read_text()


def test_a_trace_that_its_client_does_not_sample_has_no_spans(
    collector: Collector, server: Server, stub: inference_pb2_grpc.InferenceStub
) -> None:
    trace = "11111111111111111111111111111111"
    list(stub.Generate(named(request("x", 1), "unsampled"), metadata=[parent("00", trace)], timeout=60))
    list(stub.Generate(named(request("x", 1), "after"), timeout=60))
    collector.call("after")
    assert trace not in {span.trace_id.hex() for span in collector.spans()}
    assert f"request_id=unsampled trace_id={trace} " in server.log.read_text()


def test_cancelled_and_failed_calls_tell_their_status(
    collector: Collector, stub: inference_pb2_grpc.InferenceStub
) -> None:
    call = stub.Generate(named(request(CANARY, 5000), "cancelled"))
    next(call)
    call.cancel()
    above, below = collector.call("cancelled")
    assert attributes(above)["rpc.response.status_code"] == attributes(above)["error.type"] == "CANCELLED"
    assert above.status.code == Status.STATUS_CODE_UNSET, "the client's wish is no fault of the server"
    assert attributes(below)["gen_ai.usage.output_tokens"] >= 1

    late = stub.Generate(named(request(CANARY, 30_000), "late"), timeout=2.0)
    with pytest.raises(grpc.RpcError) as caught:
        list(late)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    above, _ = collector.call("late")
    assert attributes(above)["rpc.response.status_code"] in ("DEADLINE_EXCEEDED", "CANCELLED"), "whichever comes first"

    trace = "22222222222222222222222222222222"
    bad = request(CANARY, 1, sampling={"temperature": -1.0})
    for metadata in ([], [parent("01", trace)]):
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(bad, metadata=metadata, timeout=60))

    def refused() -> list[Span]:
        return [span for span in collector.spans() if attributes(span).get("error.type") == "INVALID_ARGUMENT"]

    (span,) = waited_for(refused)  # that of the client who samples
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, PARENT)


def test_histograms_count_requests(collector: Collector, stub: inference_pb2_grpc.InferenceStub) -> None:
    def counts() -> dict[str, int]:
        return {name: sum(p.count for p in m.histogram.data_points) for name, m in collector.metrics().items()}

    list(stub.Generate(named(request("x", 20), "counted"), timeout=60))
    collector.call("counted")
    time.sleep(0.6)  # several exports: all that was counted until now has been sent
    before = counts()
    for _ in range(3):
        list(stub.Generate(request("x", 20), timeout=60))
    waited_for(
        lambda: counts().get("gen_ai.server.request.duration", 0) == before["gen_ai.server.request.duration"] + 3
    )
    assert before.keys() == {
        "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    }  # fmt: skip
    points = collector.metrics()["gen_ai.server.time_per_output_token"].histogram.data_points
    (point,) = [each for each in points if "error.type" not in attributes(each) and _is_completion(each)]
    assert attributes(point) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pagoda",
        "gen_ai.request.model": "synthetic",
    }
    assert list(point.explicit_bounds)[:3] == [0.01, 0.025, 0.05]
    assert point.sum / point.count > 0.0005, "steps of a millisecond"


def _is_completion(point: Any) -> bool:
    return attributes(point)["gen_ai.operation.name"] == "text_completion"


def test_no_text_reaches_the_collector(collector: Collector, stub: inference_pb2_grpc.InferenceStub) -> None:
    message = named(request(CANARY, 20, stop=[CANARY]), "secret")
    text = Answer(list(stub.Generate(message, metadata=[("authorization", f"Bearer {CANARY}")], timeout=60))).text()
    collector.call("secret")
    received = b"".join(body for _, _, body in collector.bodies)
    assert b"llm_request" in received
    assert CANARY.encode() not in received
    assert text.encode() not in received


@pytest.mark.parametrize("is_silent", [False, True], ids=["nothing listens", "it never answers"])
def test_a_collector_that_is_away_changes_nothing_for_clients(is_silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}" if is_silent else "http://127.0.0.1:9"
        with environment(**FAST), running_server(*MODEL, "--otlp-endpoint", endpoint) as server:
            with grpc.insecure_channel(server.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                until = time.monotonic() + 4
                while time.monotonic() < until:
                    answer = Answer(list(stub.Generate(request("hello", 5), timeout=60)))
                    assert len(answer.ids()) == 5
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 60, "it waits a second for the collector"
            log = server.log.read_text()
        assert log.count("OpenTelemetry: ") <= 1, "a line a minute"
        assert is_silent or log.count("OpenTelemetry: ") == 1
        assert "Traceback" not in log


def test_a_wrong_variable_ends_the_start_with_one_line() -> None:
    with environment(OTEL_BSP_MAX_QUEUE_SIZE="-1"), pytest.raises(AssertionError) as caught:  # noqa: SIM117
        with running_server("--model", "synthetic", "--otlp-endpoint", "http://127.0.0.1:9"):
            pass
    assert "error: --otlp-endpoint: an OTEL_* variable has a wrong value: max_queue_size must be" in str(caught.value)
