"""The command line, in this process: JSON where asked for, and one line of words for every mistake."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch

from turnwise import recipes
from turnwise.cli.flags import COMMON, NO_FLAGS, flag
from turnwise.cli.main import COMMANDS, FUNCTIONS, main
from turnwise.config.settings import SECTIONS, Settings
from turnwise.models.tiny import tiny_model, tiny_tokenizer

GOOD_AND_BROKEN = """
from turnwise.core.protocols import Step


class Good:
    def reset(self, seed):
        return [{"role": "user", "content": f"say {seed % 5}"}]

    def step(self, action):
        right = action.text == "1"
        return Step((), float(right), terminated=True, info={"success": right})


class Broken(Good):
    def step(self, action):
        return None
"""


ROW = '{"prompt": "a", "completion": "b"%s}'
FILES = {
    "empty": [],
    "rubbish": ["to be or not to be"],
    "columns": ['{"question": "a"}'],
    "pairs": ['{"prompt": "a", "chosen": "b", "rejected": "c"}'],
    "dialogues": [ROW % ""],
    "tasks": [ROW % ', "seed": 1', ROW % ', "seed": 2', ROW % ', "seed": 3', ROW % ""],
    "elsewhere": [ROW % ', "task": "guess/train/1/1"', ROW % ', "task": "calculator/held_out/1/1"'],
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to run in, with a module of two environments on the path; whoever begins to learn has failed."""
    from turnwise.training import trainer

    def learn(*_):
        raise AssertionError("this was not refused")

    monkeypatch.setattr(trainer, "cold_start", learn)
    monkeypatch.setattr(trainer.Trainer, "_learn", learn)
    (tmp_path / "their_environments.py").write_text(GOOD_AND_BROKEN)
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    monkeypatch.syspath_prepend(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A saved model with a chat template, and the same without."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer([], 300)
    for name, template in (("whole", tokenizer.chat_template), ("mute", None)):
        tiny_model(len(tokenizer), 0, hidden=16, layers=1, context=64).save_pretrained(root / name)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / name)
    return root


def refused(capsys, *argv) -> str:
    """The one line a mistake is answered with."""
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("turnwise: "), err
    assert "Traceback" not in out
    return lines[0]


# ----------------------------------------------------------------------- JSON


