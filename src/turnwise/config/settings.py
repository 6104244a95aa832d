"""Every setting of a run: frozen sections, and one record that is all of them, shared by the command line, the Python API and
run.json. Names are flat (``lr``, ``eval_tasks``); a function that reads one section says so in its type.

A method's own hyper-parameters are the arguments of its recipe function; here they are in ``method_options``. An
environment may suggest some settings (``Environment.suggests``): they apply where the user gives none.
"""

# ruff: noqa: RUF009  (the defaults are frozen values)
from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from turnwise.config.convert import check_limit, convert
from turnwise.config.values import Cluster, ModelName, Opponents, SettingValue, Staleness
from turnwise.errors import SettingError, nearest

OTHER_NAMES = {  # names of older releases and of other trainers, for the hint of an error message
    "positions": "micro_batch_tokens", "probe_tolerance": "mismatch_tolerance", "learning_rate": "lr",
    "max_steps": "steps", "num_generations": "group_size", "batch_size": "groups", "train_batch_size": "groups",
    "max_new_tokens": "max_tokens", "max_completion_length": "max_tokens", "max_length": "context",
    "max_grad_norm": "clip_norm", "lr_scheduler_type": "schedule", "warmup_steps": "warmup", "output_dir": "out",
    "num_iterations": "epochs", "save_steps": "checkpoint_every", "eval_steps": "eval_every", "report_to": "trackers",
    "gradient_checkpointing": "recompute", "environment": "env", "n_gpus": "ranks", "rank": "lora_rank",
    "nproc_per_node": "ranks", "world_size": "ranks", "tasks": "data",
}  # fmt: skip


def setting(default: Any, text: str, **declared: Any) -> Any:
    """A setting with its default, its help text and, where it has one, its ``limit`` or its ``choices``."""
    metadata = {"help": text, **declared}
    return (
        field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True, kw_only=True)
