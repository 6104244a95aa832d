"""Whole small runs that learn from demonstrations, from their own past, from a file, from a teacher, with another's credit;
and the same after a crash."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from safetensors.torch import load_file
from support.lottery import WORDS

from turnwise import recipes
from turnwise.cli import display
from turnwise.cli import sharing as exports
from turnwise.cli.main import main
from turnwise.core.batch import pack
from turnwise.data.replay import ExpertCache, RecentBuffer
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api
from turnwise.training import loop as run_module
from turnwise.training.loop import Loop

SMALL = {
    "env": "guess",
    "difficulty": (1,),
    "hidden": 32,
    "layers": 1,
    "vocabulary": 300,
    "steps": 4,
    "groups": 2,
    "group_size": 3,
    "max_tokens": 8,
    "max_turns": 3,
    "context": 320,
    "eval_tasks": 3,
    "checkpoint_every": 2,
    "trackers": (),
}
LOTTERY = {**SMALL, "env": "support.lottery:Lottery", "steps": 12, "max_tokens": 4, "max_turns": 2, "context": 128}
PAYING = {**LOTTERY, "steps": 4, "group_size": 6, "warmup": 0}  # a quarter of the answers win


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose initial model the others start from."""
    out = tmp_path_factory.mktemp("first")
    api.train(method="grpo", out=str(out), name="run", cold_steps=4, cold_batch=8, **{**SMALL, "steps": 1})
    return out / "run"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    exports.export("guess", "pairs", root / "pairs.jsonl", tasks=30)
    exports.export("guess", "demos", root / "demos.jsonl", tasks=12)
    loose = [json.loads(line) for line in (root / "demos.jsonl").read_text().splitlines()]
    (root / "loose.jsonl").write_text("\n".join(json.dumps({"messages": row["messages"]}) for row in loose))
    return root


def train(first, tmp_path, method="grpo", name="run", **settings):
    given = {**SMALL, "model": str(first / "initial"), "out": str(tmp_path), "name": name, **settings}
    recipe = given.pop("recipe", None)
    summary = api.train(recipe=recipe, **given) if recipe else api.train(method=method, **given)
    return tmp_path / name, summary


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def mixed(run):
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        return ledger.mixed(), ledger.group_counts()


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def same(left, right):
    a, b = weights(left), weights(right)
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


def assert_paid(run):
    """Rewards vary and the policy moves before the crash and after it: else equal weights would show nothing."""
    paid, norms = ([row[name] for row in rows(run)] for name in ("reward", "grad_norm"))
    assert any(paid[:3]) and len(set(paid)) > 1 and min(norms) > 0, (paid, norms)


class Crash(Exception):
    pass


def crash_and_resume(monkeypatch, first, tmp_path, after, recipe=None, **settings):
    """The same run, stopped in the step after a checkpoint, once its rows were drawn; then resumed."""
    update_policy, steps = Loop._update, []

    async def crash(self, *args):
        steps.append(args[-1])
        if args[-1] == after:
            raise Crash
        return await update_policy(self, *args)

    monkeypatch.setattr(Loop, "_update", crash)
    more = {"recipe": recipe} if recipe else {}
    with pytest.raises(Crash):
        train(first, tmp_path, name="broken", **settings, **more)
    monkeypatch.setattr(Loop, "_update", update_policy)
    api.resume(tmp_path / "broken", recipe=recipe)
    return tmp_path / "broken"


# ---------------------------------------------------------------- demonstrations


def test_a_player_demonstrates_every_task(first, tmp_path):
    run, _ = train(first, tmp_path, "luffy", demos="oracle")
    assert all(row["mixed/expert"] == SMALL["groups"] == row["demos/played"] for row in rows(run))
    used, _ = mixed(run)
    assert len(used) == 4 * SMALL["groups"] and all(o == "expert" and i.startswith("oracle:guess/") for _, i, o in used)


def test_a_file_of_named_tasks_decides_which_are_drawn(first, tmp_path, files):
    run, _ = train(first, tmp_path, "luffy", demos=str(files / "demos.jsonl"))
    named = {json.loads(line)["task"] for line in (files / "demos.jsonl").read_text().splitlines()}
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        assert {entry.task.key for entry in ledger.groups()} <= named
    assert all(row["mixed/expert"] == SMALL["groups"] for row in rows(run))


def test_loose_rows_are_a_share_of_the_batch(first, tmp_path, files):
    run, _ = train(first, tmp_path, "luffy", demos=str(files / "loose.jsonl"), demo_share=0.4)
    assert {row["mixed/expert"] for row in rows(run)} == {4.0}  # of 10


