"""What the model's format of answers means for one request: how its answer is parsed, and what grammar it has."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pagoda.v1 import inference_pb2

from ..answers.formats import AnswerFormat
from ..answers.lark import Lark, Rule
from ..answers.parser import AnswerParser
from ..text.chat_template import Json
from ..text.tokenizer import Tokenizer
from .guided import GrammarChecker
from .validation import GenerateParams

_NUM_LAST = 32  # tokens of a prompt that show what the answer goes on with
_ID_LENGTH = 9  # of letters and digits, because Mistral's templates take no other


@dataclass(frozen=True, slots=True)
class Parsing:
    """How a request's answers are parsed. A stream that is resumed gets the same parts again.

    tools       schemas of the arguments of the tools that the answer may call, by name
    is_due      whether it has to call one
    is_single   whether it ends with its first call
    prompt_end  the prompt's last characters
    salt        different for each request: ids of calls follow from it
    """

    format: AnswerFormat
    tools: Mapping[str, Mapping[str, Json]]
    is_due: bool
    is_single: bool
    prompt_end: str
    salt: str

    def parser(self, index: int) -> AnswerParser:
        """A parser for the request's nth sequence."""
        ids = partial(self._call_id, index)
        return AnswerParser(self.format, self.tools, self.prompt_end, ids, self.is_due, self.is_single)

    def _call_id(self, index: int, call: int) -> str:
        digest = hashlib.sha256(f"{self.salt} {index} {call}".encode()).digest()
        return base64.b32encode(digest).decode().lower()[:_ID_LENGTH]


def parsing_of(
    params: GenerateParams, format: AnswerFormat | None, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Parsing | None:
    """How the answers to a prompt are parsed; None: all of them is text."""
    if format is None or not params.is_parsed or not (format.reasoning_format or (format.tool_format and params.tools)):
        return None
    tools = {tool.name: tool.parameters for tool in params.tools} if format.tool_format else {}
    salt = f"{params.request_id} {params.sampling.seed} {len(prompt)}"
    prompt_end = _end_of(prompt, tokenizer)
    return Parsing(format, tools, params.calls_due is not None, params.ends_with_call, prompt_end, salt)


def guided_by(
    params: GenerateParams, format: AnswerFormat | None, tokenizer: Tokenizer, prompt: Sequence[int]
) -> inference_pb2.Guided | None:
    """The grammar of the whole output; None: it may be anything.

    Calls that are due have the model's format. What the client asks for concerns the answer that follows the reasoning.
    """
    if params.calls_due is None and params.guided is None:
        return None
    if format is None or (params.calls_due is None and not (format.reasoning_format and params.is_parsed)):
        return params.guided
    lark = Lark({text: id for text, id in tokenizer.added_ids.items() if text in format.markers})
    prompt_end = _end_of(prompt, tokenizer)
    if params.calls_due is not None:
        start = format.calls(lark, params.calls_due, prompt_end)
    else:
        assert params.guided is not None
        start = format.answer(lark, rule_of(params.guided, lark), prompt_end)
    return inference_pb2.Guided(ebnf_grammar=lark.grammar(start))


async def checked_grammar(
    params: GenerateParams,
    format: AnswerFormat | None,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    grammars: GrammarChecker,
) -> inference_pb2.Guided | None:
    """The grammar of the whole output, as the engine will see it. What the client sent was checked alone before.

    Raises InvalidArgument with the field that the grammar comes from.
    """
    guided = guided_by(params, format, tokenizer, prompt)
    if guided is None or guided is params.guided:
        return guided
    asked = params.guided.WhichOneof("format") if params.guided is not None else ""
    return await grammars.check(guided, f"guided.{asked}" if asked else "chat.tools")


def rule_of(guided: inference_pb2.Guided, lark: Lark) -> Rule:
    """What a client asks for, as a rule of a grammar."""
    match guided.WhichOneof("format"):
        case "json_schema":
            return lark.json(json.loads(guided.json_schema))
        case "json_object":
            return lark.json({"type": "object"})
        case "regex":
            return lark.regex(guided.regex)
        case "choice":
            return lark.one_of(lark.sequence(option) for option in guided.choice.options)
        case _:
            return lark.nested(guided.ebnf_grammar)


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt[-_NUM_LAST:], skip_special_tokens=False)
