from __future__ import annotations

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import control_pb2
from pagoda_server.router.engines.tenant_loads import MAX_LISTED, add_tenants


def engine(count: int = 0, **services: int) -> engine_pb2.Tenants:
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
    load = added(engine(a=30, b=10), engine(b=40, c=20))
    assert [(tenant.name, tenant.share) for tenant in load.tenants] == [("b", 0.5), ("a", 0.3), ("c", 0.2)]
    b = load.tenants[0]
    assert (b.running, b.waiting, b.service, b.recent_service) == (2, 4, 150, 50)
    assert load.num_tenants == 3


def test_service_of_tenants_that_are_not_listed_counts_in_the_shares() -> None:
    load = added(engine(count=7, a=30))
    assert load.tenants[0].share == 0.75
    assert load.num_tenants == 7


def test_no_more_are_listed_for_several_engines_than_for_one() -> None:
    load = added(*(engine(**{f"{at} {number}": number for number in range(40)}) for at in range(2)))
    assert (len(load.tenants), load.num_tenants) == (MAX_LISTED, 80)
    assert load.tenants[0].recent_service == 39
    assert load.tenants[-1].recent_service == 8


def test_an_engine_that_has_served_nobody_has_no_shares() -> None:
    load = added(engine(a=0))
    assert load.tenants[0].share == 0
    assert added(engine_pb2.Tenants()).num_tenants == 0
