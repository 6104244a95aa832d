"""Chat templates that are one loop over the messages: their text grows by what they append, so a turn renders only its own part.

A template renders the whole dialogue, and an episode renders after every turn, so the time of a turn grows with the number of
turns before it. Where the source proves that each message is rendered alone, only the new ones are rendered. The proof: the
messages are read in one place, the loop; nothing in the template keeps state from one message to the next.

Knows templates and messages; neither ids nor dialogues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.core.records import Message
from turnwise.rollout.chat_template import Render, Tools, compile_template

MARK = "\x00messages\x00"
STATEFUL = (
    "loop",
    "namespace",
    "cycler",
    "joiner",
    "self",
    "caller",
    "strftime_now",
)  # names a stateless template lacks
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
    found = MessageLoop(render, shell, {**tokenizer.special_tokens_map, **extra})
    return found if _agrees(found) else None


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


def _agrees(loop: MessageLoop) -> bool:
    """Whether the parts sum to the whole. A template that refuses these messages is not used in parts."""
    try:
        before, behind = loop.ends(())
        whole = loop.render(_PROBE, (), True)
        return whole == before + loop.tail(_PROBE[:2], ()) + loop.tail(_PROBE[2:], ()) + behind
    except Exception:  # templates raise any exception
        return False
