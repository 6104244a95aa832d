"""The exactness certificate of a run that an agent played: counted from the ledger; in the summary, the card, on the terminal."""

from __future__ import annotations

import json

import pytest
from support.agent_runs import SMALL, solve

from turnwise.cli import display
from turnwise.core.records import Status
from turnwise.rollout.certificate import certificate, certificate_lines
from turnwise.store.database import EpisodeFacts
from turnwise.training import api


def episode(facts, status=Status.FINISHED, sampled=10, trained=True, reason=""):
    return EpisodeFacts(status, reason, sampled, trained, {f"agent/{k}": v for k, v in facts.items()})


def test_counts_of_calls_restarts_and_tokens():
    found = certificate(
        [
            episode({"opening": 1.0, "continued": 3.0, "interleaved": 1.0, "sub-agent": 1.0}),
            episode(
                {
                    "opening": 1.0,
                    "template": 1.0,
                    "differs/template": "at token 4: recorded 'a', now 'b'",
                    "retries": 2.0,
                }
            ),
            episode({}, Status.FAILED, sampled=5, trained=False, reason="the agent did not end"),
        ]
    )
    assert (found["calls"], found["first_calls"], found["continued"]) == (8, 2, 4)
    assert found["continued_share"] == pytest.approx(4 / 6)
    assert found["restarts"]["template"] == {"count": 1, "first_difference": "at token 4: recorded 'a', now 'b'"}
    assert found["restarts"]["sub-agent"]["count"] == 1 and found["retries"] == 2
    assert found["unfinished"] == {"count": 1, "reasons": {"the agent did not end": 1}}
    assert (found["tokens_trained"], found["tokens_sampled"]) == (20, 25)
    text = "\n".join(certificate_lines(found))
    assert "recorded 'a', now 'b'" in text and "20 / 25 (80.0%)" in text and "did not end" in text


def test_no_episode_is_a_certificate_too():
    assert certificate([])["continued_share"] is None and certificate_lines(certificate([]))


def test_refused_calls_and_overruled_fields_are_counted_and_nothing_is_no_hundred_percent():
    found = certificate(
        [
            episode({"opening": 1.0, "refused/turn_limit": 1.0, "ended_by": "turn_limit"}, Status.FAILED, trained=False),
            episode({"opening": 1.0, "refused/turn_limit": 1.0, "overruled/temperature": 3.0}),
        ]
    )
    assert found["refused"] == {"count": 2, "codes": {"turn_limit": 2}, "episodes_ended": 1}
    assert found["overruled"] == {"temperature": 3}
    text = "\n".join(certificate_lines(found))
    assert "2 calls in 2 episodes; no later calls" in text and "100" not in text.splitlines()[0]
    assert "refused calls: 2 (turn_limit 2); 1 episodes ended by one" in text and "temperature 3" in text


async def forgetful(task, client):
    """Writes what it was told in other words, so that its second call begins a new sequence."""
    reply = await client.chat.completions.create(messages=task.messages)
    text = "" if len(reply.choices[0].message.content or "") > 10**6 else "I said something"
    again = [*task.messages, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    await client.chat.completions.create(messages=again)
    return 1.0


def test_a_run_of_an_agent_certifies_its_calls(tmp_path, capsys):
    small = {**SMALL, "steps": 1, "cold_steps": 1, "eval_tasks": 0}
    exact = api.train(env="lookup", agent=solve, out=str(tmp_path), name="exact", **small)
    assert exact["exactness"]["continued_share"] == 1.0 and not exact["exactness"]["restarts"]
    assert exact["exactness"]["episodes"] == 6
    inexact = api.train(env="lookup", agent=forgetful, out=str(tmp_path), name="inexact", **small)
    assert inexact["exactness"]["continued_share"] == 0.0
    (restart,) = inexact["exactness"]["restarts"].values()
    assert restart["count"] == 6 and "recorded" in restart["first_difference"]
    display.show_summary(inexact)
    assert "restarts, " in capsys.readouterr().out
    assert "restarts, " in (tmp_path / "inexact" / "model" / "README.md").read_text()
    assert json.loads((tmp_path / "inexact" / "summary.json").read_text())["exactness"] == inexact["exactness"]
