"""Checkpoints: exact, atomic, checked; full disks and damaged files; the run directory."""

import errno
import json
import os
import random
import subprocess

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from turnwise.cli.main import main
from turnwise.errors import SettingError, StoreError
from turnwise.store import checkpoint as module
from turnwise.store import rundir
from turnwise.store.atomic import atomic_write
from turnwise.store.checkpoint import checkpoints, discard_after, latest, load_checkpoint, save_checkpoint, save_model
from turnwise.store.rundir import RunDir, runs


def save(directory, step, **options):
    return save_checkpoint(directory, step, {"w": torch.full((4,), float(step))}, {"step": step}, **options)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_an_optimiser_and_every_random_state_come_back_exactly(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    tensors = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "half": torch.ones(2).bfloat16()}
    state = {
        "python": random.getstate(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "torch": torch.get_rng_state(),
        "odd": {1: (2, None), "$tensor": float("inf"), "array": np.eye(2)},
    }
    save_checkpoint(tmp_path, 7, tensors, state)
    back = load_checkpoint(tmp_path)
    assert back.step == 7 and back.state["python"] == random.getstate()
    assert back.state["numpy"] == state["numpy"] and torch.equal(back.state["torch"], state["torch"])
    assert back.state["odd"][1] == (2, None) and back.state["odd"]["$tensor"] == float("inf")
    assert np.array_equal(back.state["odd"]["array"], np.eye(2))
    assert back.tensors["half"].dtype == torch.bfloat16
    other = torch.optim.AdamW(model.parameters(), lr=1.0)
    other.load_state_dict(back.tensors["optimiser"])
    assert other.param_groups[0]["lr"] == 1e-3
    assert torch.equal(other.state[model.weight]["exp_avg"], optimiser.state[model.weight]["exp_avg"])


def test_tied_transposed_and_clashing_tensors(tmp_path):
    w = torch.arange(6.0).reshape(2, 3)
    save_checkpoint(tmp_path, 0, {"a": w, "tied": w, "t": w.T, "x.y": w + 1, "x": {"y": w + 2}}, {})
    back = load_checkpoint(tmp_path).tensors
    assert torch.equal(back["tied"], w) and torch.equal(back["t"], w.T)
    assert torch.equal(back["x.y"], w + 1) and torch.equal(back["x"]["y"], w + 2)


def test_what_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"a checkpoint cannot hold a set \(at 'state.sampler'\)"):
        save_checkpoint(tmp_path, 0, {}, {"sampler": {1}})
    assert checkpoints(tmp_path) == []


def test_the_last_few_are_kept(tmp_path):
    for step in range(5):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert load_checkpoint(tmp_path / "step-00000003").tensors["w"][0] == 3
    with pytest.raises(StoreError):
        save(tmp_path, 5, keep=0)


def test_the_same_step_again_replaces_without_a_gap(tmp_path):
    save(tmp_path, 3)
    save_checkpoint(tmp_path, 3, {}, {"second": True})
    assert names(tmp_path) == ["step-00000003.1"]
    assert load_checkpoint(tmp_path).state == {"second": True}


def test_damaged_ones_are_skipped_with_a_warning(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    data = (tmp_path / "step-00000004" / "tensors.safetensors").read_bytes()
    (tmp_path / "step-00000004" / "tensors.safetensors").write_bytes(data[:-1] + b"\xff")
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "state.json").unlink()
    (tmp_path / ".step-00000009.1.tmp").mkdir()  # a killed writer's
    with pytest.warns(UserWarning, match="checksum|manifest|has no file") as seen:
        assert load_checkpoint(tmp_path).step == 1
    assert len(seen) == 3
    with pytest.raises(StoreError, match="checksum"):
        load_checkpoint(tmp_path / "step-00000004")
    assert len(discard_after(tmp_path, 1)) == 3 and latest(tmp_path).name == "step-00000001"
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_going_back_leaves_no_later_checkpoint(tmp_path):
    for step in (1, 2, 9):
        save(tmp_path, step)
    save(tmp_path, 3, keep=1)  # 9 belongs to a past the run has left
    assert names(tmp_path) == ["step-00000003"]


