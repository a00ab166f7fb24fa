"""vLLM's `structured_outputs`, by which clients of several protocols ask for a format of the answer."""

from __future__ import annotations

import json

from pagoda.v1 import inference_pb2

from ..errors import InvalidArgument
from .json_body import Fields, Json


def structured_outputs(given: Json, path: str) -> inference_pb2.Guided:
    """Translate a JSON object that holds one format. Raises InvalidArgument; `path` is the object's name in errors."""
    fields, guided = Fields(given, f"{path}."), inference_pb2.Guided()
    if (schema := fields.take("json")) is not None:
        guided.json_schema = schema_text(schema, fields.name("json"))
    if (regex := fields.take("regex", str, "a string")) is not None:
        guided.regex = regex
    if (grammar := fields.take("grammar", str, "a string")) is not None:
        guided.ebnf_grammar = grammar
    if (choice := fields.take("choice", list, "a list of strings")) is not None:
        if not all(isinstance(each, str) for each in choice):
            raise InvalidArgument(fields.name("choice"), "must be a list of strings")
        guided.choice.options.extend(choice)
    if (is_object := fields.take("json_object", bool, "true or false")) is not None:
        guided.json_object = is_object
    fields.none_left()
    if sum(value is not None for value in given.values()) != 1:
        raise InvalidArgument(path, "must hold one format")
    return guided


def schema_text(given: Json, name: str) -> str:
    """Return a JSON schema, given as JSON or as its text, as text. Raises InvalidArgument, which calls it `name`."""
    if isinstance(given, str):
        return given
    if not isinstance(given, dict | bool):
        raise InvalidArgument(name, "must be a JSON Schema")
    return json.dumps(given, ensure_ascii=False)
