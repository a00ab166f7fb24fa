"""Assign Python values to message fields; a value that does not fit raises InvalidArgument with the field's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from pagoda.errors import InvalidArgument

_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
}


def assign(message: Message, path: str, value: object, *, called: str | None = None) -> None:
    """Set the field at a path such as `sampling.top_k`. Raises InvalidArgument.

    called  the path as the caller knows it, if the message will be part of another
    """
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    try:
        match value:
            case str() | bytes() | int() | float():
                if hasattr(getattr(message, name), "append"):  # one stop string needs no list around it
                    getattr(message, name).append(value)
                else:
                    setattr(message, name, value)
            case Mapping():
                getattr(message, name).update(value)
            case _:
                getattr(message, name).extend(value)
    except (TypeError, ValueError, AttributeError) as error:
        description = _complaint(message.DESCRIPTOR.fields_by_name[name], value, error)
        raise wrong(called or path, description) from error


def assign_json(struct: Struct, value: object, field: str) -> None:
    """Set a Struct to a dict of texts, numbers, booleans, None, lists and dicts. Raises InvalidArgument."""
    if not isinstance(value, Mapping):
        raise wrong(field, f"is {type(value).__name__}, must be a dict")
    try:
        ParseDict(dict(value), struct)
    except (ParseError, TypeError, ValueError, RecursionError) as error:
        raise wrong(field, f"cannot be JSON: {error}") from error


def wrong(field: str, description: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {description}", field)


def _complaint(field: Any, value: object, error: Exception) -> str:
    """What is wrong with the value, in clearer words than protobuf's where those are unclear."""
    if isinstance(error, UnicodeEncodeError):
        return f"is not text: there is no valid character at position {error.start}"
    if isinstance(value, Mapping) and field.message_type is not None:
        field, value = field.message_type.fields_by_name["key"], list(value)
    if field.type in _RANGES:
        low, high = _RANGES[field.type]
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, int) and not low <= each <= high:
                return f"is {each}, must be from {low} to {high}"
    if field.type == FieldDescriptor.TYPE_STRING and isinstance(error, TypeError):
        return f"is {value!r}, must be a text"
    return str(error)
