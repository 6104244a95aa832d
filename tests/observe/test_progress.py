"""Progress on a terminal and in a file, reports, transcripts, curves."""

import io
import json
import struct

import numpy as np
import pytest
import torch
from rich.console import Console

from turnwise.maths.statistics import wilson
from turnwise.observe.charts import curves, smooth
from turnwise.observe.numbers import format_duration
from turnwise.observe.progress import LivePanel, PlainLog, show_progress, sparkline
from turnwise.observe.report import comparison, table, transcript
from turnwise.observe.trackers import JsonLines


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)


def drive(listener, steps=5, **metrics):
    listener("stage", {"name": "reinforce", "total": steps})
    for step in range(steps):
        listener("step", {"stage": "reinforce", "step": step + 1, "total": steps, "success": step / steps, **metrics})
    listener("message", {"text": "saved [bold]model", "level": "info"})
    listener("message", {"text": "disk is nearly full", "level": "warning"})
    listener("end", {})


def test_the_plain_log_is_aligned():
    out = console(terminal=False)
    listener = show_progress(out, every_seconds=0.0)
    assert isinstance(listener, PlainLog)
    drive(listener, reward=0.25, tokens_per_second=1234.5, entropy=float("nan"))
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "== reinforce, 5 steps"
    PlainLog(out)("stage", {"name": "evaluate before", "total": 200, "of": "tasks"})
    assert "== evaluate before, 200 tasks" in out.file.getvalue()
    header, rows = lines[1], lines[2:7]
    assert header.split()[:3] == ["step", "success", "reward"]
    assert {len(row) for row in rows} == {len(header)}
    assert rows[0].split()[:5] == ["1/5", "0.0%", "0.250", "–", "–"] and "1,234" in rows[0]
    assert lines[7:] == ["saved [bold]model", "warning: disk is nearly full"]


def test_the_plain_log_has_a_sensible_rate():
    out = console(terminal=False)
    drive(PlainLog(out, every_steps=10, every_seconds=0.0), steps=45)
    rows = [line.split()[0] for line in out.file.getvalue().splitlines() if "/45" in line]
    assert rows == ["1/45", "10/45", "20/45", "30/45", "40/45", "45/45"]
    out = console(terminal=False)
    drive(PlainLog(out, every_seconds=60.0), steps=45)
    assert [line.split()[0] for line in out.file.getvalue().splitlines() if "/45" in line] == ["1/45", "45/45"]


def test_the_live_panel_shows_what_matters():
    out = console(terminal=True)
    listener = show_progress(out)
    assert isinstance(listener, LivePanel)
    drive(listener, metrics={"success": 0.6, "clip_share": 0.031, "turns": 2.5})
    shown = out.file.getvalue()
    for piece in ("reinforce", "5/5", "60.0%", "3.1%", "2.50", "–", "left", "saved [bold]model", "nearly full"):
        assert piece in shown, piece
    listener("end", {})  # twice is harmless


@pytest.mark.parametrize("terminal", [True, False])
def test_a_supervised_stage_shows_its_loss_and_no_empty_columns(terminal):
    out = console(terminal)
    listener = show_progress(out, every_seconds=0.0)
    listener("stage", {"name": "cold start", "total": 2})
    for step, loss in ((1, 2.5), (2, 0.125)):
        listener("step", {"stage": "cold start", "step": step, "total": 2, "loss": loss, "tokens_per_second": 2000.0})
    listener("end", {})
    shown = out.file.getvalue().rpartition("1/2")[2]  # a panel is drawn before anything is known of its stage
    assert "0.125" in shown and "2,000" in shown and "loss" in out.file.getvalue()
    assert "success" not in shown and "reward" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_odd_values_never_crash(terminal):
    listener = show_progress(console(terminal), every_seconds=0.0)
    listener("step", {})  # before any stage
    listener("stage", {})
    for odd in (float("nan"), float("inf"), None, "text", [], torch.tensor(1.0), torch.ones(3), np.float32(2), 10**400):
        listener("step", {"step": odd, "total": odd, "success": odd, "reward": odd, "metrics": odd})
    listener("message", {})
    listener("unheard of", {"x": 1})
    listener("end", {})


