"""Random JSON schemas, of the keywords that grammars support, whose texts are short enough for a test."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from jsonschema import Draft202012Validator


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "array", "anyOf", "object", "array"]
    kind = random.choice(kinds)
    match kind:
        case "string":
            low = random.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + random.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": random.choice(["^[a-c]{1,4}$", "^(x|yz)+1{2,3}$", "^a.{0,3}b$"])}
        case "integer":
            low = random.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 10_000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": random.choice([1, 2.5, 1000])}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": random.sample(["alpha", "beta", 7, None, 'a"b\\c', "ünï", True, "alphabet"], 3)}
        case "const":
            return {"const": random.choice(["fixed text", 42, ["a", 1], {"k": "v"}])}
        case "anyOf":
            return {"anyOf": [random_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}
        case "array":
            low = random.randint(0, 2)
            items = random_schema(random, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + random.randint(0, 2)}
    names = random.sample(["name", "age", "tags", "is ok", 'x"y', "größe"], random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }


def assert_matches(text: str, schema: dict[str, Any]) -> None:
    Draft202012Validator(schema).validate(json.loads(text))