class MethodSection:
    """The method, and which experience it learns from."""

    method: str = setting("dr_grpo", "training method of `turnwise list`, or a recipe of your own: module:recipe")
    method_options: dict[str, Any] = setting(dict, "hyper-parameters of the method")
    credit: str = setting("", "method whose credit assignment replaces the method's own; empty: its own")
    credit_options: dict[str, Any] = setting(dict, "hyper-parameters of the method named by credit")
    sampler: str = setting(
        "", "which task comes next: vade, fg_expo, craft ...; NAME,key=value; empty: the method's own"
    )
    budget: str = setting("", "rollouts and turns of each task: rollout_gdro, v0, dart ...; empty: the method's own")
    strategy: str = setting("", "how the rollouts of a group grow: branch, arpo, spo_tree ...; empty: the method's own")
    guidance: str = setting("", "help for hard tasks: ghpo, scaf, pope, prefix ...; empty: the method's own")
    replay: str = setting("", "past trajectories mixed into a step: spear, arpo_gui ...; empty: the method's own")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """The tasks, and who plays them."""

    env: str = setting(
        "calculator",
        "environment: a name of `turnwise environments`, module:Class or file.py:Class; ,key=value gives arguments",
    )
    difficulty: tuple[int, ...] = setting(
        (1, 2, 3), "difficulties to train and evaluate on, unless the environment suggests others"
    )
    max_turns: int = setting(0, "maximum turns per episode; 0: the environment's own", limit="0 or more")
    history: int = setting(0, "number of latest observations in a prompt, besides the task; 0: all", limit="0 or more")
    env_seconds: float = setting(
        30.0, "time limit of one call into the environment, in seconds", limit="a positive number of seconds"
    )
    isolate_env: bool = setting(
        False,
        "play episodes in other processes, so that an environment that crashes or freezes ends only its own episodes",
    )
    opponents: Opponents = setting(
        Opponents(),
        "who holds the other seats of a game: self (the policy, trained at every seat), past (older policies of this run: "
        "past,keep=8,every=5,pool=spread), or scripted:random (or oracle, demonstrator)",
    )
    agent: str = setting(
        "",
        "agent of your own that plays the episodes: an async function (task, client) -> reward as module:name or "
        "file.py:name, a command with arguments that finds the policy in OPENAI_BASE_URL, or `external`: agents elsewhere "
        "take episodes at --agent-address",
    )
    agent_seconds: float = setting(300.0, "time limit of an agent's whole episode, in seconds")
    agent_address: str = setting("127.0.0.1:8700", "where agents that live elsewhere take episodes: HOST:PORT")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model and its chat format."""

    model: ModelName = setting(
        ModelName("tiny"),
        "a directory in Hugging Face format, a Hub id, smollm2 (after `turnwise model fetch`), or `tiny` (created here)",
    )
    teacher: ModelName = setting(
        ModelName(), "teacher model with the same vocabulary: a directory in Hugging Face format, or a Hub id"
    )
    template: str = setting("", "chat template for a model without one: chatml, or a .jinja file")
    template_options: dict[str, Any] = setting(dict, "variables of the chat template: enable_thinking=false,key=value")
    tool_syntax: str = setting(
        "auto", "syntax of tool calls: hermes, llama3, mistral ...; auto: what the chat template writes"
    )
    describe_tools: bool = setting(False, "describe the tools in the first message if the chat template shows none")


@dataclass(frozen=True, kw_only=True)
class TinySection:
    """The tiny model, and the cold start."""

    hidden: int = setting(192, "width of the tiny model", limit="a multiple of 16")
    layers: int = setting(2, "layers of the tiny model", limit="at least 1")
    vocabulary: int = setting(512, "entries of the tiny tokenizer", limit="at least 1")
    copying: bool = setting(
        False,
        "start attention heads of the tiny model as copying heads: it learns to copy sooner",
    )
    cold_steps: int = setting(-1, "supervised steps before RL; -1: 100 for the tiny model, 0 for others")
    cold_batch: int = setting(48, "demonstrations per supervised step", limit="at least 1")
    cold_demos: int = setting(
        2048, "maximum number of distinct demonstrations of the cold start; they are then repeated", limit="at least 1"
    )
    cold_lr: float = setting(3e-3, "learning rate of the cold start", limit="0 or a positive number")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Rows of files, and demonstrations."""

    data: str = setting(
        "",
        "rows of a file, or of a data set by folder or hub id (.jsonl, .csv, .parquet ...): with --reward, prompts to answer; "
        "without, preference pairs or dialogues to learn from, without rollouts",
    )
    eval_data: str = setting("", "rows that are only evaluated on; empty: a share of --data is held out")
    held_out_share: float = setting(
        0.1, "share of the prompts of --data that is held out, by content", limit="a number from 0 to below 1"
    )
    tools: tuple[str, ...] = setting(
        (), "tools for the prompts of --data: python (an isolated interpreter), file.py:function, module:function"
    )
    demos: str = setting(
        "", "demonstrations: a .jsonl file of dialogues, or a scripted policy of the environment (oracle, demonstrator)"
    )
    demo_share: float = setting(
        0.2,
        "share of the batch for demonstrations that belong to no task of the environment",
        limit="a number between 0 and 1",
    )


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """Reward functions, and a model as judge."""

    reward: tuple[str, ...] = setting(
        (),
        "reward functions: file.py:function, module:function, exact, majority, math, code, regex:pattern=X, json_schema; with "
        "weights as in 0.5*exact,my.py:score",
    )
    reward_seconds: float = setting(
        10.0, "time limit of one call of a reward function, in seconds", limit="a positive number of seconds"
    )
    reward_memory: int = setting(
        4096, "memory limit of a process that runs a reward function, in MiB", limit="at least 1"
    )
    reward_failure: str = setting(
        "fail",
        "where a reward function raises, hangs or crashes: fail (the trajectory is dropped), or a number to give",
    )
    env_reward_weight: float = setting(1.0, "weight of the environment's own reward beside --reward")
    judge: str = setting(
        "",
        "judge of finished episodes: http://HOST/v1, policy (itself), or first_error:FOLDER, a model that names a wrong step",
    )
    judge_model: str = setting("", "name of the judge's model on its server; empty: the only one it serves")
    judge_rubric: str = setting(
        "", "what the judge scores: words, or a .txt or .md file; empty: was the task done well?"
    )
    judge_mode: str = setting(
        "each", "each: every episode alone; group: all episodes of a task in one verdict", choices=("each", "group")
    )
    judge_weight: float = setting(
        1.0, "factor of the judge's score, from 0 to 1, in the reward of the last turn", limit="a finite number"
    )
    judge_seconds: float = setting(
        120.0, "time limit of one reply of the judge, in seconds", limit="a positive number of seconds"
    )
    judge_key_env: str = setting("", "environment variable that holds the key of the judge's server; empty: no key")


