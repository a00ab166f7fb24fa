"""Prometheus metrics: what a router counts, what it knows of the engines, and the page that shows both.

Each router counts calls and tokens itself, in plain numbers. Where several routers share a port, the page has the sums.
What the routers know of the engines is the same for all of them: the page has it once, as of each engine's last step,
so that a scrape costs the engines nothing. Counts start over when the process that counts them does.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TypeAlias

import grpc
from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString

from pagoda.v1 import control_pb2, inference_pb2

from ... import installed_version
from ..engines.channel import EngineChannel
from ..engines.choosing import REASONS
from ..engines.fleet import Fleet
from ..errors import PagodaError, Passed
from ..request.admission import Admission
from ..request.failover import Failover
from ..request.migration import Migrations
from ..request.record import Answer, Record
from ..request.token_times import TOKEN_BOUNDS, Histogram, TokenTimes
from .families import FAMILIES, MODEL_LABEL, OF_ENGINES, OF_REQUESTS, Family

# A family's name, the values of its labels, and a number, or a histogram's counts with the total at the end.
Sample: TypeAlias = tuple[str, tuple[str, ...], "float | list[float]"]

_LAG_EVERY_S = 0.1
_METHODS = {each.name: each.name for each in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}
_METHODS |= dict.fromkeys(("ModelInfer", "ModelStreamInfer"), "Generate")  # of KServe's protocol
_READING = ("Embed", "Score")  # they generate nothing
_BOUNDS = {each.name: each.bounds for each in OF_REQUESTS}
_FINISHED = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CANCELLED: "abort",
}


# -- what a router counts ----------------------------------------------------------------------------------------------


class _EngineCounts:
    """What a router counts of one engine's calls."""

    def __init__(self) -> None:
        self.times = TokenTimes()
        # By method and name; those of other methods begin with their first call.
        self.requests = {("Generate", each.name): Histogram(each.bounds) for each in OF_REQUESTS}
        self.finished = Counter(dict.fromkeys(_FINISHED.values(), 0))


class Tally:
    """What one router counts: an observer of its calls.

    failover  counts those that lost their engine
    migrations  counts those that left one which is going to end
    router    this router's number among those that share a port
    model     the one that is served; empty: there are several, and a call's record names its own
    """

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        failover: Failover,
        migrations: Migrations,
        router: int,
        model: str,
    ) -> None:
        self._fleet = fleet
        self._of_engines: dict[str, _EngineCounts] = {}
        self._model = model
        self._calls = Counter({("Generate", "OK", "", model): 0})
        self._lag = Histogram(TOKEN_BOUNDS)
        self._admission = admission
        self._failover = failover
        self._migrations = migrations
        self._router = str(router)
        self._process = ProcessCollector(registry=None)

    def ended(self, record: Record) -> None:
        answer, code = record.answer, record.code
        is_passed_on = isinstance(record.error, Passed) or (answer is None and code is grpc.StatusCode.OK)
        if is_passed_on:  # another router has counted it
            return
        reason = record.error.reason if isinstance(record.error, PagodaError) else ""
        self._calls[record.method, code.name, reason, record.model or self._model] += 1
        if answer is None:
            return
        counts = self._of(record.engine)
        for end in answer.reasons:
            if (name := _FINISHED.get(end)) is not None:
                counts.finished[name] += 1
        if code is grpc.StatusCode.CANCELLED:
            counts.finished["abort"] += 1
        elif code is grpc.StatusCode.OK:
            for name, value in _values_of(answer, record.method):
                key = record.method, name
                if key not in counts.requests:
                    counts.requests[key] = Histogram(_BOUNDS[name])
                counts.requests[key].add(value)

    def times(self, engine: str) -> TokenTimes:
        """The times of an engine's tokens, which the calls themselves fill."""
        return self._of(engine).times

    def _of(self, engine: str) -> _EngineCounts:
        return self._of_engines.setdefault(engine, _EngineCounts())

    def refused(self, method: str, error: PagodaError) -> None:
        """Count a call that was refused before a handler took it up."""
        name = _METHODS.get(method.rpartition("/")[2], "other")
        self._calls[name, error.code.name, error.reason, self._model] += 1

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled."""
        while True:
            due = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.add(max(0.0, time.monotonic() - due))

    def samples(self) -> Iterator[Sample]:
        # An engine that has left takes its series along.
        self._of_engines = {channel.name: self._of(channel.name) for channel in self._fleet.channels}
        for engine, counts in self._of_engines.items():
            times = counts.times
            yield "time_to_first_token_seconds", (engine,), [*times.first.counts, times.first.total]
            yield "inter_token_latency_seconds", (engine,), [*times.between.counts, times.between.total]
            for (method, name), histogram in counts.requests.items():
                yield name, (engine, method), [*histogram.counts, histogram.total]
            for reason, count in counts.finished.items():
                yield "request_success", (engine, reason), count
            for reason in REASONS:
                yield "engine_choices", (engine, reason), self._fleet.chooser.choices[engine, reason]
            yield "prefix_tokens_predicted", (engine,), self._fleet.chooser.predicted[engine]
        for labels, number in self._calls.items():
            yield "calls", labels, number
        for outcome, number in self._failover.outcomes.items():
            yield "failovers", (outcome,), number
        for outcome, number in self._migrations.outcomes.items():
            yield "migrations", (outcome,), number
        yield "admitted_requests", (), self._admission.requests
        yield "requests_without_engine", (), self._failover.waiting.num
        yield "admitted_requests_limit", (), self._admission.max_requests
        yield "reserved_tokens", (), self._admission.tokens
        yield "reserved_tokens_limit", (), self._admission.max_tokens
        yield "event_loop_lag_seconds", (self._router,), [*self._lag.counts, self._lag.total]
        for metric in self._process.collect():
            yield metric.name.removeprefix("process_"), (self._router,), metric.samples[0].value

    def serialized(self) -> bytes:
        return json.dumps(list(self.samples())).encode()


def _values_of(answer: Answer, method: str) -> Iterator[tuple[str, float]]:
    """What the histograms of requests count of one that has completed; times are those of its slowest sequence."""
    usage, timing = answer.usage(), answer.timing()
    yield "e2e_request_latency_seconds", timing.total_s
    yield "request_queue_time_seconds", timing.queue_s
    yield "request_prefill_time_seconds", timing.prefill_s
    yield "request_prompt_tokens", usage.prompt_tokens
    if method in _READING:
        return
    decode_s = timing.decode_s + timing.preempted_s  # most are preempted after their first token
    yield "request_decode_time_seconds", decode_s
    if (tokens := usage.completion_tokens / len(answer.reasons)) > 1:
        yield "request_time_per_output_token_seconds", decode_s / (tokens - 1)
    yield "request_generation_tokens", usage.completion_tokens


def parsed(serialized: bytes) -> Iterator[Sample]:
    """The samples of another router's tally."""
    for name, labels, value in json.loads(serialized):
        yield name, tuple(labels), value


