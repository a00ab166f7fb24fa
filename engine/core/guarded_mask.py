"""The boundary around a sequence's token mask: its exceptions end that sequence, never a step or the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .sequence import TokenMask

log = logging.getLogger("pagoda.engine")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class GuardedMask:
    """A token mask that raises nothing. Once the mask inside has raised, this one allows no token.

    The sequence then fails when it needs its next token. A panic of a library in Rust is a BaseException that derives
    from nothing narrower, so everything is caught but what asks the process to end.

    error  what the mask raised; empty: nothing
    """

    def __init__(self, mask: TokenMask) -> None:
        self.error = ""
        self.depends_on_tokens = mask.depends_on_tokens
        self._mask = mask

    @property
    def field(self) -> str:
        return self._mask.field

    @property
    def fault(self) -> str:
        return self._mask.fault

    @property
    def is_slow(self) -> bool:
        return self._mask.is_slow

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        return self._call(True, self._mask.is_ready, tokens, timeout_s)

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        return self._call(False, self._mask.surely_allows, tokens, token)

    def fill(self, tokens: list[int], words: memoryview) -> None:
        self._call(None, self._mask.fill, tokens, words)
        if self.error:
            words.cast("B")[:] = bytes(words.nbytes)

    def follow(self, tokens: list[int]) -> list[int] | None:
        return self._call([], self._mask.follow, tokens)

    def _call(
        self,
        otherwise: Result,
        call: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        if self.error:
            return otherwise
        try:
            return call(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.exception("a token mask failed")
            self.error = f"{type(error).__name__} in its token mask"
            return otherwise
