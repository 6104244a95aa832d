"""What a confused model says: every environment must answer it in words.

It does not know what any environment would call sense, except that none of these is a good move anywhere.
"""

from __future__ import annotations

from typing import Any

from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.checker.rules import tool_fault

NONSENSE = {
    "empty text": Action(""),
    "garbage": Action("}{)(*&^ %$ \x00 \\ <tool_call> 1/0 __import__"),
    "huge text": Action("north 9*9 " * 20_000),
    "unicode": Action("ünïcødé ٣ 猫 🐈 \u202e \u0000 \ud800"),
    "unreadable tool call": Action("<tool_call>{", faults=("not JSON",)),
    "unknown tool": Action("", calls=(ToolCall("no_such_tool", {"x": 1}, id="1"),)),
}


def nonsense(tools: Any) -> dict[str, Action]:
    """By label. For each well-described tool also a call without arguments, and one with senseless arguments."""
    out = dict(NONSENSE)
    for tool in () if tool_fault(tools) else tools:
        function = tool["function"]
        odd = {key: [None, {"x": float("nan")}] for key in function["parameters"].get("properties", {})}
        out[f"{function['name']} without arguments"] = Action("", calls=(ToolCall(function["name"], {}),))
        out[f"{function['name']} with odd arguments"] = Action("", calls=(ToolCall(function["name"], odd),))
    return out
