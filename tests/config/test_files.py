"""Config files: what is read, what is refused and where, and that settings survive being written and read."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.files import read_config, render_config
from turnwise.config.settings import Settings, default_of, setting_type
from turnwise.errors import SettingError


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_is_read_by_the_types_of_the_settings(tmp_path):
    text = "method: grpo\nlr: 1e-5\nname: 007\ndifficulty: [1, 2]\nprofile: true\nmethod_options:\n  clip: 0.3\n  dual: null\n"
    file = read_config(written(tmp_path, text))
    assert file.values == {
        "method": "grpo", "lr": 1e-5, "name": "007", "difficulty": (1, 2), "profile": True,
        "method_options": {"clip": 0.3, "dual": None},
    }  # fmt: skip
    assert file.lines["lr"] == 2 and file.place("lr").endswith("run.yaml line 2")


def test_toml_is_read_alike(tmp_path):
    text = 'method = "grpo"\nlr = 1e-5\ndifficulty = [1, 2]\n\n[method_options]\nclip = 0.3\n'
    file = read_config(written(tmp_path, text, "run.toml"))
    assert file.values == {"method": "grpo", "lr": 1e-5, "difficulty": (1, 2), "method_options": {"clip": 0.3}}
    assert file.lines["method_options"] == 5


def test_an_empty_file_holds_no_settings(tmp_path):
    assert read_config(written(tmp_path, "# nothing\n")).values == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env: guess\ntemprature: 1\n", "line 2: no setting 'temprature'; did you mean 'temperature'"),
        ("steps: ten\n", "line 1: steps is 'ten', which is not int"),
        ("steps: [1, 2]\n", "line 1: steps is ['1', '2'], which is not int"),
        ("steps:\n", "line 1: steps is None, which is not int"),
        ("env: {name: guess}\n", "line 1: env is {'name': 'guess'}, which is not str"),
        ("\nsteps: 1\nsteps: 2\n", "line 3: steps is given twice, first in line 2"),
        ("method_options: 3\n", "line 1: method_options is 3; write one line for each"),
        ("method_options: {clip: 1, clip: 2}\n", "line 1: a key is given twice"),
        ("- steps\n", "holds no settings"),
        ("steps: 1\n  lr: 2\n", "is not YAML"),
        ("a: &x [*x]\n", "YAML aliases"),
        ("<<: {steps: 1}\n", "no setting '<<'"),
    ],
)
def test_a_wrong_yaml_file_is_refused_with_its_line(tmp_path, text, words):
    with pytest.raises(SettingError) as caught:
        read_config(written(tmp_path, text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('env = "guess"\ntemprature = 1\n', "line 2: no setting 'temprature'"),
        ("steps = true\n", "line 1: steps is True, which is not int"),
        ("steps = \n", "is not TOML"),
        ("[rollout]\nslots = 3\n", "line 1: no setting 'rollout'"),
    ],
)
def test_a_wrong_toml_file_is_refused_with_its_line(tmp_path, text, words):
    with pytest.raises(SettingError) as caught:
        read_config(written(tmp_path, text, "run.toml"))
    assert words in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for path, words in ((tmp_path / "nowhere.yaml", "there is no config file"), (tmp_path / "x.json", "must end in")):
        with pytest.raises(SettingError, match=words):
            read_config(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="cannot be read"):
        read_config(tmp_path / "binary.yaml")


# ------------------------------------------------------------------ round trip

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    [
        "",
        "null",
        "~",
        "true",
        "no",
        "1e-5",
        "007",
        "a: b",
        "- x",
        "#x",
        "'",
        '"',
        "shop:Shop,db=x",
        "\u2028",
        "😀",
        "\x85\t\n",
    ]
)
numbers = st.floats(allow_nan=False) | st.integers(-(10**20), 10**20)
options = st.dictionaries(
    texts, texts | numbers | st.booleans() | st.none() | st.lists(numbers, max_size=2), max_size=3
)
FREE_TEXT = ("env", "model", "out", "name", "template", "demos", "solutions", "data", "teacher", "device", "schedule")


@st.composite
def chosen_settings(draw):
    """Settings with free texts, and numbers that every check accepts."""
    values = {}
    for f in fields(Settings):
        kind = setting_type(f.name)
        if f.name in FREE_TEXT:
            values[f.name] = draw(texts)
        elif kind is bool:
            values[f.name] = draw(st.booleans())
        elif kind is int and f.name not in ("hidden",):
            values[f.name] = draw(st.integers(1, 10**12))
        elif kind is float and f.name not in ("demo_share",):
            values[f.name] = draw(st.floats(1e-300, math.inf))
        else:
            values[f.name] = default_of(f)
    values |= {"method_options": draw(options), "difficulty": tuple(draw(st.lists(st.integers(), max_size=3)))}
    values |= {"credit": draw(st.sampled_from(["", "rloo"])), "demo_share": draw(st.floats(0.1, 0.9))}
    values["credit_options"] = draw(options) if values["credit"] else {}
    return values


@given(chosen_settings())
def test_settings_survive_being_written_and_read(tmp_path_factory, values):
    try:
        settings = Settings.of(values)
    except SettingError:  # a setting with a range of its own: not the subject
        settings = Settings(method_options=values["method_options"], name=values["name"])
    normal = replace(settings, method_options=_as_lists(settings.method_options))
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(render_config(normal, {"lr": "flag"}, "title"), encoding="utf-8")
    assert Settings.of(read_config(path).values) == normal


def _as_lists(options):
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def test_the_rendered_file_says_what_a_setting_does_and_where_it_came_from():
    text = render_config(Settings(lr=0.5), {"lr": "flag"})
    assert "# learning rate [flag]\nlr: 0.5\n" in text and "# random seed of the whole run [default]" in text
