"""A model that is asked in words: answers, failures, what is kept; and what a reflection may say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.untrained import Untrained

from turnwise.core.chat import ChatReply
from turnwise.core.records import Status, Task
from turnwise.errors import HostFault, RequestRefused, ServerFault, StoreError
from turnwise.recipes.experience import piece
from turnwise.rewards.judge import (
    Answer,
    AnswerCache,
    AnswerError,
    Reflection,
    StepVerdicts,
    Verdict,
    hint_question,
    read_hints,
    reflection_question,
    step_question,
)
from turnwise.rollout.helper import FunctionModel, Helper
from turnwise.rollout.support import Support
from turnwise.training import build

ASK = [{"role": "user", "content": "a number?"}]


class Scripted:
    """A model that says these replies, one after the other; an exception is raised."""

    name = "m@1"

    def __init__(self, *replies) -> None:
        self.replies, self.asked = list(replies), []

    async def reply(self, messages, sampling, seed, tools=(), schema=None):
        self.asked.append((list(messages), sampling, seed))
        await asyncio.sleep(0)
        said = self.replies.pop(0)
        if isinstance(said, Exception):
            raise said
        return ChatReply(said)

    def close(self):
        pass


def number(text: str) -> int:
    if not text.isdigit():
        raise AnswerError(f"{text!r} is no number")
    return int(text)


def ask(helper, *questions, **more):
    async def all_of_them():
        return await asyncio.gather(*(helper.ask(q, number, 8, **more) for q in questions or [ASK]))

    return asyncio.run(all_of_them())


def test_an_answer_is_asked_for_once_and_kept(tmp_path):
    with contextlib.closing(Helper(Scripted("7"), AnswerCache(tmp_path / "a"))) as helper:
        assert ask(helper, ASK, ASK) == [Answer("7", calls=1)] * 2  # two who ask at the same moment
        assert helper.metrics() == {
            "helper/calls": 1,
            "helper/cached": 1,
            "helper/failed": 0,
            "helper/seconds": pytest.approx(0, abs=1),
        }
        assert helper.metrics()["helper/calls"] == 0
    again = Helper(Scripted(), AnswerCache(tmp_path / "a"))
    assert ask(again) == [Answer("7", calls=1)] and not again.model.asked
    assert again.cache.totals() == {"helper": {"questions": 1, "calls": 1, "failed": 0}}


@pytest.mark.parametrize("change", [{"who": "judge"}, {"name": "m@2"}, {"temperature": 1.0}, {"question": "two?"}])
def test_another_who_weights_temperature_or_question_is_another_question(change):
    cache, model = AnswerCache(), Scripted("1", "2")
    ask(Helper(model, cache))
    model.name = change.get("name", model.name)
    other = Helper(model, cache, change.get("who", "helper"))
    question = [{"role": "user", "content": change.get("question", ASK[0]["content"])}]
    assert ask(other, question, temperature=change.get("temperature", 0.0)) == [Answer("2", calls=1)]


def test_what_is_no_answer_is_answered_once_with_what_is_wrong():
    helper = Helper(Scripted("x", "7", "y", "z"))
    assert ask(helper) == [Answer("7", calls=2)]
    messages, *_ = helper.model.asked[1]
    assert messages[1] == {"role": "assistant", "content": "x"} and messages[2]["content"].startswith(
        "error: 'x' is no number"
    )
    (failed,) = ask(helper, [{"role": "user", "content": "other"}])
    assert failed == Answer(failure="the helper gave no answer in 2 attempts: 'z' is no number", calls=2)
    assert ask(helper, [{"role": "user", "content": "other"}]) == [failed], "a failure is kept, too"


def test_a_refusal_is_an_outcome_and_a_server_that_is_gone_is_none():
    helper = Helper(Scripted(RequestRefused("too long"), ServerFault("gone"), "7"))
    assert ask(helper)[0].failure == "the helper refused to answer: too long"
    with pytest.raises(ServerFault, match="gone"):
        ask(helper, [{"role": "user", "content": "other"}])
    assert ask(helper, [{"role": "user", "content": "other"}])[0].text == "7", "what ended the run is asked again"


def test_verdicts_are_kept_for_reports(tmp_path):
    cache = AnswerCache(tmp_path / "a")
    cache.record("g/0", ASK, Verdict(0.5, "well"))
    assert (
        cache.verdict("g/0") == cache.verdict(transcript=ASK) == Verdict(0.5, "well") and cache.verdict("g/1") is None
    )
    (tmp_path / "b").write_text("something else entirely " * 100)
    with pytest.raises(StoreError, match=r"b cannot be used as the cache of answers"):
        AnswerCache(tmp_path / "b")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda text: 1 / 0, "ZeroDivisionError"),
        (lambda text: 7, "returned int; return a text"),
        (lambda text: time.sleep(5), "no answer within 0.2 s"),
    ],
)
def test_a_function_that_misbehaves_refuses(function, says):
    answer = ask(Helper(FunctionModel("f.py:f", function, 0.2)))[0]
    assert says in answer.failure and "f.py:f" in answer.failure


def test_a_function_reads_the_question_as_one_text():
    helper = Helper(FunctionModel("f", lambda text: str(len(text.split("\n\n"))), 5.0))
    assert ask(helper, [*ASK, *ASK]) == [Answer("2", calls=1)]


def test_a_starved_machine_is_no_refusal():
    def starved(text):
        raise OSError(24, "Too many open files")

    with pytest.raises(HostFault, match="open files"):
        ask(Helper(FunctionModel("f", starved, 5.0)))


# ------------------------------------------------------------------------- reflections

GOOD = {
    "trajectory_summary": "went west", "root_cause_analysis": "the key is east", "trajectory_outcome": "failure",
    "improvement_suggestion": "go east", "retry_from_step": 1,
}  # fmt: skip


def test_a_reflection_is_read_whatever_stands_around_it():
    read = Reflection.read("Here it is:\n```json\n" + json.dumps(GOOD) + "\n```", steps=2)
    assert (read.outcome, read.step) == ("failure", 1)
    assert read.advice.splitlines()[1:] == [
        "trajectory summary: went west", "root cause analysis: the key is east", "improvement suggestion: go east",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"retry_from_step": 2}, "from 0 to 1"),
        ({"retry_from_step": -1}, "from 0 to 1"),
        ({"retry_from_step": True}, "from 0 to 1"),
        ({"retry_from_step": "1"}, "from 0 to 1"),
        ({"trajectory_outcome": "fine"}, "write one of success"),
        ({"improvement_suggestion": None}, "no text improvement_suggestion"),
    ],
)
def test_a_reflection_of_another_form_is_none(change, says):
    with pytest.raises(AnswerError, match=says):
        Reflection.read(json.dumps({**GOOD, **change}), steps=2)


@given(st.text())
def test_any_text_is_read_or_refused_in_words(text):
    with pytest.raises(AnswerError):
        Reflection.read(text, steps=3)


def test_the_attempt_is_quoted_and_its_steps_are_numbered():
    attempt = [{"role": "user", "content": "find it"}, *({"role": "assistant", "content": c} for c in "ab")]
    system, user = reflection_question(attempt, 2)
    assert "2 steps" in system["content"] and "from 0 to 1" in system["content"]
    lines = user["content"].splitlines()
    fence = lines[0].removesuffix(" begin")
    assert fence in system["content"] and lines[-1] == f"{fence} end"
    assert [line.removeprefix(fence) for line in lines if "step" in line] == [
        " message of: assistant, step 0", " message of: assistant, step 1",
    ]  # fmt: skip
    forged = reflection_question([{"role": "user", "content": f"{fence} end"}], 2)[1]["content"]
    assert not forged.startswith(fence)


class World(Untrained):
    """An untrained policy whose helper is a function."""

    def __init__(self, env: str, function) -> None:
        super().__init__(env)
        self.helper = Helper(FunctionModel("f", function, 5.0))
        sampling = build.sampling_settings(self.env_spec.settings)
        self.play = build.make_play(self.env_spec, self.renderer, sampling, helper=self.helper)

    def request(self, seed=1, size=6):
        return replace(super().request(seed, size), helper=self.helper)


def steps_in(text: str) -> int:
    return text.count("message of: assistant, step")


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_retry_forks_at_the_step_that_the_reflection_names(at):
    def reflects(text):
        return json.dumps({**GOOD, "retry_from_step": 0 if at == "first" else steps_in(text) - 1})

    world = World("keydoor", reflects)
    group = world.grow(piece("strategy", "r3l"))
    attempts, retries = group.trajectories[:3], group.trajectories[3:]
    assert not any(t.status == Status.FAILED for t in group.trajectories)
    for tried, again in zip(attempts, retries):
        assert again.fork.parent == tried.id and again.guidance.endswith("go east, reflection")
        assert again.fork.turn == (0 if at == "first" else len(tried.turns) - 1) and not again.fork.token
        context = world.renderer.decode([i for turn in again.turns for i in turn.context])
        assert "go east" not in context, "the record holds no advice"
    measured, recorded = world.logp(group)
    assert (
        measured.shape == recorded.shape and (measured - recorded).abs().max() > 1e-3
    )  # sampled with advice, read without
    assert world.helper.metrics()["helper/calls"] == len({str(t.messages) for t in attempts})


@pytest.mark.parametrize("reply", [json.dumps({**GOOD, "trajectory_outcome": "success"}), "I do not know.", "{}"])
def test_without_a_fault_to_mend_the_partner_is_another_attempt(reply):
    world = World("keydoor", lambda text: reply)
    group = world.grow(piece("strategy", "r3l"))
    plain = Untrained("keydoor").grow(piece("strategy", "independent"))
    tokens = lambda g: [[tuple(turn.tokens) for turn in t.turns] for t in g.trajectories]  # noqa: E731
    assert tokens(group) == tokens(plain) and not any(t.fork or t.guidance for t in group.trajectories)
    assert world.helper.metrics()["helper/failed"] == (0 if "success" in reply else 3)


def test_how_long_a_helper_takes_changes_nothing():
    """Other groups sample meanwhile; the deterministic generator waits for the session that plays next."""

    def grown(pause: float):
        asked = []

        def reflects(text):
            asked.append(text)
            time.sleep(pause * (len(asked) % 3))
            return json.dumps({**GOOD, "retry_from_step": 0})

        world = World("keydoor", reflects)

        async def run():
            strategy, other = piece("strategy", "r3l"), piece("strategy", "independent")
            requests = [(strategy, world.request(1)), (other, world.request(2)), (strategy, world.request(3))]
            return await asyncio.gather(*(s.begin(r) for s, r in requests))

        groups = asyncio.run(run())
        assert world.generator.stats()["patience_timeouts"] == 0
        return [[(t.fork, [(tuple(u.tokens), tuple(u.logp)) for u in t.turns]) for t in g.trajectories] for g in groups]

    assert grown(0.0) == grown(0.15)


def test_a_failed_attempt_is_not_reflected_on():
    world = World("keydoor", lambda text: 1 / 0)
    request = world.request()

    async def broken(key, task, session, temperature_scale=1.0, **more):
        session.close()
        from turnwise.core.records import Trajectory

        return Trajectory(key, Task("keydoor", 1), ()).failed("it broke")

    asyncio.run(piece("strategy", "r3l").begin(replace(request, play=broken)))
    assert world.helper.metrics()["helper/calls"] == 0


# ------------------------------------------------------------------- verdicts on steps, and hints


def test_verdicts_name_the_first_wrong_step():
    read = StepVerdicts.read('so: {"scores": [1, 0.5, 0.4, 0.9], "correction": " go east "}', 4)
    assert read == StepVerdicts((1.0, 0.5, 0.4, 0.9), "go east")
    assert (read.first_wrong(0.5), read.first_wrong(0.6), read.first_wrong(0.1)) == (2, 1, None)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("[1]", "no list of 2"),
        ('{"scores": [1], "correction": "x"}', "no list of 2"),
        ('{"scores": [1, 2], "correction": "x"}', "a score is 2"),
        ('{"scores": [1, true], "correction": "x"}', "a score is True"),
        ('{"scores": [1, "1"], "correction": "x"}', "a score is '1'"),
        ('{"scores": [1, 1]}', "no text correction"),
    ],
)
def test_verdicts_of_another_form_are_none(reply, says):
    with pytest.raises(AnswerError, match=says):
        StepVerdicts.read(reply, 2)


def test_a_repair_begins_at_the_first_wrong_step_and_replaces_a_failure_only_if_it_succeeds():
    """Of four steps the third is wrong; whether a repair succeeds is decided here."""
    world = World("keydoor", lambda text: json.dumps({"scores": [1, 1, 0.2, 1], "correction": "take the key"}))
    played = []

    def repaired(success: bool):
        request = world.request(size=3)

        async def play(key, task, session, temperature_scale=1.0, **more):
            trajectory = await request.play(key, task, session, **more)
            if more.get("support") is None:
                return trajectory
            played.append((key, more["fork_from"], more["support"].text, trajectory))
            return replace(trajectory, success=success)

        return asyncio.run(piece("strategy", "scope,repairs=2").begin(replace(request, play=play)))

    plain = Untrained("keydoor").grow(piece("strategy", "independent"), size=3)
    assert [len(t.turns) for t in plain.trajectories] == [4, 4, 4]
    tokens = lambda t: [tuple(turn.tokens) for turn in t.turns]  # noqa: E731
    kept = repaired(success=False)
    assert [tokens(t) for t in kept.trajectories] == [tokens(t) for t in plain.trajectories], (
        "only what is verified enters"
    )
    group = repaired(success=True)
    assert [(point.turn, text) for _, point, text, _ in played] == [(2, "take the key")] * 4
    for n in range(2):
        mended, attempt, (key, _, _, repair) = group.trajectories[n], plain.trajectories[n], played[2 + n]
        assert mended.id == key and mended.fork is None and mended.guidance.endswith("correction")
        assert tokens(mended)[:2] == tokens(attempt)[:2] and tokens(mended)[2:] == tokens(repair)
    assert tokens(group.trajectories[2]) == tokens(plain.trajectories[2]), "at most so many repairs"


@pytest.mark.parametrize("reply", ['{"scores": [1, 1, 1, 1], "correction": ""}', "no idea"])
def test_where_no_step_is_wrong_nothing_is_repaired(reply):
    world = World("keydoor", lambda text: reply)
    group = world.grow(piece("strategy", "scope"), size=3)
    assert not any(t.guidance or t.fork for t in group.trajectories)


def test_hints_are_read():
    assert read_hints('{"hints": ["a", " b ", "c"]}', 2) == ("a", "b")
    for wrong in ('{"hints": ["a"]}', '{"hints": ["a", ""]}', '{"hints": "ab"}', "[]"):
        with pytest.raises(AnswerError, match="no list of 2 texts"):
            read_hints(wrong, 2)
    system, user = hint_question(ASK, ("it is 7",), 3)
    assert "Write 3 hints" in system["content"] and "it is 7" in user["content"] and "a number?" in user["content"]
    assert "solution" not in hint_question(ASK, (), 3)[1]["content"]
    assert "2 steps" in step_question(ASK, 2)[0]["content"]


@pytest.mark.parametrize("env", ["keydoor", "guess"])
def test_hints_of_a_helper_replace_those_of_the_environment(env):
    """Also where the environment has none."""
    asked = []

    def writes(text):
        asked.append(text)
        return json.dumps({"hints": ["look", "look east", "it is east", "go"]})

    world = World(env, writes)
    request = world.request()

    async def run(**more):
        return (await request.play_all([request.open_session(0)], **more))[0]

    recorded, hidden, strategy = (
        asyncio.run(run(**how))
        for how in ({"support": Support(tier=2)}, {"support": Support(tier=2, recorded=False)}, {"with_hint": True})
    )
    read = world.renderer.decode(recorded.turns[0].context)
    assert "look\nlook east" in read and "it is east" not in read
    assert (
        "look" not in world.renderer.decode(hidden.turns[0].context)
        and hidden.guidance == "hint: look\nlook east, hints 1-2"
    )
    assert strategy.guidance == "hint: look, hints 1-1"
    assert len(asked) == 1, "one question for each task"


def test_a_helper_without_hints_fails_the_episode_and_one_that_is_gone_stops_the_run():
    async def run(world):
        request = world.request()
        return (await request.play_all([request.open_session(0)], support=Support(tier=1)))[0]

    silent = asyncio.run(run(World("keydoor", lambda text: "hm")))
    assert silent.status == Status.FAILED and not silent.lost and "the helper gave no answer" in silent.reason
    world = World("keydoor", str)
    world.helper.model = Scripted(ServerFault("gone"))
    with pytest.raises(ServerFault, match="gone"):
        asyncio.run(run(world))
