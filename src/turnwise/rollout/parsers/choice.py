"""Which syntax a chat template uses, and what a turn says in it.

A template is asked: it renders a call, and the syntax that reads this call back is the one. Knows the table of syntaxes; no
tokens and no dialogues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from turnwise.core.protocols import Action, ToolCall
from turnwise.rollout.parsers.syntax import ParsedTurn, Tools, ToolSyntax, same_calls, tool_names
from turnwise.rollout.parsers.table import HERMES, SYNTAXES

PROBE = ToolCall("probe_tool", {"word": "x7Q", "count": 3}, id="000000000")
_PROPERTIES = {
    "word": {"type": "string", "description": "a word"},
    "count": {"type": "integer", "description": "a number"},
}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": ["word", "count"]}
PROBE_TOOLS = ({"type": "function", "function": {"name": PROBE.name, "description": "a probe", "parameters": _SCHEMA}},)

_BARE = (r'\{\s*"(?:name|type|id)"', r"\[\s*(?:\{|[^\W\d][\w.]*\()")  # how calls without a marker begin
_MARKERS = {re.escape(marker) for syntax in SYNTAXES.values() for marker in syntax.markers}
_LIKE_A_CALL = re.compile("|".join([*sorted(_MARKERS), *_BARE]))  # most turns that call nothing need one search


def choose_syntax(turns: Iterable[str], source: str) -> ToolSyntax:
    """The syntax of a template. ``turns``: its renderings of a turn that makes the call ``PROBE``. ``source``: its own text,
    searched for markers where no rendering shows the call. A template without either leaves the choice to us: Hermes."""
    for turn in turns:
        parsed = [(syntax, syntax.parse(turn, PROBE_TOOLS)) for syntax in SYNTAXES.values()]
        readers = [(len(p.text), n, syntax) for n, (syntax, p) in enumerate(parsed) if same_calls(p.calls, (PROBE,))]
        if readers:  # relatives may read it too, and leave a tag of their own unread
            return min(readers)[2] if len(readers) > 1 else readers[0][2]
    named = [s for s in SYNTAXES.values() if s.markers and all(marker in source for marker in s.markers)]
    return max(named, key=lambda s: sum(map(len, s.markers)), default=HERMES)


def read_turn(text: str, syntax: ToolSyntax = HERMES, tools: Tools = (), in_thought: bool = False) -> Action:
    """A sampled turn as an action. Calls in another known syntax are not executed, but named in a fault."""
    parsed = syntax.parse(text, tools, in_thought)
    if tools and not parsed.calls and _LIKE_A_CALL.search(text):
        seen = other_syntax(text, parsed, syntax, tools, in_thought)
        if seen:
            fault = (
                f"error: this looks like a tool call in the syntax of {seen}, which is not read; write {syntax.example}"
            )
            return Action(text, (), (fault,), parsed.thinking, (seen,))
    return Action(text, parsed.calls, parsed.faults, parsed.thinking)


def other_syntax(text: str, parsed: ParsedTurn, mine: ToolSyntax, tools: Tools, in_thought: bool) -> str:
    """The name of another syntax that reads a call from this turn, or whose marker the turn holds; else empty."""
    others = [s for s in SYNTAXES.values() if s is not mine]
    names = tool_names(tools)
    for other in others:
        if not other.bare and not any(marker in text for marker in other.markers):
            continue
        calls = other.parse(text, tools, in_thought).calls
        if any(call.name in names for call in calls) or (calls and not other.bare):
            return other.name
    if parsed.faults:
        return ""
    return next((s.name for s in others for marker in s.markers if marker in parsed.text), "")
