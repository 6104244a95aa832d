"""Templates that render each message alone are rendered in parts; the text is that of the whole dialogue, always."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from turnwise.rollout.chat_template import fast_template, message_loop
from turnwise.rollout.renderer import CHATML, Renderer

TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},)
BODY = "<|{{ m.role }}|>{{ m.content }}<|end|>"
OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def looped(body=BODY, before="", behind="", over="messages"):
    return before + "{% for m in " + over + " %}" + body + "{% endfor %}" + behind + OPEN


ALONE = {
    "chatml": CHATML,
    "tiny": CHAT_TEMPLATE,
    "branches": looped("{% if m.role == 'tool' %}[{{ m.content | trim }}]{% else %}" + BODY + "{% endif %}"),
    "a local variable": looped("{% set c = m.content %}<|{{ m.role }}|>{{ c }}<|end|>"),
    "a constant": looped("<|{{ m.role }}|>{{ m.content }}{{ end }}", "{% set end = '<|end|>' %}{{ end }}"),
}
NOT_ALONE = {
    "loop.first": looped("{% if loop.first %}!{% endif %}" + BODY),
    "the last message": looped(behind="{{ messages[-1].role }}"),
    "the first message": looped(before="{% if messages[0].role == 'system' %}!{% endif %}"),
    "a namespace": looped("{% set ns.n = ns.n + 1 %}{{ ns.n }}" + BODY, "{% set ns = namespace(n=0) %}"),
    "a part of them": looped(over="messages[1:]"),
    "a filter": looped(over="messages if m.role != 'tool'"),
    "two loops": looped(before="{% for m in messages %}" + BODY + "{% endfor %}"),
    "a cycler": looped("{{ c.next() }}" + BODY, "{% set c = cycler('a', 'b') %}"),
    "another name": looped(before="{% set all = messages %}", over="all"),
}
TOKENIZER = tiny_tokenizer([], 300)
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
MESSAGES = st.lists(st.tuples(st.sampled_from(("user", "tool")), TEXT), min_size=1, max_size=3)


def loop_of(template):
    TOKENIZER.chat_template = template
    return message_loop(TOKENIZER, fast_template(TOKENIZER), {})


@pytest.mark.parametrize("name", NOT_ALONE)
def test_templates_with_state_are_rendered_whole(name):
    assert loop_of(NOT_ALONE[name]) is None


@pytest.mark.parametrize("name", ALONE)
@given(turns=st.lists(st.tuples(TEXT, MESSAGES), min_size=1, max_size=5), tools=st.sampled_from(((), TOOLS)))
def test_parts_are_the_whole(name, turns, tools):
    assert loop_of(ALONE[name]) is not None
    renderer = Renderer(TOKENIZER)
    whole = fast_template(TOKENIZER)
    dialogue = renderer.open([{"role": "user", "content": "task"}], tools)
    for said, replies in turns:
        renderer.append_sampled(dialogue, renderer.encode_turn(said))
        renderer.append_observation(dialogue, [{"role": role, "content": text} for role, text in replies])
        assert dialogue.text == whole(dialogue.messages, tools, True)
        assert renderer.decode(dialogue.ids) == dialogue.text


def test_a_turn_renders_its_own_messages_only():
    TOKENIZER.chat_template = CHATML
    renderer = Renderer(TOKENIZER)
    dialogue = renderer.open([{"role": "user", "content": "task"}])
    rendered = []
    render = renderer._loop.render
    renderer._loop.render = lambda messages, *rest: rendered.append(len(messages)) or render(messages, *rest)
    for _ in range(50):
        renderer.append_sampled(dialogue, renderer.encode_turn("a"))
        renderer.append_observation(dialogue, [{"role": "user", "content": "b"}])
    assert rendered == [3] + [2] * 49
