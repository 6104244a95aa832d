# Written by `python -m trials.stub --write` from Settings; a test compares.
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from turnwise.core.protocols import Listener
from turnwise.config.settings import Settings as Settings
from turnwise.core.batch import Batch as Batch
from turnwise.core.batch import pack as pack
from turnwise.core.levels import Field as Field
from turnwise.core.levels import Level as Level
from turnwise.core.levels import Partition as Partition
from turnwise.core.levels import Tree as Tree
from turnwise.core.protocols import Action as Action
from turnwise.core.protocols import Step as Step
from turnwise.core.records import Group as Group
from turnwise.core.records import Task as Task
from turnwise.core.records import Trajectory as Trajectory
from turnwise.core.records import Turn as Turn
from turnwise.environments.base import Environment as Environment
from turnwise.integrations.padded import from_padded as from_padded
from turnwise.integrations.padded import to_padded as to_padded
from turnwise.observe.notebook import show_run as show_run
from turnwise.recipes.recipe import Recipe as Recipe
from turnwise.training.api import resume as resume

__version__: str

def train(
    listen: Listener | None = None,
    recipe: Recipe | Callable[..., Recipe] | None = None,
    *,
    config: str | Path = "",
    quiet: bool = False,
    tokenizer: Any = None,
    method: Any = 'dr_grpo',  # training method of `turnwise list`, or a recipe of your own: module:recipe
    method_options: dict[str, Any] = ...,  # hyper-parameters of the method
    credit: str = '',  # method whose credit assignment replaces the method's own; empty: its own
    credit_options: dict[str, Any] = ...,  # hyper-parameters of the method named by credit
    sampler: str = '',  # which task comes next: vade, fg_expo, craft ...; NAME,key=value; empty: the method's own
    budget: str = '',  # rollouts and turns of each task: rollout_gdro, v0, dart ...; empty: the method's own
    strategy: str = '',  # how the rollouts of a group grow: branch, arpo, spo_tree ...; empty: the method's own
    guidance: str = '',  # help for hard tasks: ghpo, scaf, pope, prefix ...; empty: the method's own
    replay: str = '',  # past trajectories mixed into a step: spear, arpo_gui ...; empty: the method's own
    mask_truncated: bool = False,  # leave the tokens of episodes that a limit cut (turns, context, tokens) out of the loss, with any method
    env: Any = 'calculator',  # environment: a name of `turnwise environments`, module:Class or file.py:Class; ,key=value gives arguments
    difficulty: tuple[int, ...] = (1, 2, 3),  # difficulties to train and evaluate on, unless the environment suggests others
    max_turns: int = 0,  # maximum turns per episode; 0: the environment's own
    history: int = 0,  # number of latest observations in a prompt, besides the task; 0: all
    env_seconds: float = 30.0,  # time limit of one call into the environment, in seconds
    isolate_env: bool = False,  # play episodes in other processes, so that an environment that crashes or freezes ends only its own episodes
    env_processes: int = 0,  # processes that play whole episodes; 1: the run's own; 0: as many as cores where a GPU computes, else 1
    opponents: Any = ...,  # who holds the other seats of a game: self (the policy, trained at every seat), past (older policies of this run: past,keep=8,every=5,pool=spread), or scripted:random (or oracle, demonstrator)
    agent: Any = '',  # agent of your own that plays the episodes: an async function (task, client) -> reward as module:name or file.py:name, a command with arguments that finds the policy in OPENAI_BASE_URL, or `external`: agents elsewhere take episodes at --agent-address
    agent_seconds: float = 300.0,  # time limit of an agent's whole episode, in seconds
    agent_tokens: int = 0,  # tokens sampled in an agent's whole episode; 0: as many as its calls take
    agent_address: str = '127.0.0.1:8700',  # where agents that live elsewhere take episodes: HOST:PORT
    model: Any = ...,  # a directory in Hugging Face format, a Hub id, smollm2 (after `turnwise model fetch`), or `tiny` (created here)
    teacher: Any = ...,  # teacher model with the same vocabulary: a directory in Hugging Face format, or a Hub id
    template: str = '',  # chat template for a model without one: chatml, or a .jinja file
    template_options: dict[str, Any] = ...,  # variables of the chat template: enable_thinking=false,key=value
    tool_syntax: str = 'auto',  # syntax of tool calls: hermes, llama3, mistral ...; auto: what the chat template writes
    describe_tools: bool = False,  # describe the tools in the first message if the chat template shows none
    hidden: int = 192,  # width of the tiny model
    layers: int = 2,  # layers of the tiny model
    vocabulary: int = 512,  # entries of the tiny tokenizer
    copying: bool = False,  # start attention heads of the tiny model as copying heads: it learns to copy sooner
    cold_steps: int = -1,  # supervised steps before RL; -1: 100 for the tiny model, 0 for others
    cold_batch: int = 48,  # demonstrations per supervised step
    cold_demos: int = 2048,  # maximum number of distinct demonstrations of the cold start; they are then repeated
    cold_lr: float = 0.003,  # learning rate of the cold start
    data: Any = '',  # rows of a file, or of a data set by folder or hub id (.jsonl, .csv, .parquet ...): with --reward, prompts to answer; without, preference pairs or dialogues to learn from, without rollouts
    eval_data: Any = '',  # rows that are only evaluated on; empty: a share of --data is held out
    held_out_share: float = 0.1,  # share of the prompts of --data that is held out, by content
    tools: tuple[str, ...] = (),  # tools for the prompts of --data: python (an isolated interpreter), file.py:function, module:function
    demos: str = '',  # demonstrations: a file of dialogues, a run's folder, or a scripted policy of the environment (oracle, demonstrator)
    solutions: str = '',  # solutions for guidance: the folder of a run, or a file of dialogues; empty: the environment's or rows' own
    demo_share: float = 0.2,  # share of the batch for demonstrations that belong to no task of the environment
    reward: Any = (),  # reward functions: file.py:function, module:function, exact, majority, math, code, regex:pattern=X, json_schema; with weights as in 0.5*exact,my.py:score
    reward_seconds: float = 10.0,  # time limit of one call of a reward function, in seconds
    reward_memory: int = 4096,  # memory limit of a process that runs a reward function, in MiB
    reward_failure: str = 'fail',  # where a reward function raises, hangs or crashes: fail (the trajectory is dropped), or a number to give
    env_reward_weight: float = 1.0,  # weight of the environment's own reward beside --reward
    judge: str = '',  # judge of finished episodes: http://HOST/v1, policy (itself), file.py:function, or first_error:FOLDER, a model that names a wrong step
    judge_model: str = '',  # name of the judge's or helper's model on its server; empty: the only one it serves
    judge_rubric: str = '',  # what the judge scores: words, or a .txt or .md file; empty: was the task done well?
    judge_mode: Literal['each', 'group'] = 'each',  # each: every episode alone; group: all episodes of a task in one verdict
    judge_weight: float = 1.0,  # factor of the judge's score, from 0 to 1, in the reward of the last turn
    judge_seconds: float = 120.0,  # time limit of one reply of the judge or helper, in seconds
    judge_key_env: str = '',  # environment variable that holds the key of the judge's or helper's server; empty: no key
    helper: str = '',  # model that reflects, hints and judges steps for what asks for it: http://HOST/v1, policy (itself), file.py:function
    steps: int = 100,  # RL steps
    groups: int = 0,  # tasks per step; 0: the method's own
    group_size: int = 0,  # trajectories per task; 0: the method's own
    epochs: int = 0,  # passes over each batch; 0: the method's own
    minibatches: int = 0,  # optimiser steps per pass; 0: the method's own
    staleness: Any = ...,  # steps that rollouts may run ahead of training; 0: synchronous, reproducible; 0,continuous: synchronous, but no dialogue waits for another's tools; N,drop drops groups that come late, N,keep trains on them, N alone waits for them
    max_draws: int = 8,  # stop sampling for a batch after this many times the groups it needs
    temperature: float = 1.0,  # sampling temperature
    top_p: float = 1.0,  # nucleus sampling
    top_k: int = 0,  # sample from the k most probable tokens; 0: off
    min_p: float = 0.0,  # drop tokens less probable than this share of the most probable one
    response_format: str = '',  # what an answer must match: json_object, a JSON schema, or a file with one; a column of that name decides for its row
    regex: str = '',  # a regular expression that an answer must match; a column of that name decides for its row
    max_tokens: int = 48,  # maximum tokens sampled per turn
    context: int = 320,  # maximum tokens of a dialogue
    slots: int = 256,  # dialogues in the KV cache at the same time
    rollout_dtype: Literal['auto', 'float32', 'bfloat16', 'float16', 'fp8'] = 'auto',  # precision of rollouts: float32, bfloat16, float16, fp8, or auto: that of the learner
    generator: tuple[str, ...] = (),  # where to sample: addresses of servers (`turnwise serve`, `vllm serve`), http://HOST:PORT, or local: a process of its own on the same device; empty: this process
    generator_key_env: str = '',  # environment variable that holds these servers' token; one on this machine needs none
    generator_seconds: float = 30.0,  # seconds of silence after which a generator server is given up
    generator_weights: str = '',  # how weights reach servers: by a folder that both see, or to vLLM by nccl (GPU to GPU) or ipc (within one GPU); empty: by shared memory of this machine
    lr: float = 0.0003,  # learning rate
    schedule: Literal['constant', 'linear', 'cosine'] = 'linear',  # learning-rate schedule: constant, linear or cosine
    warmup: int = 3,  # warm-up steps of the learning rate
    weight_decay: float = 0.0,  # AdamW weight decay
    clip_norm: float = 1.0,  # gradient norm is clipped to this
    critic: Literal['shared', 'separate'] = 'shared',  # shared: a value head on the policy's hidden states; separate: a model of its own
    value_lr: float = 0.001,  # learning rate of the critic
    lora_rank: int = 0,  # train LoRA adapters of this rank; 0: all weights
    dtype: Literal['auto', 'float32', 'bfloat16', 'float64', 'fp8', 'nf4'] = 'auto',  # precision of the learner's matrix products: float32, bfloat16, fp8 (as in fp8 rollouts), nf4 (auto, with frozen weights in 4 bits beside --lora-rank), or auto: bfloat16 on a GPU, else float32
    micro_batch_tokens: int = 0,  # tokens per micro-batch; 0: 8192 on a CPU, 16384 on a GPU, 24576 on one with over 60 GiB
    recompute: bool = False,  # gradient checkpointing: recompute layers in the backward pass (less memory, more time)
    offload: bool = False,  # keep the optimiser state in host memory between steps
    mismatch_tolerance: float = 0.0,  # largest mean log-probability difference between generator and learner; 0: set by their precision
    eval_tasks: int = 200,  # held-out tasks to evaluate on before and after; 0: no evaluation
    eval_samples: int = 1,  # trajectories per held-out task (pass@k, majority@k)
    eval_temperature: float = 1.0,  # sampling temperature of the evaluation
    eval_every: int = 0,  # steps between evaluations during training; 0: none
    device: str = 'auto',  # cpu, cuda, or auto: cuda when present
    threads: int = 0,  # CPU threads of the learner and generator; 0: measured when the run starts
    ranks: int = 1,  # processes of this machine that share the learner's weights and work (FSDP2); 1: this process alone
    cluster: Any = ...,  # run on Ray: local, or HOST:PORT of a cluster, with ,generators=2,environments=4,cpus=1,gpus=0,placement=pack|spread,restarts=100; empty: no cluster
    seed: int = 0,  # random seed of the whole run
    out: str = 'runs',  # directory that contains the run directories
    name: str = '',  # name of the run directory; empty: made from method, environment, seed and a number
    checkpoint_every: int = 20,  # steps between checkpoints
    keep_checkpoints: int = 2,  # number of checkpoints to keep
    keep_tokens: int = 200,  # newest steps whose numbers of each token `turnwise view` can explain; 0: none
    remeasure_tokens: int = 128,  # of such a step, tokens whose log-probability is measured again after it, in whole groups; 0: none
    profile: bool = False,  # time and trace a few steps; write profile.md and trace.json.gz to the run directory
    trackers: tuple[str, ...] = ('tensorboard',),  # trackers besides metrics.jsonl: tensorboard, wandb, mlflow, trackio
    learning_rate: float = ...,  # TRL's name of lr
    max_steps: int = ...,  # TRL's name of steps
    num_generations: int = ...,  # TRL's name of group_size
    max_grad_norm: float = ...,  # TRL's name of clip_norm
    lr_scheduler_type: Literal['constant', 'linear', 'cosine'] = ...,  # TRL's name of schedule
    warmup_steps: int = ...,  # TRL's name of warmup
    num_iterations: int = ...,  # TRL's name of epochs
    save_steps: int = ...,  # TRL's name of checkpoint_every
    eval_steps: int = ...,  # TRL's name of eval_every
    report_to: tuple[str, ...] = ...,  # TRL's name of trackers
    output_dir: str = ...,  # TRL's name of out
    gradient_checkpointing: bool = ...,  # TRL's name of recompute
    mask_truncated_completions: bool = ...,  # TRL's name of mask_truncated
) -> dict[str, Any]:
    """Train an agent and return the summary of the run.

    ``train(method="grpo", env="calculator", steps=50)``; with your own classes and objects: ``train(env=MyEnvironment,
    method=my_recipe, model=my_model, tokenizer=my_tokenizer)``; or from a file: ``train(config="run.yaml", lr=1e-5)``.

    Progress is shown in a terminal and in a notebook unless ``quiet``; ``listen`` receives the events instead. Ctrl-C, or
    interrupting the cell, writes a checkpoint, from which ``resume`` continues."""
