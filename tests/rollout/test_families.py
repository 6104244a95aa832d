"""Templates of model families × tools, system message, thinking, several calls: rendered, parsed and continued token for
token, or recorded as rewritten, or refused in words."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import pytest
from support.chat_templates import FAMILIES, renderer_of, tokenizer_of

from turnwise.core.protocols import ToolCall
from turnwise.errors import RenderError, SettingError
from turnwise.rollout.parsers.syntax import same_calls
from turnwise.rollout.parsers.table import HERMES, SYNTAXES
from turnwise.rollout.renderer import Renderer

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = (
    {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": PROPERTIES}},
    },
)
CALL = ToolCall("weather", {"city": "Paris é", "days": 3})
OTHER = ToolCall("weather", {"city": "Rome", "days": 1})
SYSTEM, USER, REPLY = "Be brief 4711.", "Weather 1138?", "sunny 2718"


@functools.cache
def renderer(name: str) -> Renderer:
    return renderer_of(FAMILIES[name].template)


def opened(name, tools=TOOLS):
    return renderer(name).open([{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}], tools)


def say(name, dialogue, text):
    r = renderer(name)
    tokens = r.encode_turn(r.turn_text(text, dialogue.tools))
    before = list(dialogue.ids)
    action = r.append_sampled(dialogue, tokens)
    assert dialogue.ids == before + tokens  # the sampled ids stay
    return action


def reply(name, dialogue, count=1):
    """Tool replies; the ids are continued, or the restart has a cause."""
    r, before = renderer(name), list(dialogue.ids)
    r.append_observation(
        dialogue, [{"role": "tool", "name": "weather", "content": f"{REPLY}{n}"} for n in range(count)]
    )
    text = r.decode(dialogue.new_ids)
    assert all(f"{REPLY}{n}" in text for n in range(count))
    if dialogue.restarted:
        assert dialogue.cause and dialogue.ids == dialogue.new_ids == r.encode(dialogue.text)
    else:
        assert dialogue.ids == before + dialogue.new_ids
    assert r.decode(dialogue.ids) == dialogue.text


def test_there_are_templates_of_more_than_twenty_families():
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize("name", FAMILIES)
def test_the_syntax_is_what_the_template_writes(name):
    r = renderer(name)
    assert r.syntax.name == FAMILIES[name].syntax
    notes = " ".join(r.conversion.notes(True))
    assert all(words in notes for words in FAMILIES[name].notes) and bool(notes) == bool(FAMILIES[name].notes)
    assert not r.conversion.refusal and not any("does not read" in w for w in r.warnings(TOOLS))
    r.check_tools(TOOLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_and_replies(name):
    dialogue = opened(name)
    assert not say(name, dialogue, "hm").calls
    dialogue = opened(name)
    action = say(name, dialogue, HERMES.write([CALL]))
    assert same_calls(action.calls, [CALL]) and not action.faults
    reply(name, dialogue)
    assert dialogue.restarted == bool(FAMILIES[name].restarts)
    assert say(name, dialogue, "It is sunny.").faults == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_system_message_is_read_once_and_first(name):
    text = opened(name).text
    assert text.count(SYSTEM) == text.count(USER) == 1 and text.index(SYSTEM) < text.index(USER)


@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_is_written_read_and_never_executed(name):
    dialogue = opened(name)
    action = say(name, dialogue, f"<think>\nor {OTHER.name}?\n</think>\n\n{HERMES.write([CALL])}")
    assert same_calls(action.calls, [CALL]) and action.thinking.strip() == "or weather?"
    reply(name, dialogue)
    if FAMILIES[name].keeps_thinking and not FAMILIES[name].restarts:
        assert not dialogue.restarted
    inside = opened(name)
    text = renderer(name).turn_text(f"<think>\n{HERMES.write([OTHER])}\n</think>\n\nno", TOOLS)
    assert not renderer(name).append_sampled(inside, renderer(name).encode_turn(text)).calls


@pytest.mark.parametrize("name", FAMILIES)
def test_several_calls_in_a_turn(name):
    dialogue, text = opened(name), HERMES.write([CALL, OTHER])
    if not FAMILIES[name].parallel:
        with pytest.raises(RenderError, match="one call a turn"):
            say(name, dialogue, text)
        return
    action = say(name, dialogue, text)
    assert same_calls(action.calls, [CALL, OTHER]) and len({call.id for call in action.calls}) == 2
    reply(name, dialogue, 2)
    assert dialogue.restarted == bool(FAMILIES[name].restarts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_malformed_call_is_answered_and_the_dialogue_goes_on(name):
    r, dialogue = renderer(name), opened(name)
    broken = r.turn_text(HERMES.write([CALL]), TOOLS).replace("Paris", "\x00", 1)[:-4] + "\x00"
    action = r.append_sampled(dialogue, r.encode_turn(broken))
    assert action.faults or action.calls
    reply(name, dialogue)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_of_plain_text_goes_on(name):
    r = renderer(name)
    dialogue = r.open([{"role": "user", "content": USER}])
    say(name, dialogue, "Fine.")
    r.append_observation(dialogue, [{"role": "user", "content": "And tomorrow?"}])
    assert r.decode(dialogue.ids) == dialogue.text and "And tomorrow?" in r.decode(dialogue.new_ids)
    assert not dialogue.restarted or dialogue.cause


# -------------------------------------------------------------------- conversions

REFUSES_ALL = (
    "{% if messages | length > 2 %}{{ raise_exception('two messages at most') }}{% endif %}" + FAMILIES["phi3"].template
)


def test_a_template_that_renders_no_reply_at_all_is_refused_at_the_door():
    r = renderer_of(REFUSES_ALL)
    r.check_tools(())
    with pytest.raises(RenderError, match=r"no tool reply.*two messages at most.*--template"):
        r.check_tools(TOOLS)


def test_a_template_without_tools_describes_them_when_asked():
    plain, described = (renderer_of(FAMILIES["gemma2"].template, describe_tools=d) for d in (False, True))
    assert "--describe-tools" in plain.warnings(TOOLS)[0] and not described.warnings(TOOLS)
    text = described.open([{"role": "user", "content": USER}], TOOLS).text
    assert '"weather"' in text and described.syntax.example in text
    assert (
        described.open([{"role": "user", "content": USER}]).text == plain.open([{"role": "user", "content": USER}]).text
    )
    assert renderer_of(FAMILIES["qwen2.5"].template, describe_tools=True).conversion.changes_nothing


def test_a_syntax_that_is_not_known_is_told():
    r = renderer_of(
        FAMILIES["qwen2.5"]
        .template.replace("<tool_call>", "<<")
        .replace("</tool_call>", ">>")
        .replace('"arguments"', '"args"')
    )
    assert any("does not read" in warning and "--tool-syntax" in warning for warning in r.warnings(TOOLS))


def test_the_syntax_can_be_chosen():
    r = renderer_of(FAMILIES["gemma2"].template, syntax="tool_code")
    dialogue = r.open([{"role": "user", "content": USER}], TOOLS)
    action = r.append_sampled(dialogue, r.encode_turn(r.turn_text(HERMES.write([CALL]), TOOLS)))
    assert "```tool_code" in action.text and same_calls(action.calls, [CALL])
    r.append_observation(dialogue, [{"role": "tool", "content": REPLY}])
    assert "```tool_output\nsunny 2718\n```" in r.decode(dialogue.new_ids) and not dialogue.restarted
    with pytest.raises(SettingError, match="did you mean 'tool_code'"):
        renderer_of(FAMILIES["gemma2"].template, syntax="toolcode")


def test_calls_of_another_syntax_are_counted_as_unread():
    r, dialogue = renderer("llama3"), opened("llama3")
    action = r.append_sampled(dialogue, r.encode_turn(SYNTAXES["tool_code"].write([CALL])))
    assert (
        action.unread == ("tool_code",)
        and action.facts == {"unread_tool_calls": 1.0}
        and "tool_code" in action.faults[0]
    )


# ----------------------------------------------------------------- template options

SWITCH = FAMILIES["smollm2"].template.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
)


def test_options_reach_the_template_by_both_paths():
    plain, off = renderer_of(SWITCH), renderer_of(SWITCH, options={"enable_thinking": False})
    messages = [{"role": "user", "content": "a"}]
    assert off.open(messages).text == plain.open(messages).text + "<think></think>"
    odd = [{"role": "user", "content": "a", "unusual": 1}]  # rendered by Transformers, not by the compiled template
    assert off.open(odd).text.endswith("<think></think>") and not plain.open(odd).text.endswith("<think></think>")


# ------------------------------------------------- templates of installed packages


def installed_templates():
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    return sorted(folder.glob("*.jinja")) if folder and folder.is_dir() else []


@pytest.mark.skipif(not installed_templates(), reason="trl, whose templates are read here, is not installed")
@pytest.mark.parametrize("path", installed_templates(), ids=lambda path: path.stem)
def test_published_templates_are_followed_or_refused(path):
    source = path.read_text(encoding="utf-8")
    try:
        r = Renderer(tokenizer_of(source))
    except RenderError:
        return  # a template of images, whose contents are lists
    dialogue = r.open([{"role": "user", "content": USER}], TOOLS)
    action = r.append_sampled(dialogue, r.encode_turn(r.turn_text(HERMES.write([CALL]), TOOLS)))
    assert same_calls(action.calls, [CALL])
    r.append_observation(dialogue, [{"role": "tool", "name": "weather", "content": REPLY}])
    assert REPLY in r.decode(dialogue.new_ids) and (not dialogue.restarted or dialogue.cause)


# ------------------------------------------------------------------ second opinion


@pytest.mark.parametrize(
    ("syntax", "parser"),
    [("hermes", "qwen3"), ("qwen3_coder", "qwen3.5"), ("glm", "glm"), ("deepseek_v3", "deepseek-v3")],
)
def test_another_reader_reads_the_same(syntax, parser):
    """The package ``renderers`` parses token ids; skipped where it is not installed."""
    parsers = pytest.importorskip("renderers.parsers", exc_type=ImportError)
    text = SYNTAXES[syntax].write([CALL, OTHER], TOOLS)
    tokenizer = tokenizer_of(text)
    tokenizer.add_tokens(sorted(set(re.findall(r"</?\w+>|<｜[^｜]+｜>", text))))
    _, found = parsers.get_tool_parser(parser, tokenizer).extract(tokenizer.encode(text, add_special_tokens=False))
    theirs = [ToolCall(call.name, dict(call.arguments)) for call in found]
    assert same_calls(SYNTAXES[syntax].parse(text, TOOLS).calls, [CALL, OTHER])
    assert same_calls(theirs, [CALL, OTHER])


THEIR_TOKENS = {
    "kimi": {
        "tool_calls_section_begin_id": "<|tool_calls_section_begin|>", "tool_calls_section_end_id": "<|tool_calls_section_end|>",
        "tool_call_begin_id": "<|tool_call_begin|>", "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
        "tool_call_end_id": "<|tool_call_end|>",
    },
    "minimax": {
        "think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<minimax:tool_call>",
        "tool_call_end_id": "</minimax:tool_call>",
    },
    "harmony": {
        "return_id": "<|return|>", "call_id": "<|call|>", "start_id": "<|start|>", "end_id": "<|end|>",
        "channel_id": "<|channel|>", "message_id": "<|message|>", "constrain_id": "<|constrain|>",
    },
    "llama3": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("syntax", "parse"),
    [
        ("kimi", "parse_kimi_k2"),
        ("minimax", "parse_minimax"),
        ("harmony", "parse_gpt_oss"),
        ("llama3", "parse_llama_3"),
    ],
)
def test_another_reader_of_whole_turns_reads_the_same(syntax, parse):
    parsing = pytest.importorskip("renderers.parsing", exc_type=ImportError)
    text = "<|start|>assistant" * (syntax == "harmony") + SYNTAXES[syntax].write([CALL], TOOLS)
    tokenizer = tokenizer_of(text)
    tokenizer.add_tokens(list(THEIR_TOKENS[syntax].values()))
    options = {name: tokenizer.convert_tokens_to_ids(token) for name, token in THEIR_TOKENS[syntax].items()}
    options |= {} if syntax == "harmony" else {"stop_ids": {tokenizer.eos_token_id}}
    options |= {"tools": list(TOOLS)} if syntax == "minimax" else {}
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = getattr(parsing, parse)(tokenizer, ids, **options).tool_calls
    assert same_calls([ToolCall(call.name, dict(call.arguments)) for call in found], [CALL])


def test_ids_that_a_template_would_refuse_are_replaced():
    r, dialogue = renderer("mistral_v3"), opened("mistral_v3")
    action = r.append_sampled(dialogue, r.encode_turn('[TOOL_CALLS] [{"name": "weather", "arguments": {}, "id": "1"}]'))
    assert action.calls[0].id == "000000000"
    reply("mistral_v3", dialogue)
    assert dialogue.restarted and "000000000" in dialogue.text
