"""Every setting of a run, in one flat frozen record: the command line, the Python API and run.json all speak it.

A method's own hyper-parameters are the arguments of its recipe function; here they travel in ``method_options``. An
environment may suggest some (``Environment.suggests``): they count where the user gives none.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

from turnwise.config.convert import convert
from turnwise.errors import SettingError, nearest

AT_LEAST_ONE = (
    "steps", "max_tokens", "context", "slots", "eval_samples", "checkpoint_every", "keep_checkpoints",
    "max_draws", "layers", "vocabulary", "cold_batch", "cold_demos",
)  # fmt: skip
AT_LEAST_ZERO = (
    "groups", "group_size", "epochs", "minibatches", "max_turns", "history", "eval_tasks", "eval_every", "warmup",
    "lora_rank", "positions",
)  # fmt: skip
ROLLOUT_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")


def knob(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Settings:
    # what
    method: str = knob("dr_grpo", "the method; `turnwise list` shows all")
    env: str = knob("calculator", "environment: a built-in name, reasoning_gym:DATASET or module:Class")
    model: str = knob(
        "tiny", "a folder in Hugging Face layout, a hub id, smollm2 (once fetched), or `tiny` (made here)"
    )
    difficulty: tuple[int, ...] = knob(
        (1, 2, 3), "difficulties to train and evaluate on, unless the environment suggests others"
    )
    credit: str = knob("", "whose credit to take instead of the method's own: another method; empty: its own")
    seed: int = knob(0, "every random choice of the run follows from it")
    device: str = knob("auto", "cpu, cuda, or auto: cuda when present")
    out: str = knob("runs", "folder that run directories are made in")
    name: str = knob("", "name of the run directory; empty: method, environment, seed, a number")
    template: str = knob("", "chat template if the model has none: chatml, or a .jinja file")
    # learning from others
    demos: str = knob(
        "", "demonstrations: a .jsonl file of dialogues, or a player of the environment: oracle, demonstrator"
    )
    demo_share: float = knob(0.2, "share of the batch for demonstrations that are of no particular task")
    data: str = knob("", "learn from this file alone, without rollouts: pairs, or dialogues with rewards (.jsonl)")
    teacher: str = knob(
        "", "a model with the same vocabulary to learn from: a folder in Hugging Face layout, or a hub id"
    )
    # how much
    steps: int = knob(100, "RL steps")
    groups: int = knob(0, "tasks per step; 0: the method's own")
    group_size: int = knob(0, "trajectories per task; 0: the method's own")
    epochs: int = knob(0, "passes over each batch; 0: the method's own")
    minibatches: int = knob(0, "optimiser steps per pass; 0: the method's own")
    staleness: int = knob(0, "how many steps rollouts may run ahead of training; 0 is synchronous")
    max_draws: int = knob(8, "give up filling a batch after this many times the groups it needs")
    # rollouts
    temperature: float = knob(1.0, "sampling temperature")
    top_p: float = knob(1.0, "nucleus sampling")
    top_k: int = knob(0, "sample among the k likeliest; 0: off")
    min_p: float = knob(0.0, "drop tokens below this share of the likeliest")
    max_tokens: int = knob(48, "token budget of one turn")
    max_turns: int = knob(0, "turn limit; 0: the environment's own")
    context: int = knob(320, "ids a dialogue may hold")
    history: int = knob(0, "how many of the latest observations a prompt shows, besides the task; 0: all")
    slots: int = knob(256, "dialogues whose cache is kept at once")
    rollout_dtype: str = knob("auto", "of rollouts: float32, bfloat16, float16, fp8, or auto: as the learner")
    env_seconds: float = knob(30.0, "wall time one call into the environment may take")
    # learning
    lr: float = knob(3e-4, "learning rate")
    schedule: str = knob("linear", "constant, linear or cosine")
    warmup: int = knob(3, "steps of warm-up")
    weight_decay: float = knob(0.0, "AdamW weight decay")
    clip_norm: float = knob(1.0, "largest gradient norm")
    critic: str = knob("shared", "shared: the critic reads the policy's states; separate: it is a model of its own")
    value_lr: float = knob(1e-3, "learning rate of the critic")
    positions: int = knob(0, "ids per micro-batch; 0: 8192 on a CPU, 16384 on a GPU, 24576 on one with over 60 GiB")
    dtype: str = knob(
        "auto",
        "of the learner's products: float32, bfloat16, fp8 (as fp8 rollouts), or auto: bfloat16 on a GPU, else float32",
    )
    recompute: bool = knob(False, "compute layers again in the backward pass: less memory, more time")
    offload: bool = knob(False, "keep the optimiser's memory on the host between steps, where a GPU is short of it")
    lora_rank: int = knob(0, "train LoRA adapters of this rank; 0: all weights")
    probe_tolerance: float = knob(
        0.0, "largest mean log-probability difference between generator and learner; 0: what their precision allows"
    )
    # the tiny model and its cold start
    hidden: int = knob(192, "width of the tiny model")
    layers: int = knob(2, "layers of the tiny model")
    vocabulary: int = knob(512, "entries of the tiny tokenizer")
    copying: bool = knob(False, "heads of the tiny model begin by saying again what they look at: it copies sooner")
    cold_steps: int = knob(-1, "supervised steps before RL; -1: 100 for the tiny model, 0 for a given one")
    cold_batch: int = knob(48, "demonstrations per supervised step")
    cold_demos: int = knob(2048, "demonstrations played for the cold start, at most; each is then seen again")
    cold_lr: float = knob(3e-3, "learning rate of the cold start")
    # evaluation
    eval_tasks: int = knob(200, "held-out tasks, before and after; 0: none, for a run on --data alone")
    eval_samples: int = knob(1, "trajectories per held-out task (pass@k, majority@k)")
    eval_temperature: float = knob(1.0, "sampling temperature of the evaluation")
    eval_every: int = knob(0, "also evaluate every so many steps; 0: never")
    # keeping
    checkpoint_every: int = knob(20, "steps between checkpoints")
    keep_checkpoints: int = knob(2, "checkpoints kept")
    profile: bool = knob(False, "time a few steps, trace a few, and leave profile.md and trace.json.gz in the run")
    trackers: tuple[str, ...] = knob(("tensorboard",), "besides metrics.jsonl: tensorboard, wandb, mlflow, trackio")
    method_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "hyper-parameters of the method"})
    credit_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "those of the method named by credit"}
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            object.__setattr__(self, f.name, convert(f.name, value, kind_of(f)))
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise SettingError(f"{name} is {getattr(self, name)}; write at least 1")
        for name in AT_LEAST_ZERO:
            if getattr(self, name) < 0:
                raise SettingError(f"{name} is {getattr(self, name)}; write 0 or more")
        if self.hidden % 16 or self.hidden < 16:
            raise SettingError(f"hidden is {self.hidden}; write a multiple of 16")
        if self.rollout_dtype not in ROLLOUT_DTYPES:
            raise SettingError(
                f"rollout_dtype is {self.rollout_dtype!r}; {nearest(self.rollout_dtype, ROLLOUT_DTYPES)}"
            )
        if self.probe_tolerance < 0:
            raise SettingError(f"probe_tolerance is {self.probe_tolerance}; write 0 or a positive number")
        if self.critic not in ("shared", "separate"):
            raise SettingError(f"critic is {self.critic!r}; {nearest(self.critic, ('shared', 'separate'))}")
        if not self.env_seconds > 0:
            raise SettingError(f"env_seconds is {self.env_seconds}; write a positive number of seconds")
        if not 0 < self.demo_share < 1:
            raise SettingError(f"demo_share is {self.demo_share}; write a number between 0 and 1")
        if self.credit_options and not self.credit:
            raise SettingError("credit_options are given, but no credit; write --credit NAME")
        if self.staleness < 0:
            raise SettingError(f"staleness is {self.staleness}; write 0 for synchronous, or a positive number of steps")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """From a mapping with possibly wrong names."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise SettingError(f"no setting {key!r}; {nearest(key, known)}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def title(self) -> str:
        """The method, and whose credit it takes: ``sapo+hgpo``."""
        return f"{self.method}+{self.credit}" if self.credit else self.method


def kind_of(f: Field) -> Any:
    return typing.get_type_hints(Settings)[f.name]


def default_of(f: Field) -> Any:
    if f.default is not MISSING:
        return f.default
    assert f.default_factory is not MISSING
    return f.default_factory()
