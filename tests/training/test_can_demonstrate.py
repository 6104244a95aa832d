"""Which environments have scripted policies: the tiny model starts from them, so a class without them is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from turnwise.cli.main import main
from turnwise.core.protocols import Step
from turnwise.core.records import Task
from turnwise.environments.base import Environment, overrides, text_action, user_message
from turnwise.environments.isolated import PROCESSES, IsolatedEnvironment
from turnwise.errors import SettingError
from turnwise.rollout.scripted import scripted_messages
from turnwise.training.build import load_tokenizer
from turnwise.training.plan import EnvSpec, resolve_settings


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


@pytest.mark.parametrize(
    ("cls", "player", "words"),
    [
        (Bare, "oracle", "has no oracle policy; write `oracle` in its class"),
        (Bare, "random", "has no random policy; write `random_action`"),
        (WithOracle, "demonstrator", "has no demonstrator policy; write `oracle` and `random_action`, or its own"),
    ],
)
def test_a_scripted_policy_that_a_class_lacks_is_refused_in_words(cls, player, words, capsys):
    assert main(["eval", "--env", f"{__name__}:{cls.__name__}", "--player", player]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train", "grpo"], ["train", "grpo", "--dry-run"], ["export"]])
def test_every_command_refuses_in_words(arguments, capsys, tmp_path):
    env = f"{__name__}:Bare"
    more = [env, str(tmp_path / "x.jsonl")] if arguments == ["export"] else ["--env", env, "--out", str(tmp_path)]
    assert main([*arguments, *more]) == 2
    told = capsys.readouterr().err
    assert told.startswith("turnwise: ") and "oracle" in told and "NotImplementedError" not in told


def test_policies_that_exist_are_not_refused():
    for player in ("oracle", "random", "demonstrator"):
        spec(WithBoth).require_policy(player)


def test_an_environment_without_a_name_cannot_be_isolated():
    settings = replace(spec(WithBoth).settings, env="object:WithBoth", isolate_env=True)
    with pytest.raises(SettingError, match="another process cannot import"):
        EnvSpec.from_settings(settings, WithBoth)


def test_a_scripted_policy_in_another_process_plays_the_same():
    """The random numbers of a demonstrator are those of its episode, wherever it plays."""
    task = Task("guess", seed=3)

    def played(isolate):
        env_spec = EnvSpec.from_settings(resolve_settings({"env": "guess", "isolate_env": isolate}))
        assert isinstance(env_spec.make(task), IsolatedEnvironment) == isolate
        return asyncio.run(scripted_messages("demonstrator", env_spec.make(task), task.seed, 5))

    try:
        assert played(True) == played(False)
    finally:
        PROCESSES.stop()
