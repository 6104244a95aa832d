"""`turnwise eval --policy URL`: a served model plays environments through the chat protocol."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.chat_servers import ChatStub, free_address, serving, slowly, text
from turnwise.cli.main import main
from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Task
from turnwise.engines.remote import chat_server
from turnwise.environments.base import Environment, user_message
from turnwise.environments.builtin.lookup import Lookup
from turnwise.errors import HostFault, ServerFault, SettingError
from turnwise.rollout.chat_session import NO_REPLY, as_sent, read_text
from turnwise.rollout.parsers.table import SYNTAXES
from turnwise.training.evaluation import ServedPolicy, evaluate_policy, evaluate_served
from turnwise.training.plan import EnvSpec, resolve_settings

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(chat_server.RetryPolicy, "wait", lambda *_: 0.001)


def calculate(body):
    """Calls python with the question's numbers, then says the number that it printed."""
    assert [tool["function"]["name"] for tool in body["tools"]] == ["python"]
    first, last = body["messages"][0], body["messages"][-1]
    if last["role"] == "tool":
        assert last["tool_call_id"] == "id-0"
        return text(f"answer: {last['content'].strip()}")
    return text(None, ("python", {"code": f"print({expression(first['content'])})"}))


def expression(question: str) -> str:
    """Difficulty 1: two numbers, and what to do with them."""
    operator = "*" if "boxes" in question or "each" in question else "+" if "finds" in question else "-"
    return operator.join(re.findall(r"\b([ab])=", question))


class LookupOracle:
    """Replays the dialogue of a task with the environment's oracle, and answers with its next action."""

    def __init__(self, tasks, as_text: str = ""):
        self.tasks = {Lookup(difficulty=t.difficulty, split=t.split).reset(t.seed)[0]["content"]: t for t in tasks}
        self.as_text = as_text

    def __call__(self, body):
        task = self.tasks[body["messages"][0]["content"]]
        env = Lookup(difficulty=task.difficulty, split=task.split)
        env.reset(task.seed)
        replies = [m for m in body["messages"] if m["role"] == "tool"]
        for reply in replies:
            step = env.step(env.oracle())
            assert step.messages[0]["content"] == reply["content"]
        action = env.oracle()
        if not action.calls:
            return text(action.text)
        if self.as_text:
            return text("I search. " + SYNTAXES[self.as_text].write(action.calls, body["tools"]))
        return text(None, *[(call.name, call.arguments) for call in action.calls])


def lookup_tasks(count: int):
    return EnvSpec.from_settings(resolve_settings({"env": "lookup"})).first_tasks("held_out", count)


def evaluated(stub: ChatStub, served=None, **overrides):
    with serving(stub) as url:
        return evaluate_policy("", "", "held_out", overrides, ServedPolicy(url, **(served or {})))


def test_a_served_oracle_solves_the_calculator():
    stub = ChatStub(calculate)
    result = evaluated(stub, env="calculator", difficulty=(1,), eval_tasks=6)
    assert result["success"] == 1 and result["turns"] == 2 and result["tool_calls"] == 1
    assert result["tokens_per_turn"] == 7 and result["failed"] == 0
    assert result["who"] == f"m at {stub.url}"
    assert {message["role"] for body in stub.seen for message in body["messages"]} == {"user", "assistant", "tool"}


@pytest.mark.parametrize("as_text", ["", "hermes", "llama3", "mistral_v11", "qwen3_coder"])
def test_a_served_oracle_solves_lookup_with_calls_in_fields_or_in_its_text(as_text):
    tasks = lookup_tasks(8)
    result = evaluated(ChatStub(LookupOracle(tasks, as_text)), env="lookup", eval_tasks=8, eval_samples=2)
    assert result["success"] == 1 and result["pass@k"]["2"] == 1 and result["tool_calls"] > 0


def test_the_tasks_and_measures_are_those_of_other_evaluations():
    served = evaluated(ChatStub(LookupOracle(lookup_tasks(8))), env="lookup", eval_tasks=8)
    scripted = evaluate_policy("", "oracle", "held_out", {"env": "lookup", "eval_tasks": 8})
    assert served.keys() == scripted.keys()
    same = ("success", "interval", "reward", "turns", "tool_calls", "tool_errors", "by_difficulty")
    assert {name: served[name] for name in same} == {name: scripted[name] for name in same}


def test_a_flaky_server_costs_nothing_but_time():
    """The first three attempts of every request go wrong, each in another way."""
    oracle, attempts = LookupOracle(lookup_tasks(6)), Counter()

    def flaky(body):
        attempts[body["seed"]] += 1
        return (
            {1: (429, {}), 2: None, 3: (500, {})}.get(attempts[body["seed"]])
            if attempts[body["seed"]] < 4
            else oracle(body)
        )

    result = evaluated(ChatStub(flaky), env="lookup", eval_tasks=6)
    assert result["success"] == 1 and result["failed"] == 0
    assert set(attempts.values()) == {4}


