"""Every program of examples/ runs, with settings small enough for a test, and says in its docstring how long it takes."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
TESTED = {
    "compare_methods",
    "method_in_trl",
    "offline_preferences",
    "own_environment",
    "own_method",
    "own_prompts_and_reward",
}
TESTED |= {"dreamed_keydoor", "expert_plans", "flaw_finder", "planner_and_verifier", "shapley_of_facts"}
ELSEWHERE = {"one_file_grpo"}  # tests/training/test_one_file_grpo.py


@pytest.fixture
def program(request, monkeypatch):
    """The module of an example, importable by its name, as when it is run."""
    name = request.param
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    assert {path.stem for path in PROGRAMS} == TESTED | ELSEWHERE


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_examples_say_how_long_they_take(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert f"python examples/{path.name}" in doc and re.search(r"\d+ seconds|a minute", doc)


@pytest.mark.parametrize("program", ["own_method"], indirect=True)
def test_the_gate_fades(program):
    assert program.gradient_by_ratio() == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["own_environment", "own_method"], indirect=True)
def test_training_examples_run(program):
    summary = program.main(steps=2, cold_steps=3, eval_tasks=8)
    assert 0 <= summary["success_after"]["success"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("program", ["own_prompts_and_reward"], indirect=True)
def test_prompts_and_rewards_teach(program):
    summary = program.main()
    before, after = summary["success_before"]["success"], summary["success_after"]["success"]
    assert after > before + 0.1 and set(summary["success_after"]["rewards"]) == {"correct", "brief"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["offline_preferences"], indirect=True)
def test_preferences_run(program):
    summary = program.main(tasks=24, steps=2)
    assert set(summary["ranking"]) >= {"before", "after"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["compare_methods"], indirect=True)
def test_comparison_runs(program):
    rows = program.main(seeds=(0,), steps=1, cold_steps=3, eval_tasks=8)
    assert [row["method"] for row in rows] == ["grpo", "gspo"]
    assert rows[0]["before"] == rows[1]["before"]  # one cold start for both


@pytest.mark.slow
@pytest.mark.parametrize("program", ["method_in_trl"], indirect=True)
def test_trl_runs_or_says_what_is_missing(program, capsys):
    log = program.main(steps=2)
    if log is None:
        assert program.MISSING in capsys.readouterr().out


# ------------------------------------------------------- roles with a shared memory


@pytest.mark.parametrize("program", ["planner_and_verifier"], indirect=True)
def test_roles_take_turns_and_share_a_memory(program):
    """The scripted roles solve every task; each role reads its own prompt with the memory, and no earlier turn."""
    for seed in range(6):
        env = program.PlannerLoop(difficulty=2)
        (first,) = env.reset(seed)
        roles, step = [], None
        while step is None or not step.terminated:
            roles.append(env.agent)
            step = env.step(env.oracle())
            assert step.info["facts"]["planner"] == float(roles[-1] == "planner") and (
                step.terminated or step.context == []
            )
        assert roles == ["planner", "verifier"] * 2 and step.info["success"] and len(env.memory) == 2
        assert first["content"].startswith("planner.") and "memory: empty" in first["content"]


@pytest.mark.parametrize("program", ["planner_and_verifier"], indirect=True)
def test_only_the_planners_turns_are_trained(program):
    from support.untrained import Untrained

    from turnwise import recipes
    from turnwise.core.batch import pack
    from turnwise.core.levels import TOKEN, TURN
    from turnwise.rollout.strategies import Independent

    world = Untrained("planner_and_verifier:PlannerLoop", max_tokens=4, difficulty=(1,))
    group = world.grow(Independent(), seed=4, size=3)
    assert {turn.agent for t in group.trajectories for turn in t.turns} == {"planner", "verifier"}
    batch = pack([group])
    objective = recipes.build("flow_grpo").objective
    planned = [turn.agent == "planner" for t in group.trajectories for turn in t.turns]
    kept = objective.keep(None, None, SimpleNamespace(batch=objective.credit(batch)))
    owner = batch.tree.ancestor(TOKEN, TURN).tolist()
    assert kept.at(TOKEN).x.tolist() == [planned[turn] for turn in owner]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["planner_and_verifier"], indirect=True)
def test_the_planner_learns_inside_the_loop(program):
    summary = program.main(steps=2, eval_tasks=8, cold_steps=3, cold_demos=64, hidden=32)
    assert 0 <= summary["success_after"]["success"] <= 1


# ------------------------------------------------------------------ worths of facts


@pytest.mark.parametrize("program", ["shapley_of_facts"], indirect=True)
def test_shapley_values_by_random_orders_are_the_exact_ones(program):
    """Against the sum over all orders; they add up to what all facts are worth together, and a useless fact is worth nothing."""
    rng = random.Random(1)
    value = {frozenset(s): rng.random() * 4 for n in range(4) for s in itertools.combinations(range(3), n)}
    value |= {s | {3}: v for s, v in list(value.items())}  # fact 3 adds nothing
    exact = [0.0] * 4
    for order in itertools.permutations(range(4)):
        for n, fact in enumerate(order):
            exact[fact] += (value[frozenset(order[: n + 1])] - value[frozenset(order[:n])]) / 24
    found = program.shapley(value.__getitem__, 4, random.Random(2), most=4000, least=4000, near=0.0)
    assert found == pytest.approx(exact, abs=0.15) and found[3] == 0.0
    assert sum(found) == pytest.approx(value[frozenset(range(4))] - value[frozenset()])


@pytest.mark.parametrize("program", ["shapley_of_facts"], indirect=True)
def test_orders_end_early_where_nothing_moves(program):
    """Additive values: every order gives the same gains, so three orders suffice."""
    calls = []

    def value(known):
        calls.append(known)
        return float(sum(k + 1 for k in known))

    assert program.shapley(value, 3, random.Random(0)) == [1.0, 2.0, 3.0]
    assert len(calls) == 1 + 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("program", ["shapley_of_facts"], indirect=True)
def test_worths_are_estimated_and_trained_on(program):
    summary = program.main(
        first_steps=1, steps=2, eval_tasks=8, cold_steps=3, cold_demos=64, hidden=32, groups=2, group_size=4
    )
    assert 0 <= summary["success_after"]["success"] <= 1
    assert program.WorthyLookup.estimated and all(len(w) in (1, 2) for w in program.WorthyLookup.estimated.values())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["expert_plans"], indirect=True)
def test_plans_are_read_and_played(program):
    env = program.Advised(difficulty=2)
    texts = [env.reset(seed)[0]["content"] for seed in range(40)]
    assert 10 <= sum("plan: python t=" in text for text in texts) <= 30
    held_out = program.Advised(difficulty=2, split="held_out")
    assert not any("plan:" in held_out.reset(seed)[0]["content"] for seed in range(10))
    found = program.main(steps=2, cold_steps=3, eval_tasks=8, hidden=32, layers=1, groups=2)
    assert {name: 0 <= summary["success_after"]["reward"] <= 1 for name, summary in found.items()} == {
        "plans": True,
        "without": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("program", ["flaw_finder"], indirect=True)
def test_a_reward_model_finds_flaws_and_a_policy_is_trained_with_it(program):
    small = {"hidden": 32, "layers": 1, "groups": 2, "eval_tasks": 4}
    found = program.main(episodes=96, judge_steps=1, judge_cold=3, steps=1, cold_steps=3, **small)
    assert -1 <= found["judge"]["success_after"]["reward"] <= 1
    assert all(0 <= found[f"{method} flawed"] <= 1 for method in ("fapo", "grpo"))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dreamed_keydoor"], indirect=True)
def test_a_policy_learns_in_a_dream(program):
    found = program.main(
        episodes=20, world_steps=3, steps=1, world={"hidden": 32, "layers": 1, "eval_tasks": 4}, groups=1, group_size=3,
        hidden=32, layers=1, eval_tasks=4, cold_steps=3,
    )  # fmt: skip
    assert 0 <= found["policy"]["success_after"]["success"] <= 1 and found["world"]["success_before"] is not None


@pytest.mark.parametrize("program", ["dreamed_keydoor"], indirect=True)
def test_transitions_are_those_of_the_environment(program, tmp_path):
    rows = tmp_path / "rows.jsonl"
    program.record(rows, 8)
    env = program.Transitions(rows=str(rows))
    for seed in range(20):
        (prompt,) = env.reset(seed)
        assert " do " in prompt["content"] and env.step(env.oracle()).reward == 1.0
    assert program.plain("you cannot. key here") == "key here" == program.plain("key here")
