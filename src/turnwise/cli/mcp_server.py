"""``turnwise mcp``: start, watch, diagnose and compare runs from a coding agent, by the Model Context Protocol.

Every tool is one command with ``--json`` in a process of its own: the agent gets what a user gets, and a run outlives the
server that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise import __version__
from turnwise.cli.flags import Parser, flag
from turnwise.errors import SettingError, TurnwiseError
from turnwise.inspector.queries import RunReader
from turnwise.store.rundir import runs

ANSWER_SECONDS = 600  # of a command that only reads; a dry run of a large model is the longest
START_SECONDS = 120  # until a run has written its directory, or was refused
LAST_LINES = 20


def start_run(method: str = "dr_grpo", settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Start training in the background and return its run directory. `settings` are those of `turnwise train`, by name, and the
    method's own: {"env": "keydoor", "steps": 50, "clip": 0.1}. Ask `estimate_run` first when the run may be long. A setting
    that is refused comes back as `refused`, with what to write instead."""
    values = {"name": f"{method.partition(':')[0]}-{time.strftime('%Y%m%d-%H%M%S')}", "out": "runs", **(settings or {})}
    return _in_background(["train", method, *_words(values)], Path(values["out"]) / str(values["name"]))


def resume_run(run: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Go on with a stopped run in the background, or extend a finished one: settings {"steps": 200}."""
    return _in_background(["resume", run, *_words(settings or {})], Path(run))


def stop_run(run: str) -> dict[str, Any]:
    """Stop a run after its current step; it writes a checkpoint, from which `resume_run` goes on."""
    state = run_status(run)["result"]
    if not isinstance(state, dict) or not state.get("alive"):
        return {"stopped": False, "reason": f"{run} is not running"}
    os.kill(int(state["process"]), signal.SIGTERM)
    return {"stopped": True, "process": state["process"]}


def run_status(run: str) -> dict[str, Any]:
    """What a run is doing: step, throughput, who waits for whom, and whether it has ended or was killed."""
    return _answer("status", run)


def diagnose_run(run: str) -> dict[str, Any]:
    """What is wrong with a run, the most probable cause first, with evidence and the setting to change."""
    return _answer("doctor", run)


def compare_runs(runs: list[str]) -> dict[str, Any]:
    """Compare finished runs that share a task: paired seeds, intervals, a stated error rate."""
    return _answer("compare", *runs)


def list_runs(folder: str = "runs") -> dict[str, Any]:
    """The runs of a folder, with method, environment, whether they have finished, and held-out success before and after."""
    return {"runs": [_listed(run.path) for run in runs(folder)]}


def _listed(path: Path) -> dict[str, Any]:
    """One run; of a damaged one, what is wrong with it."""
    try:
        with RunReader(path) as reader:
            settings = {name: reader.settings.get(name) for name in ("method", "env", "agent")}
            summaries = {name: (reader.evaluation(name) or {}).get("summary", {}) for name in ("before", "after")}
            success = {name: summary.get("success") for name, summary in summaries.items()}
            return {"run": str(path), **settings, "finished": reader.summary is not None, "success": success}
    except TurnwiseError as fault:
        return {"run": str(path), "fault": str(fault)}


def view_run(run: str, view: str = "failures", query: dict[str, Any] | None = None) -> dict[str, Any]:
    """A page about a run as data: overview, failures (how episodes failed, with examples), why (what a step did to a token),
    what-if, siblings, gradient, policy, prompts, waits, tasks, reward, step, search. `query` chooses: {"step": 3, "trajectory":
    "20.6", "token": 5}, {"search": "word"}."""
    return _answer("view", run, *_words({"view": view, **(query or {})}))


def estimate_run(method: str = "dr_grpo", settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Take a few steps at these settings, keep nothing, and say what time and memory the whole run needs."""
    return _answer("train", method, *_words(settings or {}), "--dry-run")


def list_methods(words: str = "", family: str = "") -> dict[str, Any]:
    """Training methods; only those with each of the words in name, idea or paper, or of one family."""
    return _answer("list", *words.split(), *_words({"family": family} if family else {}))


def explain_method(method: str) -> dict[str, Any]:
    """Equation, paper, slots, hyper-parameters and deviations of one method."""
    return _answer("explain", method)


def list_environments() -> dict[str, Any]:
    """Environments: built in, installed, and how to install the rest."""
    return _answer("environments")


def check_environment(environment: str) -> dict[str, Any]:
    """Play an environment (a name, module:Class or file.py:Class) and report its faults."""
    return _answer("check-env", environment)


TOOLS = (
    start_run, resume_run, stop_run, list_runs, run_status, view_run, diagnose_run, compare_runs, estimate_run, list_methods,
    explain_method, list_environments, check_environment,
)  # fmt: skip


def mcp(argv: Sequence[str]) -> int:
    """``turnwise mcp``"""
    about = "Serve these commands to a coding agent by the Model Context Protocol, over standard input and output."
    Parser("mcp", about, json="").parse(argv)
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise SettingError("turnwise mcp needs the package mcp; write pip install 'turnwise-rl[mcp]'") from None
    server = MCPServer("turnwise", version=__version__)
    for tool in TOOLS:
        server.add_tool(tool)
    server.run()
    return 0


def _words(values: Mapping[str, Any]) -> list[str]:
    """Settings as flags: ``{"lr": 1e-5, "difficulty": [1, 2]}`` as ``--lr=1e-05 --difficulty=1,2``."""
    text = {k: ",".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for k, v in values.items()}
    return [f"{flag(name)}={value}" for name, value in text.items()]


def _answer(*words: str) -> dict[str, Any]:
    """What a command printed, as data; with its messages, and its exit status where that says more than done."""
    try:
        ended = subprocess.run(_turnwise([*words, "--json"]), capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"result": None, "status": None, "messages": f"no answer within {ANSWER_SECONDS} s"}
    try:
        result = json.loads(ended.stdout) if ended.stdout.strip() else None
    except ValueError:
        result = ended.stdout
    return {"result": result, "status": ended.returncode, "messages": _last_lines(ended.stderr)}


def _in_background(words: list[str], run: Path) -> dict[str, Any]:
    """Start a command that trains, in a session of its own, so that it outlives this server; wait until it has begun."""
    log = run.with_name(f"{run.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with log.open("ab") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(_turnwise(words), start_new_session=True, **streams)  # type: ignore[call-overload]
    status = run / "status.json"
    while process.poll() is None and time.time() - began < START_SECONDS:
        if status.is_file() and status.stat().st_mtime >= began - 1:
            break
        time.sleep(0.2)
    if process.poll():
        return {"refused": _last_lines(log.read_text(encoding="utf-8", errors="replace"))}
    return {"run": str(run), "process": process.pid, "log": str(log)}


def _turnwise(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "turnwise", *words]


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])
