"""Which environments have scripted policies: the tiny model starts from them, so a class without them is refused."""

from __future__ import annotations

import pytest

from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, overrides, text_action, user_message
from turnwise.errors import SettingError
from turnwise.training.build import load_tokenizer
from turnwise.training.env_spec import EnvSpec, resolve_settings


class Bare(Environment):
    """Only the required methods."""

    def reset(self, seed):
        return [user_message("say yes")]

    def step(self, action):
        return Step([], float(action.text == "yes"), terminated=True, info={"success": action.text == "yes"})


class WithOracle(Bare):
    def oracle(self):
        return text_action("yes")


class WithBoth(WithOracle):
    """The demonstrator of the base class mixes these two."""

    def random_action(self, rng):
        return text_action(rng.choice(["yes", "no"]))


class Unrelated:
    """Not a subclass; has no demonstrator to inherit."""

    reset, step, oracle, random_action = Bare.reset, Bare.step, WithOracle.oracle, WithBoth.random_action


def spec(cls: type) -> EnvSpec:
    return EnvSpec.from_settings(resolve_settings({"env": f"{__name__}:{cls.__name__}"}))


@pytest.mark.parametrize("cls", [Bare, WithOracle, Unrelated])
def test_a_tiny_model_needs_scripted_policies(cls):
    assert not spec(cls).can_demonstrate
    with pytest.raises(SettingError, match="has no `demonstrate`"):
        load_tokenizer(spec(cls).settings, spec(cls))


def test_the_inherited_demonstrator_counts_if_it_can_act():
    assert spec(WithBoth).can_demonstrate
    assert not overrides(WithBoth, "demonstrate") and overrides(WithBoth, "oracle") and not overrides(Bare, "no_method")
