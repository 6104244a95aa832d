"""Every program of examples/ runs, with settings small enough for a test, and says in its docstring how long it takes."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
TESTED = {"compare_methods", "method_in_trl", "offline_preferences", "own_environment", "own_method", "own_prompts_and_reward"}
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
