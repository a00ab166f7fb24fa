"""Requests of several sequences (parallel sampling): one of them computes the prompt for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagoda_server.engine.core.sequence import Sequence
from pagoda_server.engine.kv.blocks import BlockPool
from pagoda_server.engine.kv.prefix_cache import Prefix


@dataclass(slots=True)
class _Request:
    """
    first   the sequence that computes the prompt
    others  those that have not started, by id
    blocks  of all of the prompt but its last token, once that is computed: held for `others`
    """

    id: int
    first: Sequence
    others: dict[int, Sequence] = field(default_factory=dict)
    blocks: list[int] | None = None


class SharedPrompts:
    """Which sequences wait until another has computed their prompt, and the blocks from which they then start.

    A sequence that starts computes the prompt's last token again, for logits of its own to sample from. The block that
    this token belongs to, and which the first sequence goes on to fill, is copied; all before it are shared.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._requests: dict[int, _Request] = {}  # those with sequences that have not started

    @property
    def num_parked(self) -> int:
        return sum(len(request.others) for request in self._requests.values() if request.blocks is None)

    def parked(self) -> Iterator[Sequence]:
        """Those that wait for their prompt, and not yet to be admitted."""
        for request in self._requests.values():
            if request.blocks is None:
                yield from request.others.values()

    def park(self, seq: Sequence) -> bool:
        """Whether a new sequence is to wait for the first of its request. If it is the first, the others will."""
        if seq.request is None:
            return False
        request = self._requests.setdefault(seq.request, _Request(seq.request, seq))
        if request.first is not seq:
            request.others[seq.id] = seq
        return request.first is not seq

    def computed(self, seq: Sequence) -> list[Sequence]:
        """A sequence has its first token. Those that waited for it: they may be admitted now.

        Its prompt's blocks are held for them; there are none if it was preempted before its token was known.
        """
        request = self._of(seq)
        if request is None or request.first is not seq:
            return []
        request.blocks = seq.blocks[: self._pool.blocks_for(seq.prompt_len - 1)]
        self._pool.share(request.blocks)
        ready = list(request.others.values())
        self._forget_if_all_started(request)
        return ready

    def find(self, seq: Sequence) -> Prefix | None:
        """What the first sequence computed of the prompt, for one that has not started."""
        request = self._of(seq)
        if request is None or not request.blocks or seq.id not in request.others:
            return None
        full, rest = divmod(seq.prompt_len - 1, self._pool.block_size)
        return Prefix(seq.prompt_len - 1, request.blocks[:full], request.blocks[full] if rest else None, request.first)

    def started(self, seq: Sequence) -> None:
        """It has blocks of its own: the prompt's are held for the others alone."""
        request = self._of(seq)
        if request is not None and seq.id in request.others:
            del request.others[seq.id]
            self._forget_if_all_started(request)

    def ended(self, seq: Sequence) -> list[Sequence]:
        """A sequence ended, in whatever state. If it was to compute the prompt: the one that is to do so now."""
        request = self._of(seq)
        if request is None:
            return []
        request.others.pop(seq.id, None)
        self._forget_if_all_started(request)
        if request.first is not seq or request.blocks is not None or not request.others:
            return []
        request.first = request.others.pop(next(iter(request.others)))
        return [request.first]

    def release(self) -> bool:
        """Gives up the blocks that are held, because they are wanted elsewhere. False if none are held.

        Who has not started then looks for its prompt in the prefix cache, like anybody else.
        """
        holding = [request for request in self._requests.values() if request.blocks]
        for request in holding:
            request.others.clear()
            self._forget_if_all_started(request)
        return bool(holding)

    def held(self) -> Iterator[list[int]]:
        """Like a block table for each request."""
        yield from (request.blocks for request in self._requests.values() if request.blocks)

    def _of(self, seq: Sequence) -> _Request | None:
        return self._requests.get(seq.request) if seq.request is not None else None

    def _forget_if_all_started(self, request: _Request) -> None:
        if not request.others:
            del self._requests[request.id]
            self._pool.release(request.blocks or [])
