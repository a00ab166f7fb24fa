"""The LoRA adapters that an engine holds, as it reports them, and the checks of these reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pagoda.engine.v1 import engine_pb2

from ...channel.strides import IDENTITY_BYTES
from ...settings.request import MAX_ADAPTER_NAME, MAX_ADAPTER_PATH
from .refusals import InvalidMessage

MAX_HELD = 1 << 16  # adapters of an engine, whatever it says it may hold
MAX_NUMBER = 1 << 48  # of bytes, and of what else a count cannot exceed


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that an engine holds.

    identity   SHA-256 of all that the engine has read: of equal ones the tokens are equal
    rank       the largest of its ranks
    num_bytes  memory that it takes
    path       where the engine has read it
    """

    name: str
    identity: bytes
    rank: int
    num_bytes: int
    is_pinned: bool
    path: str

    @classmethod
    def of(cls, reported: engine_pb2.Adapter) -> Adapter:
        each = reported
        return cls(each.name, each.identity, each.rank, each.num_bytes, each.is_pinned, each.path)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"identity": self.identity.hex()}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Adapter:
        return cls(**(given | {"identity": bytes.fromhex(given["identity"])}))


class HeldAdapters:
    """What an engine holds now.

    limits       of its connection; None: it takes no adapters, or is lost
    epoch        of the engine that has reported last
    by_name      None: it has not reported since it greeted
    greetings    how often it has greeted
    """

    def __init__(self) -> None:
        self.greetings = 0
        self.limits: engine_pb2.AdapterLimits | None = None
        self.epoch = 0
        self.by_name: Mapping[str, Adapter] | None = None
        self._identities: frozenset[bytes] = frozenset()

    def holds(self, identity: bytes) -> bool:
        return identity in self._identities

    def names_of(self, identity: bytes) -> list[str]:
        return [each.name for each in (self.by_name or {}).values() if each.identity == identity]

    def greet(self, hello: engine_pb2.EngineMessage) -> bool:
        """Take the limits beside an engine's hello. Return whether it can report what it holds."""
        self.lose()
        self.greetings += 1
        self.epoch = hello.epoch
        self.limits = hello.adapter_limits if hello.HasField("adapter_limits") else None
        return self.limits is not None

    def report(self, adapters: engine_pb2.Adapters) -> None:
        self._set({each.name: Adapter.of(each) for each in adapters.held})

    def change(self, adapter: Adapter, *, is_gone: bool) -> None:
        """Take over what an engine has answered, ahead of its report. Its first report has it."""
        if self.by_name is not None:
            kept = {name: each for name, each in self.by_name.items() if name != adapter.name}
            self._set(kept if is_gone else kept | {adapter.name: adapter})

    def lose(self) -> None:
        self.limits, self.by_name, self._identities = None, None, frozenset()

    def _set(self, by_name: Mapping[str, Adapter]) -> None:
        self.by_name = by_name
        self._identities = frozenset(each.identity for each in by_name.values())


def check_limits(limits: engine_pb2.AdapterLimits) -> None:
    """Raises InvalidMessage."""
    if not 0 < limits.max_adapters <= MAX_HELD or not 0 < limits.max_loaded <= MAX_HELD:
        raise InvalidMessage("adapter_limits")


def check_adapters(adapters: engine_pb2.Adapters, limits: engine_pb2.AdapterLimits) -> None:
    """Check a report. Raises InvalidMessage."""
    if len(adapters.held) > limits.max_loaded:
        raise InvalidMessage("adapters.held: more than it says that it may hold")
    if len({each.name for each in adapters.held}) < len(adapters.held):
        raise InvalidMessage("adapters.held: twice the same name")
    for each in adapters.held:
        check_adapter(each)


def check_adapter(adapter: engine_pb2.Adapter) -> None:
    """Raises InvalidMessage."""
    if not (0 < len(adapter.name) <= MAX_ADAPTER_NAME and adapter.name.isprintable()):
        raise InvalidMessage("adapter.name")
    if len(adapter.identity) != IDENTITY_BYTES:
        raise InvalidMessage("adapter.identity: length")
    if len(adapter.path) > MAX_ADAPTER_PATH:
        raise InvalidMessage("adapter.path: length")
    if adapter.num_bytes > MAX_NUMBER:
        raise InvalidMessage("adapter.num_bytes")
