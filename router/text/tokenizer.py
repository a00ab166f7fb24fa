"""Text and chats to token ids, and back; off the event loop where it takes long."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

import tokenizers

from pagoda_server.router.errors import ConfigError, Internal
from pagoda_server.router.text.chat_template import Chat, ChatTemplate
from pagoda_server.router.text.detokenizer import Detokenization, Detokenizer
from pagoda_server.router.text.special_tokens import SpecialTokens
from pagoda_server.router.text.tokenizer_files import TokenizerFiles

# The threads here are the parallelism; the library's own would compete with the engine for its cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Result = TypeVar("Result")
Prompt: TypeAlias = str | Sequence[int] | Chat

_NUM_THREADS = 4


class Tokenizer:
    """Threads may share it.

    fingerprint        SHA-256 of tokenizer.json, in hex: the engine's must be the same
    vocab_size         highest token id + 1; the model's embedding may have more rows
    eos_token_ids      end a sequence; ascending
    chat_template      None: chats cannot be encoded
    recommended        sampling that the model's authors recommend, by the names that Hugging Face gives its parameters
    """

    def __init__(self, folder: Path) -> None:
        """Reads a Hugging Face model folder. Raises ConfigError if a file is missing or cannot be used."""
        files = TokenizerFiles.read(folder)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer_json.decode())
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"tokenizer.json cannot be used: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        eos_token_id = tokenizer.token_to_id(files.special_tokens.get("eos_token", ""))
        eos_token_ids = {*files.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,))}
        self.fingerprint = hashlib.sha256(files.tokenizer_json).hexdigest()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.chat_template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self.recommended = files.recommended
        self._detokenization = Detokenization(tokenizer)
        self._special_tokens = SpecialTokens(tokenizer)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text that reads like a special token stays text; `add_special_tokens` puts the tokenizer's own around it."""
        return self._special_tokens.encode(text, add_special_tokens)

    def encode_chat(self, chat: Chat) -> list[int]:
        """The template's special tokens are tokens; what reads like one in a client's text stays text.

        Only for a model with a chat template. Raises InvalidArgument if it refuses the conversation.
        """
        assert self.chat_template, "validation refuses a chat where there is no template"
        disarmed = chat.with_texts(self._special_tokens.disarm)
        return self._special_tokens.encode_rendered(self.chat_template.render(disarmed))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All at once; ids outside the vocabulary add nothing."""
        return self._detokenization.decode(ids, skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes of a token inside a text; the name of a special token."""
        return self._detokenization.token_bytes(id)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """For a new sequence."""
        return self._detokenization.detokenizer(skip_special_tokens)

    async def encode_prompt(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """`encode` or `encode_chat` in a thread; token ids are taken as they are."""
        match prompt:
            case str():
                return await self._in_thread(lambda: self.encode(prompt, add_special_tokens))
            case Chat():
                return await self._in_thread(lambda: self.encode_chat(prompt))
            case _:
                return list(prompt)

    async def decode_ids(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """`decode` in a thread."""
        return await self._in_thread(lambda: self.decode(ids, skip_special_tokens))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _contained, work)


def _contained(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:  # a panic of the library is one request's fault, not the end of the process
        raise Internal("the tokenizer panicked") from error
