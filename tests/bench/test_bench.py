"""The benchmarks: their arithmetic by hand, their engines on a very small setup, and failures that appear in the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turnwise.bench import generation, hardware_limits, learning, report, step_worker, table, training_step
from turnwise.bench import models as shapes
from turnwise.bench.report import BenchRow
from turnwise.cli.main import main
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.models.tiny import tiny_tokenizer

ROOT = Path(__file__).parent.parent.parent
SETUP = replace(
    shapes.setup_for("cpu"),
    shape={**shapes.SMALL, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8},
    batches=(2, 3),
    prompt=8,
    new=6,
    learn=(8, 8),
    repeats=1,
)


# ---------------------------------------------------------------------- arithmetic


def test_more_tokens_or_fewer_seconds_are_better():
    fast, slow = BenchRow("p", "l", "a", 30.0, "tok/s"), BenchRow("p", "l", "b", 10.0, "tok/s")
    assert report.better(fast, slow) == 3.0
    assert report.better(BenchRow("p", "l", "a", 2.0, "s"), BenchRow("p", "l", "b", 6.0, "s")) == 3.0
    assert report.better(BenchRow("p", "l", "a", None, "s"), slow) is None
    assert [r.times for r in report.with_ratio_to([fast, slow], "b")] == [3.0, None]
    assert [r.times for r in report.with_ratio_to([fast, slow], "absent")] == [None, None]


def test_the_limit_is_memory_or_compute_bound():
    model = shapes.llama({**shapes.SMALL, "num_hidden_layers": 2})
    n = shapes.parameters(model)
    token = 2 * 4 * 2 * 2 * 32  # keys and values, four bytes, two layers, two heads of 32
    reads = 4 * n + 8 * token * (10 + 6 / 2)
    assert hardware_limits.HardwareLimits(1e3, 1e30).generation(model, 8, 10, 6, 4) == pytest.approx(8 / (reads / 1e3))
    assert hardware_limits.HardwareLimits(1e30, 1e3).generation(model, 8, 10, 6, 4) == pytest.approx(1e3 / (2 * n))
    assert hardware_limits.HardwareLimits(1.0, 6e9).learning(model) == pytest.approx(1e9 / n)


def test_small_and_large_are_the_models_they_say():
    assert shapes.parameters(shapes.small()) == 853_120
    assert shapes.SMOL["num_hidden_layers"] == 30 and shapes.setup_for("cuda").step == (64, 8, 256)
    assert shapes.setup_for("cpu", quick=True).repeats < shapes.setup_for("cpu").repeats


def test_workloads_have_the_stated_sizes():
    load = generation.equal(3, 5, 7, seed=1)
    assert load.tokens == 21 and [len(p) for p in load.prompts] == [5] * 3
    assert load.prompts != generation.equal(3, 5, 7, seed=2).prompts  # no prefix cache may help
    by_name = {load.name: load for load in generation.standard()}
    assert by_name["dialogue"].tokens == 64 * 4 * 24 and len(by_name["ragged"].prompts) == 256


def test_a_table_in_markdown_and_json():
    made = [
        BenchRow("generation", "batch 2", "turnwise", 12_345.6, "tok/s", 2.0, 0.5),
        BenchRow("step", "", "TRL", None, "s"),
    ]
    text = report.markdown("a machine", made)
    assert "| 12,346 tok/s | 2.00 | 50.0% |" in text and "| TRL | – |" in text
    assert json.loads(report.as_json({"machine": "m"}, made))["rows"][0]["times"] == 2.0


# ------------------------------------------------------------------------- engines


def test_engines_alternate_and_the_first_round_warms_up():
    calls: list[str] = []
    engines = {name: lambda load, name=name: calls.append(name) for name in ("a", "b")}
    rates, _ = generation.measure(engines, lambda n: generation.equal(2, 2, 2), 2)
    assert calls == ["a", "b"] * 3 and set(rates) == {"a", "b"}


def test_both_generators_sample_the_same_number():
    net = SETUP.model()
    generator = LocalGenerator(net, slots=3, context=64, stop_ids=())
    load = generation.ragged(3, vocabulary=512)
    load = replace(load, new_tokens=[[2], [5], [3]], prompts=[p[:8] for p in load.prompts])
    done = generation.local(generator)(load)
    assert [len(c.tokens) for c in done] == [2, 5, 3]
    generation.stock(net, 2)(load)
    gap = generation.mismatch(SETUP, load.prompts, done)
    assert gap["mean"] <= gap["p999"] <= gap["largest"] < 1e-5


@pytest.mark.slow
def test_rows_of_generation_and_learning():
    limits = hardware_limits.HardwareLimits(1e9, 1e9)
    made = generation.rows(SETUP, limits, 1)
    assert {r.who for r in made} == {"turnwise", "transformers.generate", "limit of the machine"}
    assert all(r.value and r.value > 0 for r in made) and all(r.times for r in made if r.who == "turnwise")
    made = learning.rows(SETUP, limits, 1)
    assert [r.who for r in made][:3] == ["turnwise", "plain step", "turnwise, prompts shared by 8"]
    assert all(r.part == "learning" and r.of_limit for r in made)


@pytest.mark.parametrize("shared", [False, True])
def test_siblings_share_a_prompt_or_do_not(shared):
    batch = learning.batch_of(16, 10, 512, shared)
    heads = {tuple(batch.sequences.ids[a : a + 5].tolist()) for a in batch.sequences.start[:-1].tolist()}
    assert len(heads) == (2 if shared else 16)
    found = learning.ours(replace(SETUP, learn=(16, 10)), shared)()
    assert found["skipped"] == 0 and found["grad_norm"] > 0


# --------------------------------------------------------------------- whole steps


def test_tool_replies_are_not_counted():
    assert step_worker.sampled([1, 2, 8, 5, 5, 9, 3], 8, 9) == 3


def test_a_widened_tokenizer_encodes_alike_and_decodes_every_row():
    plain = tiny_tokenizer(step_worker.corpus(), 512)
    wide = step_worker.widened(plain, 600)
    text = "<|user|>12+34=?<|end|>"
    assert len(wide) == 600 and wide.encode(text) == plain.encode(text)
    assert wide.decode([599]) == "w00599"


def test_medians_and_highest_memory():
    one = {"seconds": 1.0, "tokens": 4.0, "turns": 1.0, "tool_calls": 0.0, "peak_mb": 5.0, "device_gb": 0.0}
    found = training_step.summary([one, {**one, "seconds": 3.0, "peak_mb": 9.0}, {**one, "seconds": 2.0}])
    assert (found["seconds"], found["fastest"], found["slowest"], found["peak_mb"]) == (2.0, 1.0, 3.0, 9.0)


def test_missing_packages_are_noted(monkeypatch):
    mine = {"seconds": 1.0, "fastest": 1.0, "slowest": 1.0, "tokens": 2048.0, "peak_mb": 5.0, "device_gb": 0.0}
    monkeypatch.setattr(training_step, "compare", lambda *a: {"turnwise": mine})
    made = training_step.rows("single", "cpu", None, 1, 1)
    assert [r.note for r in made if r.who == "TRL"] == ["not installed"] * 2
    assert made[0].value == 1.0


def test_the_worker_imports_turnwise_lazily():
    code = f"import runpy, sys; runpy.run_path({step_worker.__file__!r}); print('turnwise' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_one_real_step():
    found = training_step.compare("single", "cpu", None, 1, 1)
    assert found["turnwise"]["tokens"] == 64 * 32 and found["turnwise"]["seconds"] > 0


# ----------------------------------------------------------------------- the table


def test_a_failed_part_leaves_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(table, "setup_for", lambda *_: SETUP)
    monkeypatch.setattr(table.learning, "rows", lambda *_: 1 / 0)
    facts, made = table.measure("cpu", True, parts=("learning", "generation"), report_progress=lambda text: None)
    assert any("ZeroDivisionError" in r.note for r in made) and any(r.part == "generation" for r in made)
    assert facts["torch"] == torch.__version__ and "parameters" in table.title(facts)


def test_the_command(monkeypatch, tmp_path, capsys):
    facts = {
        "machine": "a machine", "parameters": 1e6, "dtype": "float32", "copy_bytes_per_second": 1e9,
        "matrix_flops_per_second": 1e12,
    }  # fmt: skip
    monkeypatch.setattr(
        table, "measure", lambda *_: (facts, [BenchRow("generation", "batch 2", "turnwise", 5.0, "tok/s")])
    )
    assert main(["bench", "--quick", "--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "a.md")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["rows"] and "| turnwise |" in (tmp_path / "a.md").read_text()
    assert "a machine" in capsys.readouterr().out


def test_mistakes_are_explained(capsys):
    assert main(["bench", "--parts", "generatoin"]) == 2
    assert "did you mean 'generation'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "--device", "cuda"]) == 2
        assert "no usable GPU" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("script", ["generation", "logprob_memory", "training_step", "gpu"])
def test_scripts_are_thin_and_start(script):
    path = ROOT / "benchmarks" / f"{script}.py"
    assert len(path.read_text().splitlines()) < 100
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, check=True)
    assert re.search(r"usage: ", done.stdout)
