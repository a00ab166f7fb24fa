"""Deltas are compared with the tokenizers library's decoding of all ids at once."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagoda_server.router.text.detokenizer import Detokenization
from tests.router.tokenizers_for_tests import TEXT, byte_level, sentence_piece, unigram, with_decoder

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def strip(start: int) -> dict[str, Any]:
    return {"type": "Strip", "content": " ", "start": start, "stop": 0}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def metaspace(prepend_scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": True}


TOKENIZERS = {
    "byte-level": Tokenizer.from_str(byte_level()),
    "byte-level in a sequence": with_decoder(byte_level(), sequence(BYTE_LEVEL)),
    "Llama 2": Tokenizer.from_str(sentence_piece()),
    "Gemma": with_decoder(sentence_piece(), sequence(REPLACE, BYTES, FUSE)),
    "two spaces cut": with_decoder(sentence_piece(), sequence(REPLACE, BYTES, FUSE, strip(2))),
    "each token cut": with_decoder(sentence_piece(), sequence(REPLACE, strip(1), FUSE)),
    "Metaspace": Tokenizer.from_str(unigram()),
    "Metaspace, first": with_decoder(sentence_piece(), sequence(metaspace("first"), BYTES, FUSE)),
    "Metaspace, never": with_decoder(sentence_piece(), metaspace("never")),
    "WordPiece": with_decoder(sentence_piece(), {"type": "WordPiece", "prefix": "i", "cleanup": True}),
    "none": with_decoder(sentence_piece(), None),
    "CTC": with_decoder(
        sentence_piece(), {"type": "CTC", "pad_token": "a", "word_delimiter_token": "▁", "cleanup": True}
    ),
    "bytes last": with_decoder(sentence_piece(), sequence(BYTES, REPLACE)),
}
DETOKENIZATIONS = {name: Detokenization(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of parts of characters: tokens that alone decode to U+FFFD or are written as <0x…>."""
    vocab = tokenizer.get_vocab()
    return sorted(id for token, id in vocab.items() if token.startswith("<0x") or tokenizer.decode([id]) == "\ufffd")


@cache
def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Real text, broken characters, special and added tokens, and ids outside the vocabulary, in any order."""
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    parts: list[st.SearchStrategy[list[int]]] = [
        st.sampled_from([*TEXT[2].split(), "😀", "é", " ", "  a"]).map(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        ),
        st.lists(st.integers(0, size + 2), max_size=4),
        st.lists(st.sampled_from(sorted(tokenizer.get_added_tokens_decoder())), max_size=2),
        st.just([2**32 - 1]),
    ]
    blank = [id for token, id in tokenizer.get_vocab().items() if token.strip("▁Ġ") == ""]
    parts += [st.lists(st.sampled_from(sorted(ids)), max_size=5) for ids in (byte_ids(tokenizer), blank) if ids]
    return st.lists(st.one_of(parts), max_size=8).map(lambda lists: [id for part in lists for id in part])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_concatenated_deltas_equal_the_full_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, detokenization = TOKENIZERS[name], DETOKENIZATIONS[name]
    ids = data.draw(ids_of(name))
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = detokenization.detokenizer(skip_special_tokens=skip)
    assert "".join([detokenizer.push([id]) for id in ids]) + detokenizer.flush() == full
    assert detokenization.decode(ids, skip_special_tokens=skip) == full


@pytest.mark.parametrize("name", ["byte-level", "Llama 2", "Metaspace", "WordPiece"])
def test_text_comes_with_its_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False).ids
    detokenizer = DETOKENIZATIONS[name].detokenizer()
    emitted = ""
    for end, id in enumerate(ids, 1):
        emitted += detokenizer.push([id])
        assert emitted == tokenizer.decode(ids[:end])


def test_character_comes_whole_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.token_to_id(char) for char in "ðŁĺĢ"]  # the four bytes of 😀
    detokenizer = DETOKENIZATIONS["byte-level"].detokenizer()
    assert [detokenizer.push([id]) for id in ids] == ["", "", "", "😀"]


def test_character_cut_short_is_replaced_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = DETOKENIZATIONS["byte-level"].detokenizer()
    assert detokenizer.push([tokenizer.token_to_id("ð"), tokenizer.token_to_id("Ł")]) == ""
    assert detokenizer.flush() == "\ufffd"


@given(ids=ids_of("byte-level"))
@settings(max_examples=150, deadline=None)
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(ids: list[int]) -> None:
    detokenization = DETOKENIZATIONS["byte-level"]
    joined = b"".join(detokenization.token_bytes(id) for id in ids)
    assert joined.decode(errors="replace") == detokenization.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("byte-level", "ðŁ", b"\xf0\x9f"),
        ("byte-level", "<|im_end|>", b"<|im_end|>"),
        ("Llama 2", "<0xF0>", b"\xf0"),
        ("Llama 2", "▁the", b" the"),
        ("Llama 2", "</s>", b"</s>"),
        ("Metaspace", "▁", b" "),
        ("WordPiece", "is", b"s"),
        ("CTC", "is", b"is"),
    ],
)
def test_a_token_has_the_bytes_that_it_adds_inside_a_text(name: str, token: str, expected: bytes) -> None:
    ids = (
        [TOKENIZERS[name].token_to_id(char) for char in token]
        if token == "ðŁ"
        else [TOKENIZERS[name].token_to_id(token)]
    )
    assert None not in ids, "the test's tokenizer has no such token"
    assert b"".join(DETOKENIZATIONS[name].token_bytes(id) for id in ids) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_id_outside_the_vocabulary_has_no_bytes(name: str) -> None:
    assert DETOKENIZATIONS[name].token_bytes(2**32 - 1) == b""


def test_sequences_do_not_share_state() -> None:
    tokenizer, detokenization = TOKENIZERS["byte-level"], DETOKENIZATIONS["byte-level"]
    one, other = detokenization.detokenizer(), detokenization.detokenizer()
    assert one.push([tokenizer.token_to_id("ð")]) == ""
    assert other.push([tokenizer.token_to_id("a")]) == "a"


def test_tokens_added_later_do_not_count() -> None:
    tokenizer = Tokenizer.from_str(byte_level())
    detokenization = Detokenization(tokenizer)
    tokenizer.add_tokens(["later"])
    assert detokenization.decode([tokenizer.token_to_id("later")]) == ""


@pytest.mark.parametrize("name", ["byte-level", "Llama 2"])
def test_cost_of_a_token_does_not_grow_with_the_text(name: str) -> None:
    detokenizer = DETOKENIZATIONS[name].detokenizer()
    ids = TOKENIZERS[name].encode("the dog", add_special_tokens=False).ids * 20_000
    start = time.process_time()
    for id in ids:
        detokenizer.push((id,))
    assert time.process_time() - start < 5  # decoding everything anew for each token would take hours
