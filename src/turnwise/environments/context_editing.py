"""Tools by which a policy edits its own context: ``keep`` puts notes in its place, ``drop`` forgets its oldest exchanges.

An environment that offers them holds a ``ContextEditor``: it follows what the policy has read and answers an edit with the new
context, which the environment returns as ``Step.context``. The words of the notes are sampled tokens of the turn that wrote them,
so they are credited like any action. Knows messages only: neither tokens nor the limit of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.core.protocols import Action, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import tool_schema, user_message

MAX_NOTES = 400  # characters
EDITING_TOOLS = (
    tool_schema("keep", "forget everything but the task and these notes", notes="string"),
    tool_schema("drop", "forget the oldest turns", turns="integer"),
)


class EditRefused(Exception):
    """An edit that cannot be made; the words are the tool's reply."""


@dataclass
class ContextEditor:
    """What the policy reads: the task, its notes, and the exchanges since."""

    task: list[Message]
    max_notes: int = MAX_NOTES
    notes: str = ""
    exchanges: list[list[Message]] = field(default_factory=list)  # each a turn and the reply to it

    def record(self, action: Action, reply: Sequence[Message]) -> None:
        """Add an exchange that is no edit."""
        self.exchanges.append([action.message, *reply])

    @property
    def context(self) -> list[Message]:
        """The messages that an edit leaves."""
        notes = [user_message(f"notes: {self.notes}")] if self.notes else []
        return [*self.task, *notes, *(message for exchange in self.exchanges for message in exchange)]

    def apply(self, call: ToolCall) -> list[Message]:
        """Make the edit of a call; the new context, to which the environment adds its reply."""
        notes, turns = call.arguments.get("notes"), call.arguments.get("turns")
        if call.name == "keep":
            if not isinstance(notes, str) or not notes.strip() or len(notes) > self.max_notes:
                raise EditRefused(f"error: notes must be a text of at most {self.max_notes} characters")
            self.notes, self.exchanges = " ".join(notes.split()), []
        elif call.name == "drop":
            if not isinstance(turns, int) or isinstance(turns, bool) or not 1 <= turns <= len(self.exchanges):
                raise EditRefused(f"error: turns must be a number from 1 to {len(self.exchanges)}")
            self.exchanges = self.exchanges[turns:]
        else:
            raise EditRefused(f"error: no tool {call.name[:40]}")
        return self.context
