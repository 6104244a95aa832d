"""Malformed actions, which every environment must answer with a message.

Knows no environment; none of these actions is a good move in any.
"""

from __future__ import annotations

from typing import Any

from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.checker.rules import tool_fault

MALFORMED = {
    "empty text": Action(""),
    "garbage": Action("}{)(*&^ %$ \x00 \\ <tool_call> 1/0 __import__"),
    "huge text": Action("north 9*9 " * 20_000),
    "unicode": Action("ünïcødé ٣ 猫 🐈 \u202e \u0000 \ud800"),
    "unreadable tool call": Action("<tool_call>{", faults=("not JSON",)),
    "unknown tool": Action("", calls=(ToolCall("no_such_tool", {"x": 1}, id="1"),)),
}


def malformed_actions(tools: Any) -> dict[str, Action]:
    """By label. For each valid tool schema also a call without arguments, and one with arguments of the wrong type."""
    actions = dict(MALFORMED)
    for tool in () if tool_fault(tools) else tools:
        function = tool["function"]
        odd = {key: [None, {"x": float("nan")}] for key in function["parameters"].get("properties", {})}
        actions[f"{function['name']} without arguments"] = Action("", calls=(ToolCall(function["name"], {}),))
        actions[f"{function['name']} with odd arguments"] = Action("", calls=(ToolCall(function["name"], odd),))
    return actions
