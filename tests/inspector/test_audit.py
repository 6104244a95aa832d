"""Audit of dumped batches: silent about what agrees, a number for what deviates. TRL's own loss where TRL is installed."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from turnwise.cli.main import main
from turnwise.errors import SettingError
from turnwise.inspector.audit import trl, verl
from turnwise.inspector.audit.report import AGREES, audit_batch, read_batch, recipe_gradient, synthetic_batch
from turnwise.integrations import compat


def dump(path, batch, **more):
    names = ("logp", "old_logp", "mask", "advantages", "reference")
    np.savez(path, **{name: getattr(batch, name).numpy() for name in names}, **more)
    return path


@pytest.fixture
def batch():
    return synthetic_batch(3)


def test_what_agrees_is_not_printed(tmp_path, batch):
    loss, gradient = recipe_gradient("grpo", batch)
    report = audit_batch(dump(tmp_path / "b.npz", batch, loss=loss, gradient=gradient.numpy()), "grpo")
    assert report.checks >= 4 and report.deviations == () and "0 deviations" in report.text()


def test_a_wrong_normaliser_is_named_with_its_factor(tmp_path, batch):
    loss, gradient = recipe_gradient("grpo", batch)
    report = audit_batch(dump(tmp_path / "b.npz", batch, loss=2 * loss, gradient=2 * gradient.numpy()), "grpo")
    found = {d.check: d.size for d in report.deviations}
    assert found["normaliser"] == pytest.approx(1.0) and found["loss"] == pytest.approx(1.0) and "mask" not in found


def test_a_gradient_outside_the_mask_is_named(tmp_path, batch):
    _, gradient = recipe_gradient("grpo", batch)
    wrong = torch.where(batch.mask, gradient, gradient.abs().max() / 2)
    report = audit_batch(dump(tmp_path / "b.npz", batch, gradient=wrong.numpy()), "grpo")
    assert {d.check: d.size for d in report.deviations}["mask"] == pytest.approx(0.5)


def test_a_baseline_without_a_dropped_sibling_is_named(tmp_path, batch):
    reward, group = np.array([1.0, 0, 0, 1, 1, 0]), np.array([0, 0, 0, 1, 1, 1])
    alone = reward - np.array([0.5, 0.5, 0.5, 2 / 3, 2 / 3, 2 / 3])  # the baseline of group 0 ignores its third row
    report = audit_batch(dump(tmp_path / "b.npz", batch, reward=reward, group=group), "dr_grpo")
    wrong = {d.check for d in report.deviations}
    assert "baseline" in wrong
    values = {"logp": batch.logp.tolist(), "old_logp": batch.old_logp.tolist(), "mask": batch.mask.tolist()}
    file = tmp_path / "b.json"
    file.write_text(
        json.dumps({**values, "advantages": alone.tolist(), "reward": reward.tolist(), "group": group.tolist()})
    )
    report = audit_batch(file, "dr_grpo")
    assert {d.check: d.size for d in report.deviations}["baseline"] == pytest.approx(0.25)


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(SettingError, match="no file"):
        read_batch(tmp_path / "missing.npz")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(SettingError, match="lacks logp"):
        read_batch(tmp_path / "b.json")
    (tmp_path / "b.npz").write_text("nonsense")
    with pytest.raises(SettingError, match="cannot be read"):
        read_batch(tmp_path / "b.npz")


# ------------------------------------------------------------------------ TRL


def whole_examples(examples, length, strategy):
    return [[tuple(example)] for example in examples]


def one_stream(examples, length, strategy):
    """Rows of equal length from the joined examples, without boundaries."""
    joined = [token for example in examples for token in example]
    return [[tuple(joined[a : a + length])] for a in range(0, len(joined), length)]


def test_packing_is_named_only_where_tokens_are_lost_or_see_another_example():
    assert not [d for d in trl._packing(whole_examples) if d.size > AGREES]
    found = {d.check: d.size for d in trl._packing(one_stream) if d.size > AGREES}
    assert found == {"packing, context": pytest.approx(12 / 22)}  # 8 (two cut) + 3 + 5 + 2 + 4 tokens, rows of 6
    found = {
        d.check: d.size for d in trl._packing(lambda e, *_: whole_examples(e[1:], 6, "")) if d.size > AGREES
    }
    assert found == {"packing, lost": pytest.approx(8 / 22)}


def test_a_baseline_with_a_dropped_sibling_is_named():
    def with_everyone(reward, scale, cut=None, unscored=None):
        groups = reward.view(-1, 3)
        centred = groups - groups.mean(1, keepdim=True)
        return (centred / (groups.std(1, keepdim=True) + 1e-6) if scale == "group" else centred).flatten()

    found = {d.subject: d.size for d in trl._advantages(with_everyone) if d.size > AGREES}
    assert set(found) == {"mask_truncated_completions", "no reward"}
    assert found["no reward"] == pytest.approx((0.5 - 5 / 12) / 0.5)  # the mean of 1 and 0, with and without 0.25


def test_without_trl_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert main(["audit", "trl"]) == 2
    assert "pip install 'turnwise-rl[trl]'" in capsys.readouterr().err


@pytest.mark.slow
def test_trl_deviates_where_it_is_known_to_and_nowhere_else():
    pytest.importorskip("trl", reason="TRL is not installed")
    found = {(d.check, d.subject): d.size for d in trl.audit_trl().deviations}
    assert found["micro-batch dependence", "bnpo, equal parts"] == pytest.approx(0.155, abs=1e-3)
    assert found["micro-batch dependence", "grpo, parts of 4 and 2"] == pytest.approx(0.5)
    assert found["micro-batch dependence", "dapo with top_entropy_quantile, equal parts"] > 0.1
    assert found["KL times ratio", "grpo, use_bias_correction_kl"] > 0.01
    assert found["packing, lost", "bfd"] == pytest.approx(2 / 22)
    assert found["packing, context", "wrapped"] == pytest.approx(12 / 22)
    assert found["baseline of dropped siblings", "mask_truncated_completions"] == pytest.approx(1 / 6)
    assert found["normaliser of an update", "dapo, two updates a generation"] > 0.1
    assert not [key for key in found if key[0] in ("mask", "padding", "ratio at step 0")]
    assert [subject for check, subject in found if check == "loss"] == [
        "cispo, token ratio, epsilon_high = 0.2, against cispo"
    ]
    assert ("micro-batch dependence", "dapo, parts of 4 and 2") not in found and min(found.values()) > AGREES


# ----------------------------------------------------------------------- verl


def exact(parts, loss, mode="", **_):
    """A trainer without deviations: gradients of a clipped objective, averaged over all tokens of the step."""
    whole = [parts[0]] if len(parts) == 1 else parts
    tokens = sum(int(part.mask.sum()) for part in whole)
    gradients = [-part.advantages[:, None] * part.mask / tokens for part in whole]
    return 0.0, torch.cat(gradients)


def by_part(parts, loss, mode="", **_):
    """Averages over each part, and over its padding."""
    return 0.0, torch.cat([-part.advantages[:, None] * part.mask / part.mask.numel() for part in parts])


def test_cutting_and_padding_are_named_only_where_they_matter():
    agreed = list(verl._cut_and_padded(exact))
    assert len(agreed) > 20 and max(d.size for d in agreed) < AGREES
    found = {d.check for d in verl._cut_and_padded(by_part) if d.size > AGREES}
    assert found == {"micro-batch dependence", "padding", "empty row"}
    agreed = list(trl._cut_and_padded(exact))
    assert len(agreed) > 40 and max(d.size for d in agreed) < AGREES
    assert {d.check for d in trl._cut_and_padded(by_part) if d.size > AGREES} == found


def test_without_verl_one_line_says_what_to_install(monkeypatch, capsys):
    def absent():
        raise ImportError("turnwise.integrations.verl needs verl (No module named 'verl')")

    monkeypatch.setattr(compat, "verl_algorithms", absent)
    assert main(["audit", "verl"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No module named 'verl'" in said and "pip install 'turnwise-rl[verl]'" in said


@pytest.mark.slow
def test_verl_deviates_where_it_is_known_to_and_nowhere_else():
    pytest.importorskip("verl", reason="verl is not installed")
    found = {(d.check, d.subject): d.size for d in verl.audit_verl().deviations}
    assert found[("micro-batch dependence", "geo_mean, token-mean")] > 0.1
    assert found[("padding", "vanilla, seq-mean-token-sum-norm")] == pytest.approx(0.5)
    assert found[("advantage", "grpo against grpo, a group of one")] > 0.1
    assert not [subject for check, subject in found if check == "mask" or (check == "KL" and subject.startswith("k3,"))]
    assert not [subject for check, subject in found if check == "loss" and "gspo with token-mean" not in subject]
