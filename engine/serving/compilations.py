"""Sequences that wait until the grammar which they follow is compiled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pagoda.engine.v1 import engine_pb2
from pagoda.v1 import inference_pb2

from ...grammars.fair_threads import FairThreads, QueueFull
from ..core.sequence import EndReason, Sequence
from ..core.step import Ended
from .codec import rejected

if TYPE_CHECKING:
    from ..guidance import Grammars

log = logging.getLogger("pagoda.engine")


@dataclass(frozen=True, slots=True)
class _Compilation:
    """A grammar that is compiled for the sequences of a request; without a future, it is there already."""

    ids: list[int]
    future: Future[None] | None = None


class Compilations:
    """Compiles the grammars of requests, each on a thread for them, and makes the sequences that follow them.

    The event loop's thread owns it.

    make_grammars  makes what compiles, when the first grammar comes; None: nothing can
    clock          the loop's, for when a sequence ended
    soon           calls a function on the event loop's thread
    add            called with the sequences of a request that have their grammar
    abort          ends sequences that were added
    end            called for those that never are: they ended before
    """

    def __init__(
        self,
        make_grammars: Callable[[], Grammars] | None,
        clock: Callable[[], float],
        *,
        soon: Callable[[Callable[[], None]], None],
        add: Callable[[list[Sequence]], None],
        abort: Callable[[list[int]], None],
        end: Callable[[list[int], Ended], None],
    ) -> None:
        self._make_grammars = make_grammars
        self._clock = clock
        self._soon, self._add, self._abort, self._end = soon, add, abort, end
        self._grammars: Grammars | None = None
        self._making = threading.Lock()  # one of them
        self._threads = FairThreads(2, "grammars")  # one may take a second
        self._compiling: dict[int, _Compilation] = {}  # by the id of a sequence that waits for its grammar

    def begin(self, submit: engine_pb2.Submit, make: Callable[..., list[Sequence]], ids: list[int]) -> None:
        """Compile the grammar of a request.

        make  makes its sequences from what makes their masks
        ids   of its sequences
        """
        if self._make_grammars is None:
            self._refuse(ids, "cannot be followed: this model has no tokenizer")
            return
        work = partial(self._made, self._make_grammars, submit.guided, make, ids)
        if self._grammars is not None and self._grammars.knows(submit.guided):
            self._compiling.update(dict.fromkeys(ids, _Compilation(ids)))
            work()()
            return
        try:
            compilation = _Compilation(ids, self._threads.submit(submit.tenant, lambda: self._soon(work())))
        except QueueFull as error:
            self._end(ids, rejected(self._clock(), str(error), reason=EndReason.OVERLOADED))
        else:
            self._compiling.update(dict.fromkeys(ids, compilation))

    def abort(self, ids: list[int]) -> None:
        """Compile nothing for these sequences, which are ended once others that have the same grammar have it."""
        for id in ids:
            if (compilation := self._compiling.pop(id, None)) is None:
                continue
            is_waited_for = any(other in self._compiling for other in compilation.ids)
            if not is_waited_for and compilation.future is not None and compilation.future.cancel():
                self._end(compilation.ids, rejected(self._clock(), "", reason=EndReason.ABORTED))

    def _made(
        self,
        make_grammars: Callable[[], Grammars],
        guided: inference_pb2.Guided,
        make: Callable[..., list[Sequence]],
        ids: list[int],
    ) -> Callable[[], None]:
        """Make the sequences that follow a grammar. Return what is to be done with them on the event loop's thread.

        Whatever goes wrong ends these sequences alone: a panic of llguidance is a BaseException.
        """
        from ...grammars.compiling import GrammarError  # only now: most engines never see a grammar

        try:
            with self._making:
                if self._grammars is None:
                    self._grammars = make_grammars()
            sequences = make(self._grammars.mask_maker(guided))
        except GrammarError as error:
            return partial(self._refuse, ids, str(error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.exception("a grammar could not be compiled")
            return partial(self._fail, ids, f"{type(error).__name__} in its grammar")
        return partial(self._compiled, ids, sequences)

    def _compiled(self, ids: list[int], sequences: list[Sequence]) -> None:
        """Add sequences, and end those that were aborted while their grammar was compiled."""
        self._add(sequences)
        aborted = [id for id in ids if id not in self._compiling]
        self._forget(ids)
        if aborted:
            self._abort(aborted)

    def _refuse(self, ids: list[int], detail: str) -> None:
        self._forget(ids)
        self._end(ids, rejected(self._clock(), detail, "guided"))

    def _fail(self, ids: list[int], detail: str) -> None:
        self._forget(ids)
        self._end(ids, rejected(self._clock(), detail, reason=EndReason.FAILED))

    def _forget(self, ids: list[int]) -> None:
        for id in ids:
            self._compiling.pop(id, None)
