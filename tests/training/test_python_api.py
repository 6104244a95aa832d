"""``train`` and ``resume`` called from Python: inside an event loop, with classes, functions and models as objects."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import time

import pytest
import torch

import turnwise
from turnwise import recipes
from turnwise.environments.builtin.guess import Guess
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.training.interrupt import RunStopped, StopSignals

SMALL = {"steps": 3, "groups": 2, "group_size": 4, "cold_steps": 0, "hidden": 32, "eval_tasks": 2, "trackers": ()}


class Shop(Guess):
    """An environment of this module, found by name."""

    def __init__(self, db, *, difficulty=1, split="train"):
        super().__init__(difficulty=difficulty, split=split)
        self.db = db


def robust(clip: float = 0.1):
    return recipes.build("grpo", clip=clip, beta=0.0)


def settings_of(run):
    return json.loads((run / "run.json").read_text())["settings"]


@pytest.mark.slow(tier="test")
def test_train_runs_inside_a_running_event_loop(tmp_path):
    async def cell():
        return turnwise.train(env=functools.partial(Shop, db="x"), method=robust, out=str(tmp_path), name="a", **SMALL)

    summary = asyncio.run(cell())
    assert summary["steps"] == 3
    assert settings_of(tmp_path / "a")["env"] == f"{__name__}:Shop,db=x"
    assert settings_of(tmp_path / "a")["method"] == f"{__name__}:robust"


@pytest.mark.slow(tier="test")
def test_an_interrupted_cell_writes_a_checkpoint_and_resumes(tmp_path):
    def interrupt(event, facts):
        if event == "step" and facts["stage"] == "learn" and facts["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        return turnwise.train(interrupt, env="guess", out=str(tmp_path), name="a", **SMALL)

    previous = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="with a checkpoint; `turnwise resume"):
        asyncio.run(cell())
    assert signal.getsignal(signal.SIGINT) is previous

    async def again():
        return turnwise.resume(tmp_path / "a")

    assert asyncio.run(again())["steps"] == 3


def test_a_second_signal_stops_the_worker_at_once():
    """The second is the timer's, when the step takes longer than the grace period."""
    stop, rounds = StopSignals(grace=0.1), []

    def endless():
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            while len(rounds) < 6000:  # a minute: the limit of a hang
                rounds.append(time.sleep(0.01))

    with pytest.raises(RunStopped):
        stop.run_in_thread(endless)
    assert 0 < len(rounds) < 6000


@pytest.mark.slow
def test_objects_without_a_name_must_be_given_again(tmp_path):
    class Local(Guess):
        pass

    turnwise.train(env=Local, recipe=robust(), out=str(tmp_path), name="a", **SMALL)
    assert settings_of(tmp_path / "a")["env"] == "object:Local"
    with pytest.raises(SettingError, match=r"Local was given to train\(\) as an object"):
        turnwise.resume(tmp_path / "a", recipe=robust())
    with pytest.raises(SettingError, match=r"recipe of this run was given to train\(\) as an object"):
        turnwise.resume(tmp_path / "a", env=Local)
    assert turnwise.resume(tmp_path / "a", env=Local, recipe=robust, steps=4)["steps"] == 4


@pytest.mark.slow
def test_a_model_object_is_kept_in_the_run_and_stays_as_it_is(tmp_path):
    tokenizer = tiny_tokenizer([], 300)
    model = tiny_model(len(tokenizer), 0, hidden=32, layers=1, context=320)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    given = {**SMALL, "model": model, "tokenizer": tokenizer, "env": "guess"}
    summary = turnwise.train(out=str(tmp_path), name="a", **{**given, "cold_steps": 2})
    assert summary["steps"] == 3 and settings_of(tmp_path / "a")["model"] == "object:LlamaForCausalLM"
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert turnwise.resume(tmp_path / "a", steps=4)["steps"] == 4
    with pytest.raises(SettingError, match="write the folder `initial` of that run"):
        turnwise.train(model="object:LlamaForCausalLM", env="guess")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": 3}, "model is a int"),
        ({"env": 3}, "env is 3; write a name, a class"),
        ({"env": Shop}, "Shop needs the argument 'db'"),
        ({"method": 3}, "method is 3; write a name, a Recipe"),
        ({"tokenizer": 3}, "a tokenizer is given without a model"),
        ({"recipe": robust, "method": "grpo"}, "leave one of them out"),
        ({"config": "nowhere.yaml"}, "there is no config file"),
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"batch_size": 3}, "it is called groups here"),
        ({"learning_rate": 3, "lr": 2}, "learning_rate and lr are the same setting"),
    ],
)
def test_what_is_neither_name_nor_object_is_refused(given, words, tmp_path):
    with pytest.raises(SettingError) as caught:
        turnwise.train(out=str(tmp_path), **given)
    assert words in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_settings_win_over_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 9\nenv: guess\nmethod_options: {clip: 0.4}\nmethod: grpo\n")
    summary = turnwise.train(
        config=tmp_path / "run.yaml", out=str(tmp_path), name="a", method_options={"beta": 0.0}, **SMALL
    )
    assert summary["steps"] == 3 and summary["method"] == "grpo"
    assert settings_of(tmp_path / "a")["method_options"] == {"clip": 0.4, "beta": 0.0}


@pytest.mark.slow
def test_nothing_is_printed_where_nobody_watches(tmp_path, capfd):
    turnwise.train(env="guess", out=str(tmp_path), name="a", **SMALL)
    assert capfd.readouterr().out == ""


def test_a_method_in_the_place_of_the_listener_is_refused():
    with pytest.raises(SettingError, match="write method='grpo'"):
        turnwise.train("grpo", env="calculator")
