"""The episode contract of agents over rows of a file: the agent owns its length and says what its episode was worth; what the run
refuses is named and counted, and never trained on as reward 0."""

from __future__ import annotations

import json
import re
import time

import pytest
from safetensors.torch import load_file
from support import stock_agents
from support.agent_runs import SMALL, same, weights
from support.stock_agents import ANSWER, CALLS

from turnwise.errors import EnvironmentFault, SettingError
from turnwise.training import api
from turnwise.training.agents import first_fault, try_agent, unpaid
from turnwise.training.plan import EnvSpec, resolve_settings

ROWS = [{"prompt": f"double {n % 4}", "answer": ANSWER} for n in range(16)]
STOCK = [
    ("in_process", "", "temperature"),
    pytest.param("openai_chat", "openai", "temperature", marks=pytest.mark.thorough),
    pytest.param("openai_stream", "openai", "reasoning_effort", marks=pytest.mark.thorough),
    pytest.param("openai_responses", "openai", "reasoning", marks=pytest.mark.thorough),
    pytest.param("anthropic_messages", "anthropic", "thinking", marks=pytest.mark.thorough),
]
RUN = {
    **SMALL,
    "cold_steps": 12,
    "steps": 1,
    "max_tokens": 64,
    "context": 900,
    "eval_tasks": 0,
    "group_size": 4,
    "lr": 1e-3,
}


def needs(package):
    for name in ("starlette", "uvicorn", package) if package else ():
        pytest.importorskip(name)


def rows_file(tmp_path, rows=ROWS):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first_row(run):
    return json.loads(open(f"{run}/metrics.jsonl").readline())


def messages(run):
    return [json.loads(line)["text"] for line in open(f"{run}/messages.jsonl")]


@pytest.mark.parametrize(("name", "package", "overruled"), STOCK)
def test_an_agent_of_three_calls_over_rows_is_rewarded_and_changes_the_weights(name, package, overruled, tmp_path):
    needs(package)
    agent = getattr(stock_agents, name)
    summary = api.train(data=rows_file(tmp_path), agent=agent, out=str(tmp_path), name="run", **RUN)
    exact, row = summary["exactness"], first_row(summary["run"])
    assert exact["calls"] == CALLS * exact["episodes"] and not exact["refused"]["count"]
    assert exact["unfinished"]["count"] == 0 and exact["overruled"][overruled] == exact["calls"]
    assert row["turns"] == CALLS and row["reward"] > 0 and row["truncated"] == 0 and row["grad_norm"] > 0
    before = load_file(f"{summary['run']}/initial/model.safetensors")
    assert before.keys() == weights(summary).keys() and not same(before, weights(summary))


@pytest.mark.parametrize(("name", "package", "overruled"), STOCK)
def test_check_agent_plays_three_calls_with_a_tool(name, package, overruled, tmp_path):
    needs(package)
    report = try_agent({"data": rows_file(tmp_path), "agent": f"support.stock_agents:{name}"}, 2)
    assert report.ok, report.text()
    assert "policy oracle: 0 failed, mean reward" in report.text() and "6 calls in 2 episodes" in report.text()
    assert f"{overruled} 6" in report.text()


def test_a_run_without_any_source_of_reward_is_refused_at_the_start(tmp_path):
    data = rows_file(tmp_path)
    out = tmp_path / "runs"
    with pytest.raises(SettingError, match=r"silent returns nothing.*--reward FUNCTION"):
        api.train(data=data, agent=stock_agents.silent, out=str(out), name="x", **RUN)
    assert not out.exists()
    agent = "support.stock_agents:silent"
    for values in ({"data": data, "agent": agent, "reward": ("exact",)}, {"env": "guess", "agent": agent}):
        assert not unpaid(EnvSpec.from_settings(resolve_settings(values)))  # somebody else may pay