def test_a_context_overflow_truncates_its_episode():
    def respond(body):
        if len(body["messages"]) > 2:
            return 400, {"error": {"message": "maximum context length is 10 tokens"}}
        return text(None, ("search", {"query": "a"}))

    result = evaluated(ChatStub(respond), env="lookup", eval_tasks=4)
    assert result["truncated"] == 1 and result["failed"] == 0 and result["turns"] == 1


def test_a_server_that_breaks_down_gives_no_table():
    count = iter(range(10**6))
    oracle = LookupOracle(lookup_tasks(24))
    stub = ChatStub(lambda body: oracle(body) if next(count) < 5 else (503, {"error": {"message": "out of memory"}}))
    with pytest.raises(ServerFault, match=r"8 requests in a row failed.*out of memory"):
        evaluated(stub, env="lookup", eval_tasks=24)


def test_single_failed_episodes_are_counted_with_their_reason():
    oracle = LookupOracle(tasks := lookup_tasks(6))
    question = next(q for q, task in oracle.tasks.items() if task == tasks[2])

    def respond(body):
        return (400, {"error": {"message": "bad word"}}) if body["messages"][0]["content"] == question else oracle(body)

    result = evaluated(ChatStub(respond), env="lookup", eval_tasks=6)
    assert result["failed"] == 1 and result["success"] == pytest.approx(5 / 6)
    assert list(result["failures"].values()) == [1] and "1 of 6 episodes failed" in result["note"]
    assert "bad word" in result["note"]


def test_a_slow_server_fails_its_episodes_in_bounded_time(monkeypatch):
    monkeypatch.setattr("turnwise.core.retries.PAUSES", (0.0,))
    stub = ChatStub(slowly(2.0, text("answer: x")))
    began = time.monotonic()
    with pytest.raises(HostFault, match=r"1 of 1 episodes of an evaluation: .*no reply within 0.1 s"):
        evaluated(stub, {"seconds": 0.1}, env="lookup", eval_tasks=1)
    assert time.monotonic() - began < 60


# ------------------------------------------------------------------ the command


