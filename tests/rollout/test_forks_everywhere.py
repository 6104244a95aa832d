"""Forks and states where an environment offers neither: actions that are played again, and observations that are states."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
import torch
from support.untrained import Untrained

from turnwise import environments
from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.protocols import Step
from turnwise.core.records import Group, Status, Task, Trajectory, Turn
from turnwise.environments.base import LimitedEpisode, call_action, text_action, user_message
from turnwise.environments.contract import STATE_CHARACTERS, observed_state
from turnwise.environments.prompts import PromptProblem, prompt_class, tool_prompts
from turnwise.errors import SettingError
from turnwise.recipes import build
from turnwise.recipes.experience import piece
from turnwise.recipes.families.turn_credit import SameRecentStates
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import WITH_RECIPE, refuse

CALLS = []  # what the user's tool was asked


class Corridor(LimitedEpisode):
    """A class as people bring them: five cells in a row, no snapshot, no state key, nothing said about determinism."""

    max_turns = 6

    def begin(self, seed):
        self.at = 2
        return [user_message("cell 2. say left or right")]

    def act(self, action):
        self.at += 1 if "r" in action.text else -1
        over = self.at in (0, 4)
        return Step(
            [user_message(f"cell {self.at}.{self.noise()}")], float(self.at == 4), over, info={"success": self.at == 4}
        )

    def noise(self):
        return ""

    def oracle(self):
        return text_action("right")

    def random_action(self, rng):
        return text_action(rng.choice(["left", "right"]))


class Noisy(Corridor):
    """Its replies depend on more than seed and actions."""

    def noise(self):
        return f" {random.SystemRandom().random()}"


class Acting(Corridor):
    deterministic = False


def world(cls, monkeypatch, **more):
    name = f"{__name__}:{cls.__name__}"
    monkeypatch.setattr(
        environments, "load", lambda asked, load=environments.load: cls if asked == name else load(asked)
    )
    return Untrained(name, max_turns=6, difficulty=(1,), **more)


def plan(cls, monkeypatch, **settings):
    name = f"{__name__}:{cls.__name__}"
    monkeypatch.setattr(
        environments, "load", lambda asked, load=environments.load: cls if asked == name else load(asked)
    )
    refuse(RunPlan(Settings.of({"env": name, "difficulty": (1,), **settings})), WITH_RECIPE)


# ----------------------------------------------------------------------- forks


@pytest.mark.parametrize(
    "spec", ["branch,trunks=2", "arpo,trunks=2,chance=1", "vines,states=1,vines=2", "ib_tpo,trunks=2,segment=2"]
)
def test_any_class_can_be_forked(spec, monkeypatch):
    here = world(Corridor, monkeypatch)
    group = here.grow(piece("strategy", spec), size=8)
    assert not any(t.status == Status.FAILED for t in group.trajectories)
    forks, by_id = [t for t in group.trajectories if t.fork], {t.id: t for t in group.trajectories}
    assert forks
    for t in forks:
        assert t.turns[0].state == by_id[t.fork.parent].turns[t.fork.turn].state
    measured, recorded = here.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_a_reply_that_differs_fails_the_fork_in_words(monkeypatch):
    group = world(Noisy, monkeypatch).grow(piece("strategy", "branch,trunks=2"), size=6)
    forks = [t for t in group.trajectories if t.fork]
    assert forks and all(t.status == Status.FAILED for t in forks)
    assert {"action 1 was answered otherwise when it was played again" in t.reason for t in forks} == {True}
    assert all(t.status != Status.FAILED for t in group.trajectories if not t.fork)


def test_it_is_tried_at_the_start(monkeypatch):
    forked = {"strategy": "arpo", "cold_steps": 0}
    plan(Corridor, monkeypatch, **forked)
    with pytest.raises(SettingError, match="replies otherwise when the same actions are played again"):
        plan(Noisy, monkeypatch, **forked)
    plan(Noisy, monkeypatch, cold_steps=0)  # nothing forks
    with pytest.raises(SettingError, match="may have effects outside"):
        plan(Acting, monkeypatch, **forked)


def test_who_knows_better_says_so_behind_the_name(monkeypatch):
    class Family:
        environment = staticmethod(lambda member: type(f"outside:{member}", (Acting,), {}))

    monkeypatch.setitem(environments.FAMILIES, "outside", "outside_family")
    monkeypatch.setitem(__import__("sys").modules, "outside_family", Family)
    assert environments.load("outside:a,b=2").deterministic is False
    promised = environments.load("outside:a,b=2,deterministic=true")
    assert promised.deterministic is True and environments.can_fork(promised)


# ------------------------------------------------------------- inside an answer

ROWS = {
    split: {n: PromptProblem(({"role": "user", "content": f"{n} + {n}?"},), str(2 * n)) for n in range(4)}
    for split in ("train", "held_out")
}


class PromptWorld(Untrained):
    """An untrained model over prompts."""

    def __init__(self, monkeypatch, cls, **more):
        monkeypatch.setattr(environments, "load", lambda name: cls)
        super().__init__("stand_in", max_tokens=12, max_turns=0, difficulty=(1,), **more)


@pytest.mark.parametrize(
    "spec", ["latr", "spo_tree,segment=2", "echo,high=0.01,confident=99,rise=-9,prune=false", "ib_tpo,segment=2"]
)
def test_answers_to_prompts_are_forked_inside(spec, monkeypatch):
    here = PromptWorld(monkeypatch, prompt_class(ROWS))
    group = here.grow(piece("strategy", spec), size=8)
    assert len(group.trajectories) == 8 and not any(t.status == Status.FAILED for t in group.trajectories)
    forks = [t for t in group.trajectories if t.fork]
    assert forks and all(t.fork.turn == 0 and t.fork.token for t in forks)
    measured, recorded = here.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)
    credit = build("spo_tree").advantage(pack([group]))  # the credit of segments reads such a tree
    assert credit.x.isfinite().all()


def priced(item: str) -> str:
    """The price of an item."""
    CALLS.append(item)
    return "7"


def test_a_fork_calls_no_function_of_the_user_again(monkeypatch):
    monkeypatch.setattr("turnwise.environments.prompts.load_object", lambda *_: priced)
    cls = tool_prompts(prompt_class(ROWS), ("shop:priced", "python"))
    CALLS.clear()

    async def run():
        env, fork = cls(), cls()
        env.reset(0), fork.reset(0)
        from turnwise.core.protocols import ToolCall

        await env.step(call_action(ToolCall("priced", {"item": "pear"})))
        await env.step(call_action(ToolCall("python", {"code": "x = 5"})))
        await fork.restore(json.loads(json.dumps(env.snapshot())))
        said = [(await e.step(call_action(ToolCall("python", {"code": "print(x + 1)"})))).messages for e in (env, fork)]
        env.close(), fork.close()
        return said, fork.turn

    said, turn = asyncio.run(run())
    assert said[0] == said[1] and "6" in said[0][0]["content"] and turn == 3 and CALLS == ["pear"]


# ---------------------------------------------------------------------- states


def test_what_is_observed_is_the_state(monkeypatch):
    group = world(Corridor, monkeypatch).grow(piece("strategy", "independent"), size=6)
    for t in group.trajectories:
        assert t.turns[0].state == "cell 2. say left or right" and {turn.state for turn in t.turns[1:]} <= {
            "cell 1.",
            "cell 2.",
            "cell 3.",
        }
        assert t.end in {f"cell {n}." for n in range(5)}
    batch = pack([group])
    shared = batch.reward.peer_count(SameRecentStates()(batch)).x
    assert (shared > 1).float().mean() > 0.5


def test_a_long_observation_is_named_by_its_beginning_and_all_of_it():
    one, two = ([user_message("x" * 2000 + end)] for end in "ab")
    assert observed_state(one) != observed_state(two) and observed_state(one) == observed_state(list(one))
    assert (
        len(observed_state(one)) < STATE_CHARACTERS + 20
        and observed_state(one)[:STATE_CHARACTERS] == "x" * STATE_CHARACTERS
    )


def test_similar_texts_are_one_state():
    """Each state joins the first similar one of its task; of another task none."""
    texts = [
        ["a red door, 3 turns left", "a red door, 2 turns left", "something else entirely"],
        ["a red door, 1 turns left"] * 2,
    ]
    turn = lambda state: Turn((1,), (2,), (-0.1,), version=(0,), state=state)  # noqa: E731
    groups = [
        Group(str(g), Task("t", g), (Trajectory(f"{g}.0", Task("t", g), tuple(map(turn, states)), end=""),))
        for g, states in enumerate(texts)
    ]
    batch = pack(groups)
    counts = lambda likeness: batch.reward.peer_count(SameRecentStates(1, likeness)(batch)).x.tolist()  # noqa: E731
    assert counts(1.0) == [1, 1, 1, 2, 2]
    assert counts(0.95) == [2, 2, 1, 2, 2]
    assert counts(0.01)[:3] == [3, 3, 3]