# -- what the routers know of the engines ------------------------------------------------------------------------------


def engine_samples(
    fleet: Fleet, load: control_pb2.Load, restarts: int, is_draining: bool, shows_tenants: bool
) -> Iterator[Sample]:
    """What any router knows of the engines and the server, without asking them.

    load      as of each ready engine's last step
    restarts  of engines by this server
    """
    yield "server_info", (installed_version(),), 1
    yield "draining", (), is_draining
    yield "tenants", (), load.num_tenants
    for channel in fleet.channels:
        engine = channel.name
        yield "engine_up", (engine,), channel.takes_requests
        yield "engine_restarts", (engine,), restarts
        for reason, count in channel.standing.refusals.items():
            yield "engine_refusals", (engine, reason), count
        if channel.info is not None:
            cache = channel.info.kv_cache
            yield "cache_config_info", (engine, str(cache.block_size), str(cache.num_blocks)), 1
            yield "lora_requests_info", (engine, *_adapters_of(channel)), time.time()
        for tenant in channel.sequences.tenants.listed if shows_tenants else ():
            yield "tenant_service", (engine, tenant.name), tenant.service
            yield "tenant_sequences", (engine, tenant.name, "running"), tenant.running
            yield "tenant_sequences", (engine, tenant.name, "waiting"), tenant.waiting
    for tenant in load.tenants if shows_tenants else ():
        yield "tenant_share_ratio", (tenant.name,), tenant.share
    for each in load.engines:
        yield from _samples_of_engine(each)


def _adapters_of(channel: EngineChannel) -> tuple[str, str, str]:
    """How many adapters a step can use, and the names of those that this router's requests run and wait with."""
    limits = channel.held.limits
    if limits is None:
        return "0", "", ""
    running, waiting = (
        sorted({name for identity in used for name in channel.held.names_of(identity)})
        for used in channel.sequences.adapters()
    )
    return str(limits.max_adapters), ",".join(running), ",".join(waiting)


