"""Config files, own objects and extended runs on the command line; cheap refusals; standard output reserved for JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from turnwise.cli.main import main
from turnwise.config.settings import Settings
from turnwise.environments import environment_rows
from turnwise.models import hub

SHOP = """
import os
from turnwise import recipes
from turnwise.environments.builtin.guess import Guess

class Shop(Guess):
    def __init__(self, db: str, *, difficulty=1, split="train"):
        super().__init__(difficulty=difficulty, split=split)
        print("python prints", db)
        os.write(1, b"C prints")

def robust(clip: float = 0.1):
    '''A recipe of one's own.'''
    return recipes.build("grpo", clip=clip, beta=0.0)

def clash(steps: int = 3):
    return recipes.build("rloo")
"""
SMALL = {"steps": 2, "groups": 2, "group_size": 4, "cold_steps": 0, "hidden": 32, "eval_tasks": 2, "trackers": ""}
FLAGS = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value))]


@pytest.fixture
def shop(tmp_path, monkeypatch):
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return tmp_path


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


# ------------------------------------------------------------------- own names


@pytest.mark.slow(tier="test")
def test_a_run_of_ones_own_is_configured_resumed_and_extended(shop, capsys):
    (shop / "run.yaml").write_text(
        "\n".join(f"{name}: {'[]' if value == '' else value}" for name, value in SMALL.items())
        + "\nmethod: shop:robust\nenv: shop:Shop,db=x\nname: a\nmethod_options:\n  clip: 0.3\n"
    )
    code, out, err = run(capsys, "train", "--config", "run.yaml", "--lr", "1e-4", "--json")
    summary = json.loads(out)
    assert code == 0 and summary["method"] == "shop:robust" and "python prints x" in err
    settings = json.loads((shop / "runs/a/run.json").read_text())["settings"]
    assert settings["lr"] == 1e-4 and settings["method_options"] == {"clip": 0.3} and settings["steps"] == 2

    code, out, _ = run(capsys, "config", "runs/a")
    (shop / "again.yaml").write_text(out)
    assert json.loads(run(capsys, "config", "--config", "again.yaml", "--json")[1]) == settings

    code, out, err = run(capsys, "resume", "runs/a", "--steps", "4", "--json")
    assert code == 0 and json.loads(out)["steps"] == 4
    assert "steps: 2 → 4; the linear learning-rate schedule now spans 4 steps" in err
    rows = [json.loads(line)["step"] for line in (shop / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4] and (shop / "runs/a/summary_2.json").is_file()
    for argv, words in (
        (["--lr", "1"], "resume cannot change lr"),
        (["--steps", "3"], "has already taken 4"),
        (["--stepz", "9"], "did you mean '--steps'"),
    ):
        code, _, err = run(capsys, "resume", "runs/a", *argv)
        assert code == 2 and words in err
    assert json.loads((shop / "runs/a/run.json").read_text())["settings"]["steps"] == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("train shop:robst", "did you mean 'robust'"),
        ("train shop:clash", "parameter 'steps', which is also a flag"),
        ("train shop:robust --env shop:Shop", "needs the argument 'db'"),
        ("train shop:robust --env shop:Shop,dbb=x", "did you mean 'db'"),
        ("train grpo --config run.yaml", "run.yaml line 1 has hyper-parameters of shop:robust, and the method is grpo"),
        (
            "train --config wrong.yaml",
            "wrong.yaml line 2: shop:robust has no hyper-parameter 'clib'; did you mean 'clip'",
        ),
        ("train --config nowhere.yaml", "there is no config file nowhere.yaml"),
        ("train sapo+gigpoo", "did you mean 'gigpo'"),
        ("train sapo+hgpo --credit rloo", "name one credit"),
        ("train grpo --positions 3", "it is called --micro-batch-tokens here"),
        ("train grpo --qqq 3", "see: turnwise train grpo --help"),
        ("config grop", "did you mean 'grpo'"),
        ("eval --config nowhere.yaml", "there is no config file"),
    ],
)
def test_a_mistake_is_one_line(shop, capsys, argv, words):
    (shop / "run.yaml").write_text("method_options: {clip: 0.2}\nmethod: shop:robust\n")
    (shop / "wrong.yaml").write_text("method: shop:robust\nmethod_options: {clib: 0.2}\n")
    code, _, err = run(capsys, *argv.split())
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1
    assert not (shop / "runs").exists()


def test_a_method_with_another_credit_is_one_name_everywhere(capsys):
    assert Settings(method="sapo+hgpo") == Settings(method="sapo", credit="hgpo")
    explained = json.loads(run(capsys, "explain", "sapo+hgpo", "--json")[1])
    assert explained["name"] == "sapo+hgpo"
    assert "advantage" in run(capsys, "diff", "sapo+hgpo", "sapo")[1]
    assert json.loads(run(capsys, "config", "sapo+hgpo", "--json")[1])["credit"] == "hgpo"


def test_the_effective_config_says_where_values_come_from(shop, capsys):
    (shop / "run.toml").write_text('env = "guess"\nseed = 4\n')
    out = run(capsys, "config", "grpo", "--config", "run.toml", "--seed", "5", "--clip", "0.3")[1]
    assert "[run.toml line 1]\nenv: guess" in out and "[flag]\nseed: 5" in out
    assert "[environment Guess]\ndifficulty:" in out and "[method: 8]\ngroup_size: 0" in out
    assert "method_options:\n  clip: 0.3" in out and "[default]\nlr:" in out


def test_eval_reads_a_config_file(shop, capsys):
    (shop / "e.yaml").write_text(
        "env: guess\ndifficulty: [1]\neval_tasks: 3\nmethod: grpo\nmethod_options: {clip: 0.1}\n"
    )
    code, out, _ = run(capsys, "eval", "--player", "oracle", "--config", "e.yaml", "--eval-tasks", "2", "--json")
    assert code == 0 and json.loads(out)["tasks"] == 2 and json.loads(out)["environment"] == "guess"


@pytest.mark.slow
def test_evaluation_can_be_switched_off(shop, capsys):
    flags = [word for name, value in {**SMALL, "eval_tasks": 0}.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    code, out, _ = run(capsys, "train", "rloo", "--env", "guess", *flags, "--name", "off")
    assert code == 0 and "not evaluated (--eval-tasks 0)" in out
    summary = json.loads((shop / "runs/off/summary.json").read_text())
    assert summary["success_after"]["success"] is None and not (shop / "runs/off/evaluation_before.json").exists()


# ---------------------------------------------------------------------- output


@pytest.mark.slow
def test_json_is_alone_on_standard_output(shop):
    """Also what C code writes to the file descriptor, hence a process of its own."""
    argv = ["eval", "--player", "oracle", "--env", "shop:Shop,db=x", "--eval-tasks", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.cli.main", *argv], capture_output=True, text=True, cwd=shop, timeout=120
    )
    assert json.loads(done.stdout)["tasks"] == 2
    assert "python prints" in done.stderr and "C prints" in done.stderr


# -------------------------------------------------------------- cheap refusals


def test_a_hub_that_does_not_answer_is_refused_soon(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(hub.SettingError, match="the hub cannot be reached"):
        hub.check_model("owner/name")
    snapshot = tmp_path / "hub/models--owner--name/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    hub.check_model("owner/name")  # cached: the hub is not asked


def test_a_hub_that_answers_with_any_status_is_reachable():
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.handle_request, daemon=True).start()
    assert hub.unreachable(f"http://127.0.0.1:{server.server_port}") == ""
    server.server_close()


# ---------------------------------------------------------------- environments


def test_every_environment_is_listed_with_what_it_offers(capsys):
    rows = {row["environment"]: row for row in environment_rows()}
    assert rows["calculator"]["tools"] == ["python"] and "oracle" in rows["guess"]["offers"]
    assert rows["guess"]["turns"] == [3, 4, 5] or len(rows["guess"]["turns"]) > 1
    assert rows["reasoning_gym:..."]["example"].startswith("reasoning_gym:")
    assert all(row["about"] for row in rows.values())
    out = run(capsys, "environments")[1]
    assert all(name in out for name in rows)
    assert json.loads(run(capsys, "environments", "--json")[1]) == list(rows.values())


def test_an_empty_method_and_yaml_aliases_are_refused(tmp_path, capsys):
    assert main(["train", ""]) == 2 and "empty text" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("env: &a guess\nname: *a\n")
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2 and "aliases" in capsys.readouterr().err


def test_a_dry_run_refuses_what_a_real_run_refuses(capsys):
    assert main(["train", "--dry-run", "--steps", "0"]) == 2 and "steps" in capsys.readouterr().err
