"""A million operations of the scheduler's machines: `make test-nightly`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pagoda_server.engine.scheduling.scheduler import Scheduler
from tests.engine import test_scheduler_machine as machines

OPERATIONS = 1_000_000  # schedule, commit, add, abort, over all machines
MACHINES = [
    machine
    for machine in vars(machines).values()
    if isinstance(machine, type) and issubclass(machine, machines.SchedulerMachine)
]
# Long runs find what many short ones do not; each machine's are drawn anew until they add up.
NIGHTLY = settings(
    max_examples=50,
    stateful_step_count=200,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the scheduler's operations."""
    count = [0]

    def counted(name: str) -> None:
        operation = getattr(Scheduler, name)

        def count_it(*arguments: object) -> object:
            count[0] += 1
            return operation(*arguments)

        monkeypatch.setattr(Scheduler, name, count_it)

    for name in ("schedule", "commit", "add", "abort", "flush_cache"):
        counted(name)
    return count


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_machine_keeps_every_invariant_for_its_share_of_a_million_operations(
    machine: type[machines.SchedulerMachine], operations: list[int]
) -> None:
    while operations[0] < OPERATIONS / len(MACHINES):
        run_state_machine_as_test(machine, settings=NIGHTLY)
