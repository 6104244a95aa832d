"""A chat template as a function, without the input handling that Transformers does around it.

Our messages are plain texts, so the compiled Jinja template is called directly, which takes half the time: an episode renders
after every turn. It stays in Transformers' sandbox, and is used only if it returns the same texts as ``apply_chat_template``;
messages that are not plain go to ``apply_chat_template``.

Knows templates; neither ids nor dialogues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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

    # without the system message, too: many templates write one of their own then
    parts = [_DIALOGUE[a:b] for a in (0, 1) for b in range(a + 1, 6)]
    probes = list(product(parts, ((), _TOOLS), (False, True)))
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


def _outcome(render: Render, messages: Sequence[Message], tools: Tools, opens: bool) -> str:
    try:
        return render(messages, tools, opens)
    except Exception as fault:  # templates raise any exception, for example for an unknown role
        return repr(fault)


MARK = "\x00messages\x00"
STATEFUL = {
    "loop",
    "namespace",
    "cycler",
    "joiner",
    "self",
    "caller",
    "strftime_now",
}  # a stateless template lacks them
_PROBE = [{"role": role, "content": f" {role} <1> é\n"} for role in ("user", "assistant", "tool", "assistant", "user")]


@dataclass
class MessageLoop:
    """Renders messages without what the template writes before and behind all of them."""

    render: Render
    shell: Any  # the compiled template, with a mark in place of the loop
    variables: Mapping[str, Any]
    checked: tuple[Tools, str, str] | None = None  # the tools rendered last, and what stands before and behind

    def ends(self, tools: Tools) -> tuple[str, str]:
        """What the template writes before and behind the messages when it opens a turn."""
        if self.checked is None or self.checked[0] is not tools:
            text = self.shell.render(
                tools=list(tools) or None, documents=None, add_generation_prompt=True, **self.variables
            )
            before, _, behind = text.partition(MARK)
            self.checked = (tools, before, behind)
        return self.checked[1], self.checked[2]

    def tail(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text of these messages alone."""
        before, behind = self.ends(tools)
        text = self.render(messages, tools, True)
        return text[len(before) : len(text) - len(behind)]


def message_loop(tokenizer: Any, render: Render, extra: Mapping[str, Any]) -> MessageLoop | None:
    """The loop of the tokenizer's template; None if the template is not one loop, or not provably without state."""
    source = tokenizer.chat_template
    compiled = compile_template(source) if isinstance(source, str) else None
    shell = None if compiled is None else _shell(compiled.environment, source)
    if shell is None:
        return None
    loop = MessageLoop(render, shell, {**tokenizer.special_tokens_map, **extra})
    try:  # whether the parts sum to the whole
        before, behind = loop.ends(())
        whole = render(_PROBE, (), True)
        parts = before + loop.tail(_PROBE[:2], ()) + loop.tail(_PROBE[2:], ()) + behind
    except Exception:  # templates raise any exception: one that refuses these messages is not used in parts
        return None
    return loop if whole == parts else None


def _shell(environment: Any, source: str) -> Any:
    """The template with a mark in place of its loop over the messages; None where messages are read anywhere else."""
    from jinja2 import nodes  # late import: comes with Transformers, and only callers with a tokenizer need it

    tree = environment.parse(source)
    names = [node.name for node in tree.find_all(nodes.Name)]
    stateful = any(name in STATEFUL for name in names) or any(
        tree.find(kind)
        for kind in (nodes.NSRef, nodes.ExprStmt, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    )
    loops = [
        k
        for k, node in enumerate(tree.body)
        if isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name) and node.iter.name == "messages"
    ]
    if stateful or names.count("messages") != 1 or len(loops) != 1:
        return None
    loop = tree.body[loops[0]]
    if loop.test is not None or loop.else_ or loop.recursive:
        return None
    tree.body[loops[0]] = nodes.Output([nodes.TemplateData(MARK)])
    return environment.from_string(tree)