def _samples_of_engine(load: control_pb2.EngineLoad) -> Iterator[Sample]:
    engine = load.name
    for family in OF_ENGINES:
        if family.field:
            yield family.name, (engine,), getattr(load, family.field)
    if load.prefill_tokens_per_s:  # unknown before the first step
        predicted_s = load.uncomputed_tokens / load.prefill_tokens_per_s
        yield "predicted_time_to_first_token_seconds", (engine,), predicted_s
    yield "kv_cache_usage_perc", (engine,), load.blocks_referenced / load.blocks_total if load.blocks_total else 0.0
    for state in ("free", "evictable", "referenced"):
        yield "kv_blocks", (engine, state), getattr(load, f"blocks_{state}")
    in_use = load.host_blocks_used + load.host_blocks_cached
    yield "host_blocks", (engine, "free"), load.host_blocks_total - in_use
    yield "host_blocks", (engine, "cached"), load.host_blocks_cached
    yield "host_blocks", (engine, "used"), load.host_blocks_used


# -- the page ----------------------------------------------------------------------------------------------------------


class Page:
    """All samples as Prometheus reads them. Those with equal labels are parts of one whole, and summed.

    model      the one that is served; empty: there are several
    of_engine  with several: the model of each engine, by the engine's name

    prometheus_client takes seven times as long to write the same page, which is too long for the event loop.
    """

    def __init__(
        self, model: str, samples: Iterable[Sample], of_engine: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._model = _model_label(model)
        self._of_engine = {engine: _model_label(name) for engine, name in of_engine.items()}
        self._families: dict[str, dict[tuple[str, ...], float | list[float]]] = {each.name: {} for each in FAMILIES}
        for name, labels, value in samples:
            family = self._families[name]
            family[labels] = _sum(family[labels], value) if labels in family else value

    def encoded(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that an Accept header asks for, and its content type."""
        is_open = "application/openmetrics-text" in accept
        lines: list[str] = []
        for family in FAMILIES:
            if found := self._families[family.name]:
                for prefix, full_name in zip(family.prefixes, family.full_names, strict=True):
                    name = prefix + family.name if is_open else full_name
                    lines += (f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}")
                    lines += self._lines(family, prefix, full_name, found)
        lines.append("# EOF\n" if is_open else "")
        return "\n".join(lines).encode(), CONTENT_TYPE_LATEST if is_open else CONTENT_TYPE_PLAIN_0_0_4

    def _lines(
        self, family: Family, prefix: str, name: str, found: dict[tuple[str, ...], float | list[float]]
    ) -> Iterator[str]:
        has_engine = family.labels[:1] == ("engine",)
        common = () if prefix == "process_" or MODEL_LABEL in family.labels else self._model
        for values, value in found.items():
            own = (f'{label}="{_escaped(text)}"' for label, text in zip(family.labels, values, strict=True))
            labels = ",".join((*own, *(self._of_engine.get(values[0], common) if has_engine else common)))
            if isinstance(value, list):
                *counts, total = value
                ends = accumulate(counts)
                for bound, so_far in zip(_bounds_as_text(tuple(family.bounds)), ends, strict=True):
                    yield f'{name}_bucket{{{labels},le="{bound}"}} {floatToGoString(so_far)}'
                yield f"{name}_sum{{{labels}}} {floatToGoString(total)}"
                yield f"{name}_count{{{labels}}} {floatToGoString(sum(counts))}"
            else:
                yield f"{name}{{{labels}}} {floatToGoString(value)}"


def _model_label(model: str) -> tuple[str, ...]:
    return (f'{MODEL_LABEL}="{_escaped(model)}"',) if model else ()


@lru_cache
def _bounds_as_text(bounds: tuple[float, ...]) -> list[str]:
    return [floatToGoString(bound) for bound in (*bounds, math.inf)]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _sum(one: float | list[float], other: float | list[float]) -> float | list[float]:
    if isinstance(one, list) and isinstance(other, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    assert not isinstance(one, list)
    assert not isinstance(other, list)
    return one + other


class Metrics:
    """Makes the page for a server of one router or several.

    model   see Page
    fleet   its engines, with their models
    tally   what this router counts
    known   what it knows of the engines
    others  the other routers' serialized tallies. Raises Unavailable if one that lives does not answer
    """

    def __init__(
        self,
        model: str,
        fleet: Fleet,
        tally: Tally,
        known: Callable[[], Iterable[Sample]],
        others: Callable[[], Awaitable[list[bytes]]],
    ) -> None:
        self._model = model
        self._fleet = fleet
        self._tally = tally
        self._known = known
        self._others = others

    async def page(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that an Accept header asks for, and its content type. Raises what `others` raises."""
        others = map(parsed, await self._others())
        # A thread would take longer: it takes turns with an event loop that writes tokens.
        of_engine = {} if self._model else {channel.name: channel.model for channel in self._fleet.channels}
        return Page(self._model, chain(self._known(), self._tally.samples(), *others), of_engine).encoded(accept)
