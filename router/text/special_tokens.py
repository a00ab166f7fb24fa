"""Distinguish special tokens that a chat template writes from the same text typed by a user, which stays text.

In a template's output, <|im_end|> from the template and <|im_end|> from a message look the same. Therefore:

1. `disarm` puts a mark inside every special token's text in a message, before the template sees it;
2. what still reads as a special token in the rendered text is the template's own: `encode_rendered` replaces it with an
   alias, an unguessable string that is a token of the tokenizer, and removes the marks;
3. the tokenizer sees the whole text at once, with aliases as tokens and typed special tokens as text; the ids of
   aliases are then replaced with the ids of their special tokens.

The template is trusted to insert a message, or one piece of it, unchanged. A template that cuts out the middle of a
message could join the rest to a special token.

Text without typed special tokens gives the same ids as the tokenizer's own handling, because an alias has the same
options (surrounding white space, normalization) as its token.
"""

from __future__ import annotations

import re
import secrets

from tokenizers import AddedToken, Tokenizer

from .turns import turn

_MAX_GAPS = 1 << 14  # each takes the library 80 µs
_OUTSIDE_ANY_VOCABULARY = "\U0010ffff"


class SpecialTokens:
    """Encodes text in which special tokens are text, and templates in which they are tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Change the tokenizer: its special tokens become text, and aliases are added above its last id.

        vocab_size  its last id, and one more: a vocabulary is a large dictionary, which is made at each question

        Raises ValueError if too many ids below the last have no token.
        """
        self._tokenizer = tokenizer
        # A mark does not fit inside a single character: one that is a special token stays text even in a template.
        added = tokenizer.get_added_tokens_decoder()
        special = {id: token for id, token in added.items() if token.special and len(token.content) > 1}
        longest_first = sorted((token.content for token in special.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._longest = len(longest_first[0]) if longest_first else 0
        self._beginnings = {content[:end] for content in longest_first for end in range(1, len(content))}
        # Digits survive a template that changes case. A user who guesses the mark can only have it removed.
        self._mark = _random_digits()[-16:]
        self._alias = {token.content: f"{_random_digits()}{id}" for id, token in special.items()}
        self._id_of_alias = self._add_aliases(special, vocab_size)
        tokenizer.encode_special_tokens = True
        # The token for characters outside the vocabulary may occur in plain text.
        unknown = tokenizer.encode(_OUTSIDE_ANY_VOCABULARY, add_special_tokens=False).ids
        self._forgeable = frozenset(special).difference(unknown)

    def disarm(self, typed: str) -> str:
        """A message's text for the template: marked so that no special token begins in it."""
        while (disarmed := self._pattern.sub(self._broken, typed)) != typed:  # again where special tokens overlap
            typed = disarmed
        return self._disarm_end(typed)

    def encode_rendered(self, rendered: str, is_large: bool = False) -> list[int]:
        """Encode a template's output whose messages were disarmed."""
        with turn(is_large):
            aliased = self._pattern.sub(lambda match: self._alias[match[0]], rendered).replace(self._mark, "")
        ids = self.encode(aliased, add_special_tokens=False)
        with turn(is_large):
            return [self._id_of_alias.get(id, id) for id in ids]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode text in which nothing is a special token; `add_special_tokens` puts the tokenizer's own around it."""
        # This way of encoding alone lets other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if self._forgeable.isdisjoint(ids):
            return ids
        return [
            piece
            for id, is_added in zip(ids, encoding.special_tokens_mask, strict=True)
            for piece in ((id,) if is_added or id not in self._forgeable else self._spelled(id))
        ]

    def _broken(self, match: re.Match[str]) -> str:
        return match[0][0] + self._mark + match[0][1:]

    def _disarm_end(self, typed: str) -> str:
        """Mark a trailing start of a special token, which the next message's text could complete."""
        text = typed.rstrip()
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[start:] in self._beginnings:
                return typed[: start + 1] + self._mark + typed[start + 1 :]
        return typed

    def _spelled(self, id: int) -> list[int]:
        """Encode the token's characters one by one: Unigram's search for the likeliest split finds it in plain text."""
        characters = list(self._tokenizer.id_to_token(id) or "")
        return [
            piece
            for encoding in self._tokenizer.encode_batch_fast(characters, add_special_tokens=False)
            for piece in encoding.ids
        ]

    def _add_aliases(self, special: dict[int, AddedToken], vocab_size: int) -> dict[int, int]:
        tokenizer = self._tokenizer
        # The library numbers new tokens from the vocabulary's size. If ids have gaps, the first ones would collide.
        gaps = vocab_size - tokenizer.get_vocab_size(with_added_tokens=True)
        if gaps > _MAX_GAPS:
            raise ValueError(f"its ids leave {gaps} without a token; at most {_MAX_GAPS} are supported")
        tokenizer.add_tokens([_random_digits() for _ in range(gaps)])
        tokenizer.add_tokens(
            [
                AddedToken(
                    self._alias[token.content],
                    special=False,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=token.normalized,
                )
                for token in special.values()
            ]
        )
        ids = {tokenizer.token_to_id(self._alias[token.content]): id for id, token in special.items()}
        assert None not in ids, "each alias has just been added"
        return {alias: id for alias, id in ids.items() if alias is not None}


def _random_digits() -> str:
    return f"{secrets.randbits(128):039d}"
