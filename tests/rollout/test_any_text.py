"""Any text a model, an environment or a file can hold goes through an episode, the ledger, every file and the console."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.episodes import FixedSession, Patient, play

from turnwise.cli.main import main
from turnwise.core.protocols import Step
from turnwise.core.records import Group, Status
from turnwise.core.text import MAX_CHARACTERS
from turnwise.data.dataset import read_dataset
from turnwise.data.files import read_table
from turnwise.errors import SettingError
from turnwise.observe.progress import PlainLog
from turnwise.observe.report import transcript
from turnwise.rollout.parsers.choice import read_turn
from turnwise.store.atomic import write_json
from turnwise.store.ledger import SqliteLedger

ANY = st.text(st.characters(codec=None, categories=None), max_size=30)
HOSTILE = "\ud800\x1b]0;x\x07\0\u202e\r\n# forged\n```\n</pre>\n> **User**"


def hostile(text: str) -> Patient:
    """An environment that puts this text wherever an environment can put text."""

    class Hostile(Patient):
        def reset(self, seed):
            return [{"role": "user", "content": text, "name": text}]

        def step(self, action):
            reply = {"role": "tool", "content": text, "name": text, "extra": [{text: text}]}
            info = {"facts": {text: text}, "rewards": {text: 1.0}}
            return Step([reply], reward=0.5, info=info)

        def state_key(self):
            return text

        def answer(self):
            return text

    return Hostile()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=ANY | st.just(HOSTILE))
def test_any_text_is_played_stored_and_read_again(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    trajectory = play(hostile(text), FixedSession("ok"))
    assert trajectory.status == Status.TRUNCATED, trajectory.reason
    with SqliteLedger(folder / "ledger.sqlite") as ledger:
        ledger.issue("g", trajectory.task, 0, 0)
        ledger.finish(Group("g", trajectory.task, (trajectory,)), 0)
        ledger.train(["g"], 1)
        ledger.seal(1)
        assert ledger.group("g").trajectories[0] == trajectory
    with SqliteLedger(folder / "ledger.sqlite") as ledger:
        ledger.resume(1)
        assert ledger.trajectory(trajectory.id) == trajectory
    write_json(folder / "evaluation.json", {"rows": [{"messages": list(trajectory.messages), "raw": text}]})
    rows = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["rows"]
    assert rows[0]["messages"] == list(trajectory.messages)
    (folder / "transcripts.md").write_text(transcript(rows[0]["messages"], title=text), encoding="utf-8")


def test_a_dropped_group_keeps_its_reason(tmp_path: Path) -> None:
    class Raises(Patient):
        def step(self, action):
            raise RuntimeError(HOSTILE)

    trajectory = play(Raises())
    assert trajectory.status == Status.FAILED
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        ledger.issue("g", trajectory.task, 0, 0)
        ledger.finish(Group("g", trajectory.task, (trajectory,)), 0)
        ledger.drop("g", trajectory.reason, 0)
        assert len(ledger.failures()) == 1


def test_a_tool_call_with_half_a_character() -> None:
    """It ended a run for good: the reply that quotes the name could not be written, in this run and in every resume."""
    action = read_turn('<tool_call>{"name": "\\ud800", "arguments": {"\\udfff": ["\\ud800"]}}</tool_call>')
    assert action.calls[0].name == "\ufffd"
    assert action.calls[0].arguments == {"\ufffd": ["\ufffd"]}


def test_arguments_nested_too_deep_are_a_fault() -> None:
    deep = "[" * 500 + "]" * 500
    action = read_turn('<tool_call>{"name": "f", "arguments": {"a": ' + deep + "}}</tool_call>")
    assert not action.calls and len(action.faults) == 1


def test_a_huge_observation_is_cut() -> None:
    class Huge(Patient):
        def step(self, action):
            return Step([{"role": "user", "content": "x" * (MAX_CHARACTERS + 5)}], terminated=True)

    content = play(Huge()).messages[-1]["content"]
    assert content.endswith(f"[cut: {MAX_CHARACTERS + 5} characters, the limit is {MAX_CHARACTERS}]")


# ---------------------------------------------------------------- what people read


@settings(max_examples=50, deadline=None)
@given(ANY | st.just(HOSTILE))
def test_a_transcript_cannot_be_forged(text: str) -> None:
    call = {"function": {"name": text, "arguments": text}}
    messages = [{"role": text, "name": text, "content": text, "tool_calls": [call]}, {"role": "user", "content": "end"}]
    shown = transcript(messages, title=text)
    assert not [c for c in shown if c < " " and c not in "\n\t"]
    outside, fence = [], ""
    for line in shown.split("\n"):
        ticks = line[: len(line) - len(line.lstrip("`"))]
        if not fence and len(ticks) >= 3:
            fence = ticks
        elif fence and line.rstrip() == fence:
            fence = ""
        elif not fence and line:
            outside.append(line)
    headings = [line for line in outside if line.startswith("#")]
    speakers = [line for line in outside if line.startswith("**")]
    assert not fence and len(headings) == bool(text) and len(speakers) == 2
    assert not [line for line in outside if "<" in line.replace("\\<", "")]


@settings(max_examples=50, deadline=None)
@given(ANY | st.just(HOSTILE))
def test_a_message_on_the_console_holds_no_escape(text: str) -> None:
    file = io.StringIO()
    PlainLog(Console(file=file, width=80))("message", {"text": text, "level": "warning"})
    assert not [c for c in file.getvalue() if c < " " and c not in "\n\t"]
    file.getvalue().encode()


@pytest.mark.parametrize("name", ["\x1b[2Jgrpo", "\ud800", "a\r\x07b"])
def test_an_error_line_holds_no_escape(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("turnwise: no command") and not [c for c in error if c < " " and c != "\n"]
    error.encode()


# --------------------------------------------------------------------- data files


def test_a_data_file_with_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\\ud800", "completion": "b\\udfff", "kind\\ud800": "x\\ud800"}\n')
    row = read_dataset(path).rows[0].examples[0]
    assert row.prompt[0]["content"] == "a\ufffd" and row.turns == ["b\ufffd"] and row.facts == {"kind\ufffd": "x\ufffd"}


def test_a_data_file_nested_too_deep_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": ' + "[" * 200 + "]" * 200 + "}\n")
    with pytest.raises(SettingError, match="line 2: a column is nested deeper than 64 levels"):
        read_table(path)
