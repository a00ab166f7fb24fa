"""Why a router does not use an engine that answers, what the log says of it, and when it is tried again."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from ...runtime.restarts import Faults

Reason = Literal["tokenizer", "weights", "precision", "block_size", "trust", "protocol", "hang"]


class WrongEngine(Exception):
    """The engine at an address may not serve with this router. The right one may replace it later."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class InvalidMessage(WrongEngine):
    """The engine sent what no engine sends: its connection ends. `field` names what was wrong."""

    def __init__(self, field: str) -> None:
        super().__init__("protocol", f"it breaks the protocol: {field}")


class Standing(Faults):
    """What is held against an engine.

    refused   why it is not used; empty: it is, or does not answer
    refusals  how often it answered and was not used
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""
        self.refusals: Counter[Reason] = Counter()

    def refuse(self, reason: Reason, text: str) -> None:
        self.refused = text
        self.refusals[reason] += 1
