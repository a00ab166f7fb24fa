"""The driver's own metrics for Prometheus. What engines and routers do, routers show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import installed_version
from ..settings.fleet import Bounds
from .group import Faults, Group
from .policy import Load, predicted_ttft_s, taken

MOST_CHARACTERS = 200  # of a fault
CHANGES = ("load", "request", "command")


class Metrics(Collector):
    """What the driver's last look has found. Another thread serves it, so each look puts a whole list in place."""

    def __init__(self) -> None:
        self._found: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        return self._found

    def serve(self, address: str) -> tuple[int, Callable[[], None]]:
        """Serve them at HOST:PORT. Return the port, and what ends that. Raises OSError."""
        registry = CollectorRegistry()
        registry.register(self)
        host, _, port = address.rpartition(":")
        server, _ = start_http_server(int(port), host.strip("[]"), registry)
        return server.server_port, server.shutdown

    def show(
        self,
        wanted: int,
        bounds: Bounds,
        engines: Group,
        routers: Group,
        loads: Sequence[Load],
        changes: Mapping[str, int],
        faults: Faults,
    ) -> None:
        states = GaugeMetricFamily(
            "pagoda_fleet_members", "Engines and routers, by what they do.", labels=("kind", "state")
        )
        restarts = CounterMetricFamily(
            "pagoda_fleet_restarts", "Starts of engines and routers that had ended by themselves.", labels=("kind",)
        )
        placed = GaugeMetricFamily(
            "pagoda_fleet_placed", "1 for each engine and router.", labels=("kind", "name", "node", "version")
        )
        for kind, group in (("engine", engines), ("router", routers)):
            for state, number in group.states().items():
                states.add_metric((kind, state), number)
            restarts.add_metric((kind,), group.num_restarts)
            for each in group.placed.values():
                placed.add_metric((kind, each.name, each.report.node, each.report.version), 1)
        changed = CounterMetricFamily(
            "pagoda_fleet_scale_decisions", "Changes of the number of engines, by what asked for them.", labels=("by",)
        )
        for reason in CHANGES:
            changed.add_metric((reason,), changes.get(reason, 0))
        fault = GaugeMetricFamily(
            "pagoda_fleet_fault",
            "1 for each thing that did not succeed when it was last tried.",
            labels=("of", "fault"),
        )
        for about, text in sorted(faults.current.items()):
            fault.add_metric((about, text[:MOST_CHARACTERS]), 1)
        self._found = [
            InfoMetricFamily("pagoda_fleet", "The driver's version.", value={"version": installed_version()}),
            _gauge("engines_wanted", "Engines that the load or a command asks for.", wanted),
            _gauge("engines_least", "The fewest engines that are allowed.", bounds.least),
            _gauge("engines_most", "The most engines that are allowed.", bounds.most),
            _gauge("predicted_time_to_first_token_seconds", "What new requests would wait.", predicted_ttft_s(loads)),
            _gauge("places_taken_ratio", "The part of all engines' places that is taken.", taken(loads)),
            states,
            restarts,
            placed,
            changed,
            fault,
        ]


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pagoda_fleet_{name}", help, value=value)
