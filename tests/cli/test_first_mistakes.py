"""Mistakes of a new user, on the three paths (prompts and a reward, an agent, an environment): each is answered before the model
is loaded and before the first rollout, with exit status 2, and leaves nothing behind."""

from __future__ import annotations

import json
import shlex

import pytest

from turnwise.cli.main import main
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.store.rundir import RunDir
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import held_out_note


def rows(count, **more):
    return "".join(json.dumps({"prompt": f"what is {i} + 2", "answer": str(i + 2), **more}) + "\n" for i in range(count))


FILES = {
    "prompts.jsonl": rows(40),
    "long.jsonl": rows(12) + rows(3, prompt="word " * 3000),
    "one.jsonl": rows(1),
    "empty.jsonl": "",
    "texts.jsonl": '{"text": "what is 2"}\n' * 4,
    "questions_only.jsonl": '{"prompt": "what is 2"}\n{"prompt": "what is 3"}\n',
    "sharegpt.jsonl": "".join(
        json.dumps({"conversations": [{"from": "human", "value": f"what is {i}"}, {"from": "gpt", "value": str(i)}]}) + "\n"
        for i in range(40)
    ),
    "tab.yaml": "steps: 4\n\tlr: 3\n",
    "typo.yaml": "stepz: 4\n",
    "not_a_folder": "weights",
    "beginner.py": '''
def raises(completion, answer):
    return {}["missing"]
def reads_numbers(completion, answer):
    return float(int(completion) == int(answer))
def returns_text(completion):
    return "good"
def returns_one(completions, **columns):
    return [1.0]
def forgets_to_return(completion, answer):
    completion == answer
def needs_colour(completion, colour):
    return 1.0
def takes_nothing():
    return 1.0
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth and extra_info.get("strict", True))
async def takes_a_prompt(prompt):
    return 1.0
async def yields(task, client):
    yield 1.0
async def agent(task, client):
    await client.chat.completions.create(messages=task.messages)
    return 1.0
class AgentClass:
    def __init__(self, task, client):
        pass
class Scripted:
    def oracle(self):
        return "x"
    def random_action(self, rng):
        return "x"
    def demonstrate(self, rng):
        return "x"
class NoReset(Scripted):
    def step(self, action):
        return [], 1.0, True, False, {}
class NoStep(Scripted):
    def reset(self, seed):
        return [{"role": "user", "content": "hello"}]
class OldGym(NoStep):
    def step(self, action):
        return [], 1.0, True, {}
class GymReset(NoReset):
    def reset(self, seed):
        return "observation", {}
class ResetRaises(NoReset):
    def reset(self, seed):
        return [{"role": "user", "content": self.missing}]
class NeedsSize(NoReset):
    def __init__(self, size):
        pass
''',
}
PROMPTS, REWARDED = "train --data prompts.jsonl --model model", "train --data prompts.jsonl --reward exact --model model"
ENV = "train --model model --env beginner:"
MISTAKES = {  # command: what it must say
    # own prompts: the file
    "train --data nowhere.jsonl --reward exact --model model": ["nowhere.jsonl is not there"],
    "train --data texts.jsonl --reward exact --model model": ["columns text; write prompt"],
    "train --data empty.jsonl --reward exact --model model": ["empty.jsonl holds no rows"],
    "train --data one.jsonl --reward exact --model model": ["holds one prompt, so none can be held out"],
    "train --data long.jsonl --reward exact --model model": ["3 of 15 prompts leave no room", "line 13, 14, 15", "leave these"],
    "train --data long.jsonl --reward exact": ["3 of 15 prompts leave no room", "write --context "],
    f"{REWARDED} --held-out-share 0": ["no rows are held out", "--eval-tasks 0"],
    f"{REWARDED} --env calculator": ["leave --env calculator out"],
    f"{REWARDED} --difficulty 2": ["rows of a file have no levels of difficulty"],
    # own prompts: the reward
    PROMPTS: ["write --reward FUNCTION"],
    "train --data questions_only.jsonl --reward exact --model model": ["requires 'answer'", "columns: prompt"],
    f"{PROMPTS} --reward exakt": ["did you mean 'exact'?"],
    f"{PROMPTS} --reward beginner.py:nothing": ["has no function 'nothing'"],
    f"{PROMPTS} --reward beginner.py:raises": ["line 1 of prompts.jsonl", "KeyError: 'missing' (beginner.py line 3)"],
    f"{PROMPTS} --reward beginner.py:reads_numbers": ["'I do not know.': ValueError", "--reward-failure 0"],
    f"{PROMPTS} --reward beginner.py:returns_text": ["returned 'good'; return a number"],
    f"{PROMPTS} --reward beginner.py:returns_one": ["returned 1 values for 2 answers"],
    f"{PROMPTS} --reward beginner.py:forgets_to_return": ["for the first 8 rows of prompts.jsonl: all return None", "`return`"],
    f"{PROMPTS} --reward beginner.py:needs_colour": ["requires 'colour'", "columns: answer, ground_truth, prompt"],
    f"{PROMPTS} --reward beginner.py:takes_nothing": ["takes no arguments"],
    # method, model, settings
    f"train grop {REWARDED[6:]}": ["did you mean 'grpo'?"],
    f"train dpo {REWARDED[6:]}": ["learns from pairs"],
    f"train gigpo {REWARDED[6:]}": ["an episode of prompts has one turn; write --tools"],
    "train --data prompts.jsonl --reward exact --model not_a_folder": ["this is a file, not a folder"],
    "train --data prompts.jsonl --reward exact --model base": ["has no chat template; give one with --template"],
    f"{REWARDED} --max-turns -1": ["--max-turns is -1"],
    f"{REWARDED} --lr -1": ["--lr is -1"],
    f"{REWARDED} --temperature 0": ["would all be alike", "write --temperature 1"],
    f"{REWARDED} --max-tokens 4000": ["a turn may have 4000 tokens", "write a larger --context"],
    f"{REWARDED} --group-size 1": ["write --group-size 2 or more"],
    f"{REWARDED} --device mps": ["Apple's GPUs are not supported; write --device cpu"],
    f"{REWARDED} --device gpu": ["no device 'gpu'; write cpu, cuda or auto"],
    f"{REWARDED} --lr 1e-5 --learning-rate 1e-6": ["--lr is given twice: 1e-5 and 1e-6"],
    f"{REWARDED} --config tab.yaml": ["tab.yaml line 2 is not YAML"],
    f"{REWARDED} --config typo.yaml": ["no setting 'stepz'; did you mean 'steps'?"],
    # own agent
    f"{REWARDED} --agent nowhere:agent": ["no module 'nowhere'"],
    f"{REWARDED} --agent beginner:nothing": ["has no function 'nothing'"],
    f"{REWARDED} --agent beginner:takes_a_prompt": ["takes (prompt)", "async def agent(task, client)"],
    f"{REWARDED} --agent 'python nofile.py'": ["names nofile.py, which is no file in"],
    f"{REWARDED} --agent beginner:yields": ["yields values", "return the reward"],
    f"{REWARDED} --agent beginner:AgentClass": ["is a class"],
    f"train gigpo {REWARDED[6:]} --agent beginner:agent": ["compares the states of turns"],
    # own environment
    "train --model model --env calculater": ["did you mean 'calculator'?"],
    "train --model model --env calculator --env guess": ["--env is given twice: calculator and guess"],
    "train --model model --env calculator --difficulty 9": ["it offers 1, 2, 3"],
    f"{ENV}Missing": ["has no class 'Missing'"],
    f"{ENV}NeedsSize": ["needs the argument 'size'"],
    f"{ENV}NoReset": ["has no method `reset`"],
    f"{ENV}NoStep": ["has no method `step`"],
    f"{ENV}GymReset": ["reset returned ('observation', {}); expected a list of messages"],
    f"{ENV}OldGym": ["step returned ([], 1.0, True, {}); expected a Step or (messages, reward, terminated, truncated, info)"],
    f"{ENV}ResetRaises": ["its reset raised AttributeError", "beginner.py line"],
}  # fmt: skip


