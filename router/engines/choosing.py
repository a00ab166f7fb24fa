"""Which engine gets a request: what every rule must do, and the rules.

A rule sees engines that may have the request: they are ready, and not late unless all are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from random import Random
from typing import Protocol, TypeVar

from pagoda.engine.v1 import engine_pb2

from ...channel.strides import STRIDE, chain_root, first_key
from ...settings.router import ChoiceName
from .prompt_keys import PromptKeys
from .table import EngineTable

_PROMPT_KEYS = PromptKeys()  # of all models: tokenizers differ, and equal tokens have equal keys

HASHED_STRIDES = 4  # prompts that begin with as many equal tokens go to one engine: as long as most system prompts
WARM = 0.5  # the part of a prompt that must be cached for an engine to be preferred
# How much later a first token may come from an engine that has the prompt cached: two seconds or, if more, three
# for each second for which the other engine would compute what is cached here.
PATIENCE_S, PATIENCE_PER_SAVED_S = 2.0, 3.0
MOST_TO_FEWEST = 1.2  # it has no more sequences than the engine with the fewest, times this, and its slack more
NEAR_S = 0.005  # predictions that differ by less are equal
LEAST_LENT = 4  # strides that an engine fetches from another one: fewer are computed as fast
UNKNOWN_RATE = 10_000.0  # prompt tokens a second, while no engine knows its own
MOST_ABOVE_MEAN = 1.25  # times the mean number of sequences: an engine that has more gets no prompt by its hash


class Engine(Protocol):
    """What a rule reads of an engine.

    row            that it has in the chooser's table
    num_sequences  in it, those of other routers included
    address        where it listens
    block_layout   engines that have the same can fetch each other's blocks; empty: it fetches and lends none
    """

    @property
    def name(self) -> str: ...

    @property
    def row(self) -> int: ...

    @property
    def address(self) -> str: ...

    @property
    def block_layout(self) -> bytes: ...

    @property
    def num_sequences(self) -> int: ...


AnEngine = TypeVar("AnEngine", bound=Engine)
Number = TypeVar("Number", int, float)


class Candidates(tuple[AnEngine, ...]):
    """The engines of which one gets a request. They are kept for later requests while they stay the same."""

    @cached_property
    def bits(self) -> int:
        """One bit an engine, by its row."""
        return sum(1 << row for row in self._rows)

    @cached_property
    def _rows(self) -> list[int]:
        return [engine.row for engine in self]

    @cached_property
    def _are_first(self) -> bool:
        return self._rows == list(range(len(self)))

    def column(self, column: Sequence[Number]) -> Sequence[Number]:
        """Return the values of a column of the table in the order of the engines."""
        if self._are_first and len(self) == len(column):
            return column
        return [column[row] for row in self._rows]


@dataclass(slots=True, eq=False)
class Asked:
    """What of a request decides which engine gets it, and what was found when one was chosen.

    prompt      its tokens
    salt        of its prefixes; None: it uses no prefix cache
    adapter     the identity of the one that it is computed with; empty: none
    ttft_s      its target for the time to the first token; None: it has none
    num_cached  tokens of its prompt that the chosen engine has cached, as far as is known
    lender      another engine that has more of them cached, from which the chosen one can fetch blocks, and how many
    """

    prompt: Sequence[int]
    salt: str | None = ""
    ttft_s: float | None = None
    adapter: bytes = b""
    num_cached: int = 0
    lender: tuple[str, int] | None = None
    _keys: list[int] | None = None

    @classmethod
    def of(cls, submit: engine_pb2.Submit, prompt: Sequence[int] | None = None) -> Asked:
        """
        prompt  that of `submit`, as a list: reading it from there takes four times as long
        """
        return cls(
            submit.prompt[:] if prompt is None else prompt,
            None if submit.cache.bypass else submit.cache.salt,
            submit.slo.ttft_s if submit.slo.HasField("ttft_s") else None,
            submit.adapter,
        )

    def keys(self) -> list[int]:
        """Return the stride keys of its prompt."""
        if self._keys is None:
            self._keys = self._keys_of(self.prompt)
        return self._keys

    def first_keys(self, num_tokens: int) -> list[int]:
        """Return the stride keys of its first tokens."""
        return self._keys_of(self.prompt[:num_tokens])

    def _keys_of(self, tokens: Sequence[int]) -> list[int]:
        if self.salt is None:
            return []
        return _PROMPT_KEYS.of(first_key(chain_root(self.salt, self.adapter)), tokens)


class Chooser(ABC):
    """A rule by which engines get requests.

    choices         counts them, by engine and reason
    predicted       counts prompt tokens that engines had cached, as far as was known, by engine
    follows_caches  whether engines are to report what their prefix caches hold
    table           what is known of them
    """

    follows_caches = False

    def __init__(self) -> None:
        self.choices: Counter[tuple[str, str]] = Counter()
        self.predicted: Counter[str] = Counter()
        self.table = EngineTable()
        self._turns: Counter[str] = Counter()  # by the first engine: those of another model have turns of their own

    @abstractmethod
    def choose(self, engines: Candidates[AnEngine], asked: Asked | None) -> AnEngine:
        """Return one of the engines, of which there is at least one.

        asked  None: nothing is known of the request
        """

    def chosen(self, engine: AnEngine, reason: str) -> AnEngine:
        """Count a choice."""
        self.choices[engine.name, reason] += 1
        return engine

    def least_loaded(self, engines: Candidates[AnEngine]) -> AnEngine:
        """Choose an engine of those with the fewest sequences: the next in turn."""
        fewest = min(engine.num_sequences for engine in engines)
        found = [engine for engine in engines if engine.num_sequences == fewest]
        turn = self._turns[engines[0].name]
        self._turns[engines[0].name] += 1
        return self.chosen(found[turn % len(found)], "load")

    def forget(self, name: str) -> None:
        """Drop what was counted of an engine that has left."""
        self.predicted.pop(name, None)
        self._turns.pop(name, None)
        for key in [key for key in self.choices if key[0] == name]:
            del self.choices[key]


class LeastLoaded(Chooser):
    """The engine with the fewest sequences, in turn where several have as few."""

    def choose(self, engines: Candidates[AnEngine], asked: Asked | None) -> AnEngine:
        return self.least_loaded(engines)


class ByPrefix(Chooser):
    """The engine that will have the first token soonest, or one that has the prompt cached and is not much later.

    "Sticky until saturated": to move a prompt costs another engine time to compute it and room to cache it, which pays
    only once its own engine makes it wait. A time to the first token is predicted from what the engine still has
    to compute, what the prompt adds, and how fast the engine is. An engine that has far more sequences than another one
    is saturated, too, as the time of its steps grows with them.
    """

    follows_caches = True

    def __init__(self, random: Random | None = None) -> None:
        super().__init__()
        self._random = random or Random()

    def choose(self, engines: Candidates[AnEngine], asked: Asked | None) -> AnEngine:
        prompt_len, found = 0, list[int]()
        if asked is not None:
            prompt_len, found = len(asked.prompt), self.table.cached.num_cached(asked.keys(), len(self.table))
        num_strides = prompt_len / STRIDE
        hits = engines.column(found) if found else [0] * len(engines)
        wait_s, stride_s = self._paces(engines)
        costs = [wait + (num_strides - hit) * stride for wait, stride, hit in zip(wait_s, stride_s, hits, strict=False)]
        chosen, reason = self._cheapest(costs), "cost"
        if warm := self._warm(engines, hits, num_strides) if found else []:
            best = warm[self._cheapest([costs[at] for at in warm])]
            if asked is None or asked.ttft_s is None:
                saved_s = (hits[best] - hits[chosen]) * stride_s[chosen]
                patience_s = max(PATIENCE_S, PATIENCE_PER_SAVED_S * saved_s)
            else:
                patience_s = asked.ttft_s / 2
            is_near = costs[best] <= costs[chosen] + patience_s
            chosen, reason = (best, "cached") if is_near else (chosen, "released")
        if asked is not None:
            asked.num_cached = min(STRIDE * hits[chosen], prompt_len)
            asked.lender = self._lender(engines, hits, chosen)
            self.predicted[engines[chosen].name] += asked.num_cached
        return self.chosen(engines[chosen], reason)

    def _paces(self, engines: Candidates[AnEngine]) -> tuple[Sequence[float], Sequence[float]]:
        """Return how long each engine will be busy, and in how long it computes a stride, both in seconds."""
        wait_s, stride_s = engines.column(self.table.wait_s), engines.column(self.table.stride_s)
        if 0.0 not in stride_s:
            return wait_s, stride_s
        rates = [STRIDE / each for each in stride_s if each]
        usual_s = STRIDE * len(rates) / sum(rates) if rates else STRIDE / UNKNOWN_RATE
        uncomputed = engines.column(self.table.num_uncomputed)
        return (
            [
                wait if stride else wait + count / STRIDE * usual_s
                for wait, stride, count in zip(wait_s, stride_s, uncomputed, strict=True)
            ],
            [stride or usual_s for stride in stride_s],
        )

    def _warm(self, engines: Candidates[AnEngine], hits: Sequence[int], num_strides: float) -> list[int]:
        """Find the engines that have much of a prompt cached, and not too many sequences."""
        # A prefix is known to whole strides, so almost one more may be cached: of a short prompt, a large part.
        least = max(0.0, WARM * num_strides - 1)
        most = MOST_TO_FEWEST * min(engines.column(self.table.num_sequences))
        beyond_slack = engines.column(self.table.beyond_slack)
        return [at for at, hit in enumerate(hits) if hit > least and beyond_slack[at] < most]

    def _lender(self, engines: Sequence[AnEngine], hits: Sequence[int], chosen: int) -> tuple[str, int] | None:
        """Find an engine from which the chosen one can fetch blocks, and so many tokens that it is worth a call."""
        if not (layout := engines[chosen].block_layout):
            return None
        most = max(hits)
        if most < hits[chosen] + LEAST_LENT or engines[at := hits.index(most)].block_layout != layout:
            return None
        return engines[at].address, STRIDE * most

    def _cheapest(self, costs: Sequence[float]) -> int:
        """Choose one at random of those that cost about as little as the cheapest: routers must not all run to one."""
        most = min(costs) + NEAR_S
        near = [at for at, cost in enumerate(costs) if cost <= most]
        return near[0] if len(near) == 1 else self._random.choice(near)


class Automatic(ByPrefix):
    """ByPrefix where every engine reports what it has cached, else LeastLoaded."""

    def choose(self, engines: Candidates[AnEngine], asked: Asked | None) -> AnEngine:
        if engines.bits & ~self.table.cached.reporting:
            return self.least_loaded(engines)
        return super().choose(engines, asked)


class ByHash(Chooser):
    """An engine that follows from the prompt's first tokens, as long as its load is near the mean; else the next one.

    Each engine has a rank for each hash (rendezvous hashing, Thaler & Ravishankar, 1998), so that few prompts move when
    engines join and leave. The bound is that of consistent hashing with bounded loads (Mirrokni et al., 2018).
    """

    def choose(self, engines: Candidates[AnEngine], asked: Asked | None) -> AnEngine:
        keys = asked.first_keys(HASHED_STRIDES * STRIDE) if asked is not None else []
        if not keys:
            return self.least_loaded(engines)
        key = keys[-1].to_bytes(8, "little")
        most = MOST_ABOVE_MEAN * (1 + sum(engine.num_sequences for engine in engines)) / len(engines)
        free = [engine for engine in engines if engine.num_sequences < most]
        best = max(free, key=lambda engine: blake2b(engine.name.encode(), key=key, digest_size=8).digest())
        return self.chosen(best, "hash")


REASONS = ("cached", "released", "cost", "hash", "load")
RULES: dict[ChoiceName, Callable[[], Chooser]] = {
    "auto": Automatic,
    "load": LeastLoaded,
    "hash": ByHash,
    "prefix": ByPrefix,
}
