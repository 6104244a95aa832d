"""Tools for the prompts of a file: an isolated Python interpreter, or functions of the user's own.

    tool_prompts(prompt_class(...), ("python", "search.py:search"))    a class whose episodes may call them before they answer

A turn with calls is answered by their results; the first turn without a call is the answer. Knows no file and no reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from turnwise.config.named_object import load_object
from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.prompts import PromptEnvironment
from turnwise.errors import EnvironmentFault, SettingError
from turnwise.tools import SandboxSession, Toolbox, python_tool

PYTHON = "python"
MAX_TURNS = 6
MAX_CALLS = 8  # per turn; each may take the tool's whole time limit


def load_tools(names: Sequence[str]) -> tuple[Callable[..., Any], ...]:
    """The user's functions among these tools; ``python`` has none."""
    own = [name for name in names if name != PYTHON]
    for name in own:
        if ":" not in name:
            raise SettingError(f"no tool {name!r}; write python, module:function or file.py:function")
    return tuple(load_object(name, f"tool {name!r}", callable, "function") for name in own)


class ToolPromptEnvironment(PromptEnvironment):
    """One prompt, calls of tools, one answer."""

    max_turns = MAX_TURNS
    inline = False
    own_tools: ClassVar[tuple[Callable[..., Any], ...]] = ()
    with_python: ClassVar[bool] = False

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.turn = self.failed_code = 0
        self.session: SandboxSession | None = None
        self.toolbox = Toolbox([*([self._python()] if self.with_python else []), *self.own_tools])

    def reset(self, seed: int) -> Sequence[Message]:
        messages = super().reset(seed)
        if self.problem.tools:
            raise EnvironmentFault("the row has tools of its own, which --tools cannot run; leave one of them out")
        self.tools = self.toolbox.schemas
        return messages

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        self.turn += 1
        if not (action.calls or action.faults):
            return Step(terminated=True)
        if len(action.calls) > MAX_CALLS:
            content = f"error: {len(action.calls)} calls at once; at most {MAX_CALLS}"
            messages: list[Message] = [{"role": "tool", "name": call.name, "content": content} for call in action.calls]
            errors = len(messages)
        else:
            failed_before = self.failed_code
            messages, errors = await self.toolbox.arun(action)
            errors += self.failed_code - failed_before
        info = {"tool_calls": len(action.calls) + len(action.faults), "tool_errors": errors}
        return Step(messages, truncated=self.turn >= self.max_turns, info=info)

    def _python(self) -> Callable[..., Any]:
        async def python(code: str) -> str:
            """Run Python and see what it prints."""
            if self.session is None:
                self.session = python_tool().open()
            result = await self.session.arun(code)
            self.failed_code += not result.ok
            return result.output.strip() or "(nothing printed)"

        return python

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def tool_prompts(base: type[PromptEnvironment], names: Sequence[str]) -> type[PromptEnvironment]:
    """The prompts of ``base`` with these tools."""
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise SettingError(f"the tool {sorted(repeated)[0]!r} is named twice; write it once")
    body: dict[str, Any] = {"own_tools": load_tools(names), "with_python": PYTHON in names, "__doc__": base.__doc__}
    if PYTHON in names:
        body["notice"] = staticmethod(lambda: f"python tool: {python_tool().describe()}")
    made = type(base.__name__, (ToolPromptEnvironment, base), {**body, "__module__": base.__module__})
    made()  # a function that cannot be shown to a model is refused here, not in the first episode
    return made
