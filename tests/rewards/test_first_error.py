"""The reward model of first wrong steps: its reward against the oracle, its environment, and its verdicts as facts."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.credit_segments import fapo_judge
from support.outcomes import episode

from turnwise import environments
from turnwise.config.settings import Settings
from turnwise.core.chat import ChatReply
from turnwise.core.protocols import Action
from turnwise.core.records import Group, Task
from turnwise.environments.base import text_action, tool_action
from turnwise.environments.builtin.calculator import Calculator
from turnwise.errors import SettingError
from turnwise.rewards.judge import answer, count_steps, question, read_answer, step_index_reward, steps_of
from turnwise.rollout.helper import Helper
from turnwise.rollout.scoring import FirstErrorScorer
from turnwise.training.rewards import check_models, reward_model_folder


@given(st.data())
def test_the_step_index_reward(data):
    steps = data.draw(st.integers(1, 30))
    true, said = data.draw(st.integers(-1, steps - 1)), data.draw(st.none() | st.integers(-1, steps - 1))
    found = step_index_reward(steps, true, said)
    assert found == pytest.approx(fapo_judge(steps, true, said)) and -1 <= found <= 1
    assert step_index_reward(steps, true, true) == 1 and step_index_reward(steps, true, steps) == -1


@pytest.mark.parametrize(
    "text, said",
    [
        ("error: 2", 2),
        (" Error: none.", -1),
        ("error:0", 0),
        ("", None),
        ("2", None),
        ("error: two", None),
        ("error: 1 or 2", None),
    ],
)
def test_reading_a_verdict(text, said):
    assert read_answer(text) == said
    if said is not None:
        assert read_answer(answer(said)) == said


async def played(actions, seed=3) -> tuple[list, list[float]]:
    env = Calculator(difficulty=1)
    messages, facts = list(env.reset(seed)), []
    try:
        for act in actions:
            action = act(env) if callable(act) else act
            step = await env.step(action)
            messages += [action.message, *step.messages]
            facts.append(step.info["facts"]["error"])
    finally:
        env.close()
    return messages, facts


def test_the_environment_tells_its_first_wrong_turn():
    good, broken = Calculator.oracle, tool_action("python", code="t=a x b;t")
    assert asyncio.run(played([good, good]))[1] == [-1, -1]
    messages, facts = asyncio.run(played([good, broken, good, text_action("answer: t")]))
    assert facts == [-1, 1, 1, 1]
    assert asyncio.run(played([text_action("answer: 5")]))[1] == [0]  # nothing was computed
    lines = steps_of(messages)
    assert count_steps(lines) == 4 and lines[1].startswith("step 0 python") and lines[4].startswith("> ")
    assert "first error?" in question(lines)[0]["content"]


@pytest.fixture
def rows(tmp_path):
    dice, path = random.Random(0), tmp_path / "flaws.jsonl"
    made = []
    for n in range(60):
        steps = dice.randint(1, 4)
        lines = [f"task {n}", *(f"step {k} {dice.random():.3f}" for k in range(steps))]
        made.append(json.dumps({"lines": lines, "error": dice.randint(-1, steps - 1)}))
    path.write_text("\n".join(made))
    return path


def test_the_environment_of_verdicts(rows):
    cls = environments.load(f"turnwise.environments.first_error:FirstError,rows={rows}")
    prompts = {"train": set(), "held_out": set()}
    for split, shown in prompts.items():
        for seed in range(80):
            env = cls(split=split)
            (prompt,) = env.reset(seed)
            shown.add(prompt["content"])
            assert env.step(env.oracle()).reward == 1.0 and env.step(env.oracle()).info["success"]
            wrong = env.step(text_action("no verdict"))
            assert wrong.reward == -1.0 and not wrong.info["success"] and wrong.terminated
            assert env.reset(seed) == [prompt] and -1 <= env.step(env.random_action(random.Random(seed))).reward <= 1
    assert not prompts["train"] & prompts["held_out"]
    with pytest.raises(SettingError, match="no file"):
        environments.load("turnwise.environments.first_error:FirstError,rows=nowhere.jsonl")()
    rows.write_text('{"lines": ["q", "step 0 a"], "error": 1}\n')
    with pytest.raises(SettingError, match="line 1: error is 1, and the episode has 1 steps"):
        cls()


class Judge:
    """Names step 0 of what mentions a flaw; says nonsense about riddles."""

    name = "judge"

    def __init__(self):
        self.asked, self.closed = [], False

    async def reply(self, messages, sampling, seed, tools=(), schema=None):
        text = messages[0]["content"]
        self.asked.append(text)
        return ChatReply("error: 0" if "flaw" in text else "hm" if "riddle" in text else "error: none")

    def close(self):
        self.closed = True


def test_verdicts_become_facts_of_successes_only():
    task, judge = Task("calculator", 1), Judge()
    said = lambda i, success, words: replace(  # noqa: E731
        episode(f"g.{i}", task, success, turns=2), messages=({"role": "user", "content": "q"}, Action(words).message)
    )
    group = Group(
        "g",
        task,
        (
            said(0, True, "flaw"),
            said(1, True, "fine"),
            said(2, False, "flaw"),
            said(3, True, "riddle"),
            said(4, True, "flaw"),
        ),
    )
    scorer = FirstErrorScorer(Helper(judge, who="judge", attempts=1))
    scored = asyncio.run(scorer.score(group))
    facts = [[turn.facts.get("error") for turn in t.turns] for t in scored.trajectories]
    assert facts == [[0, 0], [-1, -1], [None, None], [-1, -1], [0, 0]]
    assert [t.reward for t in scored.trajectories] == [t.reward for t in group.trajectories]
    assert len(judge.asked) == 3, "an equal episode is asked about once"
    assert {k: v for k, v in scorer.metrics().items() if k != "judge/seconds"} == {
        "judge/calls": 3, "judge/cached": 1, "judge/failed": 1, "judge/flawed": 2,
    }  # fmt: skip
    held_out = replace(group, task=replace(task, split="held_out"))
    assert asyncio.run(scorer.score(held_out)) == held_out and len(judge.asked) == 3
    scorer.close()
    assert judge.closed


def test_a_folder_without_a_model_is_refused(tmp_path):
    settings = Settings.of({"judge": f"first_error:{tmp_path}"})
    with pytest.raises(SettingError, match="holds no model; write first_error:runs/NAME/model"):
        check_models(settings)
    (tmp_path / "config.json").write_text("{}")
    assert reward_model_folder(settings) == tmp_path
