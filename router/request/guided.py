"""Structured output: check the format that a client asks for, and make the grammar that the engine follows."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from llguidance import LLTokenizer, TokenizerWrapper

from pagoda.v1 import inference_pb2

from ...grammars.compiling import (
    GrammarError,
    compiled,
    to_lark,
)
from ...grammars.compiling import (
    grammar_of as grammar_text,
)
from ...grammars.fair_threads import FairThreads, QueueFull
from ...settings.request import MAX_CHOICES, MAX_GRAMMAR_BYTES
from ..errors import Internal, InvalidArgument, ResourceExhausted, Unimplemented
from ..text.tokenizer import Tokenizer
from ..text.turns import turn
from .fields import check_bytes, check_count

_MOST_CHECKED = 1024  # grammars that are remembered as right


def guided_from(given: inference_pb2.Guided) -> inference_pb2.Guided:
    """Check what costs little: that a format is set, and how long it is. Raises InvalidArgument."""
    match given.WhichOneof("format"):
        case None:
            raise InvalidArgument("guided", "is empty: set json_schema, regex, ebnf_grammar, choice or json_object")
        case "choice":
            options = given.choice.options
            if not any(options):
                raise InvalidArgument("guided.choice.options", "holds no text")
            check_count(len(options), "guided.choice.options", MAX_CHOICES)
            check_bytes("".join(options), "guided.choice.options", MAX_GRAMMAR_BYTES)
        case "json_object":
            if not given.json_object:
                raise InvalidArgument("guided.json_object", "must be true")
        case format:
            if not getattr(given, format):
                raise InvalidArgument(f"guided.{format}", "is empty")
            check_bytes(getattr(given, format), f"guided.{format}", MAX_GRAMMAR_BYTES)
    return given


class GrammarChecker:
    """Compiles grammars as the engine will, in a thread, so that a wrong one ends its call before it reaches an engine.

    The engine's vocabulary is not needed for that: the checker's has each byte and each special token.
    """

    def __init__(self, tokenizer: Tokenizer, tenant_of_call: Callable[[], str] = str) -> None:
        """
        tenant_of_call  whose call the current task serves
        """
        self._model = tokenizer
        self._tenant_of_call = tenant_of_call
        self._tokenizer: LLTokenizer | None = None
        self._thread = FairThreads(1, "grammars")
        self._checked: OrderedDict[bytes, inference_pb2.Guided] = OrderedDict()

    async def check(self, guided: inference_pb2.Guided, field: str = "") -> inference_pb2.Guided:
        """Return the format with its grammar in Lark, if it has one.

        field  of the request, as errors name it; by default that of the format

        Tenants take turns. Raises InvalidArgument with the place of what is wrong, ResourceExhausted if too many
        grammars wait, Unimplemented if the model's tokenizer has no bytes.
        """
        if not self._model.has_bytes:
            raise Unimplemented(field or "guided")
        key = hashlib.sha256(guided.SerializeToString(deterministic=True)).digest()
        if (known := self._checked.get(key)) is not None:
            self._checked.move_to_end(key)
            return known
        format = guided.WhichOneof("format") or ""
        try:
            checking = self._thread.submit(self._tenant_of_call(), partial(self._check, guided, format))
            checked = await asyncio.wrap_future(checking)
        except QueueFull as error:
            raise ResourceExhausted(str(error), retry_after_s=1.0) from None
        except GrammarError as error:
            raise InvalidArgument(field or f"guided.{format}", str(error)) from None
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of llguidance derives from nothing narrower
            raise Internal(f"{type(error).__name__} while a grammar was checked") from error
        self._checked[key] = checked
        if len(self._checked) > _MOST_CHECKED:
            self._checked.popitem(last=False)
        return checked

    def _check(self, guided: inference_pb2.Guided, format: str) -> inference_pb2.Guided:
        with turn(True):  # Python's part of the work
            if format == "ebnf_grammar":
                guided = inference_pb2.Guided(ebnf_grammar=to_lark(guided.ebnf_grammar))
            grammar = grammar_text(format, guided.choice.options if format == "choice" else getattr(guided, format))
            if self._tokenizer is None:
                vocabulary = _Bytes(self._model.special_tokens, self._model.vocab_size)
                self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
        compiled(grammar, self._tokenizer)
        return guided


class _Bytes:
    """A vocabulary with a token for each byte, beside a model's special tokens; in the form that llguidance takes.

    An id that is left over stands for no text.
    """

    bos_token_id = None

    def __init__(self, special_tokens: Mapping[int, str], vocab_size: int) -> None:
        most = max(vocab_size, max(special_tokens, default=0) + 1)
        free = [id for id in range(most + 257) if id not in special_tokens]
        self._ids = free[:256]
        self.eos_token_id = max(most, free[256])
        self.special_token_ids: Sequence[int] = [*special_tokens, self.eos_token_id]
        self.tokens = [b""] * (self.eos_token_id + 1)
        for byte, id in enumerate(self._ids):
            self.tokens[id] = bytes([byte])
        for id, text in special_tokens.items():
            self.tokens[id] = text.encode()
        self.tokens[self.eos_token_id] = b"<|end of guided output|>"

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._ids[byte] for byte in (text if isinstance(text, bytes) else text.encode())]
