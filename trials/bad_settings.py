"""Bad commands, flags, values and configuration files."""

from __future__ import annotations

from collections.abc import Iterator

from trials.cases import Case, text_file

DRY = ("--steps", "1", "--cold-steps", "1", "--eval-tasks", "2")
COMMANDS = (
    ("no such command", ("trian",)),
    ("no such method", ("train", "gpro")),
    ("two methods", ("train", "grpo", "ppo")),
    ("method after a flag", ("train", "--steps", "1", "grpo")),
    ("unknown flag", ("train", "--stpes", "1")),
    ("flag without value", ("train", "--steps")),
    ("empty method", ("train", "")),
    ("method of odd characters", ("train", "\x1b[31m\n../../x")),
    ("no such environment", ("train", "--env", "calculater")),
    ("no such module", ("train", "--env", "nowhere:Env")),
    ("no such class", ("train", "--env", "json:Env")),
    ("not a class", ("train", "--env", "json:dumps")),
    ("empty environment", ("train", "--env", "")),
    ("no such dataset", ("train", "--env", "reasoning_gym:nothing")),
    ("no such credit", ("train", "grpo", "--credit", "gipgo")),
    ("credit options without credit", ("train", "grpo", "--credit-gamma", "1")),
    ("no such tracker", ("train", "--trackers", "tensorbord")),
    ("no such device", ("train", "--device", "gpu")),
    ("a name outside the folder", ("train", "--name", "../../outside")),
    ("a name with a folder", ("train", "--name", "a/b")),
    ("a name with NUL", ("train", "--name", "\x00x")),
    ("no such run", ("resume", "runs/nothing")),
    ("resume a file", ("resume", "/etc/hostname")),
    ("resume nothing", ("resume",)),
    ("evaluate nothing", ("eval",)),
    ("no such player", ("eval", "--player", "orakel")),
    ("no such split", ("eval", "--player", "oracle", "--split", "test")),
    ("evaluate a missing run", ("eval", "runs/nothing")),
    ("explain nothing", ("explain",)),
    ("explain a wrong name", ("explain", "grppo")),
    ("diff of one", ("diff", "grpo")),
    ("diff with a wrong name", ("diff", "grpo", "gr po")),
    ("check a missing environment", ("check-env", "nowhere:Env")),
    ("check nothing", ("check-env",)),
    ("check a missing method", ("check-method", "nowhere:recipe")),
    ("export nothing", ("export",)),
    ("fetch an unknown model", ("model", "fetch", "gpt-5")),
    ("benchmark an unknown part", ("bench", "--parts", "nonsense")),
    ("data and demonstrations", ("train", "dpo", "--data", "a.jsonl", "--demos", "b.jsonl")),
    ("pairs for a rollout method", ("train", "grpo", "--data", "missing.jsonl")),
    ("demonstrations missing", ("train", "grpo", "--demos", "missing.jsonl")),
    ("teacher that is not there", ("train", "grpo", "--teacher", "./nowhere")),
)
VALUES = {  # setting: values that it must refuse
    "steps": ("0", "-1", "abc", "1.5", "", "1e3x", "nan", "99999999999999999999999x"),
    "lr": ("abc", "", "nan", "inf", "-1e-3"),
    "group-size": ("-2", "two"),
    "groups": ("-1", "x"),
    "temperature": ("-1", "hot", "nan"),
    "top-p": ("-0.1", "1.5", "x"),
    "top-k": ("-1", "1.5"),
    "min-p": ("-1", "2"),
    "max-tokens": ("0", "-5", "many"),
    "max-turns": ("-1", "x"),
    "context": ("0", "-1", "x"),
    "history": ("-1",),
    "slots": ("0",),
    "difficulty": ("9", "x", "-1", "1,9"),
    "seed": ("x", "1.5"),
    "threads": ("-1", "x"),
    "staleness": ("-1", "x"),
    "epochs": ("-1",),
    "minibatches": ("-1",),
    "demo-share": ("0", "1", "x"),
    "warmup": ("-1",),
    "clip-norm": ("x",),
    "schedule": ("exponential",),
    "critic": ("both",),
    "rollout-dtype": ("int8",),
    "dtype": ("float64x",),
    "recompute": ("maybe",),
    "lora-rank": ("-1",),
    "hidden": ("0", "17", "x"),
    "layers": ("0",),
    "vocabulary": ("0", "x"),
    "cold-steps": ("x",),
    "cold-batch": ("0",),
    "eval-tasks": ("-1", "x"),
    "eval-samples": ("0",),
    "eval-temperature": ("-1",),
    "checkpoint-every": ("0",),
    "keep-checkpoints": ("0",),
    "env-seconds": ("0", "-1", "nan"),
    "mismatch-tolerance": ("-1",),
    "template": ("missing.jinja", "chatlm"),
    "max-draws": ("0",),
    "micro-batch-tokens": ("-1",),
    "tool-syntax": ("hermez",),
    "reward": ("missing.py:score", "json:nothing", "exakt"),
}
CONFIGS = {
    "unknown key": "stpes: 3\n",
    "wrong type": "steps: many\n",
    "list where a number belongs": "steps: [1, 2]\n",
    "nested where flat belongs": "train: {steps: 3}\n",
    "not a mapping": "- 1\n- 2\n",
    "empty": "",
    "broken YAML": "steps: {3\n",
    "tab indentation": "method_options:\n\tlow: 1\n",
    "duplicate key": "steps: 1\nsteps: 2\n",
    "binary": b"\x00\x01\xff\xfe",
    "not UTF-8": b"name: \xe9\n",
    "object tag": "!!python/object/apply:os.system ['touch stolen']\n",
    "anchors a million times": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(8)
    ),
    "deep nesting": "steps: " + "[" * 5000 + "]" * 5000,
    "unknown method": "method: gpro\n",
    "unknown method option": "method: grpo\nmethod_options: {lwo: 0.1}\n",
}  # fmt: skip
TOML = {"broken TOML": "steps = [1", "unknown TOML key": "stpes = 3", "TOML date": "steps = 2020-01-01"}


def cases() -> Iterator[Case]:
    for name, argv in COMMANDS:
        yield Case("commands", name, argv)
    for setting, values in VALUES.items():
        for value in values:
            yield Case("settings", f"--{setting} {value[:30]!r}", ("train", "--dry-run", *DRY, f"--{setting}={value}"))
    for name, content in CONFIGS.items():
        expect = "either" if name in ("empty", "duplicate key") else "refused"
        argv = ("train", "--dry-run", "--config", "run.yaml", "--env", "guess", *DRY)
        yield Case("config files", name, argv, expect, text_file("run.yaml", content))
    for name, content in TOML.items():
        yield Case("config files", name, ("train", "--config", "run.toml"), "refused", text_file("run.toml", content))
    yield Case("config files", "missing", ("train", "--config", "none.yaml"))
    yield Case(
        "config files", "unknown suffix", ("train", "--config", "run.ini"), "refused", text_file("run.ini", "steps=1")
    )
