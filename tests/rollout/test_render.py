"""Messages to ids and back: what was sampled stays, what the template adds is appended, what it rewrites restarts."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.errors import RenderError
from turnwise.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from turnwise.rollout.parsers.choice import read_turn
from turnwise.rollout.renderer import CHATML, Renderer

FORGETS_THOUGHTS = CHAT_TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")
TRIMS = CHAT_TEMPLATE.replace("message.content", "message.content | trim")
REFUSES_TOOLS = CHAT_TEMPLATE.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{% if message.role == 'tool' %}{{ 1 / 0 }}{% endif %}",
)


def renderer(template: str = CHAT_TEMPLATE) -> Renderer:
    tokenizer = tiny_tokenizer(["<tool_call>", "the answer is", "think"], 480)
    tokenizer.chat_template = template
    return Renderer(tokenizer)


PLAIN, THINKING, TRIMMING = renderer(), renderer(FORGETS_THOUGHTS), renderer(TRIMS)
SIZE = len(PLAIN.tokenizer)

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SAMPLED = st.lists(st.integers(0, SIZE - 1).filter(lambda i: i not in PLAIN.stop_ids), max_size=8)
TURNS = st.lists(st.tuples(SAMPLED, st.booleans(), st.sampled_from(["tool", "user"]), WORDS), min_size=1, max_size=5)


# ------------------------------------------------------- the exact-prefix law


@settings(deadline=None, max_examples=150)
@given(first=WORDS, turns=TURNS)
def test_a_dialogue_is_exactly_its_contexts_and_sampled_tokens(first, turns):
    """Any ids at all may be sampled, broken UTF-8 and special tokens among them, closed or cut short."""
    dialogue = PLAIN.open([{"role": "user", "content": first}], [{"function": {"name": "f"}}])
    pieces = [list(dialogue.new_ids)]
    for sampled, closed, role, words in turns:
        tokens = sampled + [PLAIN.stop_ids[0]] * closed
        PLAIN.append_sampled(dialogue, tokens)
        assert dialogue.new_ids == []
        PLAIN.append_observation(dialogue, [{"role": role, "content": words}])
        assert not dialogue.restarted
        pieces += [tokens, list(dialogue.new_ids)]
        assert dialogue.ids == [i for piece in pieces for i in piece]
        rendered = PLAIN.tokenizer.apply_chat_template(
            dialogue.messages, tools=dialogue.tools, tokenize=False, add_generation_prompt=True
        )
        assert PLAIN.decode(dialogue.ids) == dialogue.text == rendered


def test_what_was_sampled_is_not_encoded_again():
    """Two ids for a text that has a shorter encoding: the dialogue keeps the two."""
    dialogue = PLAIN.open([{"role": "user", "content": "?"}])
    shortest = PLAIN.encode("think")
    letters = [i for letter in "think" for i in PLAIN.encode(letter)]
    assert len(letters) > len(shortest)
    PLAIN.append_sampled(dialogue, letters)
    PLAIN.append_observation(dialogue, [])
    start = len(PLAIN.open([{"role": "user", "content": "?"}]).ids)
    assert dialogue.ids[start : start + len(letters)] == letters


def test_an_empty_turn_is_a_turn():
    dialogue = PLAIN.open([{"role": "user", "content": "?"}])
    assert PLAIN.append_sampled(dialogue, []).text == ""
    PLAIN.append_observation(dialogue, [{"role": "user", "content": "well?"}])
    assert not dialogue.restarted and PLAIN.decode(dialogue.new_ids) == "<|end|><|user|>well?<|end|><|assistant|>"


# ------------------------------------------------- templates that rewrite


def speak(r: Renderer, *said: str):
    """A dialogue in which the agent says these things and is answered 'go on'."""
    dialogue = r.open([{"role": "user", "content": "begin"}])
    for text in said:
        r.append_sampled(dialogue, r.encode_turn(text))
        r.append_observation(dialogue, [{"role": "user", "content": "go on"}])
    return dialogue


@pytest.mark.parametrize(
    ("r", "said"), [(THINKING, "<think>hm</think>yes"), (TRIMMING, " yes ")], ids=["thoughts", "trim"]
)
def test_rewritten_history_restarts_on_the_fresh_rendering(r, said):
    dialogue = speak(r, said)
    assert dialogue.restarted
    assert dialogue.new_ids == dialogue.ids == r.encode(dialogue.text)
    assert dialogue.text == "<|user|>begin<|end|><|assistant|>yes<|end|><|user|>go on<|end|><|assistant|>"
    assert dialogue.messages[1]["content"] == said  # people still read what was said
    r.append_sampled(dialogue, r.encode_turn("no"))
    assert not dialogue.restarted


@pytest.mark.parametrize("r", [THINKING, TRIMMING], ids=["thoughts", "trim"])
def test_nothing_restarts_where_nothing_is_rewritten(r):
    assert not speak(r, "yes", "no").restarted


def test_an_end_the_template_does_not_write_restarts():
    """Sampled with the tokenizer's own end of sequence where the template closes turns otherwise."""
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    r = Renderer(tokenizer)
    dialogue = r.open([{"role": "user", "content": "?"}])
    assert r.append_sampled(dialogue, [*r.encode("yes"), tokenizer.eos_token_id]).text == "yes"
    r.append_observation(dialogue, [])
    assert dialogue.restarted and "yes<|im_end|>" in dialogue.text


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("template", [None, ""])
def test_a_tokenizer_without_template_is_refused(template):
    with pytest.raises(RenderError, match="no chat template; give one with --template"):
        renderer(template)


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{% for %}", "{{ 1 / 0 }}"])
def test_a_template_that_never_works_is_refused_at_once(template):
    with pytest.raises(RenderError, match="the chat template refused a dialogue with roles"):
        renderer(template)


