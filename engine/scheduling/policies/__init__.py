"""Who is next in line, by name. A policy only orders; the scheduler's step is the same for all of them."""

from __future__ import annotations

from pagoda_server.engine.scheduling.policies.deadline import Deadline
from pagoda_server.engine.scheduling.policies.fair import Fair
from pagoda_server.engine.scheduling.policies.fcfs import Fcfs
from pagoda_server.engine.scheduling.policies.policy import Policy, PolicySettings
from pagoda_server.engine.scheduling.policies.priority import Priority
from pagoda_server.settings.engine import PolicyName

POLICIES: dict[PolicyName, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair, "deadline": Deadline}

__all__ = ["POLICIES", "Policy", "PolicyName", "PolicySettings"]