def test_nothing_there(tmp_path):
    assert latest(tmp_path / "none") is None
    with pytest.raises(StoreError, match="no usable checkpoint"):
        load_checkpoint(tmp_path)
    save(tmp_path, 0)
    manifest = tmp_path / "step-00000000" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(StoreError, match="format 99"):
        load_checkpoint(tmp_path / "step-00000000")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError('Error while serializing: I/O error: Os { code: 28, message: "No space left on device" }'),
    ],
)
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, error):
    save(tmp_path, 1)

    def full(tensors, path):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(StoreError, match="no space left on the disk"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"] and load_checkpoint(tmp_path).step == 1


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB, where the machine lets us make one."""
    path = tmp_path / "small"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip("cannot mount a small file system here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_really_full_disk(small_disk):
    save(small_disk, 1)
    with pytest.raises(StoreError, match="no space left on the disk"):
        save_checkpoint(small_disk, 2, {"w": torch.zeros(1_000_000)}, {})
    assert names(small_disk) == ["step-00000001"] and load_checkpoint(small_disk).step == 1


def test_a_failing_export_leaves_nothing(tmp_path):
    def export(path):
        (path / "config.json").write_text("{}")
        raise RuntimeError("tokenizer")

    with pytest.raises(RuntimeError, match="tokenizer"):
        save(tmp_path, 1, model_export=export)
    assert names(tmp_path) == []
    save(tmp_path, 1, model_export=lambda path: (path / "config.json").write_text("{}"))
    (tmp_path / "step-00000001" / "model" / "config.json").write_text("!")
    with pytest.warns(UserWarning, match=r"model.config\.json"):
        assert latest(tmp_path) is None


def test_the_final_model_is_replaced_whole(tmp_path):
    target = tmp_path / "model"
    save_model(target, lambda path: (path / "a").write_text("1"))
    with pytest.raises(ZeroDivisionError):
        save_model(target, lambda path: 1 / 0)
    assert (target / "a").read_text() == "1"
    save_model(target, lambda path: (path / "b").write_text("2"))
    assert names(target) == ["b", "manifest.json"] and names(tmp_path) == ["model"]
    os.rename(target, tmp_path / ".model.old")  # killed between the two renames
    with pytest.raises(ZeroDivisionError):
        save_model(target, lambda path: 1 / 0)
    assert names(target) == ["b", "manifest.json"] and names(tmp_path) == ["model"]


# ------------------------------------------------------------ run directory


def test_a_run_directory(tmp_path):
    run = RunDir.create(tmp_path / "runs", "first", settings={"lr": 1e-3}, recipe="grpo", seed=3)
    metadata = RunDir.open(tmp_path / "runs" / "first").metadata()
    assert (metadata["settings"], metadata["recipe"], metadata["seed"]) == ({"lr": 1e-3}, "grpo", 3)
    assert metadata["format"] == rundir.FORMAT == 3
    assert metadata["versions"]["torch"] and run.ledger.name == "ledger.sqlite"
    run.write_summary({"success": 0.5})
    assert json.loads(run.summary.read_text()) == {"success": 0.5}
    assert [each.path.name for each in runs(tmp_path / "runs")] == ["first"]
    assert names(tmp_path / "runs") == ["first"] and runs(tmp_path / "none") == []


def test_a_run_is_never_overwritten(tmp_path):
    RunDir.create(tmp_path, "first")
    with pytest.raises(StoreError, match="already exists"):
        RunDir.create(tmp_path, "first")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    with pytest.raises(StoreError, match="already exists"):
        RunDir.create(tmp_path, "notes")
    with pytest.raises(StoreError, match="already exists"), atomic_write(tmp_path / "first", replace=False) as path:
        path.mkdir()  # another process was faster
    for name in ("", "../up", ".hidden", "a/b"):
        with pytest.raises(SettingError):
            RunDir.create(tmp_path, name)


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path):
    RunDir.create(tmp_path, "calculator-grpo")
    with pytest.raises(StoreError, match="did you mean 'calculator-grpo'"):
        RunDir.open(tmp_path / "calculator-grop")
    (tmp_path / "calculator-grpo" / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"cannot be read: .*; copy the run again"):
        RunDir.open(tmp_path / "calculator-grpo").metadata()
    for foreign in ("{}", "[1, 2]", "null"):
        (tmp_path / "calculator-grpo" / "run.json").write_text(foreign)
        with pytest.raises(StoreError, match="calculator-grpo is no run of Turnwise"):
            RunDir.open(tmp_path / "calculator-grpo")


@pytest.mark.parametrize(
    ("number", "writer"),
    [
        (
            None,
            r"written by Turnwise 0\.1 \(run format 1\); this release reads format 3\. .* turnwise 0\.1, or start a new run",
        ),
        (1, r"written by Turnwise 0\.1 \(run format 1\)"),
        (4, r"written by a newer release of Turnwise \(run format 4\); this release reads format 3"),
        (0, r"an unknown release of Turnwise \(run format 0\)"),
        ("two", r"an unknown release of Turnwise \(run format two\)"),
    ],
)
def test_a_run_of_another_format_is_refused(tmp_path, number, writer):
    run = RunDir.create(tmp_path, "old")
    metadata = run.metadata()
    assert metadata.pop("format") == 3
    if number is not None:
        metadata["format"] = number
    run.settings.write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match=writer):
        RunDir.open(run.path)
    assert [each.path.name for each in runs(tmp_path)] == ["old"]  # still listed, and its name still taken


@pytest.mark.parametrize("command", [["resume"], ["eval"], ["export", "rows.jsonl"]])
def test_every_command_refuses_a_run_of_another_format(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(tmp_path / "runs", "old")
    metadata = run.metadata()
    del metadata["format"]
    run.settings.write_text(json.dumps(metadata))
    assert main([command[0], str(run.path), *command[1:]]) == 2
    assert "was written by Turnwise 0.1 (run format 1)" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()
