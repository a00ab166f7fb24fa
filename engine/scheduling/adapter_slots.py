"""Which adapters have a slot on the device. A sequence with an adapter runs only while that has one.

A slot whose adapter has no running sequence goes to the next adapter that needs one, the least recently used first.
While all are in use, a sequence waits, and others overtake it. Once it has waited for PATIENCE_S one slot is drained:
no further sequence of that slot's adapter starts until the slot has gone to the one that waits. Without this it would
wait for as long as others arrive. Only the next in line may have a drained slot before it: a sequence of a higher rank
that had to wait for the other one to start would let neither of them start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.adapter import Adapter
from ..core.sequence import Sequence

PATIENCE_S = 0.5


@dataclass(slots=True)
class _Slot:
    """
    adapter   None: it was never used
    running   sequences that have started with it
    last_use  the number of the last start
    """

    adapter: Adapter | None = None
    running: int = 0
    last_use: int = 0


class AdapterSlots:
    """The slots of a runner, by number. The loop's thread owns it."""

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._clock = clock
        self._num_starts = 0
        self._by_identity: dict[bytes, int] = {}
        self._drained: int | None = None
        self._drained_for: Sequence | None = None  # the sequence that gets the drained slot

    def has_place(self, seq: Sequence, *, is_next: bool) -> bool:
        """Say whether a waiting sequence can start, as far as its adapter is concerned; note it if it cannot.

        is_next  whether it is the next in line
        """
        adapter = seq.request.adapter
        if adapter is None:
            return True
        if self._place(adapter, seq) is not None or (is_next and self._any_place(adapter) is not None):
            return True
        now = self._clock()
        if now - seq.account.waits_for_adapter(now) >= PATIENCE_S:
            self._drain_for(seq)
        return False

    def take(self, seq: Sequence) -> int:
        """Give a sequence that starts, and for which there is a place, its adapter's slot; -1 if it has no adapter."""
        adapter = seq.request.adapter
        if adapter is None:
            return -1
        number = self._place(adapter, seq)
        if number is None:
            number = self._any_place(adapter)
        assert number is not None, "has_place() comes before"
        slot = self._slots[number]
        if slot.adapter is None or slot.adapter.identity != adapter.identity:
            if slot.adapter is not None:
                del self._by_identity[slot.adapter.identity]
            slot.adapter = adapter
            self._by_identity[adapter.identity] = number
        self._num_starts += 1
        slot.running, slot.last_use = slot.running + 1, self._num_starts
        if self._drained_for is seq:
            self._drained = self._drained_for = None
        return number

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence with a slot no longer runs."""
        if seq.adapter_slot >= 0:
            self._slots[seq.adapter_slot].running -= 1

    def ended(self, seq: Sequence) -> None:
        """Note that a sequence is no longer there: no slot is drained for it."""
        if self._drained_for is seq:
            self._drained = self._drained_for = None

    def _place(self, adapter: Adapter, seq: Sequence) -> int | None:
        """Return the slot that the adapter has, or the one that it can get."""
        number = self._by_identity.get(adapter.identity)
        if number is not None:
            is_for_others = number == self._drained and self._drained_for is not seq
            return None if is_for_others else number
        if self._drained_for is seq and self._drained is not None:
            return self._drained if not self._slots[self._drained].running else None
        return self._least_recently_used([number for number in self._free if number != self._drained])

    def _any_place(self, adapter: Adapter) -> int | None:
        """Return the slot that the adapter has or can get, even one that is drained for another sequence."""
        number = self._by_identity.get(adapter.identity)
        return self._least_recently_used(self._free) if number is None else number

    @property
    def _free(self) -> list[int]:
        slots = enumerate(self._slots)
        return [number for number, slot in slots if not slot.running and not (slot.adapter and slot.adapter.is_pinned)]

    def _least_recently_used(self, numbers: list[int]) -> int | None:
        return min(numbers, key=lambda number: self._slots[number].last_use, default=None)

    def _drain_for(self, seq: Sequence) -> None:
        """Drain the slot with the fewest running sequences, of those that can be had, unless one is drained already."""
        if self._drained_for is not None:
            return
        candidates = [
            number for number, slot in enumerate(self._slots) if not (slot.adapter and slot.adapter.is_pinned)
        ]
        if candidates:
            self._drained = min(candidates, key=lambda number: self._slots[number].running)
            self._drained_for = seq

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless each running sequence with an adapter has a slot that holds it."""
        counts = [0] * len(self._slots)
        for seq in running:
            adapter = seq.request.adapter
            assert (adapter is None) == (seq.adapter_slot < 0)
            if adapter is not None:
                counts[seq.adapter_slot] += 1
                held = self._slots[seq.adapter_slot].adapter
                assert held is not None
                assert held.identity == adapter.identity
        assert counts == [slot.running for slot in self._slots]
        for identity, number in self._by_identity.items():
            held = self._slots[number].adapter
            assert held is not None
            assert held.identity == identity
