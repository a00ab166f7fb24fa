"""Which engine gets a request: what every rule must do, and the rules that need to know no prefix cache.

A rule sees engines that may have the request: they are ready, and not late unless all are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar

from pagoda.engine.v1 import engine_pb2

from ...channel.strides import STRIDE, chain_root, first_key, stride_keys
from ...settings.router import ChoiceName

HASHED_STRIDES = 4  # prompts that begin with as many equal tokens go to one engine: as long as most system prompts
MOST_ABOVE_MEAN = 1.25  # times the mean number of sequences: an engine that has more gets no prompt by its hash


class Engine(Protocol):
    """What a rule reads of an engine.

    num_sequences  in it, those of other routers included
    """

    @property
    def name(self) -> str: ...

    @property
    def num_sequences(self) -> int: ...


AnEngine = TypeVar("AnEngine", bound=Engine)


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request decides which engine gets it.

    prompt    its tokens
    salt      of its prefixes; None: it uses no prefix cache
    """

    prompt: Sequence[int]
    salt: str | None = ""

    @classmethod
    def of(cls, submit: engine_pb2.Submit, prompt: Sequence[int] | None = None) -> Asked:
        """
        prompt  that of `submit`, as a list: reading it from there takes four times as long
        """
        return cls(submit.prompt[:] if prompt is None else prompt, None if submit.cache.bypass else submit.cache.salt)

    def keys(self, num_strides: int | None = None) -> list[int]:
        """Return the stride keys of its prompt, or of the first strides only."""
        if self.salt is None:
            return []
        tokens = self.prompt if num_strides is None else self.prompt[: num_strides * STRIDE]
        return stride_keys(first_key(chain_root(self.salt)), tokens)


class Chooser(Protocol):
    """A rule by which engines get requests."""

    def choose(self, engines: Sequence[AnEngine], asked: Asked | None) -> AnEngine:
        """Return one of the engines, of which there is at least one.

        asked  None: nothing is known of the request
        """


class LeastLoaded:
    """The engine with the fewest sequences, in turn where several have as few."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, engines: Sequence[AnEngine], asked: Asked | None = None) -> AnEngine:
        fewest = min(engine.num_sequences for engine in engines)
        least_loaded = [engine for engine in engines if engine.num_sequences == fewest]
        return least_loaded[next(self._turns) % len(least_loaded)]


class ByHash:
    """An engine that follows from the prompt's first tokens, as long as its load is near the mean; else the next one.

    Each engine has a rank for each hash (rendezvous hashing, Thaler & Ravishankar, 1998), so that few prompts move when
    engines join and leave. The bound is that of consistent hashing with bounded loads (Mirrokni et al., 2018).
    """

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()

    def choose(self, engines: Sequence[AnEngine], asked: Asked | None) -> AnEngine:
        keys = asked.keys(HASHED_STRIDES) if asked is not None else []
        if not keys:
            return self._least_loaded.choose(engines)
        key = keys[-1].to_bytes(8, "little")
        most = MOST_ABOVE_MEAN * (1 + sum(engine.num_sequences for engine in engines)) / len(engines)
        free = [engine for engine in engines if engine.num_sequences < most]
        return max(free, key=lambda engine: blake2b(engine.name.encode(), key=key, digest_size=8).digest())


RULES: dict[ChoiceName, Callable[[], Chooser]] = {"load": LeastLoaded, "hash": ByHash}
