"""A model folder's files about its tokenizer, with a zero byte between one and the next."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import tokenizers

from pagoda_server.router.errors import ConfigError, Internal
from pagoda_server.router.text import tokenizer as module
from pagoda_server.router.text.panics import contained
from tests.fuzz.common import check_line, folder_of

FILES = ("tokenizer__json", "tokenizer_config__json", "generation_config__json")
TEXTS = ("", "Hello, wörld! 12 \U0001f642", "<|im_end|> <s> a", "\u0000\ufffd")
MOST_IDS = 30


def check(data: bytes) -> bool:
    with folder_of(**dict(zip(FILES, data.split(b"\0", len(FILES) - 1), strict=False))) as folder:
        return check_folder(folder)


def check_folder(folder: Path) -> bool:
    try:
        with mock.patch.object(module, "ChatTemplate", _no_template):  # a target of its own
            tokenizer = module.Tokenizer(folder)
    except ConfigError as error:
        check_line(error)
        return False
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = reference.get_vocab(with_added_tokens=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        return True  # of two tokens with one id the library shows any
    added = reference.get_added_tokens_decoder().values()
    if reference.normalizer is not None and any(token.special and token.normalized for token in added):
        return True  # the library shows the normalized name, and does not skip it, because no token is called so
    try:
        _check_decoding(tokenizer, reference, list(range(min(tokenizer.vocab_size, MOST_IDS))))
        for text, with_special in itertools.product(TEXTS, (True, False)):
            try:
                ids = _encoded(tokenizer, text, with_special)
            except Exception:  # of the library: the call ends so too
                return False
            assert all(0 <= id < tokenizer.vocab_size for id in ids)
            _check_decoding(tokenizer, reference, ids)
    except Internal:  # the library panicked: the call ends with INTERNAL
        return False
    finally:
        tokenizer.close()
    return True


def _no_template(*_: object) -> None:
    """Take the place of the template, whose processes would take most of the time."""


def _encoded(tokenizer: module.Tokenizer, text: str, with_special: bool) -> list[int]:
    return contained(lambda: tokenizer.encode(text, with_special))


def _check_decoding(tokenizer: module.Tokenizer, reference: tokenizers.Tokenizer, ids: list[int]) -> None:
    for id in ids:
        tokenizer.token_bytes(id)
    for skips in (True, False):
        detokenizer = tokenizer.detokenizer(skips)
        text = "".join(detokenizer.push([id]) for id in ids) + detokenizer.flush()
        expected = contained(lambda skips=skips: reference.decode(ids, skip_special_tokens=skips))
        assert text == tokenizer.decode(ids, skips) == expected
