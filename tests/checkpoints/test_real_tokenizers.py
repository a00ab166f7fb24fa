"""Vocabularies of GGUF files become tokenizers that give the ids of the models' own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf.constants import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagoda_server.checkpoints.gguf_file import GgufFile
from pagoda_server.checkpoints.gguf_tokenizer import write_tokenizer
from tests.real_models import TOKENIZERS, gemma_gguf, qwen_gguf, tokenizer_folder

pytestmark = pytest.mark.thorough

PRE = {"deepseek_v3": "deepseek-v3", "gptoss": "gpt-4o", "llama3": "llama-bpe", "qwen3": "qwen2"}
LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<(pad|mask|unk|bos|eos|start_of_turn|end_of_turn)>")

NASTY = [
    *("", " ", "  ", "\n", "\r\n", "\t", "\n\n", " \n \n ", "\n \n", "\r", "\r\r\n", "a\r\nb\r\n\r\nc",
      "\u00a0", "\u3000", "\u2028x"),
    *(" " * count + "x" for count in range(2, 40, 5)),
    *("x" + " " * count for count in range(1, 40, 5)),
    *("a" + "\n" * count + "b" for count in (1, 2, 3, 15, 31, 32, 33, 70)),
    *("1234567890"[:count] for count in range(1, 11)),
    *("12345678901234567890", "3.14159", "1,234,567.89", "1e-10", "0x1F", "٣٤٥٦", "१२३४५", "½ ⅓ ²³ Ⅷ ①",
      "1st 2nd 007", "12ab34"),
    *("I'm you're he'll she'd we've it's don't", "I'M YOU'RE HE'LL SHE'D WE'VE IT'S DON'T",
      "O'Reilly's 'quoted' 'tis 's", "’s ’t don’t"),
    *("日本語のテキストです。", "漢字かなカナ混じり文、１２３。", "你好，世界！", "한국어 텍스트입니다.",
      "㐀㐁鿿豈 𠀀𠀁"),
    *("🙂", "👩‍👩‍👧‍👦 family", "🏳️‍🌈🇸🇪", "👍🏽👍", "a🙂b🙂c", "☃️❤️"),
    *("e\u0301 é n\u0303 A\u030a \u0301", "Zürich Ångström ﬁ ﬀ Ⅸ", "\u1e9b\u0323", "न\u093cमस\u094dते", "ﷺ"),
    *("مرحبا بالعالم، كيف حالك؟", "שָׁלוֹם עולם", "สวัสดีชาวโลก", "नमस्ते दुनिया", "வணக்கம் உலகம்", "ამხანაგო",
      "Привет, мир!", "Γειά σου Κόσμε"),
    *("Latin кириллица 漢字 عربي mixed123текст456字",
      "camelCaseHTTPServer snake_case SCREAMING_CASE kebab-case", "ǅ ǈ ʰ ﬃ ß ẞ İı"),
    *("\u200b\u200c\u200d\ufeff\u2060", "a\u200bb", "\u202eevil\u202c", "\x00\x01\x1b[31m\x7f", "\ufffd\ufffd",
      "a\ufffdb", "\ue000 \U0010ffff"),
    "def f(x):\n    if x > 0:\n\t\treturn {'a': [1, 2.5e3]}  # comment\n\n\n    return None\n",
    "for (int i=0;i<n;++i){a[i]+=b[i]*c;}//done\n#include <x.h>\n/* a */ std::vector<int>& v;",
    "SELECT * FROM t WHERE a<>'b''c' AND d>=10;\n<div class=\"x\">&nbsp;</div>\n\\frac{a}{b} $x^2$",
    "https://example.com/path?query=1&other=%20#frag user@mail.org C:\\Windows\\ /usr/bin/env",
    "!!! ... ??? --- *** ___ === /// \\\\\\ ((())) [[[]]] {{{}}} <<<>>> \"\"\" ''' ``` ~~~ @@@ ### $$$ %%% ^^^ &&&",
    "…—–‘’“”«»‹›„‚•·¡¿§¶†‡‰′″€£¥©®™°±×÷≠≤≥∞∑√∫",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|> <|eot_id|><|start_header_id|> <bos><start_of_turn>x<end_of_turn>",
    "<tool_call> <think> </think> <table><td> [INST] <s></s> <unk> <pad> <0x0A> <unused5>"
    " ▁▁ ▁a <｜fim▁hole｜><｜User｜>",
    *("a" * 3000, "ab" * 1000, "Donaudampfschifffahrtsgesellschaftskapitän" * 20, "语" * 500, "🙂" * 200,
      "9" * 500, "=" * 300, " a" * 500),
    "trailing spaces   ", "trailing newline\n", "   leading",
    "\n\nleading newlines", "tab\tand\t\ttabs\t", "end.\n\n  \n",
]  # fmt: skip


class Vocabulary(SimpleNamespace):
    """The metadata of a GGUF file, read as from one: the file itself would take most of a minute to write and read."""

    def _get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    text = integer = number = flag = texts = integers = numbers = _get

    def has(self, key: str) -> bool:
        return key in self.metadata


def gguf_vocabulary(folder: Path, pre: str | None) -> Vocabulary:
    """The vocabulary that llama.cpp's converter makes of a tokenizer.json."""
    document = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(document["model"]["vocab"])
    added = {token["id"]: token for token in document["added_tokens"]}
    by_id = {id: token for token, id in ids.items()} | {id: token["content"] for id, token in added.items()}
    tokens, kinds = [], []
    for id in range(max(by_id) + 1):
        token, kind = by_id.get(id, f"[PAD{id}]"), TokenType.NORMAL if id in by_id else TokenType.UNUSED
        if id in added:
            is_control = added[id]["special"] or LOOKS_SPECIAL.fullmatch(token)
            kind = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        elif pre is None and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kind = TokenType.BYTE
        if pre is None and kind == TokenType.USER_DEFINED:
            token = token.replace("▁", " ")
        tokens.append(token)
        kinds.append(int(kind))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    metadata: dict[str, object] = {
        "general.architecture": "tiny",
        "tiny.context_length": 1,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    if pre is None:
        best = {piece: -rank for rank, piece in reversed(list(enumerate(merge.replace(" ", "") for merge in merges)))}
        scores = [
            best.get(token, -1e6) if kind == TokenType.NORMAL else -1000.0
            for token, kind in zip(tokens, kinds, strict=True)
        ]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        metadata |= {"tokenizer.ggml.unknown_token_id": ids["<unk>"], "tokenizer.ggml.add_space_prefix": False}
        metadata |= {"tokenizer.ggml.bos_token_id": ids["<bos>"]}
    else:
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    embedding = SimpleNamespace(shape=(len(tokens), 1))
    return Vocabulary(
        name="tiny.gguf", architecture="tiny", metadata=metadata, tensors={"token_embd.weight": embedding}
    )


@cache
def original(family: str) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_folder(family) / "tokenizer.json"))


