"""The policies by name. A new policy is a class in a file of its own and one entry here."""

from __future__ import annotations

from pagoda_server.engine.scheduling.fair import Fair
from pagoda_server.engine.scheduling.least_slack import LeastSlack
from pagoda_server.engine.scheduling.policy import Policy
from pagoda_server.engine.scheduling.priority import Fcfs, Priority
from pagoda_server.settings.engine import PolicyName

POLICIES: dict[PolicyName, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair, "deadline": LeastSlack}
