"""Convert token ids to text as they arrive: all deltas together equal the decoding of all ids at once.

The reference is `tokenizers.Tokenizer.decode`. The method depends on the tokenizer's decoder:

byte-level   every token is bytes (GPT-2, Llama 3, Qwen); text follows when they complete a character
piece-wise   every token is a text or one byte (SentencePiece: Llama 2, Mistral, Gemma; also WordPiece)
any other    no text is certain before the last token, so `flush` returns all of it
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from tokenizers import Tokenizer, decoders

from ...checkpoints.synthetic import letters_of_bytes
from .panics import contained
from .piece_detokenizer import PieceWise, PieceWiseKind, flat, piece_wise

logger = logging.getLogger(__name__)

Tokens: TypeAlias = dict[int, str]  # ids that decoding does not skip


class Detokenizer(Protocol):
    """One sequence's text so far."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add and no later id can change. Ids outside the vocabulary add nothing."""

    def flush(self) -> str:
        """The text still held after the last id, such as the replacement of an incomplete character."""


class Detokenization:
    """Makes a tokenizer's detokenizers, which share what it learns about each token.

    Threads may share it. It does not see tokens that are added to the tokenizer later.

    vocab_size  highest token id + 1
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = _tokens_of_model(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        tokens |= {id: token.content for id, token in added.items()}
        self.vocab_size = max(tokens, default=-1) + 1
        self._special = {id: token.content for id, token in added.items() if token.special}
        ordinary = tokens.copy()
        for id in self._special:
            del ordinary[id]
        self._decoder = tokenizer.decoder
        self._ordinary = ordinary
        self._kind = {False: _kind_of(self._decoder, tokens), True: _kind_of(self._decoder, ordinary)}
        self._keeping: dict[tuple[str, ...], _Kind] = {}

    def detokenizer(self, skip_special_tokens: bool = True, kept: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for a new sequence. Of special tokens that it skips, it keeps those of these texts."""
        if kept and skip_special_tokens:
            return self._kind_keeping(tuple(kept)).detokenizer()
        return self._kind[skip_special_tokens].detokenizer()

    def _kind_keeping(self, kept: tuple[str, ...]) -> _Kind:
        if (kind := self._keeping.get(kept)) is None:
            special = {id: text for id, text in self._special.items() if text in kept}
            kind = _kind_of(self._decoder, self._ordinary | special) if special else self._kind[True]
            self._keeping[kept] = kind
        return kind

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, id: int) -> bytes:
        """A token's UTF-8 bytes inside a text; a special token's name; empty for unknown ids."""
        return self._kind[False].token_bytes(id)


def _tokens_of_model(tokenizer: Tokenizer) -> Tokens:
    """All tokens but those that have been added. Asked for one by one they take half of the vocabulary's time."""
    model, size = tokenizer.model, tokenizer.get_vocab_size(with_added_tokens=False)
    tokens = dict(enumerate(map(model.id_to_token, range(size))))
    if None in tokens.values():  # ids leave gaps, so some are beyond the size
        return {id: token for token, id in tokenizer.get_vocab(with_added_tokens=False).items()}
    return tokens


class _Kind(Protocol):
    """One kind of tokenizer: how its tokens become text."""

    def detokenizer(self) -> Detokenizer: ...

    def token_bytes(self, id: int) -> bytes: ...


def _kind_of(decoder: decoders.Decoder | None, tokens: Tokens) -> _Kind:
    if decoder is None:
        return PieceWiseKind(tokens, PieceWise(" ".join, has_bytes=False, strip=None))
    description = json.loads(decoder.__getstate__())
    if [step["type"] for step in flat(description)] == ["ByteLevel"]:
        return _ByteLevelKind(tokens)
    if (plan := piece_wise(description)) is not None:
        return PieceWiseKind(tokens, plan)
    logger.warning("the tokenizer's decoder needs all tokens at once: text will arrive at the end of each sequence")
    return _WholeKind(tokens, decoder)


# Byte-level


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token, filled on first use."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __missing__(self, id: int) -> bytes:
        token = self._tokens.get(id)
        if token is None:
            return b""
        try:
            self[id] = bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token outside the byte alphabet stands for itself
            self[id] = token.encode()
        return self[id]


_BYTE_OF_CHAR = {letter: byte for byte, letter in enumerate(letters_of_bytes())}


class _ByteLevelKind:
    def __init__(self, tokens: Tokens) -> None:
        self._token_bytes = _TokenBytes(tokens)

    def detokenizer(self) -> Detokenizer:
        return _ByteLevelDetokenizer(self._token_bytes)

    def token_bytes(self, id: int) -> bytes:
        return self._token_bytes[id]


class _ByteLevelDetokenizer:
    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        # Both this and the reference write one U+FFFD for each maximal part of an ill-formed sequence (Unicode, 3.9).
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        return self._utf8.decode(b"".join([token_bytes[id] for id in ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


# Any other


class _WholeKind:
    def __init__(self, tokens: Tokens, decoder: decoders.Decoder) -> None:
        self._tokens = tokens
        self._decoder = decoder

    def detokenizer(self) -> Detokenizer:
        return _WholeDetokenizer(self._tokens, self._decoder)

    def token_bytes(self, id: int) -> bytes:
        if id not in self._tokens:
            return b""
        return contained(lambda: self._decoder.decode([self._tokens[id]])).encode()


class _WholeDetokenizer:
    def __init__(self, tokens: Tokens, decoder: decoders.Decoder) -> None:
        self._tokens = tokens
        self._decoder = decoder
        self._pushed: list[str] = []

    def push(self, ids: Sequence[int]) -> str:
        self._pushed += [self._tokens[id] for id in ids if id in self._tokens]
        return ""

    def flush(self) -> str:
        pushed, self._pushed = self._pushed, []
        return contained(lambda: self._decoder.decode(pushed)) if pushed else ""
