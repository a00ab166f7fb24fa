"""A model's tokens in the form that llguidance takes.

llguidance reads a tokenizer.json itself, too, but in one call that keeps the interpreter's lock, for seconds. Here the
same is done in pieces, between which the engine's other threads go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, models

from ...checkpoints.synthetic import letters_of_bytes

END = "<|end of guided output|>"  # a token that llguidance allows where the grammar may end; no sequence chooses it

# Without dropout, so that a text always has the same tokens.
_OPTIONS = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
            "ignore_merges")  # fmt: skip
_NO_PREFIX: dict[str, dict[str, Any]] = {
    "ByteLevel": {"add_prefix_space": False},
    "Metaspace": {"prepend_scheme": "never"},
}


class Vocabulary:
    """The tokens of a tokenizer.json, and END behind all ids that a model may have.

    Special tokens are no text: a grammar names them. Other added tokens are tokens like others if they are in the
    vocabulary; else they spell no text, and a grammar names them by their ids. llguidance would force any added token
    where a text spells it, and then refuse it.

    tokens             [ids] the bytes of each token; none for an id without a token, which is never allowed
    special_token_ids  whose `tokens` are names
    """

    bos_token_id = None

    def __init__(self, content: bytes, vocab_size: int) -> None:
        """
        content     of tokenizer.json
        vocab_size  ids at least, without END's

        Raises ValueError for a tokenizer whose decoder makes no bytes, and whatever the library raises.
        """
        document = json.loads(content)
        ids = document["model"]["vocab"]
        if isinstance(ids, list):  # of pairs, each a text and its score
            ids = {text: id for id, (text, _) in enumerate(ids)}
        names = _named(document.get("added_tokens") or [], ids)
        self.eos_token_id = end = max([vocab_size, *(id + 1 for id in (*ids.values(), *names))])
        names[end] = END
        self.special_token_ids = list(names)
        self.tokens = [b""] * (end + 1)
        bytes_of = _bytes_of(list(_flat(document.get("decoder"))))
        for text, id in ids.items():
            self.tokens[id] = bytes_of(text)
        for id, name in names.items():
            self.tokens[id] = name.encode()
        self._encoder = _encoder(document)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar forces."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def for_grammars(self) -> LLTokenizer:
        """Make llguidance's tries: first that of all tokens, then, in a call of its own, those of texts in JSON."""
        all_tokens = LLTokenizer(TokenizerWrapper(self), slices=[])
        _of_spaces, *of_texts = LLTokenizer.general_slices()  # spaces may follow each other only where a schema says so
        return all_tokens.with_slices(of_texts)


def _named(added_tokens: list[dict[str, Any]], ids: dict[str, int]) -> dict[int, str]:
    """The names of the added tokens that are no text, by id."""
    # The library ignores empty texts, and takes the last of several tokens with one text.
    added = {token["content"]: token["special"] for token in added_tokens if token["content"]}
    names, free = dict[int, str](), len(ids)
    for text, is_special in added.items():
        if not is_special and text in ids:
            continue
        # The library ignores the file's ids: a token that is not in the vocabulary gets the id behind all others.
        id = ids.get(text, free)
        free = max(free, id + 1)
        names[id] = text if is_special else f"<[{id}]>"
    return names


def _flat(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A step of a tokenizer, or those of a sequence of them."""
    if step is not None and step["type"] == "Sequence":
        for each in next(value for value in step.values() if isinstance(value, list)):
            yield from _flat(each)
    elif step is not None:
        yield step


def _bytes_of(decoder: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """What maps the text of a token to its bytes."""
    kinds = {step["type"] for step in decoder}
    if "ByteFallback" in kinds:
        replaced = [step["pattern"] for step in decoder if step["type"] == "Replace" and step["content"] == " "]
        space = next((pattern["String"] for pattern in replaced if len(pattern.get("String", "")) == 1), " ")
        bytes_named = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        return lambda text: bytes_named.get(text) or text.replace(space, " ").encode()
    if "ByteLevel" not in kinds:
        raise ValueError("its decoder makes no bytes")
    byte_of = {letter: byte for byte, letter in enumerate(letters_of_bytes())}

    def named_bytes(text: str) -> bytes:
        try:
            return bytes([byte_of[letter] for letter in text])
        except KeyError:
            return b""

    return named_bytes


def _encoder(document: dict[str, Any]) -> Tokenizer:
    """A tokenizer of plain text, which puts nothing before it.

    The library would parse a vocabulary's JSON in one call, which takes twice as long as it takes one from Python.
    """
    model = document["model"]
    normalizers = [step for step in _flat(document.get("normalizer")) if step["type"] != "Prepend"]
    splits = [step | _NO_PREFIX.get(step["type"], {}) for step in _flat(document.get("pre_tokenizer"))]
    is_bpe = model.get("type") == "BPE"
    plain: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
        "model": {"type": "BPE", "vocab": {}, "merges": []} if is_bpe else model,
    }
    encoder = Tokenizer.from_str(json.dumps(plain))
    if is_bpe:
        pairs = [tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]]
        options = {name: model[name] for name in _OPTIONS if model.get(name) is not None}
        encoder.model = models.BPE(model["vocab"], pairs, **options)
    return encoder
