"""What every runner makes of a sequence's sampling parameters and of its token mask."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from ...settings.sampling import LOGIT_BIAS, PARAMETERS
from ..core.sequence import SamplingParams, TokenMask

NGRAMS_AT_ONCE = 1024  # tokens: half a millisecond, which a step takes for each of its sequences
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # below it, a division would give no number


def draws_at_random(params: SamplingParams) -> bool:
    """Whether the token is drawn; otherwise it is the most likely one."""
    return params.temperature >= _SMALLEST_TEMPERATURE and params.top_k != 1


def signed_seeds(params: Iterable[SamplingParams]) -> np.ndarray:
    """Return [params] int64: the same 64 bits as the unsigned seeds."""
    return np.array([each.seed & 0xFFFF_FFFF_FFFF_FFFF for each in params], dtype=np.uint64).view(np.int64)


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
    field = "sampling.allowed_token_ids"
    fault = ""
    error = ""
    is_slow = False

    def __init__(self, ids: Iterable[int]) -> None:
        numbers = np.fromiter(ids, dtype=np.int64)
        is_allowed = np.zeros(32 * num_mask_words(int(numbers.max(initial=-1)) + 1), dtype=bool)
        is_allowed[numbers] = True
        self._words = np.packbits(is_allowed, bitorder="little").view("<u4")

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        return True

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        return token < 32 * len(self._words) and bool(self._words[token >> 5] >> np.uint32(token & 31) & 1)

    def fill(self, tokens: list[int], words: memoryview) -> None:
        count = min(len(words), len(self._words))
        np.frombuffer(words, dtype="<u4")[:count] = self._words[:count]

    def follow(self, tokens: list[int]) -> list[int] | None:
        return []


class TokenBans:
    """A TokenMask that lets nothing be repeated, or nothing be said, that must not be.

    prompt_len  leading tokens that are the prompt
    ngram_size  no n-gram of prompt and output comes twice, as in transformers' NoRepeatNGramLogitsProcessor; 0: any may
    bad_words   tokens that must not follow each other in the output
    allowed     which tokens can be chosen apart from that; None: all
    """

    depends_on_tokens = True
    field = "sampling.allowed_token_ids"  # bans alone leave most of a vocabulary
    fault = ""
    error = ""

    def __init__(
        self,
        prompt_len: int,
        ngram_size: int = 0,
        bad_words: Iterable[Iterable[int]] = (),
        allowed: TokenMask | None = None,
    ) -> None:
        self._prompt_len = prompt_len
        self._ngrams = _NGrams(ngram_size) if ngram_size else None
        self._bad_words = [list(word) for word in bad_words]
        self._allowed = allowed
        self.is_slow = bool(ngram_size) and prompt_len > NGRAMS_AT_ONCE  # until it has taken in most of its prompt

    def is_ready(self, tokens: list[int], timeout_s: float) -> bool:
        """Take in a part of a long prompt, and more while there is time; say whether `fill` will be quick."""
        if self._ngrams is None:
            return True
        until = time.monotonic() + timeout_s
        while self._ngrams.num_missing(tokens) > NGRAMS_AT_ONCE:
            self._ngrams.approach(tokens)
            if time.monotonic() >= until:
                break
        self.is_slow = self._ngrams.num_missing(tokens) > NGRAMS_AT_ONCE
        return not self.is_slow

    def surely_allows(self, tokens: list[int], token: int) -> bool:
        is_allowed = self._allowed is None or self._allowed.surely_allows(tokens, token)
        return is_allowed and token not in self._banned_after(tokens)

    def fill(self, tokens: list[int], words: memoryview) -> None:
        mask = np.frombuffer(words, dtype="<u4")
        if self._allowed is None:
            mask.fill(0xFFFF_FFFF)
        else:
            self._allowed.fill(tokens, words)
        for token in self._banned_after(tokens):
            if token < 32 * len(mask):
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))

    def follow(self, tokens: list[int]) -> list[int]:
        """Nothing must come next."""
        return []

    def _banned_after(self, tokens: list[int]) -> set[int]:
        banned = set(self._ngrams.following(tokens)) if self._ngrams is not None else set()
        for word in self._bad_words:
            start = len(tokens) - (len(word) - 1)
            if start >= self._prompt_len and tokens[start:] == word[:-1]:
                banned.add(word[-1])
        return banned


class _NGrams:
    """The n-grams of a sequence. A token that is added to it, or taken from its end, costs constant time.

    What it keeps follows from the tokens of the last call: those of the next one may be any.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], list[int]] = {}  # by all tokens of an n-gram but its last: the last ones

    def following(self, tokens: list[int]) -> list[int]:
        """The tokens that would end an n-gram which `tokens` hold already."""
        self._go_to(tokens)
        if len(tokens) < self._size - 1:
            return []
        return self._next.get(tuple(tokens[len(tokens) - self._size + 1 :]), [])

    def num_missing(self, tokens: list[int]) -> int:
        """Count the tokens that it has yet to take in, as far as their number shows."""
        return len(tokens) - len(self._tokens)

    def approach(self, tokens: list[int]) -> None:
        """Take in the next tokens that are missing."""
        self._go_to(tokens[: len(self._tokens) + NGRAMS_AT_ONCE])

    def _go_to(self, tokens: list[int]) -> None:
        num_common = self._num_common(tokens)
        while len(self._tokens) > num_common:
            if (ends := self._ends()) is not None:
                ends.pop()
            self._tokens.pop()
        for token in tokens[num_common:]:
            self._tokens.append(token)
            if (ends := self._ends()) is not None:
                ends.append(token)

    def _ends(self) -> list[int] | None:
        """Those that the last n-gram is among; None if there is none yet."""
        start = len(self._tokens) - self._size
        return None if start < 0 else self._next.setdefault(tuple(self._tokens[start:-1]), [])

    def _num_common(self, tokens: list[int]) -> int:
        most = min(len(self._tokens), len(tokens))
        if self._tokens[:most] == tokens[:most]:  # the usual case, without a loop in Python
            return most
        return next(index for index in range(most) if self._tokens[index] != tokens[index])


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def fill_mask(mask: TokenMask, tokens: list[int], words: np.ndarray) -> None:
    """Fills the mask of the token that follows `tokens`.

    words  [num_mask_words] int32, contiguous
    """
    words[:] = 0
    mask.fill(tokens, words.view(np.uint32).data)
