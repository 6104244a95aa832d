"""Random JSON schemas and regular expressions whose texts end soon, and what decides whether a text matches one."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema

WORDS = ("red", "green", "blue", "name", "age", "id", "x", "größe", 'say "hi"', "a\\b")


def random_schema(r: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"] + ["object", "array", "anyOf"] * (depth > 0)
    match r.choice(kinds):
        case "string":
            low = r.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + r.randint(0, 6)}
        case "integer":
            low = r.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + r.randint(0, 5000)}
        case "enum":
            return {"enum": r.sample([*WORDS, 1, 2.5, None, True], 3)}
        case "const":
            return {"const": r.choice(WORDS)}
        case "pattern":
            return {"type": "string", "pattern": f"^{random_regex(r, 1)}$"}
        case "object":
            names = r.sample(WORDS, r.randint(0, 3))
            required = [name for name in names if r.random() < 0.7]
            properties = {name: random_schema(r, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = r.randint(0, 2)
            items = random_schema(r, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + r.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(r, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def random_regex(r: random.Random, depth: int = 2) -> str:
    kinds = ["letters", "digits", "word"] + ["either", "both", "repeat", "option"] * (depth > 0)
    match r.choice(kinds):
        case "letters":
            return f"[a-f]{{{r.randint(1, 2)},{r.randint(3, 5)}}}"
        case "digits":
            return f"[0-9]{{{r.randint(1, 4)}}}"
        case "word":
            return re.escape(r.choice(("yes", "no", "maybe", "ok")))
        case "either":
            return f"({random_regex(r, depth - 1)}|{random_regex(r, depth - 1)})"
        case "both":
            return random_regex(r, depth - 1) + random_regex(r, depth - 1)
        case "repeat":
            return f"({random_regex(r, depth - 1)}){{1,3}}"
    return f"({random_regex(r, depth - 1)})?"


def random_grammar(seed: int) -> str:
    r = random.Random(seed)
    return f"regex:{random_regex(r)}" if r.random() < 0.3 else f"json_schema:{json.dumps(random_schema(r))}"


def matches(grammar: str, text: str) -> bool:
    kind, _, source = grammar.partition(":")
    if kind == "regex":
        return re.fullmatch(source, text) is not None
    try:
        jsonschema.validate(json.loads(text), json.loads(source))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