@pytest.mark.slow
def test_demonstrations_survive_a_crash(lottery, tmp_path, monkeypatch):
    exports.export("support.lottery:Lottery", "demos", tmp_path / "demos.jsonl", tasks=12)
    given = {**PAYING, "method": "luffy", "demos": str(tmp_path / "demos.jsonl")}
    whole, _ = train(lottery, tmp_path, **given)
    broken = crash_and_resume(monkeypatch, lottery, tmp_path, 3, **given)
    assert same(whole, broken) and mixed(broken)[0] == mixed(whole)[0]
    assert_paid(whole)


# ------------------------------------------------------------------------ replay


def replaying(replay):
    return replace(recipes.build("reinforce"), replay=replay)


def test_past_rows_come_back_and_are_accounted_for(first, tmp_path):
    run, _ = train(first, tmp_path, recipe=replaying(RecentBuffer(above=-1e9, share=0.5)))
    used, counts = mixed(run)
    assert counts.trained == 4 * SMALL["groups"], "fresh groups are trained on once"
    assert Counter(step for step, _, origin in used if origin == "replay") == {1: 3, 2: 3, 3: 3}, (
        "half of six fresh rows"
    )
    assert [row.get("mixed/replay") for row in rows(run)] == [None, 3, 3, 3]
    assert rows(run)[-1]["replay/stored"] == 4 * 6


@pytest.fixture(scope="module")
def lottery(tmp_path_factory):
    """A model that wins now and then: the first of a group fails, the second has a success, in any order."""
    out = tmp_path_factory.mktemp("lottery")
    api.train(method="grpo", out=str(out), name="run", **{**LOTTERY, "steps": 1})
    return out / "run"


def test_tasks_come_back_so_that_a_stored_success_helps_a_group_that_fails(lottery, tmp_path):
    run, _ = train(lottery, tmp_path, "arpo_gui", method_options={"pool": 4}, **LOTTERY)
    used, _ = mixed(run)
    assert used and {origin for _, _, origin in used} == {"replay"}
    assert sum(row.get("mixed/replay", 0.0) for row in rows(run)) == len(used)
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        drawn = Counter(entry.task.key for entry in ledger.groups())
    assert set(drawn.values()) == {6} and len(drawn) == 4, "each of four tasks once in a pass, six passes"


def test_a_task_that_fails_is_shown_an_experts_trace_until_it_has_a_success_of_its_own(lottery, tmp_path):
    run, _ = train(lottery, tmp_path, "bepa", demos="oracle", method_options={"pool": 4}, **LOTTERY)
    told = Counter({kind: sum(row.get(f"mixed/{kind}", 0.0) for row in rows(run)) for kind in ("expert", "replay")})
    assert told["expert"] > 0 and told["replay"] > 0
    assert Counter(origin for _, _, origin in mixed(run)[0]) == told


def test_a_group_that_fails_is_drawn_again_with_a_hint(lottery, tmp_path):
    given = {**LOTTERY, "env": "support.lottery:Hinted", "steps": 4, "groups": 4}
    run, _ = train(lottery, tmp_path, "guide", **given)
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        groups = [ledger.group(entry.group_id) for entry in ledger.groups()]
    for group in groups:
        helped = [bool(t.guidance) for t in group.trajectories]
        stuck = not any(t.success for t in group.trajectories[:3])
        assert helped == [False] * 3 + [True] * 3 * stuck
        word = random.Random(group.task.seed).choice(WORDS)
        assert all(t.guidance == f"hint: say {word}" for t in group.trajectories if t.guidance)
    assert 0 < sum(len(g.trajectories) == 6 for g in groups) < len(groups)
    told = [row for row in rows(run) if "source/guided/rows" in row]
    assert sum(row["source/guided/rows"] for row in told) == sum(len(g.trajectories) - 3 for g in groups)
    assert all(abs(row["source/policy/ratio"] - 1) < 1e-5 for row in told)
    guided = [abs(row["source/guided/ratio"] - 1) for row in told]  # divided by what was sampled with the hint
    assert all(gap > 1e-5 for gap in guided) and max(guided) > 1e-3, guided


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replay", "more"),
    [(RecentBuffer(above=-1e9, share=0.5), {}), (ExpertCache(), {"demos": "oracle"})],
    ids=["recent", "expert cache"],
)
def test_a_buffer_survives_a_crash(lottery, tmp_path, monkeypatch, replay, more):
    recipe, more = replaying(replay), {**PAYING, **more}
    whole, _ = train(lottery, tmp_path, recipe=recipe, **more)
    broken = crash_and_resume(monkeypatch, lottery, tmp_path, 3, recipe, **more)
    assert same(whole, broken), "the resumed run trained on something else"
    assert mixed(broken)[0] == mixed(whole)[0], "replayed use is accounted for once"
    assert mixed(broken)[1].trained == mixed(whole)[1].trained
    assert_paid(whole)
    assert all(row["replay/stored"] > 0 for row in rows(whole)[2:]), "an empty buffer shows nothing"