def test_a_template_that_refuses_a_role_says_which():
    r = renderer(REFUSES_TOOLS.replace("'tool'", "'developer'"))
    dialogue = r.open([{"role": "user", "content": "?"}])
    r.append_sampled(dialogue, r.encode_turn("call"))
    with pytest.raises(RenderError, match=r"roles \['user', 'assistant', 'developer'\]"):
        r.append_observation(dialogue, [{"role": "developer", "content": "42"}])


def test_a_template_that_swallows_what_the_agent_says_is_refused():
    with pytest.raises(RenderError):
        renderer("{% for m in messages if m.role == 'user' %}{{ m.content }}<|end|>{% endfor %}")


def test_a_lossy_tokenizer_is_refused():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    with pytest.raises(RenderError, match="does not decode a text to itself"):
        Renderer(tokenizer)


# ------------------------------------------------------------------ stop ids


def test_a_turn_ends_where_the_template_ends_it():
    end = PLAIN.tokenizer.eos_token_id
    assert PLAIN.stop_ids == (end,)
    assert PLAIN.encode_turn("a")[-1] == end


def test_the_templates_end_comes_before_the_tokenizers():
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    assert Renderer(tokenizer).stop_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id)


def test_an_end_that_the_tokenizer_does_not_name_is_found_all_the_same(caplog):
    """Transformers 5.17 reads SmolLM2's file as if its turns ended with what opens them."""
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.eos_token = "<|im_start|>"
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in tokenizer.all_special_ids
    renderer = Renderer(tokenizer)
    dialogue = renderer.open([{"role": "user", "content": "a"}])
    renderer.append_sampled(dialogue, renderer.encode_turn("b"))
    renderer.append_observation(dialogue, [{"role": "user", "content": "c"}])
    assert renderer.stop_ids[0] == end and not dialogue.restarted and not caplog.records


def test_a_template_that_does_not_go_on_where_a_turn_ended_is_warned_of(caplog):
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{{ eos_token }}{% endfor %}"
    Renderer(tokenizer)
    assert "re-reads its whole dialogue" in caplog.text and tokenizer.eos_token in caplog.text


def test_without_any_end_a_tokenizer_is_refused():
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RenderError, match="token that ends a turn"):
        Renderer(tokenizer)


# ---------------------------------------------------------------- tool calls


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call at all", []),
        (call('{"name": "f", "arguments": {"x": 1}}'), [("f", {"x": 1})]),
        (call('{"name": "f"}'), [("f", {})]),
        (call('\n {"name": "f", "arguments": {"x": {"y": {"z": "}{"}}}} \n'), [("f", {"x": {"y": {"z": "}{"}}})]),
        ("so " + call('{"name": "f"}') + " and " + call('{"name": "g"}'), [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f"}', [("f", {})]),  # unterminated, but readable
        (call('{"name": "größe", "arguments": {"π": "🙂\\u00e9"}}'), [("größe", {"π": "🙂é"})]),
    ],
)
def test_calls_are_read(text, calls):
    action = read_turn(text)
    assert [(c.name, c.arguments) for c in action.calls] == calls
    assert not action.faults and action.text == text
    assert len({c.id for c in action.calls}) == len(calls)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "is not JSON"),
        ("f(1)", "is not JSON"),
        ('{"name": "f", "arguments": {"x": 1}', "is not JSON"),
        ("{'name': 'f'}", "is not JSON"),
        ('["f", {}]', "a tool call needs"),
        ('"f"', "a tool call needs"),
        ("7", "a tool call needs"),
        ("null", "a tool call needs"),
        ('{"arguments": {}}', "a tool call needs"),
        ('{"name": 7}', "a tool call needs"),
        ('{"name": "f", "arguments": [1]}', "a tool call needs"),
        ('{"name": "f", "arguments": null}', "a tool call needs"),
        ('{"name": "f", "arguments": {"x": %s}}' % ("9" * 5000), "error: "),
        ("[" * 100_000, "error: "),
        ('{"a":' * 100_000, "error: "),
    ],
)
def test_what_cannot_be_read_is_a_fault_in_words(body, words):
    action = read_turn(call(body))
    assert not action.calls and len(action.faults) == 1
    assert words in action.faults[0] and len(action.faults[0]) < 200


def test_a_fault_does_not_cost_the_other_calls():
    action = read_turn(call("oops") + call('{"name": "f"}') + call("[]"))
    assert [c.name for c in action.calls] == ["f"] and len(action.faults) == 2


def test_a_huge_call_is_read():
    text = string.ascii_letters * 20_000
    assert read_turn(call(json.dumps({"name": "f", "arguments": {"x": text}}))).calls[0].arguments["x"] == text


SHARDS = ["<tool_call>", "</tool_call>", '{"name"', ': "f"', "}", "{", '"', "é", " ", "[", ","]
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.none(), max_size=4)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(SHARDS), max_size=12))
def test_nothing_a_model_says_raises(pieces):
    text = "".join(pieces)
    assert read_turn(text).text == text


@settings(deadline=None)
@given(ARGUMENTS, st.text(min_size=1, max_size=9))
def test_every_well_formed_call_comes_back(arguments, name):
    if "</tool_call>" not in json.dumps([name, arguments]):
        (found,) = read_turn(call(json.dumps({"name": name, "arguments": arguments}))).calls
        assert (found.name, found.arguments) == (name, arguments)