@pytest.fixture(scope="module", params=TOKENIZERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizer, ...]]:
    """A family's own tokenizer, and ours of its vocabulary."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(gguf_vocabulary(tokenizer_folder(request.param), PRE.get(request.param)), folder)  # type: ignore
    yield original(request.param), Tokenizer.from_file(str(folder / "tokenizer.json"))
    original.cache_clear()


def assert_same_ids(both: tuple[Tokenizer, ...], text: str) -> None:
    expected, found = (tokenizer.encode(text, add_special_tokens=False).ids for tokenizer in both)
    assert found == expected, repr(text[:80])
    kept, ours = (tokenizer.decode(expected, skip_special_tokens=False) for tokenizer in both)
    assert ours == kept, repr(text[:80])


def test_nasty_texts_have_the_ids_of_the_models_own_tokenizer(both: tuple[Tokenizer, ...]) -> None:
    for text in NASTY:
        assert_same_ids(both, text)
    for first in NASTY[:-12:3]:
        for second in NASTY[1:-12:5]:
            assert_same_ids(both, first + second)


def letters() -> st.SearchStrategy[str]:
    scripts = st.sampled_from("aZ é'’ \n\t\r09٣½漢かカ한🙂\u200d\ufe0f\u0301ठ्ثไ_-./\\<|>▁\u00a0\ufffd\x00")
    return st.text(scripts | st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=1000, deadline=None)
@given(text=letters())
def test_random_texts_have_the_ids_of_the_models_own_tokenizer(both: tuple[Tokenizer, ...], text: str) -> None:
    assert_same_ids(both, text)


@pytest.mark.parametrize(("family", "path"), [("qwen3", qwen_gguf), ("gemma3", gemma_gguf)])
def test_a_real_file_has_the_ids_of_the_models_own_tokenizer(family: str, path: Any, tmp_path: Path) -> None:
    """Qwen2.5's tokens are the first of Qwen3's, whose tokens of tools and thoughts are newer."""
    write_tokenizer(GgufFile(path()), tmp_path)
    found, expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), original(family)
    newer = ("<tool_call>", "<think>", "</think>", "<tool_response>")
    for text in NASTY:
        if family == "gemma3" or not any(token in text for token in newer):
            assert_same_ids((expected, found), text)
    begins = found.token_to_id("<bos>") if family == "gemma3" else None
    assert found.encode("a").ids == [
        *([] if begins is None else [begins]),
        *expected.encode("a", add_special_tokens=False).ids,
    ]
