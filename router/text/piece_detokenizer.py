"""Convert ids to text where every token is a text or one byte: SentencePiece's and WordPiece's decoders."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenizers import decoders

from .panics import contained

REPLACEMENT = "\ufffd"

Step: TypeAlias = dict[str, Any]  # one decoder as tokenizer.json writes it


@dataclass(frozen=True, slots=True)
class Strip:
    """Up to `count` characters to remove from the beginning of the text."""

    char: str
    count: int


@dataclass(frozen=True, slots=True)
class PieceWise:
    """The steps of a piece-wise decoder.

    join       joins tokens to text; looks at one token at a time and at whether it is the first
    has_bytes  whether tokens like <0xE2> then become bytes
    strip      what is then cut from the beginning of the text
    """

    join: Callable[[list[str]], str]
    has_bytes: bool
    strip: Strip | None


def piece_wise(decoder: Step) -> PieceWise | None:
    """Read [token-wise steps …, ByteFallback?, (Fuse, Strip on the left?)?]; None for a decoder of another form."""
    rest = flat(decoder)
    token_wise = []
    while rest and rest[0]["type"] in ("Replace", "Metaspace", "WordPiece", "Strip"):
        token_wise.append(rest.pop(0))
    has_bytes = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[has_bytes:]
    match [step["type"] for step in rest]:
        case [] | ["Fuse"]:
            return PieceWise(_joined_by(token_wise), has_bytes, None)
        case ["Fuse", "Strip"] if rest[1]["stop"] == 0:
            return PieceWise(_joined_by(token_wise), has_bytes, Strip(rest[1]["content"], rest[1]["start"]))
    return None


def flat(step: Step) -> list[Step]:
    """The steps of a decoder, with nested sequences flattened."""
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in flat(part)]


def _joined_by(steps: list[Step]) -> Callable[[list[str]], str]:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
    return lambda tokens: contained(lambda: decoder.decode(tokens))


class Pieces(dict[int, "str | int | None"]):
    """What each token adds after the first: text, one byte, or nothing (None). Filled on first use."""

    _BYTE = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")
    _ANCHOR = "a"

    def __init__(self, tokens: Mapping[int, str], join: Callable[[list[str]], str], has_bytes: bool) -> None:
        self._tokens = tokens
        self._join = join
        self._has_bytes = has_bytes
        self._anchor_len = len(join([self._ANCHOR]))

    def first(self, id: int) -> str | int | None:
        """What the token adds as the first one."""
        token = self._tokens.get(id)
        return None if token is None else self._text_or_byte(self._join([token]))

    def __missing__(self, id: int) -> str | int | None:
        token = self._tokens.get(id)
        if token is None:
            return None
        self[id] = self._text_or_byte(self._join([self._ANCHOR, token])[self._anchor_len :])
        return self[id]

    def _text_or_byte(self, text: str) -> str | int:
        match = self._BYTE.fullmatch(text) if self._has_bytes else None
        return text if match is None else int(match[1], 16)


class PieceWiseKind:
    """Tokenizers whose decoder works as the plan says."""

    def __init__(self, tokens: Mapping[int, str], plan: PieceWise) -> None:
        self._pieces = Pieces(tokens, plan.join, plan.has_bytes)
        self._strip = plan.strip

    def detokenizer(self) -> PieceDetokenizer:
        return PieceDetokenizer(self._pieces, self._strip)

    def token_bytes(self, id: int) -> bytes:
        match self._pieces[id]:
            case None:
                return b""
            case int(byte):
                return bytes([byte])
            case str(text):
                return text.encode()


class PieceDetokenizer:
    def __init__(self, pieces: Pieces, strip: Strip | None) -> None:
        self._pieces = pieces
        self._strip = strip
        self._bytes = _ByteRun()
        self._is_first = True

    def push(self, ids: Sequence[int]) -> str:
        text = []
        for id in ids:
            piece = self._pieces.first(id) if self._is_first else self._pieces[id]
            if piece is None:
                continue
            self._is_first = False
            if isinstance(piece, int):
                text.append(self._bytes.push(piece))
            else:
                text += (self._bytes.end(), piece)
        return self._stripped("".join(text))

    def flush(self) -> str:
        return self._stripped(self._bytes.end())

    def _stripped(self, text: str) -> str:
        if self._strip is None or not text:
            return text
        char, count = self._strip.char, self._strip.count
        cut = 0
        while cut < min(count, len(text)) and text[cut] == char:
            cut += 1
        self._strip = Strip(char, count - cut) if cut == len(text) else None
        return text[cut:]


class _ByteRun:
    """A run of adjacent byte tokens. If all of it is UTF-8 it is text; otherwise each byte is one U+FFFD.

    Its text is known when the run ends, or as soon as it can no longer become UTF-8.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._is_broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, byte: int) -> str:
        if self._is_broken:
            return REPLACEMENT
        self._bytes.append(byte)
        try:
            self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._is_broken = True
            return REPLACEMENT * len(self._bytes)
        return ""

    def end(self) -> str:
        if not self._bytes:
            return ""
        try:
            text = "" if self._is_broken else self._bytes.decode()
        except UnicodeDecodeError:  # the run ends inside a character
            text = REPLACEMENT * len(self._bytes)
        self._bytes.clear()
        self._is_broken = False
        self._utf8.reset()
        return text
