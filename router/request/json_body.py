"""Bodies that are JSON objects: bounded decoding, and fields that are taken once, with errors that name them."""

from __future__ import annotations

import contextlib
import json
import json.scanner
from collections.abc import Callable, Iterator
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # the decoder in Python
from typing import Any, NoReturn, TypeAlias

from pagoda.v1 import inference_pb2

from ...settings.sampling import PARAMETERS, Interval
from ..errors import InvalidArgument
from .fields import Limits, check_count, check_integer, check_number
from .wire import MAX_FIELDS

FEW_VALUES = 1 << 14  # which the fast decoder takes no more than a few milliseconds for
MAX_UINT32 = (1 << 32) - 1

_MAX_SHOWN = 64  # characters of a client's own text in an error

Json: TypeAlias = Any


class _TooMany(Exception):
    pass


def json_object(raw: bytes, limits: Limits) -> dict[str, Json]:
    """Parse a body that must be a JSON object. Raises InvalidArgument, whose text holds nothing of the body.

    Python's fast decoder keeps the interpreter's lock for the whole body. A body of many values is therefore decoded by
    the decoder in Python, between whose steps the event loop runs, and which counts the values.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("body", "is not UTF-8") from None
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    if sum(map(raw.count, (b",", b":", b"[", b"{"))) > FEW_VALUES:
        _make_countable(decoder, MAX_FIELDS + limits.max_model_len + limits.vocab_size)
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise InvalidArgument("body", "is nested too deep") from None
    except _TooMany:
        raise InvalidArgument("body", "has too many values") from None
    except _Repeated as error:
        raise InvalidArgument(shown(error.name), "is given twice") from None
    except ValueError:
        raise InvalidArgument("body", "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument("body", "is not a JSON object")
    return value


def _make_countable(decoder: json.JSONDecoder, most: int) -> None:
    """Let the decoder in Python take over. It raises _TooMany for more than so many values."""
    left = most

    def counted(scan: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
        def scan_and_count(text: str, at: int) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise _TooMany
            return scan(text, at)

        return scan_and_count

    decoder.parse_array = lambda place, scan: JSONArray(place, counted(scan))  # type: ignore[attr-defined]
    decoder.parse_object = (  # type: ignore[attr-defined]
        lambda place, strict, scan, *rest: JSONObject(place, strict, counted(scan), *rest)
    )
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]


class _Repeated(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def shown(name: str) -> str:
    """A client's own text as an error may show it."""
    return ascii(name)[1:-1][:_MAX_SHOWN]


@contextlib.contextmanager
def translating() -> Iterator[None]:
    """While a body becomes a message of the protocol: raise InvalidArgument for what no message can hold."""
    try:
        yield
    except UnicodeEncodeError:  # the protocol's texts are UTF-8
        raise InvalidArgument("body", "holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise InvalidArgument("body", "is nested too deep") from None


class Fields:
    """The fields of a JSON object. Each is taken once; null is the same as no field."""

    def __init__(self, given: Json, path: str = "") -> None:
        if not isinstance(given, dict):
            raise InvalidArgument(path.rstrip("."), "must be an object")
        self._given = given
        self._left = set(given)
        self._path = path

    @property
    def path(self) -> str:
        """The object's own name."""
        return self._path.rstrip(".")

    def name(self, name: str) -> str:
        return self._path + name

    def take(self, name: str, kind: type | tuple[type, ...] = object, what: str = "") -> Json:
        """A field's value; None if it is not given. `what` says its type in words."""
        self._left.discard(name)
        value = self._given.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            if kind is object:
                return value
            raise InvalidArgument(self.name(name), f"must be {what}")
        return value

    def text(self, name: str) -> str:
        return self.take(name, str, "a string") or ""

    def flag(self, name: str) -> bool:
        return self.take(name, bool, "true or false") or False

    def integer(self, name: str, low: int = 0, high: int = MAX_UINT32) -> int | None:
        value: int | None = self.take(name, int, "a whole number")
        if value is not None:
            check_integer(value, self.name(name), low, high)
        return value

    def number(self, name: str, interval: Interval) -> float | None:
        """A number, which is checked as the client has sent it: the protocol's has fewer digits and a lower end."""
        value: float | None = self.take(name, (int, float), "a number")
        if value is not None:
            check_number(value, self.name(name), interval)
        return value

    def put_parameters(self, sampling: inference_pb2.Sampling, *names: str) -> None:
        """Set the sampling parameters that are given, of these or, without names, of all."""
        for each in PARAMETERS:
            if not names or each.name in names:
                value = self.integer(each.name) if each.is_integer else self.number(each.name, each.interval)
                if value is not None:
                    setattr(sampling, each.name, value)

    def entries(self, name: str, most: int) -> list[Json]:
        value: list[Json] = self.take(name, list, "a list") or []
        check_count(len(value), self.name(name), most)
        return value

    def texts(self, name: str, most: int) -> list[str]:
        texts = self.entries(name, most)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidArgument(self.name(f"{name}[{index}]"), "must be a string")
        return texts

    def integers(self, name: str, most: int) -> list[int]:
        return integers_of(self.entries(name, most), self.name(name))

    def none_left(self) -> None:
        """Refuse the first field that has not been taken."""
        for name in self._given:
            if name in self._left and self._given[name] is not None:
                raise InvalidArgument(self.name(shown(name)), "is not a field that this server knows")


def integers_of(values: list[Json], name: str) -> list[int]:
    for index, value in enumerate(values):
        if type(value) is not int:
            raise InvalidArgument(f"{name}[{index}]", "must be a whole number")
        if not 0 <= value <= MAX_UINT32:
            check_integer(value, f"{name}[{index}]", 0, MAX_UINT32)
    return values
