"""Why a router does not use an engine that answers."""

from __future__ import annotations

from typing import Literal

Reason = Literal["tokenizer", "weights", "precision", "block_size", "trust", "protocol"]


class WrongEngine(Exception):
    """The engine at an address may not serve with this router. The right one may replace it later."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
