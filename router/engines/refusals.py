"""Why a router does not use an engine that answers, what the log says of it, and when it is tried again."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal

SAYS_AGAIN_S = 60.0  # the same fault of an engine is one line of the log in this time
LONGEST_PAUSE_S = 30.0
PROVEN_S = 60.0  # an engine that has served for so long is no longer suspected
MAX_FAULTS = 64  # that are remembered

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


class Standing:
    """What is held against an engine: whether its faults go to the log, and the pause before it is tried again.

    refused   why it is not used; empty: it is, or does not answer
    refusals  how often it answered and was not used
    """

    def __init__(self) -> None:
        self.refused = ""
        self.refusals: Counter[Reason] = Counter()
        self._strikes = 0
        self._said: dict[str, float] = {}

    def refuse(self, reason: Reason, text: str) -> None:
        self.refused = text
        self.refusals[reason] += 1

    def may_say(self, fault: str) -> bool:
        """Whether a fault goes to the log: not again within a minute."""
        now = time.monotonic()
        if now - self._said.get(fault, -SAYS_AGAIN_S) < SAYS_AGAIN_S:
            return False
        if len(self._said) >= MAX_FAULTS:
            self._said = {each: at for each, at in self._said.items() if now - at < SAYS_AGAIN_S}
        if len(self._said) < MAX_FAULTS:
            self._said[fault] = now
            return True
        return False

    def served(self, seconds: float) -> None:
        if seconds >= PROVEN_S:
            self._strikes = 0

    def strike(self, least_s: float, *, is_first_free: bool = False) -> float:
        """Count a fault; return the pause after it, which doubles with each. Of deaths, the first has the least."""
        self._strikes += 1
        doublings = self._strikes - 1 - is_first_free
        return least_s if doublings < 0 else min(2.0**doublings, LONGEST_PAUSE_S)