def test_list_as_json_names_every_method(capsys):
    assert main(["list", "--json"]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == list(recipes.METHODS)


def test_list_has_one_line_a_method_and_filters(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len([line for line in lines if line.startswith("  ")]) == len(recipes.METHODS) and max(map(len, lines)) <= 120
    )
    assert main(["list", "clip", "--family", "critic_free", "--needs", "reference", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and {row["family"] for row in rows} == {"critic_free"}
    assert all("reference" in row["needs"] and "clip" in str(row).lower() for row in rows)
    assert main(["list", "--family", "critic_fre"]) == 2 and "did you mean 'critic_free'" in capsys.readouterr().err


def test_a_setting_may_have_the_name_it_has_in_trl(capsys, tmp_path):
    words = ["config", "grpo", "--learning-rate=0.5", "--num-generations", "6", "--json"]
    assert main(words) == 0
    settings = json.loads(capsys.readouterr().out)
    assert (settings["lr"], settings["group_size"]) == (0.5, 6)
    (tmp_path / "run.yaml").write_text("max_steps: 7\n")
    assert main(["config", "--config", str(tmp_path / "run.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 7


def test_diff(capsys):
    assert main(["diff", "grpo", "gspo", "--json"]) == 0
    assert {row["slot"] for row in json.loads(capsys.readouterr().out)} == {"ratio", "gate", "penalties", "control"}
    assert main(["diff", "grpo", "grpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["diff", "grpo", "grpo"]) == 0
    assert "do not differ" in capsys.readouterr().out


def test_eval_of_a_scripted_player_as_json(here, capsys):
    argv = ["eval", "--player", "oracle", "--env", "guess", "--difficulty", "1", "--eval-tasks", "3", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["success"] == 1.0 and found["tasks"] == 3 and found["who"] == "oracle"
    assert not list(here.iterdir())


# ----------------------------------------------------------------------- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_usage_names_every_command(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert set(COMMANDS) == set(FUNCTIONS) and all(f"turnwise {name}" in out for name in FUNCTIONS)


@pytest.mark.parametrize("command", FUNCTIONS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0 and "usage: turnwise" in capsys.readouterr().out


def help_of(command, capsys, *more):
    with pytest.raises(SystemExit):
        main([command, "--help", *more])
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_where_the_method_is_written_and_how_lists_are(capsys):
    train, serve = help_of("train", capsys, "all"), help_of("serve", capsys)
    assert train.startswith("usage: turnwise train [METHOD] [--config FILE] [flags] ")
    assert "METHOD, written first, is a name of `turnwise list` [dr_grpo]" in train
    assert "empty: this process; several: separated by commas, or the flag repeated --" in train
    assert "[1,2,3]" in serve and "[(" not in serve


def test_help_shows_what_people_use_and_help_all_every_setting_by_section(capsys):
    shown, full = help_of("train", capsys), help_of("train", capsys, "all")
    common = {flag(name) for names in COMMON.values() for name in names}
    every = {flag(f.name) for f in fields(Settings)} - {flag(name) for name in NO_FLAGS}
    assert len(common) == 15 and common < every
    listed = lambda text: {name for name in every if f" {name} X" in text or f" {name} [X]" in text}  # noqa: E731
    assert listed(shown) == common and listed(full) == every
    assert "--help all" in shown and all(str(section.__doc__).rstrip(".").lower() in full for section in SECTIONS)


def test_help_of_train_fits_a_screen_and_no_line_of_it_wraps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert not any(line.startswith(" " * 10) for line in lines), "every flag has one line"


@pytest.mark.parametrize(
    "words", [["--help", "machine"], ["--help=machine"], ["-h", "machine"], ["grpo", "-h", "machine"]]
)
def test_help_of_a_section_shows_its_settings_alone(words, capsys):
    with pytest.raises(SystemExit):
        main(["train", *words])
    out = capsys.readouterr().out
    assert "the machine:" in out and "--ranks X" in out and "--env X" not in out and "hyper-parameters" not in out


def test_help_of_no_section_names_them_and_where_a_method_stands(capsys):
    assert main(["train", "--help", "machin"]) == 2
    assert "did you mean 'machine'" in capsys.readouterr().err
    assert main(["train", "--help", "grpo"]) == 2
    told = capsys.readouterr().err
    assert "rollout" in told and "turnwise train METHOD --help" in told
    with pytest.raises(SystemExit):
        main(["train", "--help", "--steps", "3"])
    assert "--help SECTION" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("turnwise 0")


# ------------------------------------------------------------------- mistakes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("trian", "did you mean 'train'"),
        ("train grop", "did you mean 'grpo'"),
        ("train grpo --temprature 1", "did you mean '--temperature'"),
        ("train grpo --bta 1", "did you mean '--beta'"),
        ("train ppo --beta 1", "unknown setting '--beta'"),
        ("train grpo --steps ten", "steps is 'ten', which is not int"),
        (
            "train grpo --steps",
            "expected one argument; write --steps VALUE, or --steps=VALUE where it begins with a dash",
        ),
        ("train grpo --staleness -1,keep", "--staleness=VALUE where it begins with a dash"),
        ("train grpo --steps 0", "write a number >= 1"),
        ("train grpo --clip -0.1", "Clip: low is -0.1"),
        ("train grpo --clip=-0.1", "Clip: low is -0.1"),
        ("train grpo --group-size 1", "--group-size 2"),
        ("train grpo gspo", "unexpected 'gspo'"),
        ("train rows.jsonl", "a file is given as --data rows.jsonl"),
        ("train --steps 1 grpo", "grpo"),
        ("train grpo --env calculater", "did you mean 'calculator'"),
        ("train grpo --env no_such_module:Env", "no module 'no_such_module'"),
        ("train grpo --env their_environments:Goood", "did you mean 'Good'"),
        ("train grpo --difficulty 77", "no difficulty 77"),
        ("train grpo --difficulty=", "difficulty"),
        ("train grpo --device gpu9", "no device 'gpu9'"),
        (
            "train grpo --model ./no/such/model",
            "from './no/such/model': there is no such folder; write a folder in Hugging Face",
        ),
        ("train grpo --model no/such/model", "from 'no/such/model': there is no such folder"),
        ("train grpo --model ../their_environments.py", "this is a file, not a folder"),
        ("train grpo --env their_environments:Good --difficulty 1", "demonstrate"),
        ("train grpo --temperature -1", "temperature is -1"),
        ("train grpo --top-p 2", "--top-p is 2"),
        ("train grpo --checkpoint-every 0", "turnwise: --checkpoint-every is 0; write a number >= 1"),
        (
            "train grpo --generator-seconds 0",
            "turnwise: --generator-seconds is 0.0; write a number > 0",
        ),
        ("train grpo --schedule cosin", "did you mean 'cosine'"),
        ("train grpo --lr -1", "lr is -1"),
        ("train grpo --trackers tensorbord", "tensorbord"),
        ("train grpo --name a/b", "is not a valid run name"),
        ("resume nowhere", "there is no run at nowhere"),
        ("eval nowhere", "there is no run at nowhere"),
        ("eval", "say what to evaluate"),
        ("eval --player orakel", "no scripted policy 'orakel'"),
        ("eval --player oracle --eval-tasks 0", "--eval-tasks is 0; write at least 1"),
        ("eval --player oracle --split test", "no split 'test'"),
        ("eval --model ./no/such/model", "there is no such folder"),
        ("explain grop", "did you mean 'grpo'"),
        ("explain", "required: method; see: turnwise explain --help"),
        ("diff grpo gspoo", "did you mean 'gspo'"),
        ("diff grpo gspo+nope", "no method 'nope'; did you mean 'scope'"),
        ("explain gspo --credit dpo", "is part of its loss"),
        ("train gspo --credit", "expected one argument"),
        ("train gspo --credit gigpoo", "did you mean 'gigpo'"),
        ("train gspo --credit dpo", "the credit of dpo does not go with this method"),
        ("train gspo --credit gigpo --env countdown", "compares turns that were taken in equal states"),
        ("train gspo --credit rloo --credit-omega 1", "unknown setting '--credit-omega'"),
        ("train gspo --credit gigpo --credit-omega x --env guess", "omega is 'x'"),
        ("train luffy", "luffy learns from demonstrations; write --demos FILE"),
        ("train luffy --demos nowhere.jsonl", "nowhere.jsonl is not there"),
        ("train luffy --demos oracle --env their_environments:Good", "has no oracle"),
        ("train luffy --demos ../empty.jsonl", "holds no rows"),
        ("train luffy --demos ../rubbish.jsonl", "is not JSON"),
        ("train luffy --demos ../columns.jsonl", "columns question; write messages"),
        ("train luffy --demos ../pairs.jsonl", "this method learns from single dialogues"),
        (
            "train luffy --demos ../tasks.jsonl",
            "1 of 4 rows cannot be used. line 4: no task, while other rows name one",
        ),
        ("train luffy --demos ../elsewhere.jsonl", "line 1: a task of guess, and the run is on calculator; line 2"),
        ("train bepa --demos ../dialogues.jsonl", "name a task in every row"),
        ("train luffy --demos oracle --demo-share 1.5", "--demo-share is 1.5"),
        ("train grpo --demos oracle", "leave --demos out"),
        ("train dpo", "dpo learns from pairs; write --data FILE"),
        ("train dpo --data .", "is a folder"),
        ("train dpo --data ../dialogues.jsonl", "this method learns from pairs"),
        ("train mapl --data ../pairs.jsonl", "has no column"),
        ("train grpo --data ../pairs.jsonl", "holds answers of others"),
        ("train opd", "opd learns from a teacher; write --teacher PATH"),
        ("train opd --teacher ./nowhere", "from './nowhere': there is no such folder"),
        ("train grpo --teacher tiny", "leave --teacher out"),
        ("export nowhere rows.jsonl", "there is no run at nowhere"),
        ("export guess", "required: file"),
        ("export guess rows.jsonl --as poems", "no row format 'poems'"),
        ("export guess rows.jsonl --tasks 0", "tasks is 0"),
        ("export their_environments:Good rows.jsonl", "no oracle and demonstrator"),
        ("check-env calculater", "did you mean 'calculator'"),
        ("environments extra", "unexpected 'extra'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(argv, words, here, capsys):
    assert words in refused(capsys, *argv.split())
    assert not list(here.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_where_there_is_none(here, capsys):
    assert "no usable GPU; write --device cpu" in refused(capsys, "train", "grpo", "--device", "cuda")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("model", "template", "words"),
    [
        ("mute", "", "has no chat template; give one with --template"),
        ("mute", "chatmel", "no chat template 'chatmel'"),
        ("whole", "nowhere.jinja", "no chat template 'nowhere.jinja'"),
    ],
)
def test_a_missing_template(model, template, words, here, models, capsys):
    argv = ["train", "grpo", "--model", models / model, *(["--template", template] if template else [])]
    assert words in refused(capsys, *argv)
    assert not list(here.iterdir())


# ------------------------------------------------------------------ check-env


def test_check_env_tells_good_from_broken(here, capsys):
    good, broken = (["check-env", f"their_environments:{name}", "--episodes", "4"] for name in ("Good", "Broken"))
    assert main(good) == 0
    assert capsys.readouterr().out.startswith("Good: ok")
    assert main([*good, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(broken) == 1
    assert "problem:" in capsys.readouterr().out
    assert main([*broken, "--json"]) == 1
    assert any("step" in problem for problem in json.loads(capsys.readouterr().out)["problems"])
