"""How an episode failed, in words that many episodes share, so that failures can be counted. Reads records, not settings."""

from __future__ import annotations

import re

from turnwise.core.records import Limit, Status, Stop, Trajectory

LIMITS = {
    Limit.TURNS: "ran out of turns",
    Limit.CONTEXT: "ran out of context",
    Limit.TOKENS: "ran out of tokens for the episode",
    Limit.SECONDS: "ran out of time",
    Limit.ENVIRONMENT: "stopped by a limit of the environment",
}
TEXT = 70  # characters of an error
UNREADABLE = "the tool call"
QUOTED, DIGITS = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`"), re.compile(r"\d+")


def failure(trajectory: Trajectory) -> str:
    """The cause of a failed episode; empty for a solved one. The first that applies: a fault of the environment or an engine, a
    limit, an answer that was cut off, the last error of a tool, a named reward that was not earned, a wrong answer."""
    if trajectory.solved and trajectory.status != Status.FAILED:
        return ""
    if trajectory.status == Status.FAILED:
        return f"broke off: {without_details(trajectory.reason) or 'no reason given'}"
    if trajectory.limit is not None:
        return LIMITS[trajectory.limit]
    turns = trajectory.turns
    if turns and turns[-1].stop == Stop.LENGTH:
        return "last answer cut off at its token limit"
    faulty = [number for number, turn in enumerate(turns) if turn.tool_errors]
    if faulty:
        role, reply = _reply(trajectory, len(turns) - faulty[-1])
        if not reply:
            return "malformed or refused action at the end"
        # a fault of the call itself is reported in these words by every parser; a user's reply is the environment's help
        kind = "malformed call" if UNREADABLE in reply else "tool error" if role == "tool" else "action not understood"
        return f"{kind}{'' if faulty[-1] == len(turns) - 1 else ', then a wrong answer'}: {without_details(reply)}"
    missed = sorted(name for name, value in trajectory.rewards.items() if value <= 0)
    if missed:
        return f"no reward for {', '.join(missed)}"
    return "wrong answer after tool calls" if any(turn.tool_calls for turn in turns) else "wrong answer, no tool called"


def _reply(trajectory: Trajectory, from_end: int) -> tuple[str, str]:
    """Who answered what to a turn, counted from the last one: turns of a fork's parent have messages and are not its own."""
    messages = trajectory.messages
    actions = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(actions) < from_end:
        return "", ""
    start = actions[-from_end] + 1
    end = next((i for i in actions if i >= start), len(messages))
    replies = [(str(m.get("role", "")), str(m.get("content") or "")) for m in messages[start:end]] or [("", "")]
    # of several tools' replies, that of the tool that failed
    return next((reply for reply in reversed(replies) if "error" in reply[1].lower()), replies[-1])


def without_details(text: str) -> str:
    """The first line, with names and numbers taken out, so that equal causes read alike."""
    line = (text.strip().splitlines() or [""])[0]
    line = DIGITS.sub("#", QUOTED.sub("'…'", line))
    return line if len(line) <= TEXT else f"{line[: TEXT - 1]}…"