@dataclass(frozen=True, kw_only=True)
class AmountSection:
    """Amount of training."""

    steps: int = setting(100, "RL steps", limit="at least 1")
    groups: int = setting(0, "tasks per step; 0: the method's own", limit="0 or more")
    group_size: int = setting(0, "trajectories per task; 0: the method's own", limit="0 or more")
    epochs: int = setting(0, "passes over each batch; 0: the method's own", limit="0 or more")
    minibatches: int = setting(0, "optimiser steps per pass; 0: the method's own", limit="0 or more")
    staleness: Staleness = setting(
        Staleness(),
        "steps that rollouts may run ahead of training; 0: synchronous, reproducible; 0,continuous: synchronous, but no dialogue "
        "waits for another's tools; N,drop drops groups that come late, N,keep trains on them, N alone waits for them",
    )
    max_draws: int = setting(
        8, "stop sampling for a batch after this many times the groups it needs", limit="at least 1"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """Sampling."""

    temperature: float = setting(1.0, "sampling temperature")
    top_p: float = setting(1.0, "nucleus sampling")
    top_k: int = setting(0, "sample from the k most probable tokens; 0: off")
    min_p: float = setting(0.0, "drop tokens less probable than this share of the most probable one")
    max_tokens: int = setting(48, "maximum tokens sampled per turn", limit="at least 1")
    context: int = setting(320, "maximum tokens of a dialogue", limit="at least 1")
    slots: int = setting(256, "dialogues in the KV cache at the same time", limit="at least 1")
    rollout_dtype: str = setting(
        "auto",
        "precision of rollouts: float32, bfloat16, float16, fp8, or auto: that of the learner",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
    )
    generator: tuple[str, ...] = setting(
        (),
        "where to sample: addresses of servers (`turnwise serve`, `vllm serve`), http://HOST:PORT, or local: a process of its "
        "own on the same device; empty: this process",
    )
    generator_key_env: str = setting("", "environment variable that holds the token of these servers; empty: none")
    generator_seconds: float = setting(
        30.0, "seconds of silence after which a generator server is given up", limit="a positive number of seconds"
    )
    generator_weights: str = setting(
        "",
        "how weights reach servers: by a folder that both see, or to vLLM by nccl (GPU to GPU) or ipc (within one GPU); empty: "
        "by shared memory of this machine",
    )


@dataclass(frozen=True, kw_only=True)
class LearnerSection:
    """Optimisation."""

    lr: float = setting(3e-4, "learning rate", limit="0 or a positive number")
    schedule: str = setting(
        "linear", "learning-rate schedule: constant, linear or cosine", choices=("constant", "linear", "cosine")
    )
    warmup: int = setting(3, "warm-up steps of the learning rate", limit="0 or more")
    weight_decay: float = setting(0.0, "AdamW weight decay", limit="0 or a positive number")
    clip_norm: float = setting(1.0, "gradient norm is clipped to this")
    critic: str = setting(
        "shared",
        "shared: a value head on the policy's hidden states; separate: a model of its own",
        choices=("shared", "separate"),
    )
    value_lr: float = setting(1e-3, "learning rate of the critic", limit="0 or a positive number")
    lora_rank: int = setting(0, "train LoRA adapters of this rank; 0: all weights", limit="0 or more")
    dtype: str = setting(
        "auto",
        "precision of the learner's matrix products: float32, bfloat16, fp8 (as in fp8 rollouts), "
        "nf4 (auto, with frozen weights in 4 bits beside --lora-rank), or auto: bfloat16 on a GPU, else float32",
        choices=("auto", "float32", "bfloat16", "float64", "fp8", "nf4"),
    )
    micro_batch_tokens: int = setting(
        0, "tokens per micro-batch; 0: 8192 on a CPU, 16384 on a GPU, 24576 on one with over 60 GiB", limit="0 or more"
    )
    recompute: bool = setting(
        False, "gradient checkpointing: recompute layers in the backward pass (less memory, more time)"
    )
    offload: bool = setting(False, "keep the optimiser state in host memory between steps")
    mismatch_tolerance: float = setting(
        0.0,
        "largest mean log-probability difference between generator and learner; 0: set by their precision",
        limit="0 or more",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Evaluation."""

    eval_tasks: int = setting(
        200, "held-out tasks to evaluate on before and after; 0: no evaluation", limit="0 or more"
    )
    eval_samples: int = setting(1, "trajectories per held-out task (pass@k, majority@k)", limit="at least 1")
    eval_temperature: float = setting(1.0, "sampling temperature of the evaluation")
    eval_every: int = setting(0, "steps between evaluations during training; 0: none", limit="0 or more")


@dataclass(frozen=True, kw_only=True)
class MachineSection:
    """The machine."""

    device: str = setting("auto", "cpu, cuda, or auto: cuda when present")
    threads: int = setting(
        0, "CPU threads of the learner and generator; 0: measured when the run starts", limit="0 or more"
    )
    ranks: int = setting(
        1,
        "processes of this machine that share the learner's weights and work (FSDP2); 1: this process alone",
        limit="at least 1",
    )
    cluster: Cluster = setting(
        Cluster(),
        "run on Ray: local, or HOST:PORT of a cluster, with ,generators=2,environments=4,cpus=1,gpus=0,placement=pack|spread,"
        "restarts=100; empty: no cluster",
    )
    seed: int = setting(0, "random seed of the whole run")


@dataclass(frozen=True, kw_only=True)
class OutputSection:
    """Output."""

    out: str = setting("runs", "directory that contains the run directories")
    name: str = setting("", "name of the run directory; empty: made from method, environment, seed and a number")
    checkpoint_every: int = setting(20, "steps between checkpoints", limit="at least 1")
    keep_checkpoints: int = setting(2, "number of checkpoints to keep", limit="at least 1")
    keep_tokens: int = setting(
        200, "newest steps whose numbers of each token `turnwise view` can explain; 0: none", limit="0 or more"
    )
    profile: bool = setting(
        False, "time and trace a few steps; write profile.md and trace.json.gz to the run directory"
    )
    trackers: tuple[str, ...] = setting(
        ("tensorboard",), "trackers besides metrics.jsonl: tensorboard, wandb, mlflow, trackio"
    )


@dataclass(frozen=True, kw_only=True)
class Settings(
    OutputSection, MachineSection, EvaluationSection, LearnerSection, RolloutSection, AmountSection,
    RewardSection, DataSection, TinySection, ModelSection, EnvironmentSection, MethodSection,
):  # fmt: skip
    """All settings of a run, typed and checked. The sections stand in reverse, because a dataclass lists its last base first."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = convert(f.name, getattr(self, f.name), type_of(f))
            object.__setattr__(self, f.name, value)
            check_limit(f.name, value, f.metadata)
        method, credit = split_method(self.method)
        if credit and self.credit not in ("", credit):
            raise SettingError(f"method is {self.method!r} and credit is {self.credit!r}; name one credit")
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "credit", credit or self.credit)
        if self.credit_options and not self.credit:
            raise SettingError("credit_options are given, but no credit; write --credit NAME")
        if self.reward_failure != "fail":
            convert("reward_failure", self.reward_failure, float)
        if self.eval_data and (not self.data or self.offline):
            raise SettingError(
                "eval_data is given without prompts to train on; write --data FILE and --reward FUNCTION"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """From a mapping whose names may be wrong: flags, a file, arguments of ``train``, or what run.json records."""
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise SettingError(f"no setting {key!r}; {known_setting(key, names)}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """What ``of`` reads back to the same settings, in types of JSON and tuples."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: v.plain() if isinstance(v, SettingValue) else v for name, v in values.items()}

    @property
    def uses_prompts(self) -> bool:
        """Whether the rows of ``data`` are the tasks: where rewards score answers to them, or an agent plays."""
        return bool(self.data and (self.reward or self.judge or self.agent))

    @property
    def offline(self) -> bool:
        """Whether the run learns from the rows of ``data`` alone, without rollouts."""
        return bool(self.data) and not self.uses_prompts

    @property
    def title(self) -> str:
        """The method, and the method whose credit it uses: ``sapo+hgpo``."""
        return f"{self.method}+{self.credit}" if self.credit else self.method


SECTIONS = Settings.__bases__[::-1]


def split_method(name: str) -> tuple[str, str]:
    """Method and credit of ``sapo+hgpo``; the credit is empty where none is named."""
    method, _, credit = name.partition("+")
    return method, credit


def known_setting(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown setting: what it is called here, or the nearest name."""
    other = OTHER_NAMES.get(name.replace("-", "_"))
    return f"it is called {other} here" if other else nearest(name, known)


def type_of(f: Field) -> Any:
    """The type of a setting, resolved from its annotation."""
    return _types()[f.name]


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(Settings)


def default_of(f: Field) -> Any:
    """The default of a setting."""
    if f.default is not MISSING:
        return f.default
    assert f.default_factory is not MISSING
    return f.default_factory()
