"""The sweep of methods: shards, rows that are kept, and what a page says of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from turnwise import recipes
from turnwise.recipes.experience import SLOTS

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import method_acts

ENVS = ["lookup", "prompts"]


def row(name, env, verdict, **more):
    cell = {"kind": "method", "name": name, "env": env, "verdict": verdict}
    return {"commit": "c0ffee", "versions": {"python": "3"}, **cell, **more}


def test_shards_are_all_cells_once():
    everything = method_acts.cells(set(), set(), ENVS)
    shards = [everything[part::5] for part in range(5)]
    assert sorted(cell for shard in shards for cell in shard) == sorted(everything)
    assert len(everything) == len({*everything}) == 2 * (len(recipes.METHODS) + sum(map(len, SLOTS.values())))
    assert method_acts.cells({"method"}, {"arpo"}, ENVS) == [("method", "arpo", "lookup"), ("method", "arpo", "prompts")]


def test_the_newest_row_of_a_cell_counts_and_is_kept(tmp_path, monkeypatch):
    kept, rows = tmp_path / "kept.jsonl", tmp_path / "rows.jsonl"
    monkeypatch.setattr(method_acts, "RECORDED", kept)
    lines = [
        row("arpo", "lookup", "died", why="it fell"),
        row("arpo", "lookup", "acted", acted={"strategy": 0.4}, warnings={"later": ["long"]}),
        row("arpo", "prompts", "refused", why="one turn"),
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = method_acts.recorded(rows)
    assert found["method", "arpo", "lookup"]["verdict"] == "acted"
    method_acts.record(found)
    (line,) = map(json.loads, kept.read_text().splitlines())
    assert line["cells"] == {
        "lookup": {"verdict": "acted", "acted": {"strategy": 0.4}}, "prompts": {"verdict": "refused", "why": "one turn"},
    }  # fmt: skip
    assert "| method arpo | acted | refused | strategy 0.4 |" in method_acts.table(found)
    method_acts.record({("method", "dapo", "nim"): row("dapo", "nim", "plain")})
    assert [json.loads(text)["name"] for text in kept.read_text().splitlines()] == ["arpo", "dapo"]


def test_a_cell_that_no_process_survives_is_a_row(tmp_path):
    """The folder of the start is a file, so that every process ends with a traceback."""
    (tmp_path / "process-0").write_text("in the way")
    ((cell, result),) = method_acts.play_all([("method", "grpo", "lookup")], tmp_path, 1, float("inf"))
    assert cell == ("method", "grpo", "lookup") and result["verdict"] == "died" and "ended with 1" in result["why"]
