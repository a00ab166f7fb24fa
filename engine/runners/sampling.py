"""What every runner makes of a sequence's sampling parameters and of its token mask."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagoda_server.engine.core.sequence import SamplingParams, TokenMask
from pagoda_server.settings.sampling import LOGIT_BIAS, PARAMETERS

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # below it, a division would give no number


def draws_at_random(params: SamplingParams) -> bool:
    """Whether the token is drawn; otherwise it is the most likely one."""
    return params.temperature >= _SMALLEST_TEMPERATURE and params.top_k != 1


def find_fault(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be used with this vocabulary: one row's mistake must not spoil the batch."""
    for each in PARAMETERS:
        value = getattr(params, each.name)
        if value not in each.interval:
            return f"{each.name} is {value}, outside {each.interval}"
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            return f"logit_bias names token {token}; the vocabulary has {vocab_size}"
        if bias not in LOGIT_BIAS:
            return f"logit_bias of token {token} is {bias}, outside {LOGIT_BIAS}"
    if len({token for token, _ in params.logit_bias}) < len(params.logit_bias):
        return "logit_bias names a token twice"
    return None


class AllowedTokens:
    """A TokenMask that allows the same token ids everywhere. Ids beyond the vocabulary allow nothing."""

    depends_on_tokens = False
    fault = ""

    def __init__(self, ids: Iterable[int]) -> None:
        numbers = np.fromiter(ids, dtype=np.int64)
        is_allowed = np.zeros(32 * num_mask_words(int(numbers.max(initial=-1)) + 1), dtype=bool)
        is_allowed[numbers] = True
        self._words = np.packbits(is_allowed, bitorder="little").view("<u4")

    def fill(self, tokens: list[int], words: memoryview) -> None:
        count = min(len(words), len(self._words))
        np.frombuffer(words, dtype="<u4")[:count] = self._words[:count]

    def follow(self, tokens: list[int]) -> list[int] | None:
        return []


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def fill_mask(mask: TokenMask, tokens: list[int], words: np.ndarray) -> None:
    """Fills the mask of the token that follows `tokens`.

    words  [num_mask_words] int32, contiguous
    """
    words[:] = 0
    mask.fill(tokens, words.view(np.uint32).data)
