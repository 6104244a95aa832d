"""Settings of chat templates: how they are read, where they reach, and that demonstrations keep their tool calls."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.chat_templates import FAMILIES, tokenizer_of

from turnwise.config.settings import Settings
from turnwise.data.dataset import read_dataset
from turnwise.data.tokenize import DialogueTokenizer, build_groups
from turnwise.errors import SettingError
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.parsers.table import SYNTAXES
from turnwise.training import build
from turnwise.training.plan import EnvSpec, RunPlan, resolve_settings
from turnwise.training.refusals import AT_ONCE, refuse
from turnwise.training.trainer import demonstrations


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("enable_thinking=false", {"enable_thinking": False}),
        ("enable_thinking=False,effort=low, budget = 3", {"enable_thinking": False, "effort": "low", "budget": 3}),
        ('{"enable_thinking": false}', {"enable_thinking": False}),
        ({"effort": "low"}, {"effort": "low"}),
    ],
)
def test_template_options_are_read_and_stored(text, options):
    settings = Settings(template_options=text)
    assert settings.template_options == options
    assert Settings.of(json.loads(json.dumps(settings.as_dict()))).template_options == options  # as run.json stores it


@pytest.mark.parametrize("text", ["enable_thinking", "=1", "{"])
def test_template_options_that_cannot_be_read_are_refused(text):
    with pytest.raises(SettingError, match=r"template_options is .* write key=value,key=value"):
        Settings(template_options=text)


def test_an_unknown_syntax_is_refused_at_once():
    with pytest.raises(SettingError, match="did you mean 'hermes'"):
        refuse(RunPlan(Settings(tool_syntax="hermse")), AT_ONCE)


def demos_with(family: str, **settings):
    spec = EnvSpec.from_settings(resolve_settings({"env": "lookup"}))
    renderer = build.make_renderer(replace(spec.settings, **settings), tokenizer_of(FAMILIES[family].template))
    tasks = [spec.tasks("train").draw(n) for n in range(12)]
    return renderer, demonstrations(tasks, spec.make, renderer, EpisodeLimits(turns=8, context=10**6), "oracle")


@pytest.mark.parametrize(
    "family", ["gemma2", "mistral_v1", "mistral_v3", "phi3", "llama3", "gpt-oss", "glm", "qwen2.5"]
)
def test_demonstrations_keep_their_tool_calls(family):
    """A template that refuses the role tool made all of them fail: "0 % succeed"."""
    renderer, demos = demos_with(family)
    assert len(demos) == 12 and all(demo.success for demo in demos)
    for demo in demos:
        assert sum(turn.tool_calls for turn in demo.turns) >= 1 and not any(turn.tool_errors for turn in demo.turns)
        calling = [renderer.decode(turn.tokens) for turn in demo.turns if turn.tool_calls]
        assert all(renderer.syntax.parse(text).calls for text in calling)


def test_demonstrations_are_written_in_the_syntax_that_is_chosen():
    renderer, demos = demos_with("gemma2", tool_syntax="tool_code", describe_tools=True)
    first = renderer.decode(demos[0].turns[0].context), renderer.decode(demos[0].turns[0].tokens)
    assert "You can call these tools" in first[0] and first[1].startswith("```tool_code\nsearch(")


# --------------------------------------------------------------------------- rows

ROW = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask.",
         "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "</tool_call>"}'}}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    "family", ["qwen3_coder", "llama3", "kimi", "gpt-oss", "magistral", "deepseek_v31", "qwen2.5", "gemma2"]
)
def test_rows_with_tool_calls_are_written_as_the_model_writes_them(family, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    renderer = build.make_renderer(Settings(), tokenizer_of(FAMILIES[family].template))
    (group,) = build_groups(read_dataset(path), DialogueTokenizer(renderer, 10_000))
    turn = group.trajectories[0].turns[0]
    parsed = SYNTAXES[FAMILIES[family].syntax].parse(renderer.decode(turn.tokens[:-1]))
    assert [(call.name, call.arguments) for call in parsed.calls] == [("weather", {"city": "</tool_call>"})]
    assert parsed.thinking.strip() == "I ask." and turn.tool_calls == 1 and turn.tool_errors == 0


def test_an_argument_that_a_syntax_cannot_express_names_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    call = {"function": {"name": "weather", "arguments": {"city": "</parameter>"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    path.write_text(json.dumps({"prompt": "a", "completion": [message]}) + "\n")
    renderer = build.make_renderer(Settings(), tokenizer_of(FAMILIES["qwen3_coder"].template))
    with pytest.raises(SettingError, match=r"line 1: .*qwen3_coder cannot express weather"):
        build_groups(read_dataset(path), DialogueTokenizer(renderer, 10_000))