def test_the_command_writes_a_table_and_json_and_rows(capsys, tmp_path):
    with serving(ChatStub(LookupOracle(lookup_tasks(3)))) as url:
        words = ["eval", "--policy", url, "--env", "lookup", "--eval-tasks", "3"]
        assert main([*words, "--json", "--save", str(tmp_path / "rows.json")]) == 0
        out = json.loads(capsys.readouterr().out)
        assert main(words) == 0
    assert out["success"] == 1
    shown = capsys.readouterr().out
    assert "success" in shown and "m at http://" in shown and "3/3" in shown
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 3 and "<tool_call>" in rows[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policy", "localhost:8000"], "http://localhost:8000/v1"),
        (["--policy", "http://127.0.0.1:9/v1", "--player", "oracle"], "give one of"),
        (["--policy", "http://127.0.0.1:9/v1", "--model", "x"], "--policy-model"),
        (["--policy", "http://127.0.0.1:9/v1", "--policy-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--policy", "http://127.0.0.1:9/v1", "--policy-seconds", "soon"], "--policy-seconds is 'soon'"),
        (["--policy", "http://127.0.0.1:9/v1", "--policy-parallel", "0"], "at least 1"),
        (["--policy", "http://127.0.0.1:9/v1", "--env", "nonsense"], "nonsense"),
        (["--policy-model", "x"], "--policy URL"),
    ],
)
def test_mistakes_are_answered_in_words(flags, says, capsys):
    assert main(["eval", *flags]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_nobody_listens(capsys):
    assert main(["eval", "--policy", free_address(), "--env", "lookup"]) == 2
    assert "no connection" in capsys.readouterr().err


def test_a_served_policy_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, turnwise.training.evaluation, turnwise.training.evaluation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_beside_a_served_model(monkeypatch, capsys):
    """The served model plays the run's tasks; the two results stand side by side."""
    from turnwise.training import evaluation as module

    settings = resolve_settings({"env": "lookup", "eval_tasks": 4, "max_tokens": 5})
    monkeypatch.setattr(module, "select_policy", lambda run, overrides: (settings, Path("some/run/model")))

    def scripted(env_spec, folder, split, run, listen):
        return module._scripted(env_spec, "random", split, listen)

    monkeypatch.setattr(module, "_model", scripted)
    stub = ChatStub(LookupOracle(lookup_tasks(4)))
    with serving(stub) as url:
        assert main(["eval", "some/run", "--policy", url, "--json"]) == 0
    run, served = json.loads(capsys.readouterr().out)
    assert (run["who"], run["tasks"]) == ("some/run", 4)
    assert served["success"] == 1 and served["tasks"] == 4
    assert stub.seen[0]["max_tokens"] > 5  # the tiny model's limit does not bind a served one


# ------------------------------------------------------------- messages as sent


def turn(content: str, *calls: tuple[str, str]) -> tuple[Action, str]:
    return Action("as kept", tuple(ToolCall(name, {}, id) for name, id in calls)), content


def kept(*roles: str) -> list[dict[str, str]]:
    """Messages of a dialogue; the model's own have the text of ``turn``."""
    return [
        {"role": role, "content": "as kept" if role == "assistant" else f"{role} {n}"} for n, role in enumerate(roles)
    ]


def test_every_reply_names_its_call():
    messages = kept("user", "assistant", "tool", "tool", "assistant", "user")
    messages[2]["tool_call_id"] = "b"
    sent = as_sent(messages, [turn("x", ("f", "a"), ("g", "b")), turn("y")])
    assert [m.get("tool_call_id") for m in sent] == [None, None, "b", "a", None, None]
    assert [m["content"] for m in sent] == ["user 0", "x", "tool 2", "tool 3", "y", "user 5"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["a", "b"]


def test_calls_without_a_reply_are_closed_and_replies_without_a_call_come_from_the_user():
    sent = as_sent(kept("user", "assistant", "user"), [turn("", ("f", "a"))])
    assert [(m["role"], m["content"]) for m in sent] == [
        ("user", "user 0"), ("assistant", None), ("tool", NO_REPLY), ("user", "user 2"),
    ]  # fmt: skip
    sent = as_sent(kept("user", "assistant", "tool"), [turn("not a call")])
    assert [m["role"] for m in sent] == ["user", "assistant", "user"]


def test_examples_of_the_environment_are_not_the_models_turns():
    sent = as_sent(kept("system", "user", "assistant", "user", "assistant", "user"), [turn("mine")])
    assert [m["content"] for m in sent][2::2] == ["as kept", "mine"]


def test_turns_that_an_edited_context_lacks_are_not_sent():
    first, second = (replace(turn(text)[0], text=text) for text in ("one", "two"))
    messages = [*kept("user"), {"role": "assistant", "content": "two"}, *kept("user")]
    sent = as_sent(messages, [(first, "said one"), (second, "said two")])
    assert [m["content"] for m in sent] == ["user 0", "said two", "user 0"]


def test_a_call_in_thinking_or_of_no_tool_is_text():
    call = SYNTAXES["hermes"].write((ToolCall("add", {}),))
    assert not read_text(f"<think>{call}</think>no", TOOLS).calls
    assert read_text(f"<think>hm</think>{call}", TOOLS).calls
    assert not read_text('{"name": "someone", "parameters": {}}', TOOLS).calls
    assert read_text('{"name": "add", "parameters": {}}', TOOLS).calls
    assert read_text("<tool_call>{add</tool_call>", TOOLS).faults


class Forgetful(Environment):
    """Shows only the latest observation."""

    max_turns = 4
    suggests = {"history": 1}  # noqa: RUF012

    def reset(self, seed):
        self.turn = 0
        return [user_message("task")]

    def step(self, action):
        self.turn += 1
        return Step([user_message(f"seen {self.turn}")], terminated=self.turn == 4, info={"success": True})


def test_history_limits_what_a_served_model_reads():
    stub = ChatStub(lambda body: text("go"))

    async def play(url):
        settings = resolve_settings({"env": f"{__name__}:Forgetful", "eval_tasks": 1})
        server = await ServedPolicy(url).connect(lambda event, facts: None)
        return await evaluate_served(EnvSpec.from_settings(settings), server, "held_out", lambda event, facts: None)

    with serving(stub) as url:
        evaluation = asyncio.run(play(url))
    assert [m["content"] for m in stub.seen[-1]["messages"]] == ["task", "seen 3"]
    assert evaluation.trajectories[0][0].task == Task(f"{__name__}:Forgetful", evaluation.tasks[0].seed, "held_out")


def test_seeds_differ_between_samples_and_turns_and_repeat():
    def seeds():
        stub = ChatStub(lambda body: text(None, ("search", {"query": "a"})))
        evaluated(stub, env="lookup", eval_tasks=2, eval_samples=2, max_turns=2)
        return sorted(body["seed"] for body in stub.seen)

    first = seeds()
    assert len(set(first)) == 8 and first == seeds()


def test_settings_of_a_served_policy_are_checked():
    with pytest.raises(SettingError, match="policy-seconds"):
        ServedPolicy("http://h/v1", seconds=0)
