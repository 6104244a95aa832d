"""A chat template as a function, without the input handling that Transformers does around it.

Our messages are plain texts, so the compiled Jinja template is called directly, which takes half the time: an episode renders
after every turn. It stays in Transformers' sandbox, and is used only if it returns the same texts as ``apply_chat_template``;
messages that are not plain go to ``apply_chat_template``.

Knows templates; neither ids nor dialogues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from turnwise.core.records import Message

Tools = Sequence[dict[str, Any]]
Render = Callable[[Sequence[Message], Tools, bool], str]
"""(messages, tools, whether to add the generation prompt) -> text."""

PLAIN_KEYS = frozenset({"role", "content", "name", "tool_call_id"})
_TOOL = {"type": "object", "properties": {"a": {"type": "string", "description": "b <c> é"}}, "required": ["a"]}
_TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": _TOOL}},)
_DIALOGUE = [{"role": role, "content": f" {role} <1> é\n"} for role in ("system", "user", "assistant", "tool", "user")]


def fast_template(tokenizer: Any, extra: Mapping[str, Any] = MappingProxyType({})) -> Render:
    """The tokenizer's template, by the fastest way that returns the same texts. ``extra``: variables of the template, such as
    ``enable_thinking``."""

    def stock(messages: Sequence[Message], tools: Tools, open_turn: bool) -> str:
        options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": open_turn}
        return tokenizer.apply_chat_template(list(messages), **options, **extra)

    source, special = tokenizer.chat_template, {**tokenizer.special_tokens_map, **extra}
    compiled = compile_template(source) if isinstance(source, str) else None
    if compiled is None:  # it does not compile: ``stock`` raises the error at the first rendering
        return stock

    checked: list[Tools] = [()]  # the tools checked last: every turn of a dialogue has the same ones

    def direct(messages: Sequence[Message], tools: Tools, open_turn: bool) -> str:
        if tools is not checked[0] and _is_json(list(tools)):
            checked[0] = tools
        plain = tools is checked[0] and all(map(_is_plain, messages))
        if not plain or not messages or tokenizer.chat_template != source:
            return stock(messages, tools, open_turn)
        options = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": open_turn}
        return compiled.render(messages=list(messages), **options, **special)

    probes = [
        (_DIALOGUE[a:b], tools, opens)
        for a in (0, 1)
        for b in range(a + 1, 6)
        for tools in ((), _TOOLS)
        for opens in (0, 1)
    ]
    return direct if all(_outcome(direct, *probe) == _outcome(stock, *probe) for probe in probes) else stock


def compile_template(source: str) -> Any:
    """The template in Transformers' sandbox; None if it does not compile."""
    from transformers.utils import chat_template_utils  # late import: only callers with a tokenizer need Transformers

    compiler = getattr(chat_template_utils, "_compile_jinja_template", None)
    try:
        return None if compiler is None else compiler(source)
    except Exception:
        return None


def _is_plain(message: Message) -> bool:
    return message.keys() <= PLAIN_KEYS and all(type(value) is str for value in message.values())


def _is_json(value: Any) -> bool:
    """Whether a value consists only of JSON types."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return all(map(_is_json, value)) if type(value) is list else value is None or type(value) in (str, int, float, bool)


def _outcome(render: Render, messages: Sequence[Message], tools: Tools, opens: int) -> str:
    try:
        return render(messages, tools, bool(opens))
    except Exception as fault:  # templates raise any exception, for example for an unknown role
        return repr(fault)
