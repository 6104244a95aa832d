"""The commands of the inspector on really trained tiny runs: output, JSON alone on standard output, exit status, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import finished_runs

from turnwise.cli.main import main
from turnwise.inspector.audit.report import synthetic_batch
from turnwise.inspector.page.views.table import OTHER_PAGES, VIEWS

SMALL = {  # of the sweep
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 2,
    "groups": 2, "group_size": 3, "max_tokens": 12, "context": 160, "eval_tasks": 4, "checkpoint_every": 1, "keep_checkpoints": 3,
    "trackers": (), "threads": 1, "keep_tokens": 5,
}  # fmt: skip
FLAGS = [
    word for name, value in SMALL.items() if name not in ("difficulty", "trackers", "steps")
    for word in (f"--{name.replace('_', '-')}", str(value))
]  # fmt: skip

pytestmark = pytest.mark.slow(tier="test")


def printed(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", list(VIEWS))
def test_view_prints_each_view_as_json(finished, name, capsys):
    assert main(["view", str(finished("grpo")), "--json", "--view", name]) == 0
    assert printed(capsys)["blocks"]


def test_the_help_of_view_lists_every_view(capsys):
    with pytest.raises(SystemExit):
        main(["view", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in (*VIEWS, *OTHER_PAGES) if f"{name}," not in shown and f"{name} [" not in shown] == []


def test_view_exports_one_file_and_refuses_nonsense(finished, tmp_path, capsys):
    assert main(["view", str(finished("grpo")), "--export", str(tmp_path / "page.html")]) == 0
    assert "<style>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["view", str(finished("grpo")), "--json", "--view", "overvew"]) == 2
    assert main(["view", str(finished("grpo")), "--json", "--view", "step", "--step", "three"]) == 2
    assert main(["view", str(tmp_path / "nowhere"), "--json"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_doctor_speaks_and_its_status_follows(finished, capsys):
    status = main(["doctor", str(finished("grpo")), "--json"])
    diagnosis = printed(capsys)
    assert diagnosis["steps"] == finished_runs.SMALL["steps"] and status == (0 if diagnosis["ok"] else 1)
    assert main(["doctor", str(finished("grpo"))]) == status and capsys.readouterr().out.strip()
    assert main(["doctor", str(finished("grpo") / "missing")]) == 2


def test_replay_repeats_a_step(finished, capsys):
    assert main(["replay", str(finished("grpo")), "--step", "2", "--json"]) == 0
    assert printed(capsys)
    assert main(["replay", str(finished("grpo")), "--step", "99"]) == 2


@pytest.mark.slow
def test_bisect_finds_no_difference_in_a_run_and_one_between_seeds(finished, capsys):
    assert main(["bisect", str(finished("grpo")), str(finished("grpo"))]) == 0
    assert main(["bisect", str(finished("grpo")), str(finished("grpo1"))]) == 1
    assert "step" in capsys.readouterr().out


def test_compare_reads_really_trained_runs(finished, tmp_path, capsys):
    paths = [str(finished(name)) for name in ("grpo", "grpo1", "dr_grpo", "dr_grpo1")]
    assert main(["compare", *paths, "--json"]) == 0
    assert {label: sorted(seeds) for label, seeds in printed(capsys)["values"].items()} == {
        "grpo": ["0", "1"], "dr_grpo": ["0", "1"],
    }  # fmt: skip
    assert main(["compare", *paths]) == 0
    assert "cannot tell" in capsys.readouterr().out  # two seeds of four tasks decide nothing
    assert main(["compare", paths[0], "gspo"]) == 2


@pytest.mark.thorough
def test_sweep_trains_a_grid_and_refuses_an_unknown_setting(tmp_path, capsys):
    words = ["sweep", "dr_grpo", "--grid", "lr=1e-4,1e-3", "--seeds", "2", "--minutes", "9", "--steps", "1"]
    assert main([*words, *FLAGS, "--out", str(tmp_path), "--json"]) == 0
    assert "lr=1e-4" in capsys.readouterr().out
    assert main(["sweep", "dr_grpo", "--grid", "learning-rate=1,2"]) == 2
    assert "lr" in capsys.readouterr().err


@pytest.mark.thorough
def test_compare_names_equal_updates_shares_the_cold_start_and_ends_in_time(tmp_path, capsys):
    """rloo and dr_grpo differ by a factor; a run from the start of another arm is the run that makes its own, bit for bit."""
    (tmp_path / "length.py").write_text(
        "def length(completion: str) -> float:\n    return len(str(completion)) % 7 / 7\n"
    )
    common = [*FLAGS, "--steps", "2", "--out", str(tmp_path), "--reward", f"{tmp_path}/length.py:length"]
    assert main(["compare", "dr_grpo", "rloo", *common, "--minutes", "9", "--name", "same", "--json"]) == 0
    report = printed(capsys)
    assert [pair["same"] for pair in report["likenesses"]] == [True] and "values" not in report
    assert (
        main(["compare", "dr_grpo", "reinforce", *common, "--minutes", "9", "--seeds", "2", "--name", "c", "--json"])
        == 0
    )
    assert {label: len(seeds) for label, seeds in printed(capsys)["values"].items()} == {"dr_grpo": 2, "reinforce": 2}
    assert main(["train", "reinforce", *common, "--seed", "1", "--name", "alone"]) == 0
    alone, shared = (load_file(tmp_path / name / "model/model.safetensors") for name in ("alone", "c/variant1-seed1"))
    assert all(torch.equal(alone[name], shared[name]) for name in alone)
    assert (tmp_path / "c/variant1-seed1/initial/model.safetensors").stat().st_nlink > 1
    capsys.readouterr()
    assert main(["compare", "dr_grpo", "reinforce", *FLAGS, "--out", str(tmp_path), "--minutes", "0.02"]) == 0
    assert "cannot tell: the minutes are used up" in capsys.readouterr().out


def test_audit_reads_a_batch_and_names_what_is_missing(tmp_path, capsys):
    batch = synthetic_batch()
    names = ("logp", "old_logp", "mask", "advantages")
    np.savez(tmp_path / "b.npz", **{name: getattr(batch, name).numpy() for name in names}, loss=99.0)
    assert main(["audit", str(tmp_path / "b.npz"), "--method", "dr_grpo", "--json"]) == 0
    assert [d["check"] for d in printed(capsys)["deviations"]] == ["loss"]
    assert main(["audit", str(tmp_path / "missing.npz")]) == 2
    assert main(["audit", str(tmp_path / "b.npz"), "--method", "grpoo"]) == 2
