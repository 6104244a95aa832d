"""Seconds of one whole training step, and peak memory: Turnwise beside TRL's GRPOTrainer on the same tiny model.

    python bench/step.py [--steps 12] [--threads 2] [--json] [--tasks single tools] [--trl-python PATH]

single  8 prompts x 8 completions of exactly 32 tokens (the end-of-turn id lies outside the vocabulary: no early stop),
        random weights, a reward read off the text
tools   8 prompts x 8 episodes of two turns: one call of a trivial tool, then an answer. TRL's own tool loop
        (``GRPOTrainer(tools=[add])``) against an environment here. Random weights make no calls, so both sides start
        from one model that has briefly imitated scripted episodes; how often it calls is in the output

A step is everything from one optimiser step's end to the next: tasks, sampling, tools, rewards, loss, optimiser, new
weights to the sampler, records. Ours is a plain ``turnwise.train`` (method grpo, beta 0, checked, recorded in a real
ledger); TRL has its defaults but for batch 64, 8 generations, beta 0, the length, float32 on the CPU, and no reports.
A third row is TRL without gradient checkpointing, which is on by default, saves memory and costs time.

Each side is a fresh process; they wait for one another and take turns step by step, so that a slow second of the machine
hits all of them. The first steps warm up and are dropped; medians of the rest. TRL may live in an interpreter of its own.
The model: Llama, 4 layers of 128 (ff 384, 4 heads, 2 for keys), vocabulary 512, about 0.85 M parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory import peak_mb  # the one beside this file

BAR = 2.0  # on `single`, ours must be this many times as fast as TRL
WARM = 3  # first steps, dropped
GROUPS, SIZE = 8, 8
SHAPE = {"hidden": 128, "layers": 4, "context": 320}
LENGTH = {"single": 32, "tools": 64}  # tokens of a turn here, of a whole completion in TRL
LR = 1e-6  # TRL's default: the policy hardly moves, so every step has the same work
COLD = 200  # supervised steps that teach the form of a tool call
SIDES = {"turnwise": "turnwise", "TRL": "trl", "TRL, no checkpointing": "trl"}

# what both sides render; `tool_calls` only comes from TRL, our messages carry the text as it was sampled
TEMPLATE = (
    "{%- if tools %}<|tools|>{{ tools | map(attribute='function.name') | join(' ') }}<|end|>{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDLESS = (  # only an assistant's turn would be ended, by an id that no model of 512 rows can sample
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|never|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE = {  # how TRL is told to read a turn
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


# ---------------------------------------------------------------------- the two tasks, for both sides


def question(seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"role": "user", "content": f"{rng.randint(12, 98)}+{rng.randint(12, 98)}=?"}]


def score(text: str) -> float:
    """Something that differs from text to text."""
    return sum(map(ord, text)) % 7 / 6


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


ADD = {  # what TRL reads off the function itself
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Single:
    """One turn, scored."""

    max_turns = 1

    def reset(self, seed: int) -> list[dict[str, str]]:
        return question(seed)

    def step(self, action: Any) -> Any:
        from turnwise.ports import Step

        return Step([], score(action.text), terminated=True, info={"success": False})


class Tools:
    """One call of ``add``, then an answer, scored. A turn without a call ends the episode, as in TRL."""

    max_turns = 8
    tools = ({"type": "function", "function": ADD},)

    def reset(self, seed: int) -> list[dict[str, str]]:
        self.reply = ""
        return question(seed)

    def step(self, action: Any) -> Any:
        from turnwise.ports import Step

        if not action.calls:
            return Step([], score(action.text), terminated=True, info={"success": action.text == self.reply != ""})
        messages = []
        for call in action.calls:
            try:
                self.reply = str(add(**call.arguments))
            except TypeError as fault:
                self.reply = str({"error": str(fault)})
            messages.append({"role": "tool", "name": "add", "content": self.reply})
        return Step(messages, info={"tool_calls": len(messages)})

    def demonstrate(self, rng: random.Random) -> Any:
        """Any two digits do: what is asked for is a call, not the right one."""
        from turnwise.environments.base import call, say

        return say(self.reply) if self.reply else call("add", a=rng.randint(1, 9), b=rng.randint(1, 9))

    def oracle(self) -> Any:
        return self.demonstrate(random.Random(0))

    def close(self) -> None:
        pass


# ---------------------------------------------------------------------- the model both sides load


def prepare(job: dict[str, Any]) -> None:
    """Save the model and tokenizer of a task."""
    from turnwise.models.tiny import tiny_model, tiny_tokenizer

    endless, model = job["task"] == "single", tiny_model(512, 0, **SHAPE)
    tokenizer = tiny_tokenizer(corpus(), 512)
    assert len(tokenizer) == 512, len(tokenizer)
    if endless:
        tokenizer.add_special_tokens({"eos_token": "<|never|>"})
        model.config.eos_token_id = model.generation_config.eos_token_id = None  # TRL would stop there as well
    tokenizer.chat_template = ENDLESS if endless else TEMPLATE
    folder = Path(job["model"])
    for made in (model, tokenizer):
        made.save_pretrained(folder)
    if not endless:
        imitate(folder, job["out"])


def corpus() -> list[str]:
    """Words enough for 512 entries, so that a tool call is neither one token nor one a letter."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(200)]
    words += ["<tool_call>", "</tool_call>", '{"name":', '"add",', '"arguments":', '{"a":', '"b":'] * 10
    return [" ".join(rng.choices(words, k=8)) for _ in range(400)]


