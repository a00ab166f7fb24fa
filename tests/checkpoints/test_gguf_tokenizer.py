"""Conversion of GGUF vocabularies to tokenizers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from gguf.constants import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pagoda_server.checkpoints import CheckpointError
from pagoda_server.checkpoints.gguf_import import import_gguf
from pagoda_server.checkpoints.gguf_tokenizer import WORD_SPLITS
from pagoda_server.checkpoints.progress import no_progress
from tests.checkpoints.tiny_gguf import CHAT_TEMPLATE, bpe_vocabulary, tiny_model

TINY = tiny_model("llama", vocab_size=400)


def imported(tmp_path: Path, **metadata: object) -> Path:
    TINY.metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    import_gguf(TINY.write(tmp_path / "tiny.gguf"), folder, no_progress)
    return folder


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("split", {split: name for name, split in WORD_SPLITS.items()}.values())
def test_any_text_survives_encoding_and_decoding(split: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(imported(tmp_path, pre=split, add_bos_token=False))
    for text in ("hello world 12345", " leading", "a\n\n\tb", "don't", "Zürich 🙂 日本語", "<not special>"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def words(split: str, text: str, tmp_path: Path) -> list[str]:
    tokenizer = tokenizer_of(imported(tmp_path, pre=split))
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_word_splits_differ_as_their_models_expect(tmp_path: Path) -> None:
    text = "It's 12345\n"
    assert words("gpt-2", text, tmp_path) == ["It", "'s", " 12345", "\n"]
    assert words("smollm", text, tmp_path) == ["It", "'s", " ", "1", "2", "3", "4", "5", "\n"]
    assert words("llama-bpe", text, tmp_path) == ["It", "'s", " ", "123", "45", "\n"]
    assert words("qwen2", text, tmp_path) == ["It", "'s", " ", "1", "2", "3", "4", "5", "\n"]
    assert words("qwen2", "a.b", tmp_path) == ["a", ".b"]
    assert words("gpt-2", "a.b", tmp_path) == ["a", ".", "b"]


@pytest.mark.parametrize(
    ("split", "text", "expected"),
    [
        ("gpt-4o", "HTTPServer's 12345 a/b/\n", ["HTTPServer's", " ", "123", "45", " a", "/b", "/\n"]),
        ("gpt-4o", "don'T ǅx नमस्ते", ["don'T", " ǅx", " नमस्ते"]),
        ("tekken", "fooBar's 12", ["foo", "Bar", "'s", " ", "1", "2"]),
        ("qwen35", "नमस्ते it's 12", ["नमस्ते", " it", "'s", " ", "1", "2"]),
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),
        ("dbrx", "IT'S 1234\n\n x", ["IT", "'S", " ", "123", "4", "\n\n", " x"]),
        ("deepseek-v3", "1234漢字かな.abc the ", ["123", "4", "漢字かな", ".abc", " the", " "]),
        ("deepseek-coder", "ab\n\n12 漢x", ["ab", "\n", "\n", "1", "2", " ", "漢", "x"]),
        ("deepseek-llm", "ab!\n12 漢x  ", ["ab", "!", "\n", "1", "2", " ", "漢", "x", "  "]),
        ("falcon", "ab 12345!?x", ["ab", " ", "123", "45", "!?", "x"]),
        ("command-r", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("kimi-k2", "漢字abc 中文's", ["漢字", "abc", " ", "中文", "'s"]),
        ("bailingmoe", "it'S a\n\nb", ["it", "'S", " a", "\n\n", "b"]),
        ("seed-coder", "x!\n12", ["x", "!", "\n", "1", "2"]),
        ("minimax-m2", "HTTPServer's 12345", ["HTTPServer's", " ", "123", "45"]),
        ("tiny_aya", "x 1234567 y's", ["x", " ", "1", "234", "567", " y's"]),
        ("youtu", "한국어abc 12漢字、ok's", ["한국어", "abc", " ", "1", "2", "漢字", "、", "ok's"]),
        ("minicpm5", "it'S 12345\n", ["it", "'S", " ", "123", "45", "\n"]),
        ("exaone-moe", "in a word 12\n\n", ["in a word", " ", "1", "2", "\n\n"]),
        ("superbpe", "by the way 1234567", ["by the way ", "1", "234", "567"]),
    ],
)
def test_each_way_to_split_words_is_that_of_its_models(
    split: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    assert words(split, text, tmp_path) == expected


@pytest.mark.parametrize("split", ["qwen2", "command-r", "olmo"])
def test_unicode_is_composed_where_the_models_do(split: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(imported(tmp_path, pre=split))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids
    tokenizer = tokenizer_of(imported(tmp_path, pre="gpt-4o"))
    assert tokenizer.encode("e\u0301").ids != tokenizer.encode("é").ids


def test_merges_are_applied_in_their_order(tmp_path: Path) -> None:
    assert tokenizer_of(imported(tmp_path)).encode("hello world").tokens == ["hello", "Ġw", "o", "r", "l", "d"]


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    vocabulary = bpe_vocabulary()
    tokens, kinds = list(vocabulary["tokenizer.ggml.tokens"]), list(vocabulary["tokenizer.ggml.token_type"])
    tokens += ["<tool>", "[PAD]"]
    kinds += [int(TokenType.USER_DEFINED), int(TokenType.UNUSED)]
    tokenizer = tokenizer_of(imported(tmp_path, tokens=tokens, token_type=kinds))
    ids = tokenizer.encode("a<tool>b<|im_end|>").ids
    assert ids == [ord("a"), tokens.index("<tool>"), ord("b"), tokens.index("<|im_end|>")]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b<|im_end|>"
    assert tokenizer.token_to_id("[PAD]") is None


def test_beginning_of_sequence_is_added_where_the_file_or_its_kind_says_so(tmp_path: Path) -> None:
    begin = bpe_vocabulary()["tokenizer.ggml.bos_token_id"]
    end = bpe_vocabulary()["tokenizer.ggml.eos_token_id"]
    assert tokenizer_of(imported(tmp_path)).encode("a").ids == [97]
    assert tokenizer_of(imported(tmp_path, add_bos_token=True)).encode("a").ids == [begin, 97]
    assert tokenizer_of(imported(tmp_path, pre="llama-bpe")).encode("a").ids == [begin, 97]
    assert tokenizer_of(imported(tmp_path, pre="llama-bpe", add_bos_token=False)).encode("a").ids == [97]
    both = tokenizer_of(imported(tmp_path, add_bos_token=True, add_eos_token=True))
    assert both.encode("a").ids == [begin, 97, end]
    assert both.encode("a", add_special_tokens=False).ids == [97]


def test_transformers_reads_the_tokenizer_its_tokens_and_its_template(tmp_path: Path) -> None:
    folder = imported(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer("hello world").input_ids == tokenizer_of(folder).encode("hello world").ids


def test_every_token_that_ends_a_turn_ends_generation_the_files_own_first(tmp_path: Path) -> None:
    tokens = bpe_vocabulary()["tokenizer.ggml.tokens"]
    ends, document, turn = (tokens.index(token) for token in ("h", "<|endoftext|>", "<|im_end|>"))
    folder = imported(tmp_path, eos_token_id=ends)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [ends, document, turn]


@pytest.mark.parametrize(
    ("recommended", "generation"),
    [
        ({}, {}),
        (
            {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1},
            {
                "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05,
                "repetition_penalty": 1.1,
            },
        ),
        ({"top_k": 0}, {"do_sample": True, "temperature": 0.8, "top_k": 0}),
        ({"penalty_repeat": 1.1}, {"repetition_penalty": 1.1}),
        ({"temp": 0.0, "top_p": 0.9, "penalty_repeat": 1.1}, {"do_sample": False, "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_the_sampling_that_a_file_recommends_is_recommended_by_the_folder(
    recommended: dict[str, float], generation: dict[str, object], tmp_path: Path
) -> None:
    tiny = tiny_model("llama")
    tiny.metadata = {f"general.sampling.{key}": value for key, value in recommended.items()}
    import_gguf(tiny.write(tmp_path / "tiny.gguf"), tmp_path, no_progress)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: value for name, value in written.items() if not name.endswith("_token_id")} == generation


UNUSABLE = {
    "'bert' vocabulary; supported: gpt2, llama": {"model": "bert"},
    "splits words as 'martian'; supported: default, gpt-2, phi-2": {"pre": "martian"},
    "inconsistent vocabulary": {"merges": ["x nonsense"]},
    "264 tokens but 1 token types": {"token_type": [1]},
    "its eos token is 9999": {"eos_token_id": 9999},
    "a token of 2000 characters": {"tokens": ["x" * 2000]},
    "tokens but embeddings for 400": {"tokens": [str(i) for i in range(401)], "token_type": [1] * 401},
}


@pytest.mark.parametrize(("message", "metadata"), UNUSABLE.items(), ids=UNUSABLE.keys())
def test_a_vocabulary_that_cannot_be_used_says_why(message: str, metadata: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        imported(tmp_path, **metadata)


PIECES = ["▁the", "▁th", "he", "▁t", "th", "er", "in", "▁a", "▁in", "the", "ther", "▁", *"abehinrt"]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    return imported(
        tmp_path_factory.mktemp("sentencepiece"),
        model="llama",
        tokens=tokens,
        token_type=[int(kind) for kind in kinds],
        scores=[0.0] * 259 + [-float(i) for i in range(len(PIECES))],
        merges=None,
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def sentencepiece_tokens(text: str) -> list[str]:
    """The definition: join the neighbours that make the best piece, leftmost first, until none do; then use bytes."""
    parts = list("▁" + text.replace(" ", "▁"))
    score = {piece: -i for i, piece in enumerate(PIECES)}
    while candidates := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in score]:
        best = max(candidates, key=lambda i: (score[parts[i] + parts[i + 1]], -i))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [token for part in parts for token in ([part] if part in score else [f"<0x{b:02X}>" for b in part.encode()])]


def test_sentencepiece_merges_follow_the_scores(sentencepiece: Path) -> None:
    tokenizer = tokenizer_of(sentencepiece)
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("abehinrt the", k=rng.randint(1, 20)))
        assert tokenizer.encode(text).tokens == ["<s>", *sentencepiece_tokens(text)], text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), min_size=1))
def test_sentencepiece_falls_back_to_bytes_and_loses_nothing(sentencepiece: Path, text: str) -> None:
    tokenizer = tokenizer_of(sentencepiece)
    if not any(token in text for token in ("<unk>", "<s>", "</s>")):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_pieces_never_merge_into_a_control_token(sentencepiece: Path) -> None:
    merges = json.loads((sentencepiece / "tokenizer.json").read_text())["model"]["merges"]
    assert merges
    assert not any("".join(pair) in {"<s>", "</s>", "<unk>"} for pair in merges)


def test_pieces_that_the_user_defined_join_before_all_others_and_keep_their_spaces(tmp_path: Path) -> None:
    """As in Gemma's files: runs of spaces are written as they are, with a score that no tokenizer uses."""
    tokens = ["<unk>", "<bos>", "▁", "a", "▁a", "  ", "   ", "<b>"]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL] + [TokenType.NORMAL] * 3 + [TokenType.USER_DEFINED] * 3
    folder = imported(
        tmp_path,
        model="llama",
        tokens=tokens,
        token_type=[int(kind) for kind in kinds],
        scores=[0.0, 0.0, -9.0, -9.0, -1.0, -1000.0, -1000.0, -1000.0],
        merges=None,
        add_space_prefix=False,
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("   a<b> a", add_special_tokens=False).tokens == ["▁▁▁", "a", "<b>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("   a<b> a").ids) == "   a<b> a"
