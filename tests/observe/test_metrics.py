"""Trackers: resume without doubles, torn lines, failing trackers, missing services."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch

from turnwise.errors import SettingError, StoreError
from turnwise.observe.trackers import JsonLines, Service, TensorBoard, Trackers, read_rows


def test_rows_come_back(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    log = JsonLines(path)
    log.log(0, {"reward": 0.5, "nan": float("nan"), "tensor": torch.tensor(2.0), "odd": "text"})
    assert json.loads(path.read_text())["reward"] == 0.5  # flushed at once
    log.close()
    (row,) = read_rows(path)
    assert row["step"] == 0 and row["nan"] is None and row["tensor"] == 2.0 and row["odd"] is None


def test_resume_logs_nothing_twice_and_mends_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for step in range(5):
        log.log(step, {"x": step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "x"')  # killed here
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3, 4]
    log = JsonLines(path, resume=3)
    log.log(3, {"x": 30})
    log.close()
    assert [(row["step"], row["x"]) for row in read_rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert read_rows(tmp_path / "none") == []
    with pytest.raises(StoreError):
        JsonLines(tmp_path)


def test_tensorboard_writes_event_files(tmp_path):
    board = TensorBoard(tmp_path / "tb", resume=3)
    board.log(3, {"reward": 1.0, "bad": float("inf"), "numpy": np.float32(1)})
    board.close()
    assert any("tfevents" in path.name for path in (tmp_path / "tb").iterdir())


def test_no_tensorboard_is_a_warning(tmp_path, monkeypatch):
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)  # its import fails
    with pytest.warns(UserWarning, match="install tensorboardX"):
        board = TensorBoard(tmp_path)
    board.log(0, {"x": 1.0})
    board.close()


class Broken:
    calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise ConnectionError("network down")

    def close(self):
        raise ConnectionError("network down")


def test_a_failing_tracker_never_stops_a_run(tmp_path):
    broken, good = Broken(), JsonLines(tmp_path / "m.jsonl")
    many = Trackers([broken, good])
    with pytest.warns(UserWarning, match="Broken failed") as seen:
        many.log(0, {"x": 1.0})
        many.log(1, {"x": 1.0})
    assert len(seen) == 1 and broken.calls == 1
    many.close()
    assert len(read_rows(tmp_path / "m.jsonl")) == 2
    with pytest.warns(UserWarning, match="Broken failed"):
        Trackers([broken]).close()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_service_names_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingError, match=rf"turnwise-rl\[{name}\]"):
        Service(name, "project", "run", {})


def test_an_unknown_service_is_answered_with_the_nearest():
    with pytest.raises(SettingError, match="did you mean 'wandb'"):
        Service("wandbb", "p", "r", {})


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_services_pass_finite_numbers_on(name, monkeypatch):
    class Fake:
        def __init__(self):
            self.seen = []

        def __getattr__(self, verb):
            def call(*values, **named):
                self.seen.append((verb, values, named))
                return self

            return call

    fake = Fake()
    monkeypatch.setitem(sys.modules, name, fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker = Service(name, "project", "run", {"lr": 0.1})
        tracker.log(4, {"x": 1.0, "bad": float("nan")})
        tracker.close()
    assert any(verb.startswith("log") and values[:1] == ({"x": 1.0},) for verb, values, _ in fake.seen)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path, monkeypatch):
    """Its thread ends, and a queue that nobody empties would hold the run up for ever."""
    files = pytest.importorskip("tensorboardX.event_file_writer")
    board = TensorBoard(tmp_path / "tb")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.EventsWriter, "write_event", full)
    board.log(1, {"a": 1.0})
    worker = board._writer.file_writer.event_writer._worker
    worker.join(60)
    assert not worker.is_alive()
    with pytest.raises(OSError, match="its disk may be full"):
        board.log(2, {f"m{n}": 1.0 for n in range(50)})
    board.log(3, {"a": 1.0})
    board.close()