def imitate(folder: Path, out: str) -> None:
    """Teach the model how ``add`` is called, by the cold start of a run of one step."""
    from turnwise.launch import train

    made = train(
        env="step:Tools", difficulty=(1,), model=str(folder), cold_steps=COLD, cold_batch=24, steps=1, eval_tasks=1,
        context=SHAPE["context"], out=out, name="cold", trackers=(),
    )  # fmt: skip
    for file in (Path(made["run"]) / "initial").iterdir():
        file.replace(folder / file.name)


# ---------------------------------------------------------------------- one side, in its own process


class Gate:
    """Takes a step when the parent says so, and answers with its time. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self, **facts: float) -> None:
        print(json.dumps({**facts, "peak_mb": peak_mb()}), file=self.out, flush=True)
        sys.stdin.readline()
        self.began = time.perf_counter()

    def done(self, **facts: float) -> None:
        self.wait(seconds=time.perf_counter() - self.began, **facts)


def ours(job: dict[str, Any]) -> None:
    from turnwise.launch import train

    gate = Gate()

    def listen(event: str, facts: Any) -> None:
        if event == "stage" and facts["name"] == "learn":
            gate.wait()
        if event == "step" and facts["stage"] == "learn":
            gate.done(**{name: facts[name] for name in ("tokens", "turns", "tool_calls")})

    train(
        listen, method="grpo", method_options={"beta": 0.0}, env=f"step:{job['task'].capitalize()}", difficulty=(1,),
        model=job["model"], cold_steps=0, steps=job["steps"], groups=GROUPS, group_size=SIZE, lr=LR, eval_tasks=1,
        max_tokens=LENGTH[job["task"]], context=SHAPE["context"], out=job["out"], name="ours", trackers=(),
    )  # fmt: skip


def theirs(job: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gate, seen = Gate(), {}
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["task"] == "tools":
        tokenizer.response_template = RESPONSE
    marks = tokenizer.convert_tokens_to_ids(["<|tool|>", "<|assistant|>"])
    count = len if job["task"] == "single" else lambda ids: sampled(ids, *marks)

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        roles = [message["role"] for completion in completions for message in completion]
        seen.update(
            tokens=float(sum(map(count, completion_ids))),
            turns=roles.count("assistant") / len(completions),
            tool_calls=roles.count("tool") / len(completions),
        )
        return [score(completion[-1]["content"]) for completion in completions]

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.done(**seen)

    options: dict[str, Any] = {"gradient_checkpointing": False} if job["side"] != "TRL" else {}
    config = GRPOConfig(
        output_dir=job["out"], per_device_train_batch_size=GROUPS * SIZE, num_generations=SIZE, beta=0.0,
        gradient_accumulation_steps=1, max_completion_length=LENGTH[job["task"]], learning_rate=LR, use_cpu=True,
        bf16=False, max_steps=job["steps"], report_to="none", eval_strategy="no", **options,
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"]), reward, config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": question(seed)} for seed in range(GROUPS * job["steps"])]),
        tools=[add] if job["task"] == "tools" else None, callbacks=[Turns()],
    )  # fmt: skip
    trainer.train()


def sampled(ids: list[int], opens: int, closes: int) -> int:
    """How many ids of a completion are the model's: those of a tool's reply, from mark to mark, are not."""
    count, reading = 0, False
    for token in ids:
        reading = reading or token == opens
        count += not reading
        reading = reading and token != closes
    return count


# ---------------------------------------------------------------------- the parent


def start(python: str, kind: str, job: dict[str, Any], threads: int, log: Path) -> subprocess.Popen[str]:
    command = [python, __file__, "--peer", kind, json.dumps(job)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log.open("w"), text=True, env=env)


def answer(side: subprocess.Popen[str], log: Path) -> dict[str, float]:
    line = side.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise SystemExit(f"a side ended early: {log.read_text()[-3000:]}")
    return json.loads(line)


def measure(task: str, pythons: dict[str, str], steps: int, threads: int, folder: Path) -> dict[str, dict[str, float]]:
    """All sides of one task, step by step in turn."""
    job = {"task": task, "model": str(folder / "model"), "out": str(folder), "steps": steps + WARM}
    logs = {name: folder / f"{name}.log" for name in (*pythons, "prepare")}
    if start(sys.executable, "prepare", job, threads, logs["prepare"]).wait():
        raise SystemExit(logs["prepare"].read_text()[-3000:])
    sides = {n: start(p, SIDES[n], {**job, "side": n}, threads, logs[n]) for n, p in pythons.items()}
    try:
        for name, side in sides.items():
            answer(side, logs[name])  # loaded
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(steps + WARM):
            for name, side in sides.items():
                print("go", file=side.stdin, flush=True)
                rounds[name].append(answer(side, logs[name]))
        return {name: summary(kept[WARM:]) for name, kept in rounds.items()}
    finally:
        for side in sides.values():
            side.kill()
            side.wait()


def summary(kept: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the steps, and the highest memory."""
    out = {key: statistics.median(row[key] for row in kept) for key in ("seconds", "tokens", "turns", "tool_calls")}
    times = sorted(row["seconds"] for row in kept)
    return {**out, "fastest": times[0], "slowest": times[-1], "peak_mb": max(row["peak_mb"] for row in kept)}


