"""Learning runs of a real model: the arithmetic of their tables, and the whole way once with a very small one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "experiments"))
import smollm2  # noqa: E402

SMALL = [
    "cold-steps=2", "cold-batch=2", "cold-demos=4", "steps=2", "groups=2", "group-size=2", "lr=1e-3", "hidden=32", "layers=1",
    "vocabulary=300", "max-tokens=4", "eval-tasks=4", "eval-every=1", "slots=8", "device=cpu",
]  # fmt: skip


def row(task="lookup", method="grpo", seed=0, after=0.5, **given):
    settings = smollm2.budget(task, "smollm2", {name.replace("_", "-"): value for name, value in given.items()})
    said = {"before": [0.1, 0.0, 0.2], "after": [after, 0.0, 1.0], "curve": [[0, 0.1], [10, after]], "tokens": 1000}
    timed = {"seconds": {"learn": 9.0}, "step": {"gather": 0.2, "learn": 0.1}, "mismatch": 1e-3}
    return {"task": task, "method": method, "seed": seed, "settings": settings, **said, **timed}


def test_settings_belong_to_a_task_and_a_model_is_kept_by_its_name():
    found = smollm2.budget("countdown", "/some/where/smollm2", {"lr": "1e-4"})
    assert found["model"] == "smollm2" and found["difficulty"] == "1" and found["lr"] == "1e-4"
    assert found["groups"] == smollm2.budget("calculator", "smollm2", {})["groups"]
    with pytest.raises(SystemExit, match="write one of calculator"):
        smollm2.budget("sokoban", "smollm2", {})


def test_a_method_that_a_task_cannot_serve_is_left_out_with_the_reason():
    assert "equal states" in smollm2.refusal("gigpo", smollm2.budget("countdown", "smollm2", {}))
    for method in smollm2.METHODS:
        assert smollm2.refusal(method, smollm2.budget("lookup", "smollm2", {})) == ""


def test_one_cold_start_for_all_methods_and_another_for_other_settings():
    name = lambda **given: smollm2.start_name("lookup", 0, smollm2.budget("lookup", "smollm2", given))  # noqa: E731
    assert name() == name(lr="1e-3") == name(steps="9")
    assert name() != name(**{"cold-steps": "31"}) and name() != name(difficulty="1")


def test_the_interval_is_the_wider_of_seeds_and_tasks():
    alone = smollm2.over_seeds([row(after=0.5)], "after")
    assert alone == pytest.approx((0.5, 0.404, 0.596), abs=1e-3)  # Wilson of 50 in 100
    alike = smollm2.over_seeds([row(seed=s, after=0.5) for s in range(3)], "after")
    assert alike == pytest.approx((0.5, 0.444, 0.556), abs=1e-3)  # of 150 in 300
    spread = smollm2.over_seeds([row(seed=s, after=x) for s, x in enumerate((0.4, 0.5, 0.6))], "after")
    assert spread == pytest.approx((0.5, 0.5 - 4.303 * 0.1 / 3**0.5, 0.5 + 4.303 * 0.1 / 3**0.5))
    assert smollm2.over_seeds([row(seed=s, after=1.0) for s in range(3)], "after")[1] < 1.0


def test_rows_of_other_settings_stand_apart():
    rows = [row(), row(method="igpo"), row(seed=1), row(steps="9"), row("calculator")]
    found = smollm2.kinds(rows)
    assert list(found) == ["calculator", "lookup", "lookup, tried 1"] and len(found["lookup"]) == 3
    text = smollm2.report(rows)
    assert "| lookup | grpo | 2 | 60 | 10%" in text and "| lookup, tried 1 | grpo | 1 | 9 |" in text
    assert "- lookup, tried 1: `--steps 9`, `--env lookup`" in text
    assert smollm2.order(rows) == ["grpo", "igpo"]


def test_the_page_is_what_its_rows_say():
    """docs/results.md is written by `--table --write` and not by hand."""
    rows = [json.loads(line) for line in (ROOT / "experiments" / "results" / "smollm2.jsonl").read_text().splitlines()]
    shown = (ROOT / "docs" / "results.md").read_text().split("<!-- rows -->\n")[1].split("\n<!-- end -->")[0]
    assert shown == smollm2.report(rows)


@pytest.mark.slow
def test_the_whole_way(tmp_path):
    """Cold start, a run from it, a method left out, nothing twice, and a page with its picture."""
    page, rows = tmp_path / "page.md", tmp_path / "rows.jsonl"
    page.write_text("above\n<!-- rows -->\nold\n<!-- end -->\nbelow\n")
    line = [
        sys.executable,
        str(ROOT / "experiments" / "smollm2.py"),
        "--model=tiny",
        "--tasks",
        "countdown",
        "--methods",
        "grpo",
    ]
    line += [
        "gigpo",
        "--seeds",
        "0",
        f"--runs={tmp_path / 'runs'}",
        f"--rows={rows}",
        f"--write={page}",
        "--set",
        *SMALL,
    ]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    first, second = (subprocess.run(line, capture_output=True, text=True, env=surroundings) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "countdown, gigpo: skipped" in first.stdout and first.stdout.count("$ turnwise train") == 2
    assert second.stdout.count("$ turnwise train") == 0
    [kept] = [json.loads(text) for text in rows.read_text().splitlines()]
    assert kept["curve"][0][0] == 0 and kept["curve"][-1][0] == 2
    assert kept["settings"]["model"] == "tiny" and kept["settings"]["cold-steps"] == "2"
    assert "| countdown, tried 1 | grpo | 1 | 2 |" in page.read_text() and page.read_text().endswith("below\n")
    assert page.with_suffix(".png").stat().st_size > 1000
    assert not list((tmp_path / "runs").glob("*/checkpoints")) and len(list((tmp_path / "runs").glob("*/initial"))) == 1