def test_an_explicit_limit_of_turns_holds_and_what_it_cuts_is_not_reward_0(tmp_path):
    values = {**RUN, "max_turns": 2, "agent": stock_agents.in_process, "data": rows_file(tmp_path)}
    words = r"a refused call ended the episode: the episode has taken its 2 turns \(--max-turns\) \(turn_limit\)"
    with pytest.raises(EnvironmentFault, match=words):
        api.train(out=str(tmp_path), name="x", **values)


async def sometimes_too_long(task, client):
    """Six calls where the row says so: with a limit of four they are cut."""
    messages, long = list(task.messages), len(seen) % 2
    seen.append(1)
    for _ in range(6 if long else 3):
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, stock_agents.GO_ON]
    return 1.0


seen: list[int] = []


def test_a_run_whose_agent_is_cut_now_and_then_counts_and_tells_it(tmp_path):
    seen.clear()
    values = {**RUN, "max_turns": 4, "agent": sometimes_too_long, "data": rows_file(tmp_path)}
    summary = api.train(out=str(tmp_path), name="x", **values)
    exact, row = summary["exactness"], first_row(summary["run"])
    assert exact["refused"]["codes"] == {"turn_limit": exact["episodes"] // 2}
    assert exact["refused"]["episodes_ended"] == exact["episodes"] // 2
    assert row["reward"] == 1.0  # the episodes that were cut are not among them
    assert any(
        "episodes failed and were not trained on" in text and "turn_limit" in text for text in messages(summary["run"])
    )


async def survives(task, client):
    reply = await client.chat.completions.create(messages=task.messages, temperature=0.5)
    for _ in range(2):
        try:
            again = [*task.messages, reply.choices[0].message, stock_agents.GO_ON]
            reply = await client.chat.completions.create(messages=again)
        except Exception:  # as many frameworks do
            return 0.5
    return 1.0


def test_a_limit_that_cuts_is_a_metric_and_a_warning_by_its_type_not_by_its_words(tmp_path):
    values = {**RUN, "max_turns": 2, "agent": survives, "data": rows_file(tmp_path)}
    summary = api.train(out=str(tmp_path), name="x", **values)
    row = first_row(summary["run"])
    assert row["truncated/episodes_by_max_turns"] == 1.0 and row["agent/refused/turn_limit"] == 1.0
    text = "\n".join(messages(summary["run"]))
    assert "ended at the limit of turns" in text and "(turn_limit)" in text
    assert text.count("the agent's calls set temperature, which the run overrules") == 1


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("silent", {}, "silent returns nothing"),
        ("typed", {}, "'logit_bias' is not supported; leave it out (unsupported_parameter); the agent: RuntimeError"),
        ("in_process", {"max_turns": 2}, "the episode has taken its 2 turns (--max-turns) (turn_limit)"),
    ],
)
def test_check_agent_names_the_cause(name, values, words, tmp_path):
    report = try_agent({"data": rows_file(tmp_path), "agent": f"support.stock_agents:{name}", **values}, 2)
    assert any(words in problem for problem in report.problems), report.text()
    assert not any("catch the model's own mistakes" in problem for problem in report.problems)


def test_a_stock_client_is_told_not_to_repeat_a_refused_call(tmp_path):
    needs("openai")
    values = {"data": rows_file(tmp_path), "agent": "support.stock_agents:openai_chat", "max_turns": 2}
    report = try_agent(values, 2)
    assert "(turn_limit); the agent: ConflictError" in report.problems[0]
    assert "refused calls: 2 (turn_limit 2); 2 episodes ended by one" in report.text()
    assert "retried calls: 0" in report.text()


def test_check_agent_does_not_miss_the_reward_of_a_function(tmp_path):
    values = {"data": rows_file(tmp_path), "agent": "support.stock_agents:silent", "reward": ("exact",)}
    assert try_agent(values, 2).ok


async def answered(task, client, **more):
    reply = await client.chat.completions.create(messages=task.messages, **more)
    return reply.choices[0].message.content


