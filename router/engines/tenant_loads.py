"""What tenants have of all engines together."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2

MAX_LISTED = 64


def add_tenants(load: control_pb2.Load, engines: Iterable[engine_pb2.Tenants]) -> None:
    """To a load that has none. What an engine has of a tenant that it does not list is not in the sum."""
    merged: dict[str, control_pb2.TenantLoad] = {}
    unlisted = recent_service = 0
    for tenants in engines:
        unlisted = max(unlisted, tenants.count - len(tenants.listed))  # they may be the same ones
        recent_service += tenants.recent_service
        for of_engine in tenants.listed:
            total = merged.setdefault(of_engine.name, control_pb2.TenantLoad(name=of_engine.name))
            total.waiting += of_engine.waiting
            total.running += of_engine.running
            total.service += of_engine.service
            total.recent_service += of_engine.recent_service
    for total in merged.values():
        total.share = total.recent_service / recent_service if recent_service else 0.0
    most_served = sorted(merged.values(), key=lambda tenant: tenant.recent_service, reverse=True)
    load.tenants.extend(most_served[:MAX_LISTED])
    load.num_tenants = len(merged) + unlisted
