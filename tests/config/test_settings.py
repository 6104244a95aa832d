"""Settings: few, typed, and refused in words."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import pytest

from turnwise import recipes
from turnwise.config.convert import convert
from turnwise.config.settings import Settings, default_of, setting_type
from turnwise.errors import SettingError

MOST = 123  # with every sub-option of a value: `--cluster local,generators=2` are two settings


def knobs(field) -> list[str]:
    """A setting, or the parts of a value that has parts."""
    kind = setting_type(field.name)
    return [f"{field.name}.{part.name}" for part in fields(kind)] if is_dataclass(kind) else [field.name]


def test_there_are_few_with_every_sub_option_counted():
    settings = [knob for field in fields(Settings) for knob in knobs(field) if knob != "method_options"]
    assert {"cluster.generators", "staleness.late", "model.cache"} <= set(settings)
    assert len(settings) + len(recipes.parameters(Settings().method)) <= MOST


def test_every_setting_says_what_it_does_and_its_default_fits_its_type():
    assert [f.name for f in fields(Settings) if len(f.metadata["help"]) <= 5] == []
    assert [
        f.name for f in fields(Settings) if convert(f.name, default_of(f), setting_type(f.name)) != default_of(f)
    ] == []


def test_the_default_method_exists():
    assert Settings().method in recipes.METHODS


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("group", "groups"), ("eval_task", "eval_tasks"), ("zzz", "known")],
)
def test_an_unknown_name_gets_the_nearest(wrong, right):
    with pytest.raises(SettingError, match=rf"no setting '{wrong}'.*{right}"):
        Settings.of({wrong: 1})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("steps", "ten", "steps is 'ten', which is not int"),
        ("steps", 1.5, "steps is 1.5, which is not int"),
        ("steps", True, "steps is True, which is not int"),
        ("steps", None, "steps is None, which is not int"),
        ("steps", float("inf"), "steps is inf, which is not int"),
        ("steps", float("nan"), "steps is nan, which is not int"),
        ("lr", "fast", "lr is 'fast', which is not float"),
        ("lr", False, "lr is False, which is not float"),
        ("difficulty", "1,x", "difficulty is '1,x', which is not tuple"),
        ("env", 3, "env is 3, which is not str"),
        ("method_options", "clip", "method_options is 'clip', which is not dict"),
        ("steps", 0, "steps is 0; write a number >= 1"),
        ("context", -5, "context is -5; write a number >= 1"),
        ("staleness", -1, "staleness is -1"),
    ],
)
def test_an_ill_typed_or_impossible_value_is_refused_in_words(name, value, words):
    with pytest.raises(SettingError) as caught:
        Settings.of({name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("1e-3", float, 1e-3),
        ("none", float | None, None),
        ("0.5", float | None, 0.5),
        ("1, 2,3", tuple[int, ...], (1, 2, 3)),
        ("", tuple[str, ...], ()),
        ("yes", bool, True),
        ("False", bool, False),
    ],
)
def test_text_is_read_as_its_type(text, kind, value):
    assert convert("x", text, kind) == value


def test_settings_survive_json():
    chosen = Settings(steps=3, difficulty=(2,), trackers=(), method="grpo", method_options={"clip": 0.3})
    assert Settings.of(json.loads(json.dumps(chosen.as_dict()))) == chosen


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0, 0),
        (4, 4),
        ("4", 4),
        ("4,wait", 4),
        ("0,wait", 0),
        (" 4 , drop ", "4,drop"),
        ("1,keep", "1,keep"),
        ("0, continuous", "0,continuous"),
    ],
)
def test_staleness_is_a_number_and_what_happens_to_late_groups(given, kept):
    assert Settings(staleness=given).staleness.plain() == kept
    assert Settings.of(json.loads(json.dumps(Settings(staleness=given).as_dict()))).staleness.plain() == kept


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("4,dorp", "'dorp' does not say what to do.*drop"), ("x", "staleness is x; write 0"), ("4,", "''"),
        ("-1,drop", "staleness is -1,drop"), ("1.5", "staleness is 1.5"), ("", "write 0 for synchronous"),
        ("0,keep", "nothing comes late in a synchronous run; write 0, or 1,keep"), ("drop", "4,wait 4,drop 4,keep"),
        ("4,continuous", "never wait for each other's tools; write 4, or 0,continuous"), ("0,continous", "continuous"),
        (None, "staleness is None"), (True, "staleness is True"),
    ],
)  # fmt: skip
def test_a_staleness_that_says_nothing_is_refused(given, words):
    with pytest.raises(SettingError, match=words):
        Settings(staleness=given)


@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("cluster", {"address": "local", "generators": 2}, "local,generators=2"),
        ("model", {"name": "tiny", "cache": "pages"}, "tiny,cache=pages"),
        ("opponents", {"kind": "past", "keep": "4"}, "past,keep=4"),
        ("staleness", {"limit": 2, "late": "drop"}, "2,drop"),
    ],
)
def test_parts_may_be_nested_as_a_config_file_does(name, parts, text):
    assert getattr(Settings(**{name: parts}), name) == getattr(Settings(**{name: text}), name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster": {"generators": 2}}, "write local, or the HOST:PORT"),
        ({"cluster": {"generator": 2}}, "did you mean 'generators'"),
        ({"cluster": "local,cpus=1,cpus=2"}, "cpus is given twice"),
        ({"opponents": [1]}, "is not Opponents"),
        ({"model": 5}, "is not ModelName"),
        ({"seed": 10**30}, "take 64 bits"),
        ({"clip_norm": -1}, "write a number > 0"),
        ({"threads": 10**7}, r"in \[0, 1024\]"),
        ({"cold_steps": -7}, "a number >= -1"),
        ({"top_p": 2}, r"a number in \(0, 1\]"),
        ({"temperature": -0.1}, "0 is greedy"),
        ({"agent_seconds": 0}, "a number > 0"),
        ({"top_k": -1}, "0 is off"),
        ({"min_p": 1}, r"in \[0, 1\)"),
    ],
)
def test_what_no_run_can_use_is_refused_where_settings_are_read(settings, words):
    with pytest.raises(SettingError, match=words):
        Settings(**settings)
