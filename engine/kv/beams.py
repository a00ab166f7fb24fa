"""Beam searches among the sequences of a scheduler: each is as many of them as it has beams, which go together.

They start, are preempted and end as one. The first computes the prompt, and whatever has to be computed again; the
others hold blocks of their own from the start, and none for what they have in common with the first, whose blocks they
take over once it has computed them. A beam that goes on twice is forked: full blocks are shared, and the block that is
begun is copied into a block of the beam that is given up for it, so that a fork never needs a block that is not there.
When each has its log-probabilities, the search chooses every beam's next token. Until then none of them computes
further, also where steps are launched ahead. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagoda_server.engine.core.beam_search import Beam, BeamSearch, Hypothesis
from pagoda_server.engine.core.output import StepOutput
from pagoda_server.engine.core.sequence import EndReason, Sequence, State, TokenLogprobs
from pagoda_server.engine.kv.block_copies import BlockCopies
from pagoda_server.engine.kv.blocks import BlockPool

_NONE = Hypothesis(-math.inf, Beam(), None)


@dataclass(slots=True, eq=False)
class Search:
    """
    rows        its sequences, the one that computes for all first
    places      which row each beam is in, best first; at first there is one, the prompt
    found       by row: what may follow it, where that is known
    has_joined  the rows have what they have in common with the first
    """

    rows: tuple[Sequence, ...]
    beams: BeamSearch
    places: list[int] = field(default_factory=lambda: [0])
    found: dict[int, TokenLogprobs] = field(default_factory=dict)
    has_joined: bool = False
    is_over: bool = False

    @property
    def is_ready(self) -> bool:
        return all(place in self.found for place in self.places)

    def outcome(self, output: StepOutput) -> Iterator[tuple[Sequence, EndReason, int | None, float]]:
        """Once it is over: tells each hypothesis, best first, under the name of a row, and how that ends."""
        if not self.is_over:
            return
        tells_logprobs = self.beams.params.tells_logprobs
        missing = len(self.rows) - len(self.beams.hypotheses)  # of a vocabulary that has fewer tokens
        for row, hypothesis in zip(self.rows, [*self.beams.hypotheses, *[_NONE] * missing], strict=True):
            for token, logprob in zip(*hypothesis.beam.path(), strict=True):
                output.add(row.id, token, TokenLogprobs(logprob, [], []) if tells_logprobs else None)
            reason = EndReason.LENGTH if hypothesis.matched is None else EndReason.STOP
            yield row, reason, hypothesis.matched, hypothesis.score


class Beams:
    """The searches that live, and what they do to block tables."""

    def __init__(self, pool: BlockPool, copies: BlockCopies) -> None:
        self._pool = pool
        self._copies = copies
        self._searches: dict[int, Search] = {}  # by the first row's id
        self._sampled: dict[int, Search] = {}  # those of which rows were sampled in the step that is being committed

    def __len__(self) -> int:
        return len(self._searches)

    # -- rows that wait -----------------------------------------------------------------------------------------------

    def rejection(self, seq: Sequence, max_num_seqs: int) -> str:
        """Why a sequence, or the search that it is a row of, could not run even alone; empty if it could."""
        pool, width = self._pool, max(1, len(seq.peers))
        if width > max_num_seqs:
            return f"{width} beams, the engine runs {max_num_seqs} sequences at once"
        shared = seq.prompt_len // pool.block_size if seq.peers else 0
        if shared + width * (pool.blocks_for(seq.max_len) - shared) <= pool.num_blocks:
            return ""
        beams = f"{width} beams of " if seq.peers else ""
        return f"{beams}up to {seq.max_len} tokens, the KV cache holds {pool.num_blocks * pool.block_size}"

    def park(self, seq: Sequence) -> bool:
        """Whether a new sequence starts when the first row of its search does, and is not queued itself."""
        params = seq.params
        if params.beams is not None and not seq.is_led:
            max_tokens = seq.max_len - seq.prompt_len
            search = BeamSearch(params.beams, params.stop_token_ids, params.min_tokens, max_tokens)
            self._searches[seq.id] = Search(seq.peers, search)
        return seq.is_led

    def parked(self) -> Iterator[Sequence]:
        for search in self._searches.values():
            if search.rows[0].state is State.WAITING:
                yield from search.rows[1:]

    @property
    def num_parked(self) -> int:
        return sum(1 for _ in self.parked())

    # -- start, preemption, end ---------------------------------------------------------------------------------------

    def num_own_blocks(self, seq: Sequence, length: int) -> int:
        """Blocks that the other rows need when the first starts with blocks for `length` tokens."""
        return sum(self._num_own(row, length) for row in seq.peers[1:])

    def start(self, seq: Sequence, length: int) -> None:
        """The first row has its blocks: the others get theirs, and wait until it has computed what is common."""
        for row in seq.peers[1:]:
            row.blocks = self._pool.allocate(self._num_own(row, length))
            row.is_held = True
        if search := self._searches.get(seq.id):
            seq.is_held = search.has_joined = False
            search.found.clear()

    def num_given_up(self, seq: Sequence) -> int:
        """Computed tokens that it gives up with its blocks; what all rows share counts once."""
        return max(0, seq.num_computed - _num_common(seq)) if seq.is_led else seq.num_computed

    def ended(self, seq: Sequence) -> None:
        if seq.peers:
            self._searches.pop(seq.peers[0].id, None)
            self._sampled.pop(seq.peers[0].id, None)

    # -- a step -------------------------------------------------------------------------------------------------------

    def sampled(self, seq: Sequence, found: TokenLogprobs) -> None:
        """What may follow a row is known. It computes nothing until the search has chosen."""
        search = self._searches[seq.peers[0].id]
        search.found[seq.peers.index(seq)] = found
        seq.is_held = True
        self._sampled[seq.peers[0].id] = search

    def advance(self) -> list[Search]:
        """At the end of a commit: the searches that have made each of their beams longer by a token."""
        sampled, self._sampled = self._sampled, {}
        advanced = []
        for search in sampled.values():
            if search.is_ready:
                self._choose(search)
                advanced.append(search)
            elif search.rows[0].blocks and 0 in search.found and not search.has_joined:
                self._join(search)
        return advanced

    def _join(self, search: Search) -> None:
        """The first row has computed all its tokens again: the others go on from what they have in common with it."""
        search.has_joined = True
        first = search.rows[0]
        for row in search.rows[1:]:
            self._share(row, first, _num_common(row))
            row.is_held = False

    def _choose(self, search: Search) -> None:
        rows, found = search.rows, search.found
        best = [(found[place].top_ids, found[place].top) for place in search.places]
        origins = search.beams.advance(best)
        search.is_over = search.beams.is_over or len(origins) < len(rows)  # no row may be without a beam
        if search.is_over:
            for row in rows:  # it counts as computed for its tenant; which one it is means nothing any more
                row.tokens.append(best[0][0][0])
            return
        parents = [search.places[at] for at, _ in origins]
        spare = iter(sorted(set(range(len(rows))) - set(parents)))
        places = [parent if parent not in parents[:at] else next(spare) for at, parent in enumerate(parents)]
        for place, parent in zip(places, parents, strict=True):
            if place != parent:
                self._fork(rows[place], rows[parent])
        for place, (_, token) in zip(places, origins, strict=True):
            rows[place].tokens.append(token)
            rows[place].is_held = False
        search.places, search.has_joined = places, True
        found.clear()

    def _fork(self, row: Sequence, parent: Sequence) -> None:
        row.tokens = list(parent.tokens)
        row.block_hashes = list(parent.block_hashes)
        if parent.blocks:  # else they were preempted while the step was computed
            self._share(row, parent, parent.num_computed)

    def _share(self, row: Sequence, parent: Sequence, length: int) -> None:
        """A row's first `length` tokens are computed: in the blocks of its parent, or in its own once they are copied.

        It keeps as many blocks of its own as the parent has from there on. They are its last ones, which nobody shares.
        """
        pool = self._pool
        full, rest = divmod(length, pool.block_size)
        num_taken = len(row.blocks) - (len(parent.blocks) - full)
        shared, own = parent.blocks[:full], row.blocks[num_taken:]
        pool.share(shared)
        pool.release(row.blocks[:num_taken])
        row.blocks = [*shared, *own]  # a new list, which tells runners that the table has changed
        if rest:
            pool.share([parent.blocks[full]])
            self._copies.want(row.id, parent.blocks[full], own[0])
        row.num_computed, row.num_published = length, full

    def _num_own(self, row: Sequence, length: int) -> int:
        return self._pool.blocks_for(length) - _num_common(row) // self._pool.block_size

    def check_integrity(self) -> None:
        """Raises AssertionError unless the rows of each search are in the same state, equally long and as far."""
        for search in self._searches.values():
            rows = search.rows
            assert len({row.state for row in rows}) == 1, "a search has started in part"
            assert len({len(row.tokens) for row in rows}) == 1, "a search's beams differ in length"
            assert len(set(search.places)) == len(search.places), "two beams in one row"
            if search.has_joined and rows[0].blocks:
                assert len({len(row.blocks) for row in rows}) == 1, "a search's beams differ in blocks"


def _num_common(row: Sequence) -> int:
    """Leading tokens that it has in common with the first row of its search."""
    first = row.peers[0].tokens
    if row.tokens == first:
        return len(first)
    return next(at for at, (own, other) in enumerate(zip(row.tokens, first, strict=True)) if own != other)
