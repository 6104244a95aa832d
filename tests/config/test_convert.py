"""One check of types for flags, settings and hyper-parameters, and its words."""

from __future__ import annotations

from typing import Literal

import pytest

from turnwise import recipes
from turnwise.config.convert import convert
from turnwise.errors import SettingError


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("grpo", {"clip": "x"}, "clip is 'x', which is not float"),
        ("grpo", {"clip": None}, "clip is None, which is not float"),
        ("grpo", {"beta": [0.1]}, r"beta is \[0.1\], which is not float"),
        ("dapo", {"limit": 1.5}, "limit is 1.5, which is not int"),
        ("dapo", {"dual": "high"}, r"dual is 'high', which is not float \| None"),
    ],
)
def test_an_ill_typed_hyper_parameter_is_named_with_its_value_and_the_type_wanted(name, options, words):
    with pytest.raises(SettingError, match=words):
        recipes.build(name, **options)


def test_hyper_parameters_are_read_like_flags():
    assert recipes.build("dapo", high="0.3", dual="none") == recipes.build("dapo", high=0.3, dual=None)


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [("3", int | str, 3), ("x", int | str, "x"), ("k1", Literal["k1", "k3"], "k1"), (None, int | None, None)],
)
def test_unions_and_literals(value, kind, read):
    assert convert("x", value, kind) == read


@pytest.mark.parametrize(("value", "kind"), [("k2", Literal["k1", "k3"]), (None, int | str), ("none", int | float)])
def test_what_no_member_takes_is_refused(value, kind):
    with pytest.raises(SettingError, match=r"x is .*(, which is not|; known: k1, k3)"):
        convert("x", value, kind)