class Reached(Exception):
    """Nothing was refused: the run would begin."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    tokenizer = tiny_tokenizer([], 300)
    for name in ("model", "base"):
        tiny_model(len(tokenizer), 0, hidden=16, layers=1, context=512).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        tokenizer.chat_template = None
    return folder


@pytest.fixture(autouse=True)
def at_the_desk(desk, monkeypatch):
    def create(*_, **__):
        raise Reached

    monkeypatch.setattr(RunDir, "create", create)
    monkeypatch.chdir(desk)


def listing(folder):
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_before_the_first_rollout(command, desk, capsys):
    before = listing(desk)
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr().err
    assert all(words in said for words in MISTAKES[command]), said
    assert len(said.strip().splitlines()) == 1 and "info['success']" not in said
    assert listing(desk) == before


@pytest.mark.parametrize(
    "flags",
    [
        ["--data", "prompts.jsonl", "--reward", "exact"],
        ["--data", "sharegpt.jsonl", "--reward", "exact"],
        ["--data", "prompts.jsonl", "--reward", "beginner.py:compute_score"],
        ["--data", "prompts.jsonl", "--reward", "beginner.py:reads_numbers", "--reward-failure", "0"],
        ["--data", "prompts.jsonl", "--reward", "exact", "--reward", "majority", "--lr", "1e-5", "--lr", "1e-5"],
        ["--data", "prompts.jsonl", "--agent", "beginner:agent"],
    ],
)
def test_what_is_no_mistake_begins(flags):
    with pytest.raises(Reached):
        main(["train", "--model", "model", *flags])


@pytest.mark.parametrize(
    ("settings", "level", "words"),
    [
        ({"held_out_share": 0.5, "eval_tasks": 10}, "warning", "10 held-out prompts: success is known to ± 26 points"),
        ({"held_out_share": 0.5, "eval_tasks": 10}, "warning", "write --eval-tasks"),
        ({}, "warning", "--eval-data FILE, or a larger --held-out-share"),
        ({"eval_data": "many.jsonl"}, "info", "100 held-out prompts: success is known to ± 10 points (95 %)"),
    ],
)
def test_the_size_of_the_held_out_set_is_said_with_the_interval_it_allows(settings, level, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(rows(40))
    (tmp_path / "many.jsonl").write_text(rows(100, prompt="other").replace("other", "another"))
    plan = RunPlan.from_caller({"data": "prompts.jsonl", "reward": "exact", **settings})
    ((how, text),) = held_out_note(plan)
    assert how == level and words in text
