"""What a call asks its answer to match, as a grammar: the fields of the chat protocols and of vLLM, and forced tools.

A grammar is a text, ``kind:source`` (``engines/grammar.py``): ``json_schema:{...}``, ``regex:...``, or ``either:[...]``,
alternatives of parts that follow each other: texts, and objects that name a kind. Pure functions; knows no library and no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.core.protocols import ToolCall
from turnwise.errors import GrammarError
from turnwise.rollout.parsers.syntax import ToolSyntax

FIELDS = frozenset({"response_format", "regex", "guided_regex", "guided_json", "guided_choice", "structured_outputs"})
"""Of a chat completion; those that are not OpenAI's are vLLM's names, and ``regex``."""
PROBE = {"turnwise_probe": 7}  # arguments whose place in a written call shows where arguments stand
FORMATS = "write type text, json_object or json_schema"


def read_grammar(body: Mapping[str, Any]) -> str:
    """The grammar that the fields of a request ask for; "" where they ask for none."""
    structured = body.get("structured_outputs") or {}
    if not isinstance(structured, Mapping):
        raise GrammarError(f"'structured_outputs' is {structured!r:.80}; write an object with regex, json or choice")
    named = [*structured.items(), ("regex", body.get("regex") or None)]
    named += [(name, body.get(f"guided_{name}")) for name in ("regex", "json", "choice")]
    grammars = [text for text in (read_format(body.get("response_format")), *map(_of_vllm, named)) if text]
    if len(set(grammars)) > 1:
        raise GrammarError("response_format, regex and guided fields ask for different texts; write one of them")
    return grammars[0] if grammars else ""


def read_format(value: Any) -> str:
    """The grammar of a ``response_format``. The schema may stand beside its type, as in the Responses format."""
    if value is None:
        return ""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return schema_grammar({"type": "object"})
    if kind != "json_schema":
        raise GrammarError(f"'response_format' is {value!r:.80}; {FORMATS}")
    inside = value.get("json_schema") if isinstance(value.get("json_schema"), Mapping) else value
    schema = inside.get("schema")
    if not isinstance(schema, Mapping):
        raise GrammarError(f"'response_format' has the schema {schema!r:.80}; write json_schema with name and schema")
    return schema_grammar(schema)


def run_grammar(response_format: Any = "", regex: Any = "") -> str:
    """The grammar of a run or of a row: a ``response_format``, or a schema alone, as an object, as its text, or in a file."""
    value: Any = response_format or None
    if isinstance(value, str):
        text = value.strip()
        if text in ("json_object", "text"):
            value = {"type": text}
        else:
            try:
                value = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
            except (OSError, ValueError) as fault:
                raise GrammarError(
                    f"response_format is {text!r:.80}: {fault}; write json_object, a JSON schema, or a file with one"
                ) from None
    formats = ("text", "json_object", "json_schema")
    if isinstance(value, Mapping) and value.get("type") not in formats:  # a schema alone
        value = {"type": "json_schema", "schema": value}
    return read_grammar({"response_format": value, "regex": regex})


def schema_grammar(schema: Any) -> str:
    """JSON that a schema describes."""
    return f"json_schema:{json.dumps(schema)}"


def regex_grammar(pattern: Any) -> str:
    """A text that a regular expression matches as a whole."""
    if not isinstance(pattern, str):
        raise GrammarError(f"'regex' is {pattern!r:.80}; write a regular expression")
    return f"regex:{pattern}"


def _of_vllm(field: tuple[str, Any]) -> str:
    name, value = field
    if value is None:
        return ""
    if name == "regex":
        return regex_grammar(value)
    if name == "json":
        return schema_grammar(json.loads(value) if isinstance(value, str) else value)
    if name == "choice" and isinstance(value, list | tuple) and value and all(isinstance(x, str) for x in value):
        return regex_grammar("|".join(map(re.escape, value)))
    raise GrammarError(f"structured output by {name!r} is {value!r:.80}; write regex, json or choice (a list of texts)")


def read_tool_choice(choice: Any) -> str | None:
    """The tool that must be called, "" for any; None where the policy is free. All three formats."""
    if choice in (None, "auto", "none"):
        return None
    if choice in ("required", "any"):
        return ""
    name = choice.get("name") or (choice.get("function") or {}).get("name") if isinstance(choice, Mapping) else None
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in ("auto", "none", "required", "any"):
        return read_tool_choice(kind)
    if kind not in ("function", "tool") or not isinstance(name, str):
        raise GrammarError(f"'tool_choice' is {choice!r:.80}; write auto, none, required, or the name of a function")
    return name


def answer_grammar(
    syntax: ToolSyntax, tools: Sequence[Mapping[str, Any]], text: str = "", forced: str | None = None
) -> str:
    """What the turn must be: ``text``, where it must match something, or a call of a tool. ``forced``: no text at all."""
    if forced is None and not (text and tools):
        return text
    functions = [tool["function"] for tool in tools if not forced or tool["function"]["name"] == forced]
    if not functions:
        names = ", ".join(str(tool["function"]["name"]) for tool in tools) or "none"
        raise GrammarError(f"'tool_choice' forces {forced or 'a tool'!r}, and the tools are: {names}")
    alternatives = [_call_parts(syntax, function, tools) for function in functions]
    if forced is None:
        kind, _, source = text.partition(":")
        alternatives.append([{kind: json.loads(source) if kind == "json_schema" else source}])
    return f"either:{json.dumps(alternatives)}"


def _call_parts(syntax: ToolSyntax, function: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A call of one tool: what stands before and after its arguments, which are JSON."""
    written = syntax.write_calls([ToolCall(function["name"], PROBE, syntax.call_id(function["name"], 0))], tools)
    before, probe, after = written.partition(json.dumps(PROBE))
    if not probe:
        raise GrammarError(
            f"a model that writes calls in the syntax {syntax.name} cannot be forced to one: its arguments are not JSON; write "
            "tool_choice auto"
        )
    parameters = function.get("parameters") or {}
    return [before, {"json_schema": {"type": "object", **parameters}}, after]
