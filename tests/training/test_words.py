"""What a user reads of a run: numbers that add up, rows that align, errors that say what to write."""

from __future__ import annotations

import pytest

from turnwise.cli.main import main
from turnwise.config.convert import convert
from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.observe.trackers import MessageLog
from turnwise.training.remote_generators import make_replicas
from turnwise.training.watch import (
    STALL_SECONDS,
    RunEvents,
    RunMoment,
    RunWatch,
    ServerFacts,
    component_row,
    component_states,
    silent,
)


def test_the_seconds_of_stages_add_up(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("turnwise.training.watch.time.perf_counter", lambda: now[0])
    events = RunEvents()
    with events.stage("prepare"):
        now[0] += 5.0
        for name, seconds in (("demonstrations", 22.0), ("cold start", 16.0), ("demonstrations", 1.0)):
            with events.stage(name):
                now[0] += seconds
    with events.stage("learn"):
        now[0] += 9.0
    assert events.seconds == {"demonstrations": 23.0, "cold start": 16.0, "prepare": 5.0, "learn": 9.0}


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, "x", "n is 'x', which is not int; write a whole number, such as 4"),
        (float, "x", "n is 'x', which is not float; write a number, such as 0.1 or 1e-5"),
        (bool, "maybe", "n is 'maybe', which is not bool; write true or false"),
    ],
)
def test_a_value_of_another_type_says_what_to_write(kind, value, words):
    with pytest.raises(SettingError) as caught:
        convert("n", value, kind)
    assert str(caught.value) == words


def test_a_wrong_flag_is_named_as_it_is_written(capsys):
    assert main(["train", "grpo", "--eval-tasks", "many"]) == 2
    assert "--eval-tasks is 'many', which is not int; write a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["foo", "http://", "http://a:x/v1"])
def test_a_wrong_generator_is_quoted_back_and_shown_without_v1(url):
    with pytest.raises(SettingError) as caught:
        make_replicas(Settings(generator=(url,)))
    said = str(caught.value)
    assert said.endswith("write an address such as http://localhost:8000, or local")
    assert said.startswith(f"--generator is {url.removesuffix('/v1')!r}")


def test_an_address_with_v1_is_the_same_server():
    assert make_replicas(Settings(generator=("http://a:1/v1/",)))[0].url == "http://a:1"


@pytest.mark.parametrize(("owed", "words"), [(0, "owes 0 replies"), (1, "owes 1 reply,"), (2, "owes 2 replies")])
def test_one_reply_is_one_reply(owed, words):
    server = ServerFacts("http://a:1", 1, owed, 7, 3, "")
    states = component_states(RunMoment("rollout", 1, "guess", 0.0, True, servers=[server]))
    assert words in next(state.doing for state in states if state.name.startswith("server"))


def test_rows_of_the_status_align_whatever_their_names():
    rows = [
        {"name": name, "state": "working", "waits_for": "", "since_progress": 3.0, "doing": "DOING"}
        for name in ("learner", "server http://127.0.0.1:8811")
    ]
    width = max(len(row["name"]) for row in rows)
    assert len({component_row(row, width).index("DOING") for row in rows}) == 1


@pytest.mark.parametrize(("lost", "told"), [("", ["the run moves again"]), ("no connection", [])])
def test_a_run_without_servers_does_not_move_again_before_it_ends(tmp_path, lost, told):
    watch = RunWatch(tmp_path, RunEvents(silent), "guess", 9)
    watch.told["nothing"] = STALL_SECONDS
    server = ServerFacts("http://a:1", 0, 0, 7, 3, lost)
    watch._judge(RunMoment("rollout", 1, "guess", 0.0, True, servers=[server]))
    assert [text for text, _ in watch.pending] == told


def test_warnings_of_an_earlier_process_are_marked(tmp_path):
    path = tmp_path / "messages.jsonl"
    MessageLog(path, silent)("message", {"level": "warning", "text": "lost the generator 8811"})
    log = MessageLog(path, silent, 5)
    log("message", {"level": "warning", "text": "new"})
    assert log.warnings == [
        {"step": 0, "text": "lost the generator 8811", "earlier": True},
        {"step": 5, "text": "new"},
    ]
