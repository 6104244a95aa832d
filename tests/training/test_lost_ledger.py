"""A run whose ledger is gone, and whose checkpoints are not: refused, unless its user says that it shall go on without."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from turnwise.cli.main import main
from turnwise.errors import SettingError
from turnwise.observe.trackers import read_rows
from turnwise.store.ledger import SqliteLedger
from turnwise.store.lost_ledger import begin_ledger, ledger_since
from turnwise.store.rundir import RunDir
from turnwise.training import api

SMALL = {
    "env": "tests.support.judged:Unpaid", "hidden": 32, "layers": 1, "vocabulary": 300, "cold_steps": 2, "cold_batch": 4,
    "groups": 2, "group_size": 4, "eval_tasks": 2, "checkpoint_every": 2, "trackers": (), "threads": 1, "schedule": "constant",
}  # fmt: skip


def train(tmp_path, name, steps):
    api.train(quiet=True, **SMALL, out=str(tmp_path), name=name, steps=steps)
    return RunDir.open(tmp_path / name)


def weights(run_dir):
    return load_file(run_dir.model / "model.safetensors")


@pytest.mark.slow
def test_a_run_goes_on_without_its_ledger_where_its_user_says_so(tmp_path, capsys):
    whole, run_dir = train(tmp_path, "whole", 6), train(tmp_path, "run", 4)
    run_dir.ledger.unlink()
    run_dir.ledger.with_name("ledger.sqlite-wal").write_bytes(b"of the lost ledger")
    argv = ["resume", str(run_dir.path), "--steps", "6"]
    assert main(argv) == 2
    assert f"go on without knowing: turnwise resume {run_dir.path} --new-ledger" in capsys.readouterr().err
    assert main([*argv, "--new-ledger"]) == 0
    assert "the ledger is a new one: which groups steps 1 to 4 trained on is unknown" in " ".join(
        capsys.readouterr().out.split()
    )
    mine, theirs = weights(run_dir), weights(whole)
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)
    with SqliteLedger(run_dir.ledger, readonly=True) as ledger:
        assert ledger.group_counts().trained == 4  # of steps 5 and 6
    assert [row["step"] for row in read_rows(run_dir.metrics) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert ledger_since(run_dir) == 4
    # from here on the new ledger is held to its checkpoints as any other
    assert main([*argv[:-1], "8"]) == 0
    assert main([*argv[:-1], "9", "--new-ledger"]) == 2
    assert "ledger.sqlite is there; leave --new-ledger out" in capsys.readouterr().err


def test_only_a_run_with_a_checkpoint_has_lost_something(tmp_path):
    with pytest.raises(SettingError, match="has no checkpoint, so nothing is lost"):
        begin_ledger(RunDir.create(tmp_path, "run"))


def test_a_kill_while_a_ledger_begins_is_no_second_loss(tmp_path):
    run_dir = RunDir.create(tmp_path, "run")
    for step in (2, 4):
        (run_dir.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    begin_ledger(run_dir)
    begin_ledger(run_dir)
    with SqliteLedger(run_dir.ledger) as ledger:
        assert ledger.digest(2) and ledger.digest(4) and not ledger.digest(3)
        assert ledger.resume(2).to_reissue == ()  # also where the newest checkpoint is damaged