# ------------------------------------------------------------------------- files


def test_pairs_from_a_file_without_rollouts(first, tmp_path, files):
    run, summary = train(first, tmp_path, "dpo", data=str(files / "pairs.jsonl"), lr=1e-3)
    found, counts = mixed(run)
    assert not found and counts.trained == counts.issued == 4 * SMALL["groups"]
    ranking = summary["ranking"]
    assert ranking["before"]["groups"] >= 2 and 0 <= ranking["after"]["accuracy"] <= 1
    assert summary["success_before"]["tasks"] == SMALL["eval_tasks"]
    assert [row["passes_over_data"] for row in rows(run)] == sorted(row["passes_over_data"] for row in rows(run))


def test_without_tasks_the_held_back_pairs_are_the_measure(first, tmp_path, files):
    _, summary = train(first, tmp_path, "simpo", data=str(files / "pairs.jsonl"), eval_tasks=0)
    assert summary["measured"].startswith("held-out pairs") and summary["success_after"]["tasks"] >= 2
    assert summary["success_after"]["success"] == summary["ranking"]["after"]["accuracy"]


def test_without_tasks_and_without_pairs_the_held_back_rows_have_a_log_probability(first, tmp_path, files, capsys):
    """Refused before: a run on dialogues with --eval-tasks 0."""
    rows = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    answers = [json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) for row in rows]
    (tmp_path / "answers.jsonl").write_text("\n".join(answers))
    _, summary = train(first, tmp_path, "otr", data=str(tmp_path / "answers.jsonl"), eval_tasks=0)
    assert summary["measured"] == "nothing: --eval-tasks 0" and summary["success_after"]["success"] is None
    assert summary["ranking"]["after"]["logp"] != summary["ranking"]["before"]["logp"]
    display.show_summary(summary)
    said = capsys.readouterr().out
    assert "not evaluated" in said and "held-out groups of the file" in said


@pytest.mark.slow
def test_an_offline_run_survives_a_crash(first, tmp_path, files, monkeypatch):
    given = {"method": "dpo", "data": str(files / "pairs.jsonl"), "eval_tasks": 0}
    whole, _ = train(first, tmp_path, **given)
    broken = crash_and_resume(monkeypatch, first, tmp_path, 3, **given)
    assert same(whole, broken) and mixed(broken)[1].trained == mixed(whole)[1].trained


def test_a_file_that_has_changed_is_noticed(first, tmp_path, files, monkeypatch):
    copy = tmp_path / "pairs.jsonl"
    copy.write_text((files / "pairs.jsonl").read_text())
    update_policy = Loop._update

    async def crash(self, *args):
        raise Crash

    monkeypatch.setattr(Loop, "_update", crash)
    with pytest.raises(Crash):
        train(first, tmp_path, "dpo", data=str(copy), eval_tasks=0)
    monkeypatch.setattr(Loop, "_update", update_policy)
    copy.write_text("\n".join(copy.read_text().splitlines()[:-1]))
    with pytest.raises(SettingError, match="has changed since this run began"):
        api.resume(tmp_path / "run")


@pytest.mark.slow
def test_preferences_are_learned(first, tmp_path, files):
    """A few passes over easy pairs: held-back answers of the oracle become likelier than the demonstrator's."""
    _, summary = train(
        first, tmp_path, "dpo", data=str(files / "pairs.jsonl"), eval_tasks=0, steps=30, groups=8, lr=3e-3
    )
    before, after = summary["ranking"]["before"], summary["ranking"]["after"]
    assert after["accuracy"] >= before["accuracy"] and after["accuracy"] > 0.5


