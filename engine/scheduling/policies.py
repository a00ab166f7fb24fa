"""The policies by name. A new policy is a class in a file of its own and one entry here."""

from __future__ import annotations

from ...settings.engine import PolicyName
from .deadline import LeastSlack
from .fair import Fair
from .policy import Policy
from .priority import Fcfs, Priority

POLICIES: dict[PolicyName, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair, "deadline": LeastSlack}