async def says_a_text(task, client):
    calls.append(task.prompt)
    return f"well done: {await answered(task, client)}"


async def calls_nobody(task, client):
    return 1.0


async def asks_for_biases(task, client):
    await answered(task, client, logit_bias={"1": 100})
    return 1.0


async def misses_a_name(task, client):
    await answered(task, client, messages=undefined_name)  # noqa: F821
    return 1.0


async def asks_for_a_solution(task, client):
    return await answered(task, client) == task.solution


async def forgets_to_wait(task, client):
    return float(client.chat.completions.create(messages=task.messages).choices[0].message.content)


def blocks(task, client):
    import time

    time.sleep(60)
    return "late"


async def knows_no_answer(task, client):
    text = await answered(task, client)
    return None if not text.isdigit() else 1.0


async def stumbles(task, client):
    json.loads("{" + await answered(task, client))
    return 1.0


def played_by(agent, data):
    return EnvSpec.from_settings(resolve_settings({"agent": "support.stock_agents:silent", "data": data}), agent=agent)


calls: list[str] = []
BROKEN = [
    (says_a_text, "the agent returned 'well done: .*expected a number"),
    (calls_nobody, "the agent made no call"),
    (asks_for_biases, "a call of the agent is refused: 'logit_bias' is not supported"),
    (misses_a_name, "the agent raised NameError: .*undefined_name"),
    (asks_for_a_solution, "a task has no 'solution'; it has messages, prompt, tools, row"),
]


@pytest.mark.parametrize(("agent", "words"), BROKEN)
def test_an_agent_that_breaks_its_contract_is_refused_before_the_model_is_loaded(agent, words, tmp_path):
    calls.clear()
    out, data = tmp_path / "runs", rows_file(tmp_path)
    assert re.search(words, first_fault(played_by(agent, data)), re.S)
    with pytest.raises(SettingError, match=f"(?s){words}.*check-agent"):
        api.train(out=str(out), name="x", agent=agent, data=data, **RUN)
    assert not out.exists() and not calls  # it was played elsewhere: nothing of it is left here


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_call_that_is_not_awaited_is_named(tmp_path):
    assert "write await in front of the call" in first_fault(played_by(forgets_to_wait, rows_file(tmp_path)))


@pytest.mark.parametrize("agent", [stumbles, sometimes_too_long, stock_agents.in_process])
def test_an_agent_that_an_answer_may_mend_is_not_refused(agent, tmp_path):
    assert not first_fault(played_by(agent, rows_file(tmp_path)))


def test_words_about_nonsense_are_nobodys_fault_and_an_agent_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    bare = rows_file(tmp_path, [{"prompt": f"what is {n}?"} for n in range(8)])  # no answer that a policy could know
    assert not first_fault(played_by(knows_no_answer, bare))
    monkeypatch.setattr("turnwise.training.agents.PREFLIGHT", 0.3)
    began = time.monotonic()
    assert not first_fault(played_by(blocks, bare))
    assert time.monotonic() - began < 10


async def turns_bad(task, client):
    await answered(task, client)
    seen.append(1)
    return 1.0 if len(seen) < 3 else "bad"


def test_the_first_episode_that_fails_in_a_run_is_told_before_its_batch_is_complete(tmp_path):
    seen.clear()
    heard = []

    def listen(kind, facts):
        heard.append((kind, facts.get("text", ""), len(seen)))

    with pytest.raises(EnvironmentFault, match="returned 'bad'"):
        api.train(
            listen, agent=turns_bad, data=rows_file(tmp_path), out=str(tmp_path), name="x", **{**RUN, "groups": 8}
        )
    (told,) = [(text, episodes) for _, text, episodes in heard if text.startswith("an episode failed")]
    assert "the agent returned 'bad'" in told[0] and "failed episodes are not trained on" in told[0]
    assert told[1] <= 8 * 4, "told while its first batch is played"
