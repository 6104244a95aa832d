"""A chat template as a function, without what Transformers does around it for messages that come from anywhere.

Ours are plain texts, so the compiled template is asked directly, in half the time: an episode asks after every turn. It stays in
Transformers' sandbox, and is asked only if it gives what ``apply_chat_template`` gives; whatever is not plain goes there.

Knows templates; neither ids nor dialogues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.core.records import Message

Tools = Sequence[dict[str, Any]]
Render = Callable[[Sequence[Message], Tools, bool], str]
"""(messages, tools, whether to open the next turn) -> text."""

PLAIN = frozenset({"role", "content", "name", "tool_call_id"})
_TOOL = {"type": "object", "properties": {"a": {"type": "string", "description": "b <c> é"}}, "required": ["a"]}
_TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": _TOOL}},)
_TALK = [{"role": role, "content": f" {role} <1> é\n"} for role in ("system", "user", "assistant", "tool", "user")]


def renderer(tokenizer: Any) -> Render:
    """The tokenizer's template, by the fastest way that gives the same texts."""

    def stock(messages: Sequence[Message], tools: Tools, open_turn: bool) -> str:
        given = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": open_turn}
        return tokenizer.apply_chat_template(list(messages), **given)

    from transformers.utils import chat_template_utils  # late: whoever has a tokenizer has it

    source, compiler = tokenizer.chat_template, getattr(chat_template_utils, "_compile_jinja_template", None)
    if not isinstance(source, str) or compiler is None:
        return stock
    try:
        compiled, special = compiler(source), dict(tokenizer.special_tokens_map)
    except Exception:  # a template that does not compile: let the stock way say so, where somebody asks
        return stock

    known: list[Tools] = [()]  # the tools that were looked at last: a dialogue has the same ones in every turn

    def quick(messages: Sequence[Message], tools: Tools, open_turn: bool) -> str:
        if tools is not known[0] and _json(list(tools)):
            known[0] = tools
        plain = tools is known[0] and all(map(_plain, messages))
        if not plain or not messages or tokenizer.chat_template != source:
            return stock(messages, tools, open_turn)
        given = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": open_turn}
        return compiled.render(messages=list(messages), **given, **special)

    asked = [
        (_TALK[a:b], tools, opens)
        for a in (0, 1)
        for b in range(a + 1, 6)
        for tools in ((), _TOOLS)
        for opens in (0, 1)
    ]
    return quick if all(_said(quick, *each) == _said(stock, *each) for each in asked) else stock


def _plain(message: Message) -> bool:
    return message.keys() <= PLAIN and all(type(value) is str for value in message.values())


def _json(value: Any) -> bool:
    """Built of nothing but what JSON is made of."""
    if type(value) is dict:
        return all(type(key) is str and _json(item) for key, item in value.items())
    return all(map(_json, value)) if type(value) is list else value is None or type(value) in (str, int, float, bool)


def _said(render: Render, messages: Sequence[Message], tools: Tools, opens: int) -> str:
    try:
        return render(messages, tools, bool(opens))
    except Exception as fault:  # templates raise whatever they like, as for a role they do not know
        return repr(fault)
