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
from typing import Annotated, Any, Literal

from turnwise.config.convert import Count, Finite, Positive, Rate, Seconds, Share, convert
from turnwise.config.values import Cluster, ModelName, Opponents, SettingValue, Staleness
from turnwise.core.limits import LIMIT, Bounds
from turnwise.core.records import Sampling
from turnwise.errors import SettingError, nearest

SAMPLING = {f.name: f.metadata.get(LIMIT) for f in fields(Sampling)}
WORD = Bounds(above=-(2**63), below=2**63, why="generators of random numbers take 64 bits")
SAME_SETTING = {  # TRL's names of settings that mean the same there with the same values: accepted everywhere
    "learning_rate": "lr", "max_steps": "steps", "num_generations": "group_size", "max_grad_norm": "clip_norm",
    "lr_scheduler_type": "schedule", "warmup_steps": "warmup", "num_iterations": "epochs", "save_steps": "checkpoint_every",
    "eval_steps": "eval_every", "report_to": "trackers", "output_dir": "out", "gradient_checkpointing": "recompute",
    "mask_truncated_completions": "mask_truncated",
}  # fmt: skip
OTHER_NAMES = {  # names of older releases and of other trainers that mean nearly the same: for the hint of an error message
    "positions": "micro_batch_tokens", "probe_tolerance": "mismatch_tolerance", "batch_size": "groups",
    "train_batch_size": "groups", "max_new_tokens": "max_tokens", "max_completion_length": "max_tokens",
    "max_length": "context", "environment": "env", "n_gpus": "ranks", "rank": "lora_rank", "nproc_per_node": "ranks",
    "world_size": "ranks", "tasks": "data",
}  # fmt: skip


