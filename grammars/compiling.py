"""Grammars of structured output: how each format becomes one that llguidance reads, and what it may cost.

The router checks a grammar with the same code and the same limits with which the engine compiles it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from ..settings.request import JSON_STYLE
from .forced_text import levels_of, longest_repeated, names_in, schemas_in

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_DEPTH = 64
MAX_GBNF_RULES = 500  # the time to convert them grows with the square of their number
MAX_LEVELS = 4000  # of rules, or of a schema's values, that may lie within each other
MAX_REPEATED_BYTES = 16_384  # of the text that a regular expression asks for at least: compiling takes 1 µs for each
MAX_DIVISOR = 10_000  # of multipleOf: the automaton has as many states, and takes some 2 µs for each

_JSON_STYLE = cast("JsonCompileOptions", JSON_STYLE)

# Work and memory for one grammar, about a tenth of what llguidance allows by default: a grammar of any size compiles
# within about a second, a step follows it within some hundredths, and its automaton takes at most some 40 MB.
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    step_max_items=5000,
    step_lexer_fuel=50_000,
    max_lexer_states=20_000,
    max_grammar_size=30_000,
    verbose_errors=False,
)
# What a grammar gets that has met a limit above. A mask takes a tenth of a second at most, on a thread of its own.
_PATIENT_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    step_max_items=50_000,
    step_lexer_fuel=2_000_000,
    max_lexer_states=20_000,
    max_grammar_size=30_000,
    verbose_errors=False,
)
# llguidance compiles parts within each other by recursion, which takes up to about 4 kB for each of MAX_LEVELS, and a
# stack that overflows ends the process. Only the pages of a stack that are touched take memory.
_STACK_BYTES = 64 << 20
_starting = threading.Lock()  # the size of a stack is set for all threads that start
_LONGEST_ERROR = 300
_LEXER_ERROR = "lexer error"  # how errors begin that concern all matchers of a grammar, whatever they have consumed
_GBNF_TEXT = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
_OF_REGEX = '{"grammars":[{"name":"regex"'  # how the library's grammar of a regular expression begins
_GBNF_HEADER = "%llguidance {}\n\n"  # before what was converted: lines of errors are then those of the rules
_VALUES = ("const", "enum")  # keywords whose numbers are written as they are
_LENGTHS = ("minLength", "maxLength")
_MOST_UINT32 = (1 << 32) - 1  # of a length, and of the digits of a multipleOf: llguidance takes no larger number
_NOT_JSON = re.compile(r"(failed to parse \"%json\": )?(.*) at line (\d+) column (\d+)", re.DOTALL)
_UNSUPPORTED = {"WordUnicode": r"\b", "WordUnicodeNegate": r"\B"}  # in an error of the library
_BOUNDS = {  # keywords, with those that include the bound, and the direction that is inwards
    "minimum": ("minimum", 1), "exclusiveMinimum": ("minimum", 1),
    "maximum": ("maximum", -1), "exclusiveMaximum": ("maximum", -1),
}  # fmt: skip
_EXACT, _LARGEST = 1 << 53, 10**300  # doubles keep every integer below the first, and end a little above the second
MAX_DIGITS = 40  # of a number that an error repeats whole
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # whose keys are names
_NOTES = ("default", "examples")  # keywords that decide nothing
_STYLE = "x-guidance"  # llguidance's own keyword: how JSON is written
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


Result = TypeVar("Result")


class GrammarError(ValueError):
    """A grammar that is wrong, or too complex to follow. The message is for the client, and names the place."""


def grammar_of(format: str, value: str | Sequence[str]) -> str:
    """Return a grammar as llguidance reads it. Raises GrammarError.

    format  the name of the field of Guided; `value` is its content: the options of a choice, nothing of a json_object
    """
    check_size(format, value)
    if format == "json_schema":
        return _schema_grammar(str(value))
    if format == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_STYLE)
    if format == "regex":
        return LLMatcher.grammar_from_regex(str(value))
    if format == "choice":  # one terminal, whose size does not slow its steps. U+007F must be escaped in Lark
        options = " | ".join(json.dumps(option, ensure_ascii=False).replace("\x7f", r"\u007f") for option in value)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")
    with _refusing_large_exponents():
        schemas = schemas_in(str(value), Decimal)
    for schema in schemas:
        _check_keywords(schema)
        if place := _narrow_bounds(schema):
            raise GrammarError(f"has a bound at {place} of a %json that would not be kept: it lies between two doubles")
    return LLMatcher.grammar_from_lark(str(value))


def check_size(format: str, value: str | Sequence[str]) -> None:
    """Raise GrammarError for sizes that would take long to compile, however short their text is: nothing is compiled.

    format, value  those of `grammar_of`
    """
    if format == "json_schema":
        schemas = [_read_schema(str(value))]
    elif format == "ebnf_grammar":
        schemas = schemas_in(str(value))
        if (names := len(names_in(str(value)))) > MAX_LEVELS:
            raise GrammarError(f"names {names} rules and terminals, at most {MAX_LEVELS} are allowed")
    else:
        schemas = []
    for schema in schemas:
        if _depth_exceeds(schema, MAX_SCHEMA_DEPTH):
            raise GrammarError(f"nests objects and lists more than {MAX_SCHEMA_DEPTH} deep")
        if (levels := levels_of(schema)) > MAX_LEVELS:
            raise GrammarError(f"nests values {levels} levels deep along its references, at most {MAX_LEVELS} may be")
    _check_divisors(schemas)
    if (length := longest_repeated(format, value)) > MAX_REPEATED_BYTES:
        raise GrammarError(f"repeats its parts to {length} bytes at least, at most {MAX_REPEATED_BYTES} are allowed")


def _check_divisors(schemas: list[object]) -> None:
    """Bound multipleOf. Powers of ten cost nothing; where several hold at once, their least common multiple counts."""
    divisors, is_combined = [], False
    waiting = schemas
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            is_combined |= not _COMBINING.isdisjoint(value)
            divisor = value.get("multipleOf")
            if isinstance(divisor, int | float) and not isinstance(divisor, bool) and math.isfinite(divisor):
                divisors.append(_without_tens(divisor))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    if sum(divisors) > MAX_DIVISOR or (is_combined and math.lcm(*divisors) > MAX_DIVISOR):
        detail = "together" if len(divisors) > 1 else f"{divisors[0]}"
        raise GrammarError(f"has a multipleOf that is too large ({detail}): at most {MAX_DIVISOR}, but for its zeros")


def _without_tens(divisor: float) -> int:
    number = int("".join(map(str, Decimal(str(divisor)).as_tuple().digits)).rstrip("0") or 1)
    return min(number, 10 * MAX_DIVISOR)


def _keywords(schema: object) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every keyword of a schema and of those in it that decides something: its place, what has it, and its name."""
    waiting = [("", schema)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{pointer}/{index}", each) for index, each in enumerate(value)]
        elif isinstance(value, dict):
            for key, inner in value.items():
                place = f"{pointer}/{key}"
                if key in _NAMED and isinstance(inner, dict):
                    waiting += [(f"{place}/{name}", each) for name, each in inner.items()]
                elif key not in _NOTES:
                    yield place, value, key
                    if key not in _VALUES:
                        waiting.append((place, inner))


def _check_keywords(schema: object) -> None:
    """Refuse what llguidance would change or leave out.

    It reads numbers in `const` and `enum` as doubles, and writes 16 digits. It follows a style of the whole schema. Its
    own errors name neither a length nor a multipleOf as the client wrote it.

    schema  its numbers with a point are Decimals
    """
    for place, holder, key in _keywords(schema):
        if key in _VALUES:
            _check_exact(place, holder[key])
        elif key == _STYLE and (place != f"/{_STYLE}" or not isinstance(holder[key], dict)):
            raise GrammarError(f"has {_STYLE} at {place}: it must be an object, and at the top of the schema")
        elif key in _LENGTHS and isinstance(holder[key], int | Decimal) and holder[key] > _MOST_UINT32:
            raise GrammarError(f"has {_shown(holder[key])} at {place}, at most {_MOST_UINT32} is allowed")
        elif key == "multipleOf" and isinstance(number := holder[key], int | Decimal) and not _is_divisor(number):
            why = "must be above 0" if number <= 0 else "has too many digits as a double"
            raise GrammarError(f"has a number at {place} that cannot be followed: {_shown(number)} {why}")


def _narrow_bounds(schema: object) -> str:
    """Move integer bounds that no double keeps inwards: llguidance rounds them to the nearest one, maybe outwards.

    Return the place of one that was moved; empty: none was.
    """
    moved = ""
    for place, holder, key in list(_keywords(schema)):
        bound = holder[key]
        if key not in _BOUNDS or not isinstance(bound, int) or not _EXACT <= abs(bound) < _LARGEST:
            continue
        inclusive, inwards = _BOUNDS[key]
        kept = _nearest_double(bound + (inwards if key != inclusive else 0), inwards)
        if (key, bound) != (inclusive, kept):
            del holder[key]
            holder[inclusive], moved = max(holder.get(inclusive, kept) * inwards, kept * inwards) * inwards, place
    return moved


def _nearest_double(number: int, direction: int) -> int:
    """The nearest integer that a double keeps, from a number in this direction: 1 up, -1 down."""
    nearest = float(number)
    if (int(nearest) - number) * direction < 0:
        nearest = math.nextafter(nearest, math.inf * direction)
    return int(nearest)


def _check_exact(pointer: str, value: object) -> None:
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict | list):
            waiting += found.values() if isinstance(found, dict) else found
        elif isinstance(found, int | Decimal) and not isinstance(found, bool) and not _is_exact(found):
            why = f"{_shown(found)}; write it as a string"
            raise GrammarError(f"has a number at {pointer} that would not be kept: {why}")


