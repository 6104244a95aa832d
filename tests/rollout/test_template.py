"""A template asked directly says what ``apply_chat_template`` says; what is not plain is asked there."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from turnwise.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from turnwise.rollout import chat_template as template
from turnwise.rollout.renderer import CHATML

STERN = (  # like published ones: no system, roles must take turns, specials, JSON of tools
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{% endfor %}"
    "{% set seen = namespace(n=0) %}{% for m in messages %}{% set seen.n = seen.n + 1 %}"
    "{% if m.role == 'user' and seen.n % 2 == 0 and loop.last %}{{ raise_exception('turns!') }}{% endif %}"
    "[{{ m.role | upper }}{{ m.name }}]{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[GO]{% endif %}"
)
THINKS = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "description": "<d> & é", "parameters": {"type": "object"}}}


def made(text: Any) -> Any:
    tokenizer = tiny_tokenizer(["the answer is"], 300)
    tokenizer.chat_template = text
    tokenizer.bos_token = "<|end|>"
    return tokenizer


def stock(tokenizer: Any, messages: Any, tools: Any, opens: bool) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=opens)


TOKENIZERS = {name: made(text) for name, text in [("tiny", CHAT_TEMPLATE), ("chatml", CHATML), ("stern", STERN)]}
RENDERS = {name: template.fast_template(tokenizer) for name, tokenizer in TOKENIZERS.items()}
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TALK = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": WORDS}, optional={"name": WORDS}
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_they_are_asked_directly(name, monkeypatch):
    monkeypatch.setattr(TOKENIZERS[name], "apply_chat_template", None)
    assert "hello" in RENDERS[name]([{"role": "user", "content": "hello"}], [TOOL], True)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(TOKENIZERS)), TALK, st.booleans(), st.booleans())
def test_any_plain_dialogue_reads_the_same(name, talk, tools, opens):
    given = [TOOL] if tools else []
    render = lambda way, *args: template._outcome(lambda *each: way(*args, *each), talk, given, opens)  # noqa: E731
    assert render(RENDERS[name]) == render(stock, TOKENIZERS[name])


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "assistant", "content": "a", "thinking": "hm"},  # has other names elsewhere
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        UserDict(role="user", content="a"),
    ],
    ids=["thoughts", "calls", "parts", "not a dict"],
)
def test_what_is_not_plain_is_asked_where_it_is_known(odd):
    tokenizer = made(THINKS)
    assert template.fast_template(tokenizer)([odd], [], False) == stock(tokenizer, [odd], [], False)


def test_tools_of_other_stuff_are_asked_there_too(monkeypatch):
    class Name(str):
        def upper(self):
            return "something else"

    tokenizer = made(
        "{% for t in tools %}{{ t.function.name.upper() }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    render, talk = template.fast_template(tokenizer), [{"role": "user", "content": "a"}]
    odd = [{"function": {"name": Name("f")}}]
    assert render(talk, odd, False) == stock(tokenizer, talk, odd, False)  # what that is, is for Transformers to say
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *args, **options: "asked there")
    for _ in range(2):
        assert render(talk, odd, False) == "asked there"
    assert render(talk, [{"function": {"name": "g"}}], False) == "Ga"


def test_a_template_cannot_change_the_dialogue():
    tokenizer = made("{% for m in messages %}{{ m.content }}{% endfor %}")
    render, talk = template.fast_template(tokenizer), [{"role": "user", "content": "a"}]
    tokenizer.chat_template = "{{ messages.append(1) }}"  # and one that came later is heard
    with pytest.raises(Exception, match="unsafe"):
        render(talk, [], False)
    assert len(talk) == 1


def test_several_templates_or_a_broken_one_stay_with_their_tokenizer():
    several = made({"default": CHATML, "tool_use": STERN})
    render, talk = template.fast_template(several), [{"role": "user", "content": "a"}]
    assert render(talk, [TOOL], True) != render(talk, [], True) == stock(TOKENIZERS["chatml"], talk, None, True)
    with pytest.raises(Exception, match="Expected an expression"):
        template.fast_template(made("{% for %}"))(talk, [], True)


def test_a_way_that_says_something_else_is_not_taken(monkeypatch):
    class Other:
        def render(self, **given):
            return "something else"

    tokenizer, talk = made(CHATML), [{"role": "user", "content": "a"}]
    expected = stock(tokenizer, talk, [], True)
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: expected)
    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", lambda text: Other())
    assert template.fast_template(tokenizer)(talk, [], True) == expected
