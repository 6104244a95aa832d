"""Every setting of a run, in one flat frozen record, shared by the command line, the Python API and run.json.

A method's own hyper-parameters are the arguments of its recipe function; here they are in ``method_options``. An
environment may suggest some (``Environment.suggests``): they apply where the user gives none.
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
    "lora_rank", "micro_batch_tokens", "threads",
)  # fmt: skip
ROLLOUT_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")


def setting(default: Any, text: str) -> Any:
    """A field of ``Settings`` with its default and its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run, flat and validated."""

    # what to train
    method: str = setting("dr_grpo", "training method; `turnwise list` shows all")
    env: str = setting("calculator", "environment: a built-in name, reasoning_gym:DATASET or module:Class")
    model: str = setting(
        "tiny",
        "a directory in Hugging Face format, a Hub id, smollm2 (after `turnwise model fetch`), or `tiny` (created here)",
    )
    difficulty: tuple[int, ...] = setting(
        (1, 2, 3), "difficulties to train and evaluate on, unless the environment suggests others"
    )
    credit: str = setting("", "method whose credit assignment replaces the method's own; empty: its own")
    seed: int = setting(0, "random seed of the whole run")
    threads: int = setting(0, "CPU threads of the learner and generator; 0: measured when the run starts")
    device: str = setting("auto", "cpu, cuda, or auto: cuda when present")
    out: str = setting("runs", "directory that contains the run directories")
    name: str = setting("", "name of the run directory; empty: made from method, environment, seed and a number")
    template: str = setting("", "chat template for a model without one: chatml, or a .jinja file")
    # other data
    demos: str = setting(
        "", "demonstrations: a .jsonl file of dialogues, or a scripted policy of the environment (oracle, demonstrator)"
    )
    demo_share: float = setting(0.2, "share of the batch for demonstrations that belong to no task of the environment")
    data: str = setting(
        "", "train on this file only, without rollouts: preference pairs, or dialogues with rewards (.jsonl)"
    )
    teacher: str = setting(
        "", "teacher model with the same vocabulary: a directory in Hugging Face format, or a Hub id"
    )
    # amount of training
    steps: int = setting(100, "RL steps")
    groups: int = setting(0, "tasks per step; 0: the method's own")
    group_size: int = setting(0, "trajectories per task; 0: the method's own")
    epochs: int = setting(0, "passes over each batch; 0: the method's own")
    minibatches: int = setting(0, "optimiser steps per pass; 0: the method's own")
    staleness: int = setting(0, "steps that rollouts may run ahead of training; 0: synchronous")
    max_draws: int = setting(8, "stop sampling for a batch after this many times the groups it needs")
    # rollouts
    temperature: float = setting(1.0, "sampling temperature")
    top_p: float = setting(1.0, "nucleus sampling")
    top_k: int = setting(0, "sample from the k most probable tokens; 0: off")
    min_p: float = setting(0.0, "drop tokens less probable than this share of the most probable one")
    max_tokens: int = setting(48, "maximum tokens sampled per turn")
    max_turns: int = setting(0, "maximum turns per episode; 0: the environment's own")
    context: int = setting(320, "maximum tokens of a dialogue")
    history: int = setting(0, "number of latest observations in a prompt, besides the task; 0: all")
    slots: int = setting(256, "dialogues in the KV cache at the same time")
    rollout_dtype: str = setting(
        "auto", "precision of rollouts: float32, bfloat16, float16, fp8, or auto: that of the learner"
    )
    env_seconds: float = setting(30.0, "time limit of one call into the environment, in seconds")
    # optimisation
    lr: float = setting(3e-4, "learning rate")
    schedule: str = setting("linear", "learning-rate schedule: constant, linear or cosine")
    warmup: int = setting(3, "warm-up steps of the learning rate")
    weight_decay: float = setting(0.0, "AdamW weight decay")
    clip_norm: float = setting(1.0, "gradient norm is clipped to this")
    critic: str = setting("shared", "shared: a value head on the policy's hidden states; separate: a model of its own")
    value_lr: float = setting(1e-3, "learning rate of the critic")
    micro_batch_tokens: int = setting(
        0, "tokens per micro-batch; 0: 8192 on a CPU, 16384 on a GPU, 24576 on one with over 60 GiB"
    )
    dtype: str = setting(
        "auto",
        "precision of the learner's matrix products: float32, bfloat16, fp8 (as in fp8 rollouts), "
        "or auto: bfloat16 on a GPU, else float32",
    )
    recompute: bool = setting(
        False, "gradient checkpointing: recompute layers in the backward pass (less memory, more time)"
    )
    offload: bool = setting(False, "keep the optimiser state in host memory between steps")
    lora_rank: int = setting(0, "train LoRA adapters of this rank; 0: all weights")
    mismatch_tolerance: float = setting(
        0.0, "largest mean log-probability difference between generator and learner; 0: set by their precision"
    )
    # the tiny model and its cold start
    hidden: int = setting(192, "width of the tiny model")
    layers: int = setting(2, "layers of the tiny model")
    vocabulary: int = setting(512, "entries of the tiny tokenizer")
    copying: bool = setting(
        False,
        "start attention heads of the tiny model as copying heads: it learns to copy sooner",
    )
    cold_steps: int = setting(-1, "supervised steps before RL; -1: 100 for the tiny model, 0 for others")
    cold_batch: int = setting(48, "demonstrations per supervised step")
    cold_demos: int = setting(
        2048, "maximum number of distinct demonstrations of the cold start; they are then repeated"
    )
    cold_lr: float = setting(3e-3, "learning rate of the cold start")
    # evaluation
    eval_tasks: int = setting(200, "held-out tasks to evaluate on before and after; 0: none, allowed with --data only")
    eval_samples: int = setting(1, "trajectories per held-out task (pass@k, majority@k)")
    eval_temperature: float = setting(1.0, "sampling temperature of the evaluation")
    eval_every: int = setting(0, "steps between evaluations during training; 0: none")
    # output
    checkpoint_every: int = setting(20, "steps between checkpoints")
    keep_checkpoints: int = setting(2, "number of checkpoints to keep")
    profile: bool = setting(
        False, "time and trace a few steps; write profile.md and trace.json.gz to the run directory"
    )
    trackers: tuple[str, ...] = setting(
        ("tensorboard",), "trackers besides metrics.jsonl: tensorboard, wandb, mlflow, trackio"
    )
    method_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "hyper-parameters of the method"})
    credit_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "hyper-parameters of the method named by credit"}
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            object.__setattr__(self, f.name, convert(f.name, value, type_of(f)))
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
        if self.mismatch_tolerance < 0:
            raise SettingError(f"mismatch_tolerance is {self.mismatch_tolerance}; write 0 or a positive number")
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
        """From a mapping whose names may be wrong."""
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise SettingError(f"no setting {key!r}; {nearest(key, names)}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def title(self) -> str:
        """The method, and the method whose credit it uses: ``sapo+hgpo``."""
        return f"{self.method}+{self.credit}" if self.credit else self.method


def type_of(f: Field) -> Any:
    """The type of a setting, resolved from its annotation."""
    return typing.get_type_hints(Settings)[f.name]


def default_of(f: Field) -> Any:
    """The default of a setting."""
    if f.default is not MISSING:
        return f.default
    assert f.default_factory is not MISSING
    return f.default_factory()
