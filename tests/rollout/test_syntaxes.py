"""Every tool-call syntax: what is written is read back, what cannot be read is a fault, and thinking is not a call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnwise.core.protocols import Action, ToolCall
from turnwise.errors import RenderError, SettingError
from turnwise.rollout.parsers.choice import choose_syntax, read_turn
from turnwise.rollout.parsers.syntax import THINKING_TAGS, same_calls
from turnwise.rollout.parsers.table import HERMES, SYNTAXES, check_name

BY_JSON = ["hermes", "mistral", "granite", "phi4", "functools", "command", "command_r", "hunyuan", "nemotron", "internlm",
           "longcat", "llama3", "xlam", "deepseek_v3", "deepseek_v31", "kimi", "mistral_v11", "llama_function"]  # fmt: skip
BY_PYTHON = ["lfm2", "olmo3", "tool_code", "pythonic"]
ONE_CALL = ["harmony"]

MARKERS = sorted({m for s in SYNTAXES.values() for m in s.markers} | {*THINKING_TAGS, *THINKING_TAGS.values()})
CLOSINGS = [
    "</tool_call>",
    "</function>",
    "</parameter>",
    "</arg_value>",
    "```",
    "<|call|>",
    "<tool_call|>",
    '<|"|>',
    "]",
    "\n",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.lists(
    st.sampled_from([*MARKERS, *CLOSINGS, '"', "'", "\\", "}", "{", "(", ";", " ", "é", "5", "true", "null"]), max_size=4
).map("".join)  # fmt: skip
SCALARS = (
    TEXTS
    | st.integers(-(10**12), 10**12)
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("print", "in", "is", "if", "or", "as")
)
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(NAMES.map(lambda n: f"a_{n}"), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


def comparable(calls):
    return json.dumps([[call.name, call.arguments] for call in calls], sort_keys=True)


IN_A_LATER_CALL = [
    ToolCall("b", {}),
    ToolCall("a", {"a_x": "</seed:think>"}),
]  # ended a thought that nothing had opened


@settings(deadline=None, max_examples=25)
@given(calls=CALLS)
@example(calls=IN_A_LATER_CALL)
@pytest.mark.parametrize("name", [*BY_JSON, *BY_PYTHON, "deepseek_v32"])
def test_any_call_is_read_back(name, calls):
    """Unicode, quotes, nesting, line ends, and texts that hold the markers of this and of every other syntax."""
    if name == "deepseek_v32" and "DSML" in comparable(calls):
        return
    syntax = SYNTAXES[name]
    assert comparable(syntax.parse(syntax.write(calls)).calls) == comparable(calls)


@settings(deadline=None, max_examples=25)
@given(calls=CALLS)
@pytest.mark.parametrize("name", sorted({*SYNTAXES} - {*BY_JSON, *BY_PYTHON}))
def test_what_a_syntax_cannot_express_is_refused_and_the_rest_is_read_back(name, calls):
    syntax = SYNTAXES[name]
    calls = calls[:1] if name in ONE_CALL else calls
    try:
        text = syntax.write(calls)
    except RenderError as fault:
        assert name in str(fault)
        texts = json.dumps([[c.name, c.arguments] for c in calls], ensure_ascii=False)
        assert re.search(r'[<>\]\[`"\\\s]|[0-9]|true|null|: ""', texts)  # only what looks like markup or JSON
    else:
        assert comparable(syntax.parse(text).calls) == comparable(calls)


PLAIN = [ToolCall("get_weather", {"city": "Paris é", "days": 3, "tags": ["a", "b"], "deep": {"x": None, "y": True}})]


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_closing_tag_in_the_text_of_a_later_call_can_be_written(name):
    calls = IN_A_LATER_CALL[1:] if name in ONE_CALL else IN_A_LATER_CALL
    assert comparable(SYNTAXES[name].parse(SYNTAXES[name].write(calls)).calls) == comparable(calls)


@pytest.mark.parametrize("name", SYNTAXES)
def test_an_ordinary_call_can_be_written_in_every_syntax(name):
    syntax = SYNTAXES[name]
    text = syntax.write(PLAIN)
    parsed = syntax.parse(f"Let me look. {text}")
    assert comparable(parsed.calls) == comparable(PLAIN) and parsed.text.strip() == "Let me look." and not parsed.faults
    assert parsed.calls[0].id


@pytest.mark.parametrize("name", sorted({*SYNTAXES} - {*ONE_CALL}))
def test_several_calls_of_one_turn_have_ids_of_their_own(name):
    calls = [*PLAIN, ToolCall("stop", {}), *PLAIN]
    parsed = SYNTAXES[name].parse(SYNTAXES[name].write(calls))
    assert comparable(parsed.calls) == comparable(calls) and not parsed.faults and not parsed.text.strip()
    assert len({call.id for call in parsed.calls}) == 3


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("tags", THINKING_TAGS.items(), ids=[*THINKING_TAGS])
def test_a_call_inside_thinking_is_no_call(name, tags):
    syntax = SYNTAXES[name]
    call, (opening, closing) = syntax.write(PLAIN), tags
    if name in ONE_CALL:
        opening, closing = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    inside = syntax.parse(f"{opening}I could say {call.replace('<|call|>', '')} here{closing}no.")
    assert not inside.calls and not inside.faults and "I could say" in inside.thinking
    assert inside.text == "no."
    after = syntax.parse(f"{opening}hm{closing}{call}")
    assert comparable(after.calls) == comparable(PLAIN) and after.thinking == "hm"
    assert not syntax.parse(f"{opening}hm {call.replace('<|call|>', '')}").calls  # cut short while thinking


def test_thinking_that_the_prompt_has_opened():
    call = HERMES.write(PLAIN)
    assert not HERMES.parse(f"hm {call}", in_thought=True).calls
    assert HERMES.parse(f"hm {call}</think>{call}", in_thought=True).calls == HERMES.parse(call).calls
    assert not HERMES.parse(f"{call}</think>no").calls  # the opening tag was in a prompt nobody told us of


def test_a_thinking_tag_inside_an_argument_is_no_thinking():
    call = '<tool_call>{"name": "f", "arguments": {"x": "<think> </think>"}}</tool_call>'
    assert HERMES.parse(call).calls[0].arguments == {"x": "<think> </think>"}


# --------------------------------------------------------------------- malformed

MALFORMED = {
    "hermes": ["<tool_call>{</tool_call>", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>'],
    "qwen3_coder": ["<tool_call>\n<function=f>\n<parameter=x>1\n</function>\n</tool_call>", "<tool_call>f</tool_call>"],
    "seed": ["<seed:tool_call>f</seed:tool_call>"],
    "glm": ["<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>", "<tool_call></tool_call>"],
    "minimax": ["<minimax:tool_call>f()</minimax:tool_call>"],
    "deepseek_v32": ["<｜DSML｜function_calls>f</｜DSML｜function_calls>"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```<｜tool▁call▁end｜>"
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>"],
    "kimi": ["<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "<|tool_calls_section_begin|>f"],
    "mistral_v11": ["[TOOL_CALLS]f{}", "[TOOL_CALLS]f[ARGS]{"],
    "llama_function": ["<function=f>{</function>"],
    "mistral": ["[TOOL_CALLS] f", '[TOOL_CALLS] [{"name": 1}]'],
    "llama3": ["<|python_tag|>print(1)", '{"name": "f", "parameters": {', '{"name": "f", "parameters": [1]}'],
    "xlam": ['[{"name": "f"}]', '[{"name": "f", "arguments": '],
    "pythonic": ["[f(1)]", "[f(x=g())]", "[f(x=1", "[f(x=1), 2]"],
    "lfm2": ["<|tool_call_start|>f(<|tool_call_end|>", "<|tool_call_start|><|tool_call_end|>"],
    "tool_code": ["```tool_code\nimport os\n```"],
    "olmo3": ["<function_calls>\nf(x=y)\n</function_calls>"],
    "gemma4": ["<|tool_call>f{}<tool_call|>", "<|tool_call>call:f{x:}<tool_call|>"],
    "function_gemma": ["<start_function_call>call:f{x:<escape>a}<end_function_call>"],
    "harmony": ["<|channel|>commentary to=functions.f<|message|>{", "<|channel|>commentary to=functions.f<|message|>1"],
    "command": ['<|START_ACTION|>[{"name": "f"}]<|END_ACTION|>'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_a_fault_in_words(name, text):
    parsed = SYNTAXES[name].parse(text)
    assert not parsed.calls and parsed.faults
    assert all(fault.startswith("error: ") and len(fault) < 400 for fault in parsed.faults)


PIECES = [
    *MARKERS,
    *CLOSINGS,
    '{"name": "f"',
    ', "arguments": {',
    "}",
    "{",
    "[",
    "f(",
    ")",
    "=",
    "call:f",
    "<function=f>",
    ":",
    '"',
    "-" * 500,
    "[" * 500,
]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(PIECES), max_size=10))
@pytest.mark.parametrize("name", SYNTAXES)
def test_nothing_a_model_says_raises(name, pieces):
    text = "".join(pieces)
    action = read_turn(text, SYNTAXES[name], TOOLS)
    assert action.text == text and not (action.unread and action.calls)


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_turn_without_any_call_stays_as_it_is(name):
    for text in ("", "the answer is 5", "[1, 2]", '{"name": "Bob"}', "f(x)", "x < 3", "```python\nf()\n```", "[TODO]"):
        parsed = SYNTAXES[name].parse(text)
        assert (parsed.calls, parsed.faults, parsed.text, parsed.thinking) == ((), (), text, "")


# ---------------------------------------------------------------- other syntaxes

TOOLS = ({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}},)


@pytest.mark.parametrize("own", SYNTAXES)
@pytest.mark.parametrize("other", SYNTAXES)
def test_a_call_in_another_syntax_is_read_or_named_never_ignored(own, other):
    action = read_turn(SYNTAXES[other].write(PLAIN), SYNTAXES[own], TOOLS)
    assert same_calls(action.calls, PLAIN) or action.faults
    if own != other and not action.calls:
        assert action.unread and action.unread[0] in SYNTAXES and action.unread[0] in action.faults[0]


def test_what_is_no_tool_of_this_dialogue_is_no_unread_call():
    answer = '{"name": "Bob", "parameters": {"age": 3}}'
    assert read_turn(answer, HERMES, TOOLS) == Action(answer)
    assert read_turn(SYNTAXES["pythonic"].write(PLAIN), HERMES, ()) == Action(SYNTAXES["pythonic"].write(PLAIN))


def test_the_key_parameters_in_hermes_tags_is_a_fault_that_names_it():
    action = read_turn('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>')
    assert not action.calls and '"parameters"' in action.faults[0]


# ------------------------------------------------------------ types of arguments


@pytest.mark.parametrize("name", ["qwen3_coder", "seed", "glm", "minimax"])
def test_the_schema_tells_text_from_numbers(name):
    syntax = SYNTAXES[name]
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    calls = [ToolCall("f", {"city": "5", "days": 5, "any": [1]})]
    assert comparable(syntax.parse(syntax.write(calls, tools), tools).calls) == comparable(calls)
    with pytest.raises(RenderError, match=name):
        syntax.write(calls)  # without the schema, "5" would be read as a number


# --------------------------------------------------------------------- the table


def test_a_name_that_is_not_in_the_table_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="did you mean 'hermes'"):
        check_name("hermess")
    check_name("auto"), check_name("qwen3_coder")


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_template_that_only_mentions_a_syntax_is_understood(name):
    syntax = SYNTAXES[name]
    found = choose_syntax([], f"To call a tool write {syntax.example} {' '.join(syntax.markers)}.")
    assert found.markers == syntax.markers or not syntax.markers


def test_a_template_that_says_nothing_of_calls_gets_the_default():
    assert choose_syntax([], "{{ messages }}") is HERMES is choose_syntax(["hello"], "")


# --------------------------------------------------- the reader as it was before

_OLD = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def old_parse(text):
    """The reader before there was a table of syntaxes: Hermes's, by a regular expression."""
    calls, faults = [], []
    for body in _OLD.findall(text):
        try:
            value = json.loads(body)
            name, arguments = value["name"], value.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
            calls.append(ToolCall(name, arguments, id=str(len(calls))))
        except ValueError as fault:
            faults.append(f"error: the tool call is not JSON: {getattr(fault, 'msg', 'a number is too long')}")
        except (KeyError, TypeError, AttributeError, RecursionError):
            faults.append('error: a tool call needs {"name": text, "arguments": object}')
    return Action(text, tuple(calls), tuple(faults))


