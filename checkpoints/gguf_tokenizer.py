"""Converts a GGUF vocabulary to tokenizer.json, its settings, generation_config.json and chat_template.jinja."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .folder import CheckpointError, quoted, write_json
from .gguf_config import recommended_sampling
from .gguf_file import GgufFile

MAX_TOKEN_CHARACTERS = 1024  # the longest known has 256; finding the merges of one takes the square of its length
SPACE = "▁"  # SentencePiece's letter for a space

# Role → its name in the file's metadata.
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}

# Control tokens that end a turn or a document; vocabularies give them different ids.
END_TOKENS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"})

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How text is split into words before byte-level BPE.

    words           a pattern that matches a word; None: GPT-2's
    single_digits   each digit is a word of its own
    composes        Unicode is composed first (NFC)
    whole_words     a word that is a token needs no merges
    begins          texts start with the beginning-of-sequence token unless the file says otherwise
    """

    words: str | None = None
    single_digits: bool = False
    composes: bool = False
    whole_words: bool = False
    begins: bool = False


_GPT2 = WordSplit()
_SMOLLM = WordSplit(single_digits=True)
_LLAMA3 = WordSplit(words=_LLAMA3_WORDS, whole_words=True, begins=True)
_QWEN2 = WordSplit(words=_QWEN2_WORDS, composes=True)

# Keyed by the values of tokenizer.ggml.pre.
WORD_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer's files. Raises CheckpointError for an unknown vocabulary or word split, or bad merges."""
    vocabulary = _Vocabulary(file)
    kind = file.text("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer, begins = _byte_level_bpe(file, vocabulary)
        elif kind == "llama":
            tokenizer, begins = _sentencepiece_bpe(file, vocabulary)
        else:
            raise CheckpointError(f"{file.name} has a {quoted(repr(kind))} vocabulary; supported: gpt2, llama")
        tokenizer.add_tokens(vocabulary.added_tokens)
        _wrap_with_special_tokens(tokenizer, file, vocabulary, begins)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"{file.name} has an inconsistent vocabulary: {quoted(error)}") from error
    # Not with the library's own method, whose errors hide that a disk is full.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_settings(file, vocabulary, folder)


class _Vocabulary:
    """The tokens by id, their kinds, and the ids that have a role."""

    def __init__(self, file: GgufFile) -> None:
        self.tokens = file.texts("tokenizer.ggml.tokens")
        if (longest := max(map(len, self.tokens), default=0)) > MAX_TOKEN_CHARACTERS:
            raise CheckpointError(
                f"{file.name} has a token of {longest} characters; {MAX_TOKEN_CHARACTERS} are allowed"
            )
        self.kinds = file.integers("tokenizer.ggml.token_type")
        if len(self.tokens) != len(self.kinds):
            raise CheckpointError(f"{file.name} has {len(self.tokens)} tokens but {len(self.kinds)} token types")
        rows = int(file.tensors["token_embd.weight"].shape[-1])
        if len(self.tokens) > rows:
            raise CheckpointError(f"{file.name} has {len(self.tokens)} tokens but embeddings for {rows}")
        self.roles: dict[str, int] = {}
        for role, key in ROLES.items():
            token_id = file.integer(f"tokenizer.ggml.{key}_token_id", -1)
            if token_id >= len(self.tokens):
                raise CheckpointError(f"{file.name} has {len(self.tokens)} tokens; its {role} token is {token_id}")
            if token_id >= 0:
                self.roles[role] = token_id

    def role(self, name: str) -> str | None:
        return self.tokens[self.roles[name]] if name in self.roles else None

    @cached_property
    def special_ids(self) -> set[int]:
        control = {i for i, kind in enumerate(self.kinds) if kind == TokenType.CONTROL}
        return control | {self.roles[role] for role in ("bos", "eos", "unk") if role in self.roles}

    @property
    def added_tokens(self) -> list[AddedToken]:
        """Tokens matched before any other, in the order of their ids. Decoded text omits the special ones."""
        return [
            AddedToken(token, special=i in self.special_ids, normalized=False)
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if i in self.special_ids or kind == TokenType.USER_DEFINED
        ]

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a turn or a document, the end-of-sequence token first."""
        first = [self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles]
        named = [i for i in sorted(self.special_ids) if self.tokens[i] in END_TOKENS]
        return list(dict.fromkeys(first + named))


def _byte_level_bpe(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in WORD_SPLITS:
        raise CheckpointError(f"{file.name} splits words as {quoted(repr(name))}; supported: {', '.join(WORD_SPLITS)}")
    split = WORD_SPLITS[name]
    # Unused tokens only pad the embedding to a round number of rows.
    vocab = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.kinds[i] != TokenType.UNUSED}
    merges = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.words is None)
    if split.words is not None:
        words = pre_tokenizers.Split(Regex(split.words), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    elif split.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def _sentencepiece_bpe(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocabulary, file.numbers("tokenizer.ggml.scores")),
            unk_token=vocabulary.role("unk"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", SPACE)
    decode = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        tokenizer.decoder = decoders.Sequence([*decode, decoders.Strip(" ", left=1)])
    else:
        tokenizer.normalizer = space
        tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer, True


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every piece, best piece first: SentencePiece joins the neighbours that make the best piece."""
    pieces = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.kinds[i] == TokenType.NORMAL}
    best_first = sorted(pieces, key=lambda piece: -scores[pieces[piece]])
    return [
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _wrap_with_special_tokens(tokenizer: Tokenizer, file: GgufFile, vocabulary: _Vocabulary, begins: bool) -> None:
    bos = vocabulary.role("bos") if file.flag("tokenizer.ggml.add_bos_token", begins) else None
    eos = vocabulary.role("eos") if file.flag("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    ids = [(token, vocabulary.tokens.index(token)) for token in (bos, eos) if token is not None]
    first = [part for part in (bos, "$A", eos) if part is not None]
    second = [f"{part}:1" for part in (bos, "$B", eos) if part is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=first, pair=first + second, special_tokens=ids)


def _write_settings(file: GgufFile, vocabulary: _Vocabulary, folder: Path) -> None:
    named = {f"{role}_token": vocabulary.role(role) for role in ("bos", "eos", "unk", "pad")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.integer(f"{file.architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config | {k: v for k, v in named.items() if v is not None})
    ids = {f"{role}_token_id": vocabulary.roles[role] for role in ("bos", "pad") if role in vocabulary.roles}
    generation = {"eos_token_id": vocabulary.end_ids, **ids, **recommended_sampling(file)}
    write_json(folder / "generation_config.json", generation)
    if template := file.text("tokenizer.chat_template", ""):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
