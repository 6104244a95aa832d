"""Pairs of samplers, budgets, strategies, guidance and replay: their machinery, on a few of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turnwise.recipes import experience

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import experience_pairs


def test_every_name_of_every_slot_is_in_a_pair_and_can_be_built():
    names = {name for pair in experience_pairs.all_pairs() for name in pair}
    assert names == {f"{slot}/{name}" for slot, pieces in experience.SLOTS.items() for name in pieces if name != "none"}
    for name in names:
        experience.piece(name.split("/")[0], experience_pairs.spec(name, "folder"))


@pytest.mark.slow
def test_a_pair_runs_and_one_that_cannot_is_refused_with_the_reason(monkeypatch):
    assert experience_pairs.run_names(("sampler/vade", "replay/spear")) == ("ok", "")
    monkeypatch.setitem(experience_pairs.SMALL, "env", "nim")
    result, why = experience_pairs.run_names(("sampler/vade", "guidance/guide"))
    assert result == "refused" and "hint" in why


def test_a_run_covers_as_many_pairs_as_it_can_and_a_failed_one_is_tried_alone(tmp_path, monkeypatch):
    tried = []
    bad = {"guidance/ghpo", "replay/spear"}

    def run(names):
        tried.append(names)
        return ("refused", "no") if bad <= set(names) else ("ok", "")

    monkeypatch.setattr(experience_pairs, "run_names", run)
    pairs = experience_pairs.all_pairs()
    experience_pairs.cover(pairs, {}, tmp_path / "rows.jsonl", float("inf"))
    rows = experience_pairs.read(tmp_path / "rows.jsonl")
    assert set(rows) == set(pairs) and {pair for pair, row in rows.items() if row[0] == "refused"} == {
        tuple(sorted(bad))
    }
    assert len(tried) < len(pairs) / 3


def test_what_is_not_finite_or_failed_is_a_failure():
    row = {"reward": 0.5, "grad_norm": 1.0}
    assert experience_pairs.verdict([row, row], "") == ("ok", "")
    assert experience_pairs.verdict([row], "")[0] == "FAILED"
    assert "grad_norm" in experience_pairs.verdict([row, {**row, "grad_norm": float("nan")}], "")[1]
    assert experience_pairs.verdict([row, row], "3 episodes failed and were not trained on")[0] == "FAILED"


def test_the_page_counts_pairs_and_lists_what_did_not_run(tmp_path):
    first, second, third = experience_pairs.all_pairs()[:3]
    keep = tmp_path / "rows.jsonl"
    keep.write_text("\n".join(f'["{a}", "{b}", {rest}]' for (a, b), rest in (
        (first, '"FAILED", "x"'), (first, '"ok", ""'), (second, '"refused", "needs hints"'), (third, '"FAILED", "y"')
    )))  # fmt: skip
    text = experience_pairs.section(experience_pairs.read(keep))
    assert "| tried | 3 |" in text and "| run | 1 |" in text and "| failed | 1 |" in text
    assert (
        f"| needs hints | `{second[0]}` + `{second[1]}` |" in text
        and "| FAILED: y |" in text
        and "not tried yet" in text
    )