SHARDS = [
    "<tool_call>",
    "</tool_call>",
    '{"name"',
    ': "f"',
    ', "arguments": {"x": 1}}',
    "}",
    "{",
    '"',
    "é",
    " ",
    "[",
    ",",
    "1",
    "<call>",
]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(SHARDS), max_size=12))
@example(["<tool_call>", '"', "</tool_call>", '"'])
def test_hermes_is_read_as_before(pieces):
    text = "".join(pieces)
    old, new = old_parse(text), read_turn(text)
    if new.calls != old.calls:  # a text of the JSON that holds the closing tag is now read
        assert "</tool_call>" in json.dumps([call.arguments for call in new.calls]) or "</tool_call>" in str(new.calls)
    elif "Unterminated string" not in str(old.faults):  # which a closing tag inside the JSON now ends no longer
        assert (new.text, new.faults) == (old.text, old.faults)


@settings(deadline=None, max_examples=100)
@given(CALLS)
def test_hermes_is_written_as_before(calls):
    text = HERMES.write(calls)
    old = "".join(f"<tool_call>{json.dumps({'name': c.name, 'arguments': c.arguments})}</tool_call>" for c in calls)
    if not any(tag in old[11:-12] for tag in ("</tool_call>", *THINKING_TAGS, *THINKING_TAGS.values())):
        assert text == old


def test_the_documentation_lists_every_syntax():
    page = (Path(__file__).parents[2] / "docs" / "howto-model.md").read_text(encoding="utf-8")
    assert [name for name in SYNTAXES if f"| `{name}` |" not in page] == []