def test_rated_answers_from_a_file_the_best_along_each_direction_is_imitated(first, tmp_path):
    said = ["up.", "it is up, I think.", "down", "it is surely down, of course."]
    made = [
        {"prompt": f"where is {n}?", "response": text, "helpfulness": i % 3, "verbosity": len(text) / 8}
        for n in range(6)
        for i, text in enumerate(said)
    ]
    (tmp_path / "rated.jsonl").write_text("\n".join(map(json.dumps, made)))
    seen, update_policy = [], run_module.update_policy

    def look(learner, recipe, groups, *rest):
        seen.extend(groups)
        return update_policy(learner, recipe, groups, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "update_policy", look)
        run, _ = train(first, tmp_path, "dpa", data=str(tmp_path / "rated.jsonl"))
    assert {len(g.trajectories) for g in seen} == {4} and len(seen) == 4 * SMALL["groups"]
    keep, batch = recipes.build("dpa").penalties[0].rows, pack(seen)
    chosen = iter(keep.select(batch).x.tolist())
    for group in seen:
        worth = [sum(t.facts[f"toward_{n}"] * r for n, r in t.rewards.items()) for t in group.trajectories]
        assert [next(chosen) for _ in worth] == [w == max(worth) for w in worth]
    assert all(row["source/expert/rows"] == 4 * SMALL["groups"] for row in rows(run))


def test_dialogues_from_a_file_without_rollouts(first, tmp_path, files):
    run, _ = train(first, tmp_path, "otr", data=str(files / "loose.jsonl"))
    assert mixed(run)[1].trained == 4 * SMALL["groups"]


# ----------------------------------------------------------------------- teacher


def test_a_teacher(first, tmp_path):
    run, _ = train(first, tmp_path, "opd", teacher=str(first / "model"), steps=1)
    assert len(rows(run)) == 1


def test_a_tiny_model_takes_its_teachers_tokenizer(first, tmp_path):
    run, _ = train(first, tmp_path, "opd", model="tiny", teacher=str(first / "model"), steps=1, seed=5, cold_steps=2)
    assert (run / "initial" / "tokenizer.json").read_text() == (first / "model" / "tokenizer.json").read_text()


def test_a_teacher_with_other_words_is_refused(first, tmp_path):
    tokenizer = tiny_tokenizer(["other words entirely " * 9] * 9, 320)
    tiny_model(len(tokenizer), 0, hidden=16, layers=1, context=64).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(SettingError, match=r"has another vocabulary .* entries differ"):
        train(first, tmp_path, "opd", teacher=str(tmp_path / "other"))
    with pytest.raises(SettingError, match="no model could be loaded"):
        train(first, tmp_path, "opd", teacher=str(tmp_path / "nope"))


# ------------------------------------------------------------------------ credit


@pytest.mark.slow
def test_a_method_with_anothers_credit(first, tmp_path, monkeypatch):
    given = {"method": "gspo", "credit": "gigpo", "credit_options": {"omega": 0.5}}
    run, summary = train(first, tmp_path, **given)
    assert summary["method"] == "gspo+gigpo"
    facts = json.loads((run / "run.json").read_text())
    assert facts["settings"]["credit"] == "gigpo" and facts["settings"]["credit_options"] == {"omega": 0.5}
    broken = crash_and_resume(monkeypatch, first, tmp_path, 3, **given)
    assert same(run, broken)


def test_the_run_is_named_after_both(first, tmp_path):
    settings = {**SMALL, "steps": 1, "model": str(first / "initial"), "out": str(tmp_path)}
    api.train(method="gspo", credit="rloo", **settings)
    assert (tmp_path / "gspo+rloo-guess-s0-1" / "run.json").is_file()


# ------------------------------------------------------------------------ export


def test_what_a_run_did_as_rows(first, tmp_path, capsys):
    run, _ = train(first, tmp_path, "grpo", steps=2, groups=6)
    for form in ("pairs", "demos"):
        code = main(["export", str(run), str(tmp_path / f"{form}.jsonl"), "--as", form])
        out, err = capsys.readouterr()
        assert (code == 0 and form in out) or "nothing to write" in err
    assert main(["export", "guess", str(tmp_path / "made.jsonl"), "--tasks", "3", "--as", "demos"]) == 0
    assert main(["export", "guess", str(tmp_path / "made.jsonl")]) == 2
    assert "will not be overwritten" in capsys.readouterr().err
    assert main(["export", "guess", str(tmp_path / "x.jsonl"), "--as", "songs"]) == 2
    assert "no row format 'songs'" in capsys.readouterr().err
    assert main(["export", "nowhere", str(tmp_path / "x.jsonl")]) == 2
    assert main(["export", "guess", str(tmp_path / "no" / "x.jsonl"), "--tasks", "1"]) == 2
    assert "no folder" in capsys.readouterr().err
