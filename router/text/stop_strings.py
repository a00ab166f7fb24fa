"""Find the first stop string in text that arrives in pieces, and hold back only what may still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


class StopMatcher:
    """Looks for stop strings in one sequence's text.

    The match is the one that ends first: the sequence stops at the earliest character that completes any stop string,
    so the outcome does not depend on how the text was cut into deltas. If several end there, the longest counts.
    Each character is examined once (Aho & Corasick, 1975), however much text came before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` holds at least one string, none of them empty."""
        self.matched: str | None = None  # the stop string found
        self._automaton = _build(tuple(stops))
        self._node = 0
        self._held = ""

    def push(self, delta: str) -> str:
        """Return the text that is now safe to emit: all text before a stop string, and none after it."""
        automaton, node = self._automaton, self._node
        if self.matched is not None:
            return ""
        if not node and automaton.first.isdisjoint(delta):
            return delta
        text = self._held + delta
        for end, char in enumerate(delta, len(self._held) + 1):
            node = automaton.step(node, char)
            self.matched = automaton.stop[node]
            if self.matched is not None:
                self._node, self._held = 0, ""
                return text[: end - len(self.matched)]
        safe = len(text) - automaton.depth[node]
        self._node, self._held = node, text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text held back, when the sequence ends for another reason."""
        held, self._node, self._held = self._held, 0, ""
        return held


@dataclass(frozen=True, slots=True)
class _Automaton:
    """A trie of the stop strings; node 0 is its root, and a node stands for the string that leads to it.

    children  node → character → node
    fallback  the longest proper suffix of the node's string that is a node too
    depth     the length of the node's string: what may still become a stop string
    stop      the longest stop string that the node's string ends with
    first     characters that stop strings begin with
    """

    children: list[dict[str, int]]
    fallback: list[int]
    depth: list[int]
    stop: list[str | None]
    first: frozenset[str]

    def step(self, node: int, char: str) -> int:
        while node and char not in self.children[node]:
            node = self.fallback[node]
        return self.children[node].get(char, 0)


@lru_cache(maxsize=16)  # a request's sequences share one; 16 stop strings of 256 characters take a megabyte
def _build(stops: tuple[str, ...]) -> _Automaton:
    automaton = _Automaton([{}], [0], [0], [None], frozenset(stop[0] for stop in stops))
    for stop in stops:
        node = 0
        for char in stop:
            if char not in automaton.children[node]:
                automaton.children[node][char] = len(automaton.children)
                automaton.children.append({})
                automaton.fallback.append(0)
                automaton.depth.append(automaton.depth[node] + 1)
                automaton.stop.append(None)
            node = automaton.children[node][char]
        automaton.stop[node] = stop
    _link(automaton)
    return automaton


def _link(automaton: _Automaton) -> None:
    """Set each node's fallback, and its stop if a shorter one ends there. Breadth first: shorter strings come first."""
    queue = deque(automaton.children[0].values())
    while queue:
        node = queue.popleft()
        for char, child in automaton.children[node].items():
            automaton.fallback[child] = automaton.step(automaton.fallback[node], char)
            queue.append(child)
        if automaton.stop[node] is None:
            automaton.stop[node] = automaton.stop[automaton.fallback[node]]