def _shown(number: int | Decimal) -> str:
    return text if len(text := str(number)) <= MAX_DIGITS else f"{Decimal(number):.9e}"


def _is_divisor(number: int | Decimal) -> bool:
    """Whether llguidance can make a number whole, which it multiplies by 10 as a double until it is.

    It names true and false as such itself.
    """
    if isinstance(number, bool):
        return True
    if not 0 < number <= _MOST_UINT32 or not (whole := float(number)):
        return False
    while whole % 1:
        whole *= 10
    return whole <= _MOST_UINT32


def _is_exact(number: int | Decimal) -> bool:
    try:
        return Decimal(f"{float(number):.16g}") == number
    except OverflowError:
        return False


def _schema_grammar(schema: str) -> str:
    value = _read_schema(schema)
    with _refusing_large_exponents():
        exact = json.loads(schema, parse_float=Decimal)
    _check_keywords(exact)
    if _narrow_bounds(value):
        schema = json.dumps(value)
    try:
        return LLMatcher.grammar_from_json_schema("{}" if value is True else schema, defaults=_JSON_STYLE)
    except ValueError as error:
        if found := _NOT_JSON.fullmatch(str(error)):
            raise GrammarError(f"is not JSON: {found[2]} at line {found[3]}, column {found[4]}") from None
        raise GrammarError(_explained(str(error))) from None


