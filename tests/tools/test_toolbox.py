"""Typed functions as tools: schemas, and every mistake answered in words."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, Literal

import pytest

from turnwise.core.protocols import Action, ToolCall
from turnwise.errors import HostFault, SettingError
from turnwise.tools import Toolbox


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def paint(colour: Literal["red", "blue"], sizes: list[float], note: str | None = None) -> dict[str, Any]:
    """Paint."""
    return {"colour": colour, "sizes": sizes, "note": note}


def fail() -> str:
    """Fail."""
    raise RuntimeError("broken")


async def slow(x: float) -> str:
    """Wait."""
    await asyncio.sleep(0)
    return f"got {x}"


def call(name: str, **arguments: Any) -> Action:
    return Action("", (ToolCall(name, arguments),))


BOX = Toolbox([add, paint, fail])


def test_schemas() -> None:
    assert BOX.schemas[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second"},
                },
                "required": ["a"],
            },
        },
    }
    assert BOX.schemas[1]["function"]["parameters"]["properties"] == {
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "sizes": {"type": "array", "items": {"type": "number"}},
        "note": {"type": "string"},
    }


@pytest.mark.parametrize(
    ("action", "content", "errors"),
    [
        (call("add", a=1, b=2), "3", 0),
        (call("add", a=1), "2", 0),
        (call("add", a=2.0), "3", 0),
        (call("paint", colour="red", sizes=[1, 2.5]), '{"colour": "red", "sizes": [1.0, 2.5], "note": null}', 0),
        (call("ad", a=1), "error: no tool 'ad'; did you mean 'add'? known: add, fail, paint", 1),
        (call("add"), "error: add: missing argument 'a'", 1),
        (call("add", a=1, c=2), "error: add: no argument 'c'; known: a, b", 1),
        (call("add", a="x"), "error: add: argument 'a' must be integer, not string \"x\"", 1),
        (call("add", a=True), "error: add: argument 'a' must be integer, not boolean true", 1),
        (call("add", a=1.5), "error: add: argument 'a' must be integer, not number 1.5", 1),
        (call("paint", colour="green", sizes=[]),
         'error: paint: argument \'colour\' must be one of "red", "blue", not string "green"', 1),
        (call("paint", colour="red", sizes="x"),
         "error: paint: argument 'sizes' must be a list of number, not string \"x\"", 1),
        (call("fail"), "error: RuntimeError: broken", 1),
        (Action("", (ToolCall("add", [1]),)), "error: add: the arguments must be an object, not list [1]", 1),  # type: ignore[arg-type]
        (Action("", faults=("not JSON",)), "error: not JSON", 1),
    ],
)  # fmt: skip
def test_answers(action: Action, content: str, errors: int) -> None:
    messages, counted = BOX.run(action)
    assert [m["content"] for m in messages] == [content]
    assert messages[0]["role"] == "tool"
    assert counted == errors
    assert asyncio.run(BOX.arun(action)) == (messages, counted)


def test_one_message_per_call_and_fault_in_order() -> None:
    calls = (ToolCall("add", {"a": 1}, id="c1"), ToolCall("fail", {}), ToolCall("add", {"a": 5}))
    messages, errors = BOX.run(Action("", calls, faults=("no name",)))
    assert messages[0] == {"role": "tool", "name": "add", "content": "2", "tool_call_id": "c1"}
    assert [m["name"] for m in messages] == ["add", "fail", "add", "unknown"]
    assert errors == 2


def test_no_call_is_no_message() -> None:
    assert BOX.run(Action("hello")) == ([], 0)


def test_async_tools() -> None:
    box = Toolbox([slow, add])
    calls = (ToolCall("slow", {"x": 1}), ToolCall("add", {"a": 1}), ToolCall("slow", {}))
    messages, errors = asyncio.run(box.arun(Action("", calls)))
    assert [m["content"] for m in messages] == ["got 1.0", "2", "error: slow: missing argument 'x'"]
    assert errors == 1
    with pytest.raises(SettingError, match=r"await toolbox\.arun"):
        box.run(Action("", calls))


def test_functions_a_model_could_not_read_are_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        """X."""

    def starred(*args: int) -> None:
        """X."""

    def odd(x: set[int]) -> None:
        """X."""

    def silent(x: int) -> None: ...

    for function, words in ((untyped, "no type"), (starred, "name every"), (odd, "has type"), (silent, "docstring")):
        with pytest.raises(SettingError, match=words):
            Toolbox([function])
    with pytest.raises(SettingError, match="two tools"):
        Toolbox([add, add])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOSPC])
def test_a_starved_machine_is_no_answer_to_the_model(number):
    def fetch(name: str) -> str:
        """Fetch a file."""
        raise OSError(number if name == "ours" else errno.ENOENT, "x")

    box = Toolbox([fetch])
    with pytest.raises(HostFault):
        box.run(Action("", (ToolCall("fetch", {"name": "ours"}),)))
    assert box.run(Action("", (ToolCall("fetch", {"name": "theirs"}),)))[1] == 1
