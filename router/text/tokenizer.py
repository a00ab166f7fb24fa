"""Convert text and chats to token ids and back, in threads where it takes long."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import tokenizers

from ...checkpoints.folder import quoted
from ...settings.request import MAX_EOS_IDS
from ..errors import ConfigError, InvalidArgument
from .chat_template import NUM_PROCESSES, Chat, ChatTemplate
from .detokenizer import Detokenization, Detokenizer
from .panics import contained
from .special_tokens import SpecialTokens
from .tokenizer_files import TokenizerFiles
from .turns import turn

# Parallelism comes from this file's threads; the library's own would compete with the engine for cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Result = TypeVar("Result")
Prompt: TypeAlias = str | Sequence[int] | Chat

_NUM_THREADS = 4
_SAMPLE = "Hello, World 1!"  # a tokenizer that fails with it would fail every request
_MAX_ADDED_BYTES = 1 << 10  # grammars fail with 3,000, and special tokens are compared from each of their bytes on
_MAX_VOCAB_SIZE = 1 << 22  # the largest known has 262,144; ids that no token has take memory too


class Tokenizer:
    """A model's tokenizer and chat template. Threads may share it.

    fingerprint    SHA-256 of tokenizer.json, in hex; the engine's must be equal
    vocab_size     highest token id + 1; the model's embedding may have more rows
    eos_token_ids  ids that end a sequence, in ascending order
    chat_template  None if the model has none
    added_ids      ids of added tokens, by text: a grammar must name them, special or not
    recommended    sampling parameters that the model's authors recommend, by Hugging Face's names
    special_tokens  text by id
    has_bytes      the bytes of every token are known, which grammars need
    """

    def __init__(self, folder: Path) -> None:
        """Read a Hugging Face model folder. Raises ConfigError if a file is missing or cannot be used."""
        files = TokenizerFiles.read(folder)
        with _usable():
            tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer_json.decode())
            tokenizer.no_truncation()
            tokenizer.no_padding()
        eos_token_id = tokenizer.token_to_id(files.special_tokens.get("eos_token", ""))
        eos_token_ids = {*files.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,))}
        self.fingerprint = hashlib.sha256(files.tokenizer_json).hexdigest()
        with _usable():
            self._detokenization = Detokenization(tokenizer)
        self.vocab_size = self._detokenization.vocab_size
        if self.vocab_size > _MAX_VOCAB_SIZE:
            raise ConfigError(f"tokenizer.json has the token id {self.vocab_size - 1}, at most {_MAX_VOCAB_SIZE - 1}")
        if len(eos_token_ids) > MAX_EOS_IDS:
            raise ConfigError(f"{len(eos_token_ids)} ids are named eos_token_id, at most {MAX_EOS_IDS} are allowed")
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.chat_template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self.recommended = files.recommended
        added = tokenizer.get_added_tokens_decoder()
        longest = max((len(token.content.encode()) for token in added.values()), default=0)
        if longest > _MAX_ADDED_BYTES:
            raise ConfigError(f"tokenizer.json has an added token of {longest} bytes, at most {_MAX_ADDED_BYTES}")
        self.special_tokens = {id: token.content for id, token in added.items() if token.special}
        self.has_bytes = _has_bytes(tokenizer)
        with _usable():
            self.added_ids = {token.content: id for id, token in added.items()}
            self._special_tokens = SpecialTokens(tokenizer, self.vocab_size)
            sample = self.encode(_SAMPLE)
        if max(sample, default=-1) >= self.vocab_size:
            raise ConfigError(f"tokenizer.json encodes texts with the id {max(sample)}, which no token has")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        # Large texts wait for each other and for nothing else: one of a megabyte takes hundreds of megabytes.
        self._large_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-large")
        self._template_threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="template")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode text. Typed special tokens stay text; `add_special_tokens` puts the tokenizer's own around it."""
        return self._special_tokens.encode(text, add_special_tokens)

    def encode_chat(self, chat: Chat) -> list[int]:
        """Render and encode a chat. The template's special tokens are tokens; those that a client typed stay text.

        The model must have a chat template. Raises InvalidArgument if the template refuses the conversation.
        """
        return self._special_tokens.encode_rendered(self._render(chat))

    def _render(self, chat: Chat, is_large: bool = False) -> str:
        assert self.chat_template, "validation refuses a chat where there is no template"
        with turn(is_large):
            disarmed = chat.with_texts(self._special_tokens.disarm)
        return self.chat_template.render(disarmed, is_large)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode all ids at once; ids outside the vocabulary add nothing."""
        return self._detokenization.decode(ids, skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """A token's UTF-8 bytes inside a text; a special token's name."""
        return self._detokenization.token_bytes(id)

    def detokenizer(self, skip_special_tokens: bool = True, kept: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for a new sequence. Of special tokens that it skips, it keeps those of these texts."""
        return self._detokenization.detokenizer(skip_special_tokens, kept)

    async def encode_prompt(
        self, prompt: Prompt, add_special_tokens: bool = True, *, is_large: bool = False
    ) -> list[int]:
        """Run `encode` or `encode_chat` in a thread, large ones one at a time; token ids are returned unchanged."""
        match prompt:
            case str():
                return await self._in_thread(lambda: self.encode(prompt, add_special_tokens), is_large)
            case Chat():
                # In threads of their own: a template that takes long delays no text.
                rendered = await _run_in(self._template_threads, lambda: self._render(prompt, is_large))
                return await self._in_thread(lambda: self._special_tokens.encode_rendered(rendered, is_large), is_large)
            case _:
                return list(prompt)

    async def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Encode each word as it stands in a text, after a space and after anything else; no tokens come twice.

        Raises InvalidArgument for a word that the tokenizer makes no token of.
        """

        def encode() -> list[list[int]]:
            found: dict[tuple[int, ...], None] = {}
            for index, word in enumerate(words):
                bare = word.removeprefix(" ")
                forms = [ids for text in (bare, f" {bare}") if (ids := tuple(self.encode(text, False)))]
                if not forms:
                    raise InvalidArgument(f"sampling.bad_words[{index}]", "becomes no tokens")
                found.update(dict.fromkeys(forms))
            return [list(ids) for ids in found]

        return await self._in_thread(encode, is_large=False)

    async def decode_ids(self, ids: Sequence[int], skip_special_tokens: bool = True, *, is_large: bool = False) -> str:
        """Run `decode` in a thread."""
        return await self._in_thread(lambda: self.decode(ids, skip_special_tokens), is_large)

    def close(self) -> None:
        for threads in (self._threads, self._large_thread, self._template_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.chat_template:
            self.chat_template.close()

    async def _in_thread(self, work: Callable[[], Result], is_large: bool) -> Result:
        return await _run_in(self._large_thread if is_large else self._threads, work)


def _has_bytes(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether llguidance can find the bytes of tokens: their decoder is of one of two kinds."""
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return any(part["type"] in ("ByteLevel", "ByteFallback") for part in (decoder, *decoder.get("decoders", ())))


@contextmanager
def _usable() -> Iterator[None]:
    """Raise ConfigError if the block fails: tokenizer.json contradicts itself."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower than Exception, and it panics
        raise ConfigError(f"tokenizer.json cannot be used: {quoted(error)}") from error


async def _run_in(threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, contained, work)