@contextlib.contextmanager
def _refusing_large_exponents() -> Iterator[None]:
    """Raise GrammarError where a number becomes no Decimal: an exponent has 18 digits at most."""
    try:
        yield
    except InvalidOperation:
        raise GrammarError("has a number whose exponent is too large") from None


def _read_schema(schema: str) -> object:
    """Raises GrammarError."""
    try:
        value = json.loads(schema)
    except json.JSONDecodeError as error:
        raise GrammarError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise GrammarError(f"is not JSON that can be read: {error}"[:_LONGEST_ERROR]) from None
    if not isinstance(value, dict) and value is not True:
        raise GrammarError("must be a JSON object, or true")
    return value


def to_lark(grammar: str) -> str:
    """Convert a grammar from GBNF to Lark, unless it is in Lark already. Raises GrammarError."""
    if is_lark_syntax(grammar):
        return grammar
    if (rules := grammar.count("::=")) > MAX_GBNF_RULES:
        raise GrammarError(f"has {rules} rules in GBNF, at most {MAX_GBNF_RULES} are allowed; Lark has no such limit")
    try:
        return gbnf_to_lark(_GBNF_TEXT.sub(_plainly_escaped, grammar)).removeprefix(_GBNF_HEADER)
    except RecursionError:
        raise GrammarError("nests parentheses too deep") from None
    except Exception as error:  # the library raises nothing narrower
        message = re.sub(r" at line (\d+), (.*)$", r" at line \1, \2", str(error), flags=re.DOTALL)
        raise GrammarError(f"is not a grammar in GBNF: {message}"[:_LONGEST_ERROR]) from None


def _plainly_escaped(found: re.Match[str]) -> str:
    """A comment, literal or class of GBNF, without the escapes that llguidance's converter spoils."""
    text = found[0]
    if text.startswith("#"):
        return text
    is_literal = text.startswith('"')

    def plain(escape: re.Match[str]) -> str:
        if escape[1] is None:
            return escape[0][1:] if is_literal and escape[0] in ("\\[", "\\]") else escape[0]
        code = int(escape[1][1:], 16)
        if code > sys.maxunicode or 0xD800 <= code < 0xE000:
            raise GrammarError(f"has the escape {escape[0]}, which is no character")
        character = chr(code)
        return f"\\x{code:02x}" if code < 0x80 and not character.isalnum() else character

    return re.sub(r"\\(?:(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|.)", plain, text, flags=re.DOTALL)


