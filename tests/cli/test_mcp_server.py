"""Runs through the tools that a coding agent gets, and through a real client of the protocol."""

from __future__ import annotations

import json
import sys
import time

import anyio
import pytest

from turnwise.cli import mcp_server as tools
from turnwise.cli.main import main
from turnwise.store.rundir import RunDir

SMALL = {"env": "guess", "difficulty": [1], "groups": 2, "group_size": 4, "max_tokens": 6, "hidden": 32, "layers": 1,
         "cold_steps": 2, "eval_tasks": 4, "trackers": ""}  # fmt: skip


def test_settings_are_written_as_flags():
    words = tools._words({"lr": 1e-5, "difficulty": [1, 2], "group_size": 4, "isolate_env": True})
    assert words == ["--lr=1e-05", "--difficulty=1,2", "--group-size=4", "--isolate-env=True"]


def test_a_refused_setting_comes_back_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean --steps" in tools.start_run("grpo", {"stepz": 3})["refused"].replace("'", "")
    assert "did you mean --learning-rate" in tools.start_run("grpo", {"lerning_rate": 3})["refused"].replace("'", "")
    assert tools.explain_method("gropo")["status"] == 2
    assert tools.stop_run("runs/none") == {"stopped": False, "reason": "runs/none is not running"}


def test_runs_are_listed_and_shown_as_data(tmp_path):
    run = RunDir.create(tmp_path, "one", {"method": "grpo", "env": "guess", "steps": 2})
    (run.path / "evaluation_after.json").write_text(json.dumps({"summary": {"success": 0.5}, "rows": []}))
    assert tools.list_runs(str(tmp_path))["runs"] == [
        {"run": str(run.path), "method": "grpo", "env": "guess", "agent": None, "finished": False,
         "success": {"before": None, "after": 0.5}},
    ]  # fmt: skip
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/run.json").write_text("{")
    damaged = next(row for row in tools.list_runs(str(tmp_path))["runs"] if row["run"].endswith("damaged"))
    assert "run.json" in damaged["fault"]
    shown = tools.view_run(str(run.path), "overview")
    assert shown["status"] == 0 and shown["result"]["blocks"][0]["text"] == "50 % of held-out tasks."


def test_without_the_package_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 2 and "pip install 'turnwise-rl[mcp]'" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_run_is_started_stopped_resumed_and_diagnosed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tools.start_run("grpo", {**SMALL, "steps": 5000, "name": "long"})["run"]
    state = _until(run, lambda s: s["alive"] and s["step"] >= 2)
    assert tools.stop_run(run)["process"] == state["process"]
    stopped = _until(run, lambda s: not s["alive"])
    assert stopped["checkpoint"] >= 2
    tools.resume_run(run, {"steps": stopped["checkpoint"] + 1})
    assert _until(run, lambda s: s["state"] == "finished")["step"] == stopped["checkpoint"] + 1
    assert tools.diagnose_run(run)["result"]


def _until(run, holds):
    for _ in range(600):
        state = tools.run_status(run)["result"]
        if holds(state):
            return state
        time.sleep(0.1)
    raise AssertionError(state)


@pytest.mark.thorough
def test_a_client_of_the_protocol_sees_and_calls_the_tools(tmp_path, monkeypatch):
    mcp = pytest.importorskip("mcp")
    monkeypatch.chdir(tmp_path)

    async def talk():
        server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "turnwise", "mcp"])
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            names = {tool.name for tool in (await session.list_tools()).tools}
            reply = await session.call_tool("list_methods", {"words": "leave-one-out"})
            return names, reply.content[0].text

    names, text = anyio.run(talk)
    assert names == {tool.__name__ for tool in tools.TOOLS}
    assert '"method": "rloo"' in text