def show(table: dict[str, dict[str, dict[str, float]]], options: argparse.Namespace) -> None:
    print(f"one step, {GROUPS * SIZE} episodes, {options.threads} threads; median of {options.steps} (fastest-slowest)")
    for task, rows in table.items():
        for name in SIDES:
            if name not in rows:
                print(f"{task:7s} {name:23s} not installed")
                continue
            r = rows[name]
            times = f"{r['seconds']:.3f} s ({r['fastest']:.3f}-{r['slowest']:.3f})"
            ratio = f"{rows['TRL']['seconds'] / r['seconds']:5.2f}x" if "TRL" in rows else ""
            work = f"{r['tokens']:5.0f} tokens, {r['turns']:.2f} turns, {r['tool_calls']:.2f} calls"
            print(f"{task:7s} {name:23s} {times:27s} {ratio:7s} {r['peak_mb']:5.0f} MB   {work}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help=f"steps that count, after {WARM} that do not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", choices=list(LENGTH), default=list(LENGTH))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    own = sys.executable if importlib.util.find_spec("trl") else None
    parser.add_argument("--trl-python", default=own, help="an interpreter that can import trl")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        kind, job = options.peer
        {"prepare": prepare, "turnwise": ours, "trl": theirs}[kind](json.loads(job))
        return 0
    pythons = {n: sys.executable if kind == "turnwise" else options.trl_python for n, kind in SIDES.items()}
    pythons = {name: python for name, python in pythons.items() if python}
    table = {}
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as folder:
            table[task] = measure(task, pythons, options.steps, options.threads, Path(folder))
    single = table.get("single", {})
    ratio = single["TRL"]["seconds"] / single["turnwise"]["seconds"] if "TRL" in single else None
    if options.json:
        print(json.dumps({"bar": BAR, "single_ratio": ratio, "threads": options.threads, "tasks": table}))
    else:
        show(table, options)
        if ratio is not None:
            print(f"single: {ratio:.2f} times as fast as TRL; bar {BAR} {'ok' if ratio >= BAR else 'FAIL'}")
    return 0 if ratio is None or ratio >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
