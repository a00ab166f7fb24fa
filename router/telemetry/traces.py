"""Traces and metrics of calls for an OpenTelemetry collector, made when a call ends and sent by threads of the SDK.

Importing this module needs the extra `tracing`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from importlib.metadata import version
from typing import TypeAlias

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from ..errors import ConfigError
from ..request.record import Answer, Record
from .logs import finish_reasons, reason_of, trace_id_of

CLOSE_S = 1.0  # that the router's end waits for the collector to take what is left
COMPLAINT_S = 60.0  # between two lines about the collector
SERVICE = "pagoda"
# Statuses for which the server is at fault, as OpenTelemetry's conventions for gRPC have it.
FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
# Bounds of the histograms' buckets in seconds, as the conventions for generative AI advise.
DURATIONS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKENS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LATER_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_OPERATIONS = {"Embed": "embeddings", "Score": "score"}  # by method
FIRST_TOKEN = "gen_ai.latency.time_to_first_token"

Attributes: TypeAlias = "dict[str, AttributeValue]"

log = logging.getLogger("pagoda.router")


class Traces:
    """An observer of calls that sends two spans for each, below its client's, and three histograms.

    endpoint  URL of a collector that takes OTLP over HTTP
    model     the one that requests ask for unless their records say otherwise

    Raises ConfigError if one of the SDK's environment variables has an impossible value.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._about: Attributes = {"gen_ai.provider.name": SERVICE, "gen_ai.request.model": model}
        complaints = logging.getLogger("opentelemetry")
        complaints.propagate = False
        complaints.addHandler(_RareComplaints())
        base = endpoint.rstrip("/")
        try:
            resource = _resource()
            self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
            reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics"))
            self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        except ValueError as error:
            raise ConfigError(f"--otlp-endpoint: an OTEL_* variable has a wrong value: {error}") from error
        self._tracer = self._tracers.get_tracer(SERVICE)
        histogram = self._meters.get_meter(SERVICE).create_histogram
        self._duration = histogram(
            "gen_ai.server.request.duration", "s", "From the receipt of a request to its last token.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )  # fmt: skip
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token", "s", "From the receipt of a request to its first token.",
            explicit_bucket_boundaries_advisory=FIRST_TOKENS,
        )  # fmt: skip
        self._later_tokens = histogram(
            "gen_ai.server.time_per_output_token", "s", "Mean time of a request's tokens after the first.",
            explicit_bucket_boundaries_advisory=LATER_TOKENS,
        )  # fmt: skip

    def ended(self, record: Record) -> None:
        parent = _parent(record)
        if record.answer is None and record.error is not None and not _is_sampled(parent):
            return  # such calls may come by thousands a second: one has a span only if its client wants that
        duration_s = record.duration_s
        start = int(1e9 * record.received_s)
        end = start + int(1e9 * duration_s)
        server = self._tracer.start_span(record.route, parent, SpanKind.SERVER, _of_call(record), start_time=start)
        if (context := server.get_span_context()).is_valid:  # not with OTEL_SDK_DISABLED
            record.trace_id = format_trace_id(context.trace_id)
        if record.answer is not None:
            operation = _OPERATIONS.get(record.method) or ("chat" if record.is_chat else "text_completion")
            about = self._about | {"gen_ai.operation.name": operation}
            if record.model:
                about["gen_ai.request.model"] = record.model
            attributes = _of_request(record, record.answer, duration_s)
            self._observe(record, record.answer, about, attributes, duration_s)
            if server.is_recording():
                below = set_span_in_context(server, Context())
                request = self._tracer.start_span("llm_request", below, attributes=about | attributes, start_time=start)
                _end(request, record, end)
        _end(server, record, end)

    def close(self) -> None:
        """Send what is left, if the collector takes it soon."""
        # The SDK waits long for a collector that is away. These threads end with the process.
        threads = [
            threading.Thread(target=provider.shutdown, daemon=True) for provider in (self._tracers, self._meters)
        ]
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _observe(
        self, record: Record, answer: Answer, about: Attributes, attributes: Attributes, duration_s: float
    ) -> None:
        if record.code is not grpc.StatusCode.OK:
            about = about | {"error.type": record.code.name}
        self._duration.record(duration_s, about)
        first_s = attributes.get(FIRST_TOKEN)
        if isinstance(first_s, float):
            self._first_token.record(first_s, about)
            later = answer.num_tokens / max(1, len(answer.reasons)) - 1  # of each sequence
            if later > 0:
                self._later_tokens.record(max(0.0, duration_s - first_s) / later, about)


def _of_call(record: Record) -> Attributes:
    """Attributes of the span of the call itself."""
    named = {"pagoda.tenant": record.tenant, "pagoda.adapter": record.adapter}
    attributes: Attributes = {name: value for name, value in named.items() if value}
    if " " in record.route:
        attributes["http.request.method"], attributes["http.route"] = record.route.split(" ", 1)
    else:
        attributes |= {
            "rpc.system.name": "grpc",
            "rpc.method": record.route,
            "rpc.response.status_code": record.code.name,
        }
    if record.code is not grpc.StatusCode.OK:
        attributes["error.type"] = record.code.name
    return attributes


def _of_request(record: Record, answer: Answer, duration_s: float) -> Attributes:
    """Attributes of the span of a request that an engine had: tokens by their conventions, times by vLLM's names."""
    usage, timing = answer.usage(), answer.timing()
    attributes: Attributes = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.latency.e2e": duration_s,
    }
    if answer.first_written is not None and record.method == "Generate":
        attributes[FIRST_TOKEN] = timing.time_to_first_token_s
    if record.num_failovers:
        attributes["pagoda.failovers"] = record.num_failovers
    if reasons := answer.reasons:  # before the first end, the engine has sent nothing
        attributes |= {
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": [name.lower() for name in finish_reasons(reasons)],
            "gen_ai.latency.time_in_queue": timing.queue_s,
            "gen_ai.latency.time_in_model_prefill": timing.prefill_s,
            "gen_ai.latency.time_in_model_decode": timing.decode_s,
            "gen_ai.latency.time_in_model_inference": timing.prefill_s + timing.decode_s,
        }
    return attributes


def _end(span: Span, record: Record, end: int) -> None:
    if record.code in FAULTS:
        span.set_status(StatusCode.ERROR, reason_of(record.error))
    span.end(end)


def _parent(record: Record) -> Context:
    """The client's span, as its traceparent and tracestate name it; an empty context if they name none."""
    if not trace_id_of(record.metadata):
        return Context()
    carrier: dict[str, list[str]] = {}
    for name, value in record.metadata:
        if name in ("traceparent", "tracestate") and isinstance(value, str):
            carrier.setdefault(name, []).append(value)
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _is_sampled(context: Context) -> bool:
    return get_current_span(context).get_span_context().trace_flags.sampled


def _resource() -> Resource:
    """This process, as the collector sees it. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES overrule it."""
    own = Resource(
        {
            SERVICE_NAME: SERVICE,
            "service.version": version("pagoda-server"),
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",  # of several routers each counts its own
        }
    )
    return Resource.get_empty().merge(own).merge(OTELResourceDetector().detect())


class _RareComplaints(logging.Handler):
    """Logs what the SDK complains of, such as a collector that is away: a line a minute, which counts the rest."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_at = 0.0
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + COMPLAINT_S
            log.warning("OpenTelemetry: %s (%d since the last such line)", record.getMessage(), self._count)
            self._count = 0
