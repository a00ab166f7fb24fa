"""Converts a GGUF vocabulary to tokenizer.json, its settings, generation_config.json and chat_template.jinja."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from .folder import CheckpointError, quoted, write_json
from .gguf_config import recommended_sampling
from .gguf_file import CONTROL, NORMAL, UNUSED, USER_DEFINED, GgufFile

MAX_TOKEN_CHARACTERS = 1024  # the longest known has 256; finding the merges of one takes the square of its length
SPACE = "▁"  # SentencePiece's letter for a space

# Role → its name in the file's metadata.
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}

# Control tokens that end a turn or a document; vocabularies give them different ids.
END_TOKENS = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
        "<EOT>", "[EOT]", "<end_of_utterance>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>",
        "[|endofturn|]", "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip

# The patterns of the models' own tokenizer.json files; each matches a word of its own.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _CL100K.replace("{1,3}", "")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_KIMI = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("[\\r\\n/]", "[\\r\\n]")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_LETTERS_OF_DEEPSEEK = (  # escaped are those that an editor may compose into others
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdb"
    "ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_MINICPM5 = _CL100K.replace("{1,3}", "+")
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    _GPT4O.replace("{1,3}", ""),
)
_SEED = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

_GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_DIGITS = pre_tokenizers.Digits(individual_digits=True)


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How text is split into words before byte-level BPE.

    steps        each splits what the one before left: a pattern whose matches are words, or a pre-tokenizer
    composes     Unicode is composed first (NFC)
    whole_words  a word that is a token needs no merges
    begins       texts start with the beginning-of-sequence token unless the file says otherwise
    """

    steps: tuple[str | PreTokenizer, ...]
    composes: bool = False
    whole_words: bool = False
    begins: bool = False


_STARCODER = WordSplit((_DIGITS, _GPT2_WORDS))
_FALCON = WordSplit(
    (
        pre_tokenizers.Punctuation(behavior="contiguous"),
        _GPT2_WORDS,
        pre_tokenizers.Digits(individual_digits=False),
        "[0-9][0-9][0-9]",
    )
)

# The values of tokenizer.ggml.pre with each way. A vocabulary whose own pattern is not known for certain is missing.
_NAMES = {
    WordSplit((_GPT2_WORDS,)): "default gpt-2 phi-2 jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum",
    WordSplit((_GPT2_WORDS,), composes=True): "olmo mpt",
    _STARCODER: "smollm starcoder refact codeshell exaone minerva-7b mellum2",
    replace(_STARCODER, composes=True): "command-r",
    _FALCON: "falcon",
    WordSplit((_CL100K,), whole_words=True, begins=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 midm-2.0 lfm2",
    WordSplit((_CL100K,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    WordSplit((_QWEN2,), composes=True): "qwen2 deepseek-r1-qwen stablelm2 megrez",
    WordSplit((_QWEN2,)): "hunyuan grok-2 solar-open",
    WordSplit((_QWEN35,), composes=True): "qwen35",
    WordSplit((_TEKKEN,), whole_words=True, begins=True): "tekken",
    WordSplit((_GPT4O,), whole_words=True): "gpt-4o llama4 kanana2 minimax-m2",
    WordSplit((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)): "tiny_aya cohere2moe",
    WordSplit(_YOUTU, whole_words=True): "youtu",
    WordSplit((r"\p{N}{1,3}", _MINICPM5), whole_words=True): "minicpm5",
    WordSplit((_EXAONE_MOE,)): "exaone-moe",
    WordSplit((_KIMI,)): "kimi-k2",
    WordSplit(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    WordSplit(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGITS)): "deepseek-coder",
    WordSplit(
        ("[\r\n]", rf"\s?[{_LETTERS_OF_DEEPSEEK}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, _DIGITS)
    ): "deepseek-llm",
    WordSplit((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    WordSplit((_SEED,)): "seed-coder",
    WordSplit((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): "superbpe",
}
WORD_SPLITS = {name: split for split, names in _NAMES.items() for name in names.split()}


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
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_settings(file, vocabulary, folder)


class _Vocabulary:
    """The tokens by id, their kinds, and the ids that have a role."""

    def __init__(self, file: GgufFile) -> None:
        self.tokens = file.texts("tokenizer.ggml.tokens")
        self.kinds = file.integers("tokenizer.ggml.token_type")
        if (longest := max(map(len, self.tokens), default=0)) > MAX_TOKEN_CHARACTERS:
            raise CheckpointError(
                f"{file.name} has a token of {longest} characters; {MAX_TOKEN_CHARACTERS} are allowed"
            )
        if len(self.tokens) != len(self.kinds):
            raise CheckpointError(f"{file.name} has {len(self.tokens)} tokens but {len(self.kinds)} token types")
        if file.text("tokenizer.ggml.model") == "llama":
            # Files write the spaces of pieces that the user defined as they are.
            self.tokens = [
                token.replace(" ", SPACE) if kind == USER_DEFINED else token
                for token, kind in zip(self.tokens, self.kinds, strict=True)
            ]
        rows = file.tensors["token_embd.weight"].shape[0]
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
        control = {i for i, kind in enumerate(self.kinds) if kind == CONTROL}
        return control | {self.roles[role] for role in ("bos", "eos", "unk") if role in self.roles}

    @property
    def added_tokens(self) -> list[AddedToken]:
        """Tokens matched before any other, in the order of their ids. Decoded text omits the special ones."""
        return [
            AddedToken(token, special=i in self.special_ids, normalized=False)
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if i in self.special_ids or kind == USER_DEFINED
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
    vocab = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.kinds[i] != UNUSED}
    merges = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps = [
        pre_tokenizers.Split(Regex(step), behavior="isolated") if isinstance(step, str) else step
        for step in split.steps
    ]
    if _GPT2_WORDS not in split.steps:  # which makes letters of the bytes too
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def _sentencepiece_bpe(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary.tokens)},
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
    """Every split of every piece, best piece first: SentencePiece joins the neighbours that make the best piece.

    The order among the splits of pieces with one score is that of transformers, on which the tokens depend. A piece
    that the user defined is worth more than any other, although files give it a score of their own.
    """
    pieces = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    merges = [
        (scores[id] if vocabulary.kinds[id] == NORMAL else 0.0, cut, len(piece) - cut, piece)
        for piece, id in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(piece[:cut], piece[cut:]) for _, cut, _, piece in merges]


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
