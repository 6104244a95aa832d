"""Refusals that need no model come before torch is loaded. All commands run in one process, which reports what each loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from turnwise.training.plan import has_gpu

PROGRAM = """
import contextlib, importlib.util, io, json, sys

find = importlib.util.find_spec  # peft, ray and pyarrow as if not installed
importlib.util.find_spec = lambda name, *more: None if name in ("peft", "ray") else find(name, *more)
sys.modules["pyarrow"] = None

from turnwise.cli.main import main

def loaded():
    return sorted({"torch", "transformers", "matplotlib", "ray"} & set(sys.modules))

for line in sys.stdin.read().splitlines():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(line.split())
    print(json.dumps([line, code, said.getvalue(), loaded()]))
"""
FILES = {
    "prompts.jsonl": '{"prompt": "2 + 2", "answer": "4"}\n{"prompt": "3 + 2", "answer": "5"}\n',
    "pairs.jsonl": '{"prompt": "hello", "chosen": "yes", "rejected": "no"}\n',
    "dialogues.jsonl": '{"prompt": "hello", "completion": "yes"}\n',
    "broken.jsonl": '{"prompt": \n',
    "rows.parquet": "PAR1",
    "typo.yaml": "stepz: 4\n",
    "own.py": (
        "class Bare:\n    def reset(self, seed):\n        return 'hello'\n"
        "    def step(self, action):\n        return 'done', 1.0, True, {}\n"
        "def colourful(completions, colour):\n    return [0.0]\n"
    ),
}
REFUSED = {  # command, and a part of what it must say
    "train nonsense": "no method 'nonsense'",
    "train grpo --nonsense 3": "unknown setting",
    "train grpo --env nonsense": "no environment",
    "train grpo --env own:Missing": "has no class",
    "train grpo --env own:Bare": "no `demonstrate`",
    "train grpo --lr abc": "lr is 'abc'",
    "train grpo --lr -1": "lr is -1",
    "train grpo --clip x": "clip",
    "train grpo --steps 0": "steps is 0",
    "train grpo --schedule x": "schedule is 'x'",
    "train grpo --group-size 1": "--group-size 2",
    "train grpo --difficulty 77": "difficulty 77",
    "train grpo --top-p 3": "--top-p is 3",
    "train grpo --name a/b": "run name",
    "train grpo --out /dev/null/x": "write --out another folder",
    "train grpo --device gpu": "no device 'gpu'",
    "train grpo --dtype half": "dtype is 'half'",
    "train reinforce --rollout-dtype fp8": "--dtype fp8",
    "train grpo --model /nonexistent": "no such folder",
    "train grpo --model owner/name": "HF_HUB_OFFLINE",
    "train grpo --model smollm2": "smollm2",
    "train grpo --lora-rank 4": "peft",
    "train grpo --cluster nonsense": "write local, or the HOST:PORT",
    "train grpo --cluster local,generator=2": "generators",
    "train grpo --cluster local,generators=0": "a number >= 1",
    "train grpo --cluster local,placement=heap": "placement is 'heap'",
    "train grpo --cluster local": "pip install 'turnwise-rl[ray]'",
    "train grpo --trackers nonsense": "no tracker",
    "train grpo --template nowhere.jinja": "no chat template",
    "train grpo --tool-syntax nonsense": "nonsense",
    "train grpo --judge http://127.0.0.1:9/v1": "no connection",
    "train grpo --agent nonsense:play": "no module 'nonsense'",
    "train grpo --config nowhere.yaml": "no config file",
    "train grpo --config typo.yaml": "stepz",
    "train gspo --credit nonsense": "no method 'nonsense'",
    "train gspo --credit gigpo --env countdown": "equal states",
    "train gspo --credit dpo": "does not go with this method",
    "train gigpo --env countdown": "equal states",
    "train opd": "--teacher",
    "train dpo": "--data FILE",
    "train dpo --data prompts.jsonl": "prompt, chosen and rejected",
    "train dpo --data dialogues.jsonl": "learns from pairs",
    "train grpo --data pairs.jsonl": "answers of others",
    "train grpo --data prompts.jsonl": "--reward FUNCTION",
    "train grpo --demos oracle": "does not learn from demonstrations",
    "train grpo --data broken.jsonl --reward exact": "not JSON",
    "train grpo --data rows.parquet --reward exact": "pyarrow",
    "train dpo --data rows.parquet": "pyarrow",
    "train grpo --data nowhere.jsonl --reward exact": "not there",
    "train grpo --data prompts.jsonl --reward nonsense": "no reward is called",
    "train grpo --data prompts.jsonl --reward own.py:colourful": "'colour'",
    "resume nowhere": "no run",
    "eval nowhere": "no run",
    "eval --env calculator": "say what to evaluate",
    "eval --env calculator --player nobody": "no scripted policy",
    "eval --env calculator --model /nonexistent": "no such folder",
    "status nowhere": "no run",
    "status .": "no run",
    "launch pbs grpo": "no kind of cluster",
    "launch slurm grpo --stepz 3": "unknown setting",
    "launch k8s grpo": "--image NAME",
    "explain nonsense": "no method",
    "diff nonsense grpo": "no method",
    "config nonsense": "no method",
    "check-method nonsense": "no method",
    "check-env own:Missing": "has no class",
    "export nowhere rows.jsonl": "no run",
    "export calculator rows.jsonl --as nonsense": "no row format",
    "push nowhere me/agent": "no run",
    "bench --parts nonsense": "no part",
    "bench --device gpu": "no device",
}  # fmt: skip
if not has_gpu():  # where there is one, the command is not refused but trains, and loads torch for all that follow
    REFUSED["train grpo --device cuda:0"] = "no usable GPU"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "TURNWISE_MODELS": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="\n".join(REFUSED), capture_output=True, text=True, cwd=folder,
        env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_that_needs_no_model_does_not_load_torch(command, answers):
    code, said, loaded = answers[command]
    assert code == 2
    assert REFUSED[command] in said and len(said.strip().splitlines()) == 1
    assert not loaded


def test_torch_loads_when_an_attribute_is_read():
    program = """
import sys
from turnwise.maths.lazy_torch import torch
from turnwise import recipes
assert recipes.build("grpo").requirements is not None and "torch" not in sys.modules
one = torch.ones
import torch as loaded
assert one is loaded.ones and torch.ones is one
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