def setting(default: Any, text: str) -> Any:
    """A setting with its default and its help text; its type says what may be written."""
    value: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**value, metadata={"help": text})


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
    mask_truncated: bool = setting(
        False, "leave the tokens of episodes that a limit cut (turns, context, tokens) out of the loss, with any method"
    )


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
    max_turns: Count = setting(0, "maximum turns per episode; 0: the environment's own")
    history: Count = setting(0, "number of latest observations in a prompt, besides the task; 0: all")
    env_seconds: Seconds = setting(30.0, "time limit of one call into the environment, in seconds")
    isolate_env: bool = setting(
        False,
        "play episodes in other processes, so that an environment that crashes or freezes ends only its own episodes",
    )
    env_processes: Count = setting(
        0, "processes that play whole episodes; 1: the run's own; 0: as many as cores where a GPU computes, else 1"
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
    agent_seconds: Seconds = setting(300.0, "time limit of an agent's whole episode, in seconds")
    agent_tokens: Count = setting(0, "tokens sampled in an agent's whole episode; 0: as many as its calls take")
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

    hidden: Annotated[int, Bounds(least=16, multiple_of=16)] = setting(192, "width of the tiny model")
    layers: Positive = setting(2, "layers of the tiny model")
    vocabulary: Positive = setting(512, "entries of the tiny tokenizer")
    copying: bool = setting(False, "start attention heads of the tiny model as copying heads: it learns to copy sooner")
    cold_steps: Annotated[int, Bounds(least=-1)] = setting(
        -1, "supervised steps before RL; -1: 100 for the tiny model, 0 for others"
    )
    cold_batch: Positive = setting(48, "demonstrations per supervised step")
    cold_demos: Positive = setting(
        2048, "maximum number of distinct demonstrations of the cold start; they are then repeated"
    )
    cold_lr: Rate = setting(3e-3, "learning rate of the cold start")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Rows of files, and demonstrations."""

    data: str = setting(
        "",
        "rows of a file, or of a data set by folder or hub id (.jsonl, .csv, .parquet ...): with --reward, prompts to answer; "
        "without, preference pairs or dialogues to learn from, without rollouts",
    )
    eval_data: str = setting("", "rows that are only evaluated on; empty: a share of --data is held out")
    held_out_share: Share = setting(0.1, "share of the prompts of --data that is held out, by content")
    tools: tuple[str, ...] = setting(
        (), "tools for the prompts of --data: python (an isolated interpreter), file.py:function, module:function"
    )
    demos: str = setting(
        "",
        "demonstrations: a file of dialogues, a run's folder, or a scripted policy of the environment (oracle, demonstrator)",
    )
    solutions: str = setting(
        "", "solutions for guidance: the folder of a run, or a file of dialogues; empty: the environment's or rows' own"
    )
    demo_share: Annotated[float, Bounds(above=0, below=1)] = setting(
        0.2, "share of the batch for demonstrations that belong to no task of the environment"
    )


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """Reward functions, and models as judge and helper."""

    reward: tuple[str, ...] = setting(
        (),
        "reward functions: file.py:function, module:function, exact, majority, math, code, regex:pattern=X, json_schema; with "
        "weights as in 0.5*exact,my.py:score",
    )
    reward_seconds: Seconds = setting(10.0, "time limit of one call of a reward function, in seconds")
    reward_memory: Positive = setting(4096, "memory limit of a process that runs a reward function, in MiB")
    reward_failure: str = setting(
        "fail",
        "where a reward function raises, hangs or crashes: fail (the trajectory is dropped), or a number to give",
    )
    env_reward_weight: Finite = setting(1.0, "weight of the environment's own reward beside --reward")
    judge: str = setting(
        "",
        "judge of finished episodes: http://HOST/v1, policy (itself), file.py:function, or first_error:FOLDER, a model that "
        "names a wrong step",
    )
    judge_model: str = setting("", "name of the judge's or helper's model on its server; empty: the only one it serves")
    judge_rubric: str = setting(
        "", "what the judge scores: words, or a .txt or .md file; empty: was the task done well?"
    )
    judge_mode: Literal["each", "group"] = setting(
        "each", "each: every episode alone; group: all episodes of a task in one verdict"
    )
    judge_weight: Finite = setting(1.0, "factor of the judge's score, from 0 to 1, in the reward of the last turn")
    judge_seconds: Seconds = setting(120.0, "time limit of one reply of the judge or helper, in seconds")
    judge_key_env: str = setting(
        "", "environment variable that holds the key of the judge's or helper's server; empty: no key"
    )
    helper: str = setting(
        "",
        "model that reflects, hints and judges steps for what asks for it: http://HOST/v1, policy (itself), file.py:function",
    )


@dataclass(frozen=True, kw_only=True)
class AmountSection:
    """Amount of training."""

    steps: Positive = setting(100, "RL steps")
    groups: Count = setting(0, "tasks per step; 0: the method's own")
    group_size: Count = setting(0, "trajectories per task; 0: the method's own")
    epochs: Count = setting(0, "passes over each batch; 0: the method's own")
    minibatches: Count = setting(0, "optimiser steps per pass; 0: the method's own")
    staleness: Staleness = setting(
        Staleness(),
        "steps that rollouts may run ahead of training; 0: synchronous, reproducible; 0,continuous: synchronous, but no dialogue "
        "waits for another's tools; N,drop drops groups that come late, N,keep trains on them, N alone waits for them",
    )
    max_draws: Positive = setting(8, "stop sampling for a batch after this many times the groups it needs")


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """Sampling."""

    temperature: Annotated[float, SAMPLING["temperature"]] = setting(1.0, "sampling temperature")
    top_p: Annotated[float, SAMPLING["top_p"]] = setting(1.0, "nucleus sampling")
    top_k: Annotated[int, SAMPLING["top_k"]] = setting(0, "sample from the k most probable tokens; 0: off")
    min_p: Annotated[float, SAMPLING["min_p"]] = setting(
        0.0, "drop tokens less probable than this share of the most probable one"
    )
    response_format: str = setting(
        "",
        "what an answer must match: json_object, a JSON schema, or a file with one; a column of that name decides for its row",
    )
    regex: str = setting(
        "", "a regular expression that an answer must match; a column of that name decides for its row"
    )
    max_tokens: Positive = setting(48, "maximum tokens sampled per turn")
    context: Positive = setting(320, "maximum tokens of a dialogue")
    slots: Positive = setting(256, "dialogues in the KV cache at the same time")
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = setting(
        "auto", "precision of rollouts: float32, bfloat16, float16, fp8, or auto: that of the learner"
    )
    generator: tuple[str, ...] = setting(
        (),
        "where to sample: addresses of servers (`turnwise serve`, `vllm serve`), http://HOST:PORT, or local: a process of its "
        "own on the same device; empty: this process",
    )
    generator_key_env: str = setting(
        "", "environment variable that holds these servers' token; one on this machine needs none"
    )
    generator_seconds: Seconds = setting(30.0, "seconds of silence after which a generator server is given up")
    generator_weights: str = setting(
        "",
        "how weights reach servers: by a folder that both see, or to vLLM by nccl (GPU to GPU) or ipc (within one GPU); empty: "
        "by shared memory of this machine",
    )


@dataclass(frozen=True, kw_only=True)
class LearnerSection:
    """Optimisation."""

    lr: Rate = setting(3e-4, "learning rate")
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "linear", "learning-rate schedule: constant, linear or cosine"
    )
    warmup: Count = setting(3, "warm-up steps of the learning rate")
    weight_decay: Rate = setting(0.0, "AdamW weight decay")
    clip_norm: Annotated[float, Bounds(above=0)] = setting(1.0, "gradient norm is clipped to this")
    critic: Literal["shared", "separate"] = setting(
        "shared", "shared: a value head on the policy's hidden states; separate: a model of its own"
    )
    value_lr: Rate = setting(1e-3, "learning rate of the critic")
    lora_rank: Count = setting(0, "train LoRA adapters of this rank; 0: all weights")
    dtype: Literal["auto", "float32", "bfloat16", "float64", "fp8", "nf4"] = setting(
        "auto",
        "precision of the learner's matrix products: float32, bfloat16, fp8 (as in fp8 rollouts), "
        "nf4 (auto, with frozen weights in 4 bits beside --lora-rank), or auto: bfloat16 on a GPU, else float32",
    )
    micro_batch_tokens: Count = setting(
        0, "tokens per micro-batch; 0: 8192 on a CPU, 16384 on a GPU, 24576 on one with over 60 GiB"
    )
    recompute: bool = setting(
        False, "gradient checkpointing: recompute layers in the backward pass (less memory, more time)"
    )
    offload: bool = setting(False, "keep the optimiser state in host memory between steps")
    mismatch_tolerance: Annotated[float, Bounds(least=0)] = setting(
        0.0, "largest mean log-probability difference between generator and learner; 0: set by their precision"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Evaluation."""

    eval_tasks: Count = setting(200, "held-out tasks to evaluate on before and after; 0: no evaluation")
    eval_samples: Positive = setting(1, "trajectories per held-out task (pass@k, majority@k)")
    eval_temperature: Annotated[float, SAMPLING["temperature"]] = setting(1.0, "sampling temperature of the evaluation")
    eval_every: Count = setting(0, "steps between evaluations during training; 0: none")


@dataclass(frozen=True, kw_only=True)
class MachineSection:
    """The machine."""

    device: str = setting("auto", "cpu, cuda, or auto: cuda when present")
    threads: Annotated[int, Bounds(least=0, most=1024)] = setting(
        0, "CPU threads of the learner and generator; 0: measured when the run starts"
    )
    ranks: Positive = setting(
        1, "processes of this machine that share the learner's weights and work (FSDP2); 1: this process alone"
    )
    cluster: Cluster = setting(
        Cluster(),
        "run on Ray: local, or HOST:PORT of a cluster, with ,generators=2,environments=4,cpus=1,gpus=0,placement=pack|spread,"
        "restarts=100; empty: no cluster",
    )
    seed: Annotated[int, WORD] = setting(0, "random seed of the whole run")


@dataclass(frozen=True, kw_only=True)
class OutputSection:
    """Output."""

    out: str = setting("runs", "directory that contains the run directories")
    name: str = setting("", "name of the run directory; empty: made from method, environment, seed and a number")
    checkpoint_every: Positive = setting(20, "steps between checkpoints")
    keep_checkpoints: Positive = setting(2, "number of checkpoints to keep")
    keep_tokens: Count = setting(200, "newest steps whose numbers of each token `turnwise view` can explain; 0: none")
    remeasure_tokens: Count = setting(
        128, "of such a step, tokens whose log-probability is measured again after it, in whole groups; 0: none"
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
        # frozen, so that a run cannot change what it records; converted here all the same, for every way in
        for f in fields(self):
            object.__setattr__(self, f.name, convert(f.name, getattr(self, f.name), setting_type(f.name)))
        method, credit = split_method(self.method)
        wrong = ""
        if credit and self.credit not in ("", credit):
            wrong = f"method is {self.method!r} and credit is {self.credit!r}; name one credit"
        elif self.credit_options and not (credit or self.credit):
            wrong = "credit_options are given, but no credit; write --credit NAME"
        elif self.eval_data and (not self.data or self.offline):
            wrong = "eval_data is given without prompts to train on; write --data FILE and --reward FUNCTION"
        if wrong:
            raise SettingError(wrong)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "credit", credit or self.credit)
        if self.reward_failure != "fail":
            convert("reward_failure", self.reward_failure, float)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """From a mapping whose names may be wrong: flags, a file, arguments of ``train``, or what run.json records."""
        for name in values:
            setting_type(name)
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


def with_our_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by the names of this project, where some have TRL's."""
    if twice := [name for name in values if SAME_SETTING.get(name) in values]:
        raise SettingError(f"{twice[0]} and {SAME_SETTING[twice[0]]} are the same setting; give one of them")
    return {SAME_SETTING.get(name, name): value for name, value in values.items()}


def setting_type(name: str, offered: Iterable[str] = ()) -> Any:
    """The type of a setting, with its limit. Refuses a name that is none: says what it is called here, or the nearest name of
    those ``offered``, which are all unless given."""
    types = _types()
    if name not in types:
        other = OTHER_NAMES.get(name.replace("-", "_"))
        hint = f"it is called {other} here" if other else nearest(name, offered or [*_types(), *SAME_SETTING])
        raise SettingError(f"no setting {name!r}; {hint}")
    return types[name]


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(Settings, include_extras=True)  # resolves annotations, which takes milliseconds


def default_of(f: Field) -> Any:
    """The default of a setting; those with a factory are dicts."""
    return f.default if f.default is not MISSING else {}