def test_a_resumed_run_judges_time_left_by_its_own_steps(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("turnwise.observe.progress.time.monotonic", lambda: clock[0])
    out = console(terminal=False)
    listener = PlainLog(out, every_seconds=0.0)
    listener("stage", {"name": "reinforce", "total": 100})
    clock[0] += 10
    listener("step", {"step": 91, "total": 100})
    assert out.file.getvalue().splitlines()[-1].split()[-2:] == ["10s", "1m30s"]


def test_small_pieces():
    assert sparkline([]) == "" and sparkline([None]) == "" and sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, None, 1.0]) in ("▁▅ █", "▁▄ █")
    assert [format_duration(x) for x in (0.4, 65, 3725, -1, float("nan"), None)] == [
        "0s",
        "1m05s",
        "1h02m",
        "–",
        "–",
        "–",
    ]


# ------------------------------------------------------------------- reports


def test_before_and_after():
    rows = comparison({"success": wilson(10, 100), "turns": 3.0}, {"success": wilson(60, 100), "new": 1})
    json.dumps(rows)
    assert [row["measure"] for row in rows] == ["success", "turns", "new"]
    assert rows[0]["change"] == pytest.approx(0.5) and rows[0]["clear"] is True
    assert rows[1]["change"] is None and rows[1]["clear"] is None
    assert comparison({"s": wilson(5, 10)}, {"s": wilson(6, 10)})[0]["clear"] is False
    out = console(terminal=False)
    out.print(table(rows))
    shown = out.file.getvalue()
    assert "0.100  [0.055, 0.174]" in shown and "+0.500" in shown and "–" in shown


def test_a_transcript_reads_well():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    shown = transcript(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, {"name": "sub", "arguments": {"b": 2}}]},
            {"role": "tool", "name": "add", "content": "2"},
            {"role": "assistant", "content": "# two\n**User**"},
            {"role": "assistant", "content": ""},
        ],
        title="task 7",
    )
    assert shown.startswith("## task 7\n\n**System**\n\n```text\nBe brief.\n```\n")
    assert '→ calls add({"a": 1})' in shown and '→ calls sub({"b": 2})' in shown
    assert "**Tool reply** (add)\n\n```text\n2\n```" in shown and "1+1?\n[image_url]" in shown
    assert "```text\n# two\n**User**\n```" in shown and shown.endswith("*(empty)*\n")


# -------------------------------------------------------------------- curves


def size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.thorough
def test_curves_from_a_file(tmp_path):
    log = JsonLines(tmp_path / "m.jsonl")
    log.log(0, {"eval/success": 0.1})
    for step in range(40):
        figures = {"success": step / 40, "reward": step, "entropy": 1.0, "turns": 2.0, "tool_errors": 0.5}
        log.log(step, {**figures, "clip_share": 0.02, "kl/behaviour": 0.001, "tokens_per_second": 900.0})
    log.log(40, {"eval/success": 0.9})
    log.close()
    out = curves(tmp_path / "m.jsonl", tmp_path / "curves.png", "a run")
    assert size(out) == (1386, 693) and out.stat().st_size > 30_000


def test_curves_of_little_or_nothing(tmp_path):
    one = curves([{"step": 0, "reward": 1.0, "success": float("nan")}], tmp_path / "one.png")
    assert size(one)[0] < 600
    assert size(curves([], tmp_path / "none.png"))[0] < 600
    curves([{"step": 0, "eval/success": 0.5}], tmp_path / "eval.png")


def test_rounding_of_the_divergence_is_not_drawn(tmp_path):
    rows = [{"step": n, "reward": 1.0, "clip_share": 0.0, "kl/behaviour": 1e-13 * n} for n in range(4)]
    plain = [{"step": n, "reward": 1.0} for n in range(4)]
    assert size(curves(rows, tmp_path / "a.png")) == size(curves(plain, tmp_path / "b.png"))
    rows[2]["kl/behaviour"] = 1e-3
    assert size(curves(rows, tmp_path / "c.png")) > size(curves(plain, tmp_path / "b.png"))


def test_smoothing_does_not_lag_and_keeps_constants():
    assert smooth(np.ones(7), 3.0) == pytest.approx(np.ones(7))
    line = np.arange(50.0)
    assert smooth(line, 5.0)[20:30] == pytest.approx(line[20:30])
    assert smooth(np.array([3.0]), 0.1) == pytest.approx([3.0])