def compiled(grammar: str, tokenizer: LLTokenizer, *, is_patient: bool = False) -> tuple[LLMatcher, bytes]:
    """Compile a grammar for a vocabulary; return it with the mask of the first token.

    grammar     from `grammar_of`
    is_patient  with the larger limits on each step

    Takes up to about a second, without the interpreter's lock. Raises GrammarError.
    """

    def compile() -> tuple[LLMatcher, bytes, LLMatcher]:
        matcher = LLMatcher(tokenizer, grammar, limits=_PATIENT_LIMITS if is_patient else _LIMITS, log_level=0)
        check_matcher(matcher, grammar)
        mask = matcher.compute_bitmask()
        allowed, follower = int.from_bytes(mask, "little"), matcher.deep_copy()
        follower.try_consume_tokens([(allowed & -allowed).bit_length() - 1] if allowed else [])
        return matcher, mask, follower

    matcher, mask, follower = _on_deep_stack(compile)
    check_matcher(matcher, grammar)
    if follower.get_error().startswith(_LEXER_ERROR):  # the automaton met a limit, of which the mask says nothing
        if is_patient:
            check_matcher(follower, grammar)
        compiled(grammar, tokenizer, is_patient=True)
    if int.from_bytes(mask, "little") == 1 << tokenizer.eos_token:
        raise GrammarError("allows the empty text alone")
    return matcher, mask


def _on_deep_stack(work: Callable[[], Result]) -> Result:
    """Return what a function returns, or raise what it raises, on a thread of its own that has _STACK_BYTES."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # a panic of llguidance derives from nothing narrower
            future.set_exception(error)

    thread = threading.Thread(target=run, name="grammar")
    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


def check_matcher(matcher: LLMatcher, grammar: str = "") -> None:
    """Raise GrammarError if the matcher has failed, as it does for a grammar that is wrong or exceeds a limit."""
    if matcher.is_error():
        raise GrammarError(_explained(matcher.get_error(), grammar))


def _explained(error: str, grammar: str = "") -> str:
    """Return llguidance's error as one line that names the place in what the client sent."""
    if error.startswith("NoExtensionBias"):
        return "allows no text at all"
    error = re.sub(r"lookarounds not supported yet; (\w+) in regex (.*)", _unsupported, error, flags=re.DOTALL)
    if found := re.search(r"regex parse error:\n(.*?)\nerror: ([^\n]*)", error, re.DOTALL):
        lines, what = found[1].split("\n"), found[2]
        marker = next((line for line in lines if line.strip() and not line.strip(" ^")), None)
        place = "" if marker is None else f" at character {marker.index('^') - 3}"
        return f"has a regular expression that cannot be used: {what}{place}"
    if found := re.match(r"Unimplemented keys: (\[.*\])", error):
        key = json.loads(found[1])[0]
        return f"uses the keyword {key!r}{_at(_places(grammar, key)[:1])}, which is not supported"
    if found := re.match(r"(?:at )?(\d+)\((\d+)\): (?:invalid regex \".*?\" \(in regex\): )?([^\n]*)", error):
        what = found[3].partition("; following ")[0]
        if grammar.startswith(_OF_REGEX):  # the line is none of the client's
            return f"cannot be used: {what}"[:_LONGEST_ERROR]
        return f"is wrong at line {found[1]}, column {found[2]}: {what}"[:_LONGEST_ERROR]
    if "too many" in error.lower() or "too big" in error or "too large" in error or "Current row has" in error:
        return f"is too complex: {_first_line(error)}"
    if found := _NOT_JSON.fullmatch(error):
        what = "has a %json that is not JSON" if found[1] else "is not JSON"
        return f"{what}: {_first_line(found[2])} at line {found[3]}, column {found[4]}"
    named = re.search(r"'(\w+)'", error)
    places = _places(grammar, named[1]) if named else []
    return f"cannot be used: {_first_line(error)}{_at(places) if len(places) == 1 else ''}"  # of several, one is wrong


def _unsupported(found: re.Match[str]) -> str:
    return f"{_UNSUPPORTED.get(found[1], found[1])} is not supported in regular expressions: {found[2]}"


def _first_line(error: str) -> str:
    return error.split("\n", 1)[0][:_LONGEST_ERROR]


def _places(grammar: str, key: str) -> list[str]:
    """Return where a JSON schema has a keyword, each as the JSON pointer of what has it."""
    try:
        (whole,) = json.loads(grammar)["grammars"]
        schema = whole["json_schema"]
    except (ValueError, KeyError, TypeError):
        return []
    return [place.removesuffix(f"/{key}") for place, _, name in _keywords(schema) if name == key]


def _at(places: list[str]) -> str:
    return "".join(f" at {place or '/'}" for place in places)


def _depth_exceeds(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
