"""What --reward says: weights, names, options, and refusals in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import SettingError
from turnwise.rewards.spec import BUILT_IN, RewardSpec, parse_rewards


@given(st.floats(-1e6, 1e6), st.sampled_from(["exact", "math", "my.py:score", "pack.mod:Scorer.score"]))
def test_a_weight_precedes_the_name(weight, name):
    spec = RewardSpec.parse(f"{weight!r}*{name}")
    assert spec.weight == weight and spec == RewardSpec.parse(f" {weight!r} * {name} ")
    assert RewardSpec.parse(name).weight == 1.0


def test_a_pattern_may_hold_stars_semicolons_and_equal_signs():
    spec = RewardSpec.parse("regex:pattern=^x*2; y$;full=yes")
    assert spec.options == {"pattern": "^x*2; y$", "full": True} and spec.weight == 1.0


def test_an_option_may_name_the_column_of_an_argument():
    spec = RewardSpec.parse("exact:answer=label;ignore_case=no")
    assert spec.columns == {"answer": "label"} and spec.options == {"ignore_case": False}


def test_equal_names_get_numbers():
    assert [s.name for s in parse_rewards(["a.py:score", "b.py:score", "exact"])] == ["score", "score_2", "exact"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_rewards_are_functions_of_a_process(name):
    spec = RewardSpec.parse(f"{name}:pattern=x" if name == "regex" else name)
    assert spec.built_in and spec.label == name and spec.name == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exac", "did you mean 'exact'"),
        ("", "cannot be read"),
        ("2*", "cannot be read"),
        ("1e999*exact", "cannot be read"),
        ("my.py:", "no reward is called"),
        ("my.py:a b", "no reward is called"),
        ("regex", "needs pattern"),
        ("regex:patern=x", "did you mean 'pattern'"),
        ("exact:loose", "option=value"),
        ("exact:completion=x", "completion"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text, words):
    with pytest.raises(SettingError, match="reward") as raised:
        RewardSpec.parse(text)
    assert words in str(raised.value)
