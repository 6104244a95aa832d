"""Why a run cannot begin, each reason with what to write instead: one table of rows, run once over the plan, the cheap first.

A row is a function of the plan that yields a message where a condition holds. What an object refuses itself when it is made (an
environment, a file of rows, a server) is made here for that. ``AT_ONCE`` needs neither method nor torch, ``WITH_RECIPE`` the
method, ``LOADED`` torch and the model's files. Settings have checked their types and limits before.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise import environments
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip, NoGate
from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.config.settings import Settings
from turnwise.config.values import KEEP, ModelName
from turnwise.core.protocols import Action
from turnwise.core.records import Sampling, Task
from turnwise.core.signals import Signal
from turnwise.data.offline_source import split_held_out
from turnwise.data.prompts import holds_prompts_only
from turnwise.data.replay import FRESH, FreshActions, NoReplay
from turnwise.engines.grammar import check_grammar
from turnwise.engines.sharded.served import unserved_reason
from turnwise.engines.sharded.torchrun import check_torchrun, ranks_here, torchrun_rank
from turnwise.environments import prompts
from turnwise.environments.base import overrides
from turnwise.environments.calls import call_environment
from turnwise.environments.contract import read_messages, read_step, turn_limit
from turnwise.errors import EnvironmentFault, GrammarError, SettingError, nearest
from turnwise.maths.statistics import wilson
from turnwise.models.facts import read_model_facts
from turnwise.models.fetch import resolve
from turnwise.models.hub import check_model
from turnwise.observe.mechanism import SLOTS
from turnwise.observe.trackers import SERVICES
from turnwise.recipes import signatures
from turnwise.recipes.catalogue import changed_slots
from turnwise.rewards.conventions import describe_fault
from turnwise.rewards.spec import COMPARING, parse_rewards
from turnwise.rollout.parsers.table import check_name
from turnwise.rollout.scripted import SCRIPTED_POLICIES, scripted_messages
from turnwise.rollout.strategies import GREEDY_REWARD, GreedyBaseline, Independent
from turnwise.rollout.typed_output import run_grammar
from turnwise.store.rundir import check_run_name
from turnwise.training.agents import UNMET as UNMET_BY_AGENTS
from turnwise.training.agents import first_fault, unpaid
from turnwise.training.plan import (
    OWN,
    EnvSpec,
    RunPlan,
    file_stamp,
    has_gpu,
    prompt_data,
    read_solutions,
    read_template,
    required_by,
)
from turnwise.training.remote_generators import check_generators
from turnwise.training.rewards import DUMMY, check_models, check_reward_functions

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe

Row = Callable[[RunPlan], Iterable[str]]
Provides = Callable[[type], bool]

FOUR_BIT = "nf4"
TRACKERS = ("tensorboard", *SERVICES)
DEVICES = r"auto|(cpu|cuda)(:\d+)?"
NO_ENGINE = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs", "tpu": "TPUs", "npu": "NPUs", "hpu": "HPUs"}
USELESS_POINTS = 15  # an evaluation with wider intervals than that sees hardly any change
TRIED_TASKS = 3  # of an environment that fails to begin, or that must reply the same twice
TRIED_TURNS = 4
RANKS_PER_CORE = 4  # a few too many serve to try something out
FLAGS = {  # requirements that a flag provides
    "demonstrations": ("demos", "--demos FILE (dialogues as JSON Lines), --demos oracle, or --data FILE (it alone)"),
    "pairs": ("data", "--data FILE (prompt, chosen and rejected as JSON Lines)"),
    "teacher": ("teacher", "--teacher PATH (a model with the same vocabulary)"),
    "helper": ("helper", "--helper policy (the model that is trained), http://HOST/v1 or file.py:function"),
}
BUFFER_FACTS = ("age", "advantage")
PAIR_FACTS = ("chosen", "gap", "family")
RUN_FACTS = ("said",)  # that a run itself records, in any environment
STRATEGY_FACTS: dict[str, type] = {GREEDY_REWARD: GreedyBaseline}  # facts that one strategy alone records
SECOND_TURN = {  # requirements that an episode of one turn cannot meet
    "feedback": "reads the environment's observations",
    "later turns": "starts at later turns of an episode",
    "state": "compares turns that were taken in equal states",
}
UNMET_BY_OPPONENTS = {  # requirements of methods that take turns for granted which another player takes
    "forks": "forks episodes at a turn",
    "hints": "writes hints into the prompt",
    "solutions": "plays the beginning of a solution",
    "help": "writes help into the prompt",
    "turn limits": "limits the turns of an episode",
}


def refuse(plan: RunPlan, rows: Sequence[Row]) -> None:
    """Raise the first message that a row has for this plan."""
    for row in rows:
        for message in row(plan):
            raise SettingError(message)


# ---------------------------------------------------------------------- at once


def _names(plan: RunPlan) -> Iterator[str]:
    """Method, hyper-parameters and environment; these objects refuse what they do not know."""
    s = plan.settings
    if s.method != OWN:
        signatures.typed_options(s.method, s.method_options)
    if s.credit:
        signatures.typed_options(s.credit, s.credit_options)
    if s.agent and (reason := unpaid(plan.env_spec)):
        yield reason
    if s.eval_tasks and not plan.env_spec.first_tasks("held_out", 1):
        yield "no rows are held out to evaluate on; write --eval-tasks 0, --eval-data FILE or a --held-out-share"


def _environment(plan: RunPlan) -> Iterator[str]:
    """A class of the user's own that does not do what an episode needs. It is opened once and takes one step, to see what it
    returns; a few tasks are tried, since one may fail for reasons of its own."""
    s, cls, spec = plan.settings, plan.env_spec.env_class, plan.env_spec
    if s.offline or s.cluster or cls.__module__.partition(".")[0] == "turnwise":
        return
    for method in ("reset", "step"):
        if not callable(getattr(cls, method, None)):
            yield f"{s.env} has no method `{method}`; write reset(self, seed) and step(self, action)"
    faults = []
    for task in spec.first_tasks("train", TRIED_TASKS):
        with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
            faults.append(thread.submit(lambda: asyncio.run(_first_step(spec, task))).result())  # noqa: B023
        if not faults[-1]:
            return
    if faults:
        yield f"{s.env} cannot be played: {faults[0]}; `turnwise check-env {s.env}` says more"


def _agent(plan: RunPlan) -> Iterator[str]:
    """An agent that breaks its contract, whatever the policy says."""
    if fault := first_fault(plan.env_spec):
        yield (
            f"{fault}; tried on the first tasks, with dummy answers in place of the model's: `turnwise check-agent` says more"
        )


def _replays(plan: RunPlan) -> Iterator[str]:
    """Forks that play actions again, where nobody says whether the replies are the same: two equal episodes are begun."""
    s, cls, spec = plan.settings, plan.env_spec.env_class, plan.env_spec
    declared = getattr(cls, "deterministic", None) is not None or (
        overrides(cls, "snapshot") and overrides(cls, "restore")
    )
    if declared or s.offline or s.cluster or "forks" not in required_by(plan.recipe):
        return

    async def replies(task: Task) -> list[Any]:
        policy = "random" if overrides(cls, "random_action") else partial(Action, text=DUMMY)
        play = partial(scripted_messages, policy, turns=TRIED_TURNS, seconds=spec.limits.environment_seconds)
        return [await play(spec.make(task), task.seed) for _ in range(2)]

    for task in spec.first_tasks("train", TRIED_TASKS):
        try:
            with ThreadPoolExecutor(1) as thread:
                both = thread.submit(lambda: asyncio.run(replies(task))).result()  # noqa: B023
        except Exception:  # an episode that fails is told of elsewhere
            continue
        first, second = next((pair for pair in zip(*both) if pair[0] != pair[1]), ("", ""))
        if first != second:
            yield (
                f"{s.env} replies otherwise when the same actions are played again ({str(first)[:80]}, then {str(second)[:80]}), "
                f"so its episodes cannot be forked, which {s.title} needs; let its replies depend on seed and actions alone, or "
                "give it a snapshot() and restore()"
            )


async def _first_step(spec: EnvSpec, task: Task) -> str:
    """What is wrong with the first messages of an episode, or with what a step returns; empty if nothing is."""
    seconds, environment = spec.limits.environment_seconds, None
    call = partial(call_environment, seconds=seconds, inline=False)
    try:
        environment = spec.make(task)
        read_messages(await call(environment.reset, task.seed), "reset")
        if spec.agent is None:  # an agent may never step
            try:
                step = await call(environment.step, Action(text=DUMMY))
            except Exception:  # it may refuse an answer that makes no sense
                return ""
            read_step(step)
    except EnvironmentFault as fault:
        return str(fault)
    except (Exception, SystemExit) as fault:
        return f"its {'constructor' if environment is None else 'reset'} raised {describe_fault(fault)}"
    finally:
        if callable(close := getattr(environment, "close", None)):
            with contextlib.suppress(Exception):
                await call(close)
    return ""


def _scorers_and_servers(plan: RunPlan) -> Iterator[str]:
    """Reward functions are loaded, a judge and servers are asked: they refuse what does not work."""
    s = plan.settings
    if s.reward:
        check_reward_functions(s, plan.env_spec.env_class, plan.given.rewards)
    check_models(s)
    check_generators(s, on_gpu=has_gpu() and not s.device.startswith("cpu"))
    if not s.offline and s.temperature == 0:
        yield "temperature is 0: the rollouts of a task would all be alike, and nothing could be learned; write --temperature 1"
    if not s.offline and s.max_tokens >= s.context:
        yield (
            f"a turn may have {s.max_tokens} tokens (--max-tokens), a whole dialogue {s.context} (--context), its prompt "
            "included; write a larger --context"
        )
    for temperature in (s.temperature, s.eval_temperature):
        Sampling(temperature=temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, max_tokens=s.max_tokens)


def _grammars(plan: RunPlan) -> Iterator[str]:
    """What answers must match, of the run and of every row, is read before a model is loaded."""
    s = plan.settings
    wanted: dict[tuple[str, str], str] = {(s.response_format, s.regex): "--response-format or --regex"}
    if s.uses_prompts and not {"response_format", "regex"}.isdisjoint(prompt_data(s).columns):
        for number, row in enumerate(prompt_data(s).rows):
            given = row.columns.get("response_format"), row.columns.get("regex")
            texts = tuple(x if isinstance(x, str) else json.dumps(x) if x else "" for x in given)
            wanted.setdefault((texts[0], texts[1]), f"row {number} of {s.data}")
    for (response_format, regex), where in wanted.items():
        try:
            grammar = run_grammar(response_format, regex)
            if grammar:
                check_grammar(grammar)
        except GrammarError as fault:
            yield f"{where}: {fault}"


def cluster(plan: RunPlan) -> Iterator[str]:
    """A Ray cluster that is none, or that cannot run what the settings ask for."""
    s = plan.settings
    if not s.cluster:
        return
    if importlib.util.find_spec("ray") is None:
        yield "--cluster needs the package ray; write pip install 'turnwise-rl[ray]'"
    if not s.cluster.local and not answers(s.cluster.address):
        yield f"no Ray cluster answers at {s.cluster.address}; start one there: ray start --head, or write --cluster local"
    if s.generator:
        yield "--cluster starts generators of its own; leave --generator out, or --cluster"
    if s.offline:
        yield "a run that learns from the rows of --data samples nothing; leave --cluster out"
    if s.opponents.kind == "past":
        yield "older policies are sampled by the learner's process, which a cluster does not do; leave --cluster out"
    if s.cluster.environments and s.env == prompts.NAME:
        yield "cluster: environments cannot play the prompts of --data, which the learner holds; leave environments= out"
    objects = [str(value) for value in (s.env, s.model, s.agent, s.data, *s.reward)]
    if s.method == OWN or any(value.startswith(GIVEN_OBJECT) for value in objects):
        yield (
            "--cluster runs in other processes, which cannot import an object that was given to train(); give it by its name: "
            "module:Class, module:function, or a folder"
        )


def answers(address: str, seconds: float = 2.0) -> bool:
    """Whether anything listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _output(plan: RunPlan) -> Iterator[str]:
    """A run directory that cannot be written. Creates no folder."""
    s = plan.settings
    if s.name:
        check_run_name(s.out, s.name)
    folder = Path(s.out).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as fault:
        yield f"nothing can be written to {s.out} ({fault.strerror}); write --out another folder"


def _packages(plan: RunPlan) -> Iterator[str]:
    s = plan.settings
    check_device(s.device)
    for tracker in s.trackers:
        if tracker not in TRACKERS:
            yield f"there is no tracker {tracker!r}; {nearest(tracker, TRACKERS)}"
        if tracker in SERVICES and importlib.util.find_spec(tracker) is None:
            yield f"tracking with {tracker} needs it installed: pip install 'turnwise-rl[{tracker}]'"
    if s.lora_rank and importlib.util.find_spec("peft") is None:
        yield "lora_rank needs the package peft: pip install 'turnwise-rl[peft]'; or write --lora-rank 0"
    if s.dtype == FOUR_BIT and not s.lora_rank:
        yield (
            "dtype nf4 keeps frozen weights in 4 bits, and without adapters every weight is trained; write --lora-rank 16, or "
            "--dtype auto"
        )
    if s.dtype == FOUR_BIT and importlib.util.find_spec("bitsandbytes") is None:
        yield "dtype nf4 needs bitsandbytes: pip install 'turnwise-rl[quantized]'; or write --dtype auto"


def _models(plan: RunPlan) -> Iterator[str]:
    s = plan.settings
    if plan.given.model is None:
        check_model_name(s.model)
    check_model_name(s.teacher)
    if s.teacher.cache:
        yield "the teacher samples nothing, so it has no KV cache; write cache= after --model"
    check_name(s.tool_syntax)
    if s.template:
        read_template(s.template)


def check_device(name: str) -> None:
    """Refuse a device that is none, and a GPU on a machine that has none. Torch has the last word on the others."""
    if (kind := name.partition(":")[0]) in NO_ENGINE:
        raise SettingError(f"device is {name}, and {NO_ENGINE[kind]} are not supported; write --device cpu, or cuda")
    if not re.fullmatch(DEVICES, name):
        raise SettingError(f"no device {name!r}; write cpu, cuda or auto")
    if name.startswith("cuda") and sys.platform in ("linux", "darwin") and not has_gpu():
        raise SettingError(f"device is {name}, but this machine has no usable GPU; write --device cpu")


def check_model_name(model: ModelName) -> None:
    """Refuse a model that cannot be loaded, as far as its name and its files show."""
    if model.given_object:
        raise SettingError(
            f"the model {model.given_object} was given to train() as an object; write the folder `initial` of that "
            "run instead, or give it again in Python: train(model=MODEL, tokenizer=TOKENIZER)"
        )
    if model and not model.tiny:
        check_model(resolve(model.name))


# -------------------------------------------------------------- with the recipe


def _adapters_and_values(plan: RunPlan) -> Iterator[str]:
    s, recipe = plan.settings, plan.recipe
    if s.lora_rank and resets_reference(recipe):
        yield (
            f"{s.title} replaces its reference policy, and the reference of adapters is the base model; write --lora-rank 0"
        )
    if recipe.critics < 0 and (s.critic == "separate" or s.lora_rank):
        flag = "--critic separate" if s.critic == "separate" else f"--lora-rank {s.lora_rank}"
        yield f"{s.title} reads its values from the frozen policy's own states; leave {flag} out"


def resets_reference(recipe: Recipe) -> bool:
    """Whether a penalty replaces the reference policy during the run."""
    from turnwise.algebra.piece import Piece

    parts = (part for weighted in recipe.penalties for part in weighted.parts)
    return any(type(part).resets_reference is not Piece.resets_reference for part in parts)


def _comparing_rewards(plan: RunPlan) -> Iterator[str]:
    """A reward that compares answers needs them all; a strategy or guidance may ask for each alone, while its group grows."""
    specs, recipe = parse_rewards(plan.settings.reward), plan.recipe
    compared = [spec.label for spec in specs if spec.built_in and spec.label in COMPARING]
    if compared and recipe.reads_rewards:
        reader = recipe.guidance if recipe.guidance.reads_rewards else recipe.strategy
        yield (
            f"the reward {compared[0]} compares the finished answers of a group, and {type(reader).__name__} reads the reward of "
            "each while the group still grows; take another strategy or guidance (independent, none), or another reward"
        )


def _players(plan: RunPlan) -> Iterator[str]:
    """Agents and opponents where a method takes every turn for the policy's own."""
    s, requires = plan.settings, required_by(plan.recipe)
    for word in sorted(requires & UNMET_BY_AGENTS.keys()) if s.agent else ():
        yield f"{s.title} {UNMET_BY_AGENTS[word]}; leave --agent out, or take another method"
    if s.opponents.kind == "self":
        return
    if s.opponents.scripted and s.opponents.scripted not in SCRIPTED_POLICIES:
        yield f"opponents is {s.opponents}; write scripted:NAME with one of {', '.join(SCRIPTED_POLICIES)}"
    if len(getattr(plan.env_spec.env_class, "agents", ())) < 2:
        yield (
            f"opponents is {s.opponents}, and {s.env} has one seat that the policy may play; leave --opponents out, or take an "
            "environment of several agents (nim, open_spiel:kuhn_poker without opponent=)"
        )
    if s.agent or s.offline:
        yield "--opponents needs the turn loop of an environment; leave --agent and --data out"
    for word in sorted(requires & UNMET_BY_OPPONENTS.keys()):
        yield f"{s.title} {UNMET_BY_OPPONENTS[word]}, which other players share; leave --opponents out"
    if s.opponents.kind == "past" and s.generator:
        yield "older policies are sampled in this process; leave --generator out, or write scripted:NAME"
    if s.opponents.kind == "past" and plan.recipe.precision.drafts:
        yield f"{s.title} samples drafts in another precision; leave --opponents out"


def requirements(plan: RunPlan) -> Iterator[str]:
    """What the method requires, and neither the environment's class nor a flag provides."""
    s, recipe, env_spec = plan.settings, plan.recipe, plan.env_spec
    for word in sorted(required_by(recipe)):
        kind, name = kind_and_name(word)
        if word in FLAGS:
            model, rows = word in ("teacher", "helper"), (s.data if s.offline else s.demos) or s.demos
            if not (getattr(s, word) if model else rows):
                rows = "; with --reward the rows of --data are prompts, so leave --reward out" if s.data else ""
                yield f"{s.title} learns from {'a ' * model}{word}; write {FLAGS[word][1]}{'' if model else rows}"
            continue
        if s.offline:
            continue  # the file provides it or not; no environment is involved
        if word in SECOND_TURN:
            if min(env_spec.limits.turns, turn_limit(env_spec.env_class)) < 2:
                cure = "--max-turns 2 or more, or take another environment"
                if s.uses_prompts:
                    cure = "--tools, so that it has more, or a strategy that forks inside an answer (latr, spo_tree)"
                yield f"{s.title} {SECOND_TURN[word]}, and an episode of {s.env} has one turn; write {cure}"
            continue
        # A strategy of the user's own may record any fact; of ours we know which does.
        recorder, strategy = STRATEGY_FACTS.get(name) if kind == "fact" else None, recipe.strategy
        if recorder and type(strategy).__module__.startswith("turnwise.") and not isinstance(strategy, recorder):
            yield (
                f"{s.title} requires the fact {name!r}, which the strategy {recorder.__name__} records and "
                f"{type(strategy).__name__} does not; leave --strategy out, or take another method"
            )
        if word == f"fact {FRESH}" and not (isinstance(recipe.replay, FreshActions) and recipe.replay.count):
            yield (
                f"{s.title} learns from turns sampled again at recorded states, and --replay {s.replay} samples none; leave "
                "--replay out, or write --fresh 0"
            )
        provides, description = _provider(word, recipe)
        if word == "forks" and not environments.can_fork(env_spec.env_class):
            yield (
                f"{s.title} forks episodes by playing their actions again, and those of {s.env} may have effects outside; write "
                f"--env {s.env},deterministic=true if they have none (in a class of your own: deterministic = True, or a "
                "snapshot() and restore())"
            )
        given = {"solutions": s.solutions, "tools": s.tools, "hints": s.helper}.get(word)
        if provides is not None and not given and not provides(env_spec.env_class):
            able = [name for name in environments.BUILT_IN if name != s.env and provides(environments.load(name))]
            others = f" (or {', '.join(able[1:])})" if able[1:] else ""
            instead = f"write --env {able[0]}{others}, or give its class one" if able else ""
            instead = instead or "give its class one, or take another method"
            if s.uses_prompts:
                description = "a reward that says whether an answer is right" if word == "verdict" else description
                instead = "return a bool, or a dict with success" if word == "verdict" else "take another method"
            source = f"the rows of {s.data}" if s.uses_prompts else s.env
            yield f"{s.title} requires {description}, and {source} provide{'s' * (not s.uses_prompts)} none; {instead}"


def kind_and_name(word: str) -> tuple[str, str]:
    """``fact worth 0`` is the fact ``worth 0``; a word without a kind is its own name."""
    kind = next((kind for kind in ("turn fact", "fact", "reward") if word.startswith(f"{kind} ")), "")
    return kind, word.removeprefix(f"{kind} ")


def _provider(word: str, recipe: Recipe) -> tuple[Provides | None, str]:
    """How a class shows that it provides a requirement, and the requirement in words. None: nothing to ask of a class."""
    kind, name = kind_and_name(word)
    if kind == "fact":
        elsewhere = recipe.replay != NoReplay() or recipe.strategy != Independent()
        if name in (*BUFFER_FACTS, *PAIR_FACTS, *RUN_FACTS) or elsewhere:
            return None, f"the fact {name!r}"
        return lambda cls: name in getattr(cls, "facts", ()), f"the fact {name!r}"
    if kind == "turn fact":
        return lambda cls: name in getattr(cls, "facts", ()), f"the fact {name!r} of each turn"
    if kind == "reward":
        return lambda cls: name in getattr(cls, "rewards", ()), f"the reward {name!r}"
    return PROVIDERS.get(word, (None, word))


PROVIDERS: dict[str, tuple[Provides, str]] = {
    "answer": (lambda cls: overrides(cls, "answer"), "the gold answer (an answer())"),
    "verdict": (lambda cls: bool(getattr(cls, "verdict", True)), "whether an episode succeeded (info['success'])"),
    "hints": (
        lambda cls: overrides(cls, "hint") or overrides(cls, "hints"),
        "a hint for each task (a hint(); in rows a column hint or hints)",
    ),
    "solutions": (
        lambda cls: overrides(cls, "oracle") or overrides(cls, "solution"),
        "a solution of each task (an oracle() or solution(); in rows a column solution, steps or answer; or --solutions)",
    ),
    "wordings": (lambda cls: getattr(cls, "wordings", 1) > 1, "several wordings of each task (wordings)"),
    "world model": (
        lambda cls: callable(getattr(cls, "predict", None)),
        "a world model to dream in (a class before the environment's, with predict() and judge(): "
        "turnwise.environments.dreamed; examples/dreamed_keydoor.py trains one)",
    ),
    "difficulties": (lambda cls: len(getattr(cls, "difficulties", (1,))) > 1, "several difficulties (difficulties)"),
    "tools": (lambda cls: bool(getattr(cls, "tools", ())), "tools (the environment's, or --tools beside --data)"),
    "process": (lambda cls: overrides(cls, "turns_to_solve"), "a process verifier (a turns_to_solve())"),
    "agents": (lambda cls: len(getattr(cls, "agents", ())) > 1, "which of several agents acts (agents)"),
    "expert turns": (
        lambda cls: bool(getattr(cls, "expert_turns", False)),
        "an expert's states and its action there (turnwise.environments.expert_turns, demonstrated:FILE)",
    ),
}


def _unread_flags(plan: RunPlan) -> Iterator[str]:
    """Groups that a strategy cannot grow, and a flag that the method would not read."""
    s, requires = plan.settings, required_by(plan.recipe)
    if callable(check_group_size := getattr(plan.recipe.strategy, "check_group_size", None)):  # one's own may have none
        check_group_size(plan.recipe.budget.size)
    if s.offline and s.demos:
        yield "--data learns from a file alone, --demos beside rollouts; write one of them"
    if s.solutions and "solutions" not in requires:
        yield f"{s.title} reads no solutions; leave --solutions out, or take a guidance that does (ghpo, prefix)"
    learns_from_files = bool(requires & {"demonstrations", "pairs"})
    if s.offline and not learns_from_files:
        if lacking := holds_prompts_only(s.data):  # a look into the file: prompts alone need a reward
            yield (
                f"{lacking}; write --reward FUNCTION (file.py:function, or a built-in one such as exact) to sample answers and "
                "reward them"
            )
        yield (
            f"{s.title} learns from its own samples, and {s.data} holds answers of others; take a method that learns from pairs "
            "or demonstrations (`turnwise list`), or write --reward FUNCTION to use only its prompts"
        )
    for word, value, read in (
        ("demonstrations", s.demos, learns_from_files),
        ("teacher", s.teacher, "teacher" in requires),
        ("helper", s.helper, bool(requires & {"helper", "hints"})),
    ):
        if value and not read:
            yield f"{s.title} does not learn from {word}; leave --{FLAGS[word][0]} out, or take another method"


def ranks(plan: RunPlan) -> Iterator[str]:
    """Several ranks for a recipe that they cannot serve, ranks that would have nothing to do, and another number than torchrun
    has started."""
    s, recipe = plan.settings, plan.recipe
    check_torchrun(s.ranks, bool(s.cluster))
    if s.ranks == 1:
        return
    dtype = recipe.precision.learner if s.dtype == "auto" else s.dtype
    signals, noisy = recipe.objective.signals, bool(recipe.smoothing)
    if reason := unserved_reason(signals, noisy, dtype, s.offload, resets_reference(recipe)):
        yield f"{s.title} cannot learn on {s.ranks} ranks: {reason}; write --ranks 1"
    trajectories = recipe.budget.groups * recipe.budget.size
    if s.ranks > trajectories:
        yield (
            f"ranks is {s.ranks}, and a step has {trajectories} trajectories ({recipe.budget.groups} groups of "
            f"{recipe.budget.size}), so some ranks would have nothing to do; write --ranks {trajectories} or fewer"
        )


def _precision(plan: RunPlan) -> Iterator[str]:
    """Log-probabilities of fp8 rollouts are off-policy for a learner in another precision."""
    s, recipe = plan.settings, plan.recipe
    learner = recipe.precision.learner if s.dtype == "auto" else s.dtype
    rollouts = recipe.precision.rollouts if s.rollout_dtype == "auto" else s.rollout_dtype
    if rollouts == "fp8" and learner != "fp8" and not recipe.corrects_off_policy:
        yield (
            f"{s.title} treats its rollouts as samples of the learner's policy, and in fp8 they are not; write --dtype fp8 (the "
            "learner rounds likewise), or take a method with a ratio (grpo) or one that corrects (tis, mis)"
        )


def _sampling_elsewhere(plan: RunPlan) -> Iterator[str]:
    """What servers and actors cannot sample."""
    s, recipe = plan.settings, plan.recipe
    if not (s.generator or s.cluster):
        return
    if recipe.precision.drafts:
        yield "this method samples drafts in lower precision, which servers cannot; leave --generator and --cluster out"
    if getattr(recipe.strategy, "shifts_logits", False):
        yield (
            f"{type(recipe.strategy).__name__} samples by other log-probabilities than the model's, which servers cannot; leave "
            "--generator and --cluster out"
        )


def _rows_and_demonstrations(plan: RunPlan) -> Iterator[str]:
    """The files are read, and refuse rows that the method or the environment cannot use."""
    plan.data.digests()
    if plan.settings.solutions:
        read_solutions(plan.settings.solutions, file_stamp(plan.settings.solutions))
    plan.env_spec.require_demonstrations()
    yield from ()


# ------------------------------------------------------- with torch and the files


def rank_places(plan: RunPlan) -> Iterator[str]:
    """More ranks than GPUs, or many more than cores: ranks that share a core wait for each other in every layer."""
    import torch

    from turnwise.training import engines

    s, device = plan.settings, engines.select_device(plan.settings).type
    if s.ranks > 1 and device != "cpu":
        cards = torch.cuda.device_count() if device == "cuda" else 0
        if cards < ranks_here(s.ranks):
            yield (
                f"ranks is {s.ranks} and every rank needs a GPU of its own, but this machine has {cards} that torch can use; "
                f"write {'--nproc-per-node' if torchrun_rank() else '--ranks'} {max(1, cards)}, or --device cpu"
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu" and not s.cluster and ranks_here(s.ranks) > RANKS_PER_CORE * cores:
        yield (
            f"ranks is {s.ranks}, and this machine has {cores} processor cores, which they would share; write --ranks {cores} or "
            "fewer, or start them on several machines with torchrun"
        )


def _tokenizer(plan: RunPlan) -> Iterator[str]:
    """Chat template and rows with the run's own tokenizer; a tiny model without rows trains its tokenizer later."""
    from turnwise.training import build, engines

    s = plan.settings
    plan.env_spec.tasks("train")
    engines.learner_settings(s, plan.recipe)
    if not s.model.tiny or plan.data.rows is not None:
        renderer = build.make_renderer(s, plan.tokenizer)
        renderer.check_tools(plan.env_spec.tools)
        groups = plan.data.groups(renderer)
        if s.offline:
            split_held_out(groups)  # refuses a file without rows
    yield from ()


def prompt_lengths(plan: RunPlan) -> Iterator[str]:
    """Prompts of a file that leave no room for an answer. An agent words its own."""
    from turnwise.training import build

    s, spec = plan.settings, plan.env_spec
    if not s.uses_prompts or s.agent:
        return
    renderer = build.make_renderer(s, plan.tokenizer)
    data = prompt_data(s)
    begin = len(renderer.open([{"role": "user", "content": ""}]).ids)  # what the chat template writes by itself
    lengths: dict[int, int] = {}  # of the rows that do not fit, by number
    for split, seeds in spec.env_class.seeds.items():  # type: ignore[attr-defined]
        environment = spec.env_class(split=split)
        for seed in seeds:
            messages = environment.reset(seed)
            # a token is at least a byte, so most rows fit without being tokenized
            if not environment.tools and begin + len(json.dumps(messages, ensure_ascii=False).encode()) < s.context:
                continue
            if (length := len(renderer.open(messages, environment.tools).ids)) >= s.context:
                lengths[seed] = length
    if not lengths:
        return
    longest = max(lengths.values())
    reads = 0 if s.model.tiny or plan.given.model is not None else read_model_facts(s.model.name).max_positions
    wider = f"write --context {longest + s.max_tokens}, or leave these rows out"
    if reads and longest >= reads:
        wider = f"the model reads at most {reads}, so leave these rows out"
    lines = [f"{data.rows[seed].line}" for seed in sorted(lengths)]
    shown = ", ".join(lines[:5]) + f" and {len(lines) - 5} more" * (len(lines) > 5)
    yield (
        f"{len(lengths)} of {len(data.rows)} prompts leave no room for an answer in a context of {s.context} tokens (line "
        f"{shown}); the longest has {longest}: {wider}"
    )


def _model_size(plan: RunPlan) -> Iterator[str]:
    """Adapters wider than a weight, and a model that does not fit."""
    from turnwise.models import loading
    from turnwise.training import engines

    s, given = plan.settings, plan.given.model
    config = given.config if given is not None else None if s.model.tiny else loading.load_config(resolve(s.model.name))
    yield from adapter_width(s, config)
    if given is None and config is not None:
        engines.check_memory(s, plan.recipe, config)


def adapter_width(settings: Settings, config: Any = None) -> Iterator[str]:
    """A rank above the width of a weight has no use: the weight itself has no higher one. ``config``: None for the tiny model."""
    from turnwise.engines.memory import ModelShape
    from turnwise.models.tiny import tiny_config

    if not settings.lora_rank:
        return
    config = config or tiny_config(0, hidden=settings.hidden, layers=settings.layers, context=settings.context)
    shape = ModelShape.of(config, 0)
    widths = [width for width in (shape.hidden, shape.attention, shape.kv // 2, shape.expert or shape.mlp) if width]
    if widths and settings.lora_rank > min(widths):
        yield (
            f"lora_rank is {settings.lora_rank}, and the narrowest weights of this model are {min(widths)} wide, so a higher "
            f"rank adds nothing; write --lora-rank {min(16, min(widths))}, or leave it out to train all weights"
        )


def _teacher(plan: RunPlan) -> Iterator[str]:
    """A teacher that does not exist or has another vocabulary. A tiny model takes its teacher's tokenizer."""
    from turnwise.training import build

    s = plan.settings
    if not s.teacher:
        return
    theirs = build.load_tokenizer(replace(s, model=s.teacher, teacher=ModelName()), plan.env_spec).get_vocab()
    if s.model.tiny:
        build.make_renderer(s, plan.tokenizer)
        return
    ours = plan.tokenizer.get_vocab()
    if ours != theirs:
        differing = len({*ours.items()} ^ {*theirs.items()})
        yield (
            f"the teacher {s.teacher} has another vocabulary than {s.model} ({differing} entries differ), so its probabilities "
            "cannot be compared token by token; give a teacher of the same family"
        )


AT_ONCE: tuple[Row, ...] = (_names, _scorers_and_servers, _grammars, cluster, _output, _packages, _models)
REQUIREMENTS: tuple[Row, ...] = (_adapters_and_values, _comparing_rewards, _players, requirements, _unread_flags)
WITH_RECIPE: tuple[Row, ...] = (
    *REQUIREMENTS,
    ranks,
    _precision,
    _sampling_elsewhere,
    _rows_and_demonstrations,
    _environment,
    _replays,
)
LOADED: tuple[Row, ...] = (rank_places, _agent, _tokenizer, prompt_lengths, _model_size, _teacher)
RESUMED: tuple[Row, ...] = (cluster, ranks, _sampling_elsewhere)  # of a run that goes on: what may be changed then


# ------------------------------------------------------ no reason to refuse, but said


def held_out_note(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """(level, text): how exactly the held-out prompts of a file can measure success, in the worst case: half of them solved."""
    s = plan.settings
    if not s.uses_prompts or not s.eval_tasks:
        return
    rows = len(plan.env_spec.env_class.seeds["held_out"])  # type: ignore[attr-defined]
    count = min(rows, s.eval_tasks)
    bounds = wilson(count / 2, count)
    points = round(50 * (bounds.high - bounds.low))
    text = f"evaluated on {count} held-out prompt{'s' * (count > 1)}: success is known to ± {points} points (95 %)"
    if points <= USELESS_POINTS:
        yield "info", text
        return
    more = f"--eval-tasks {rows}" if rows > count else "--eval-data FILE, or a larger --held-out-share"
    yield "warning", f"{text}, so a smaller change cannot be seen; write {more}"


def mechanism_notes(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """(level, text): what the method does nothing without and this run does not have. The meter shows the rest."""
    s, recipe, cls = plan.settings, plan.recipe, plan.env_spec.env_class
    names = {*getattr(cls, "rewards", ()), *(r.label for r in parse_rewards(s.reward))}
    shared = Path(getattr(recipe.replay, "folder", ""))
    words: dict[str, tuple[bool, str, str]] = {  # whether it is there, what it is, what to write
        "several rewards": (
            len(names) + bool(s.judge) > 1,
            f"weighs several rewards, and there is {'one: ' + min(names) if names else 'only the outcome'}",
            "--reward A --reward B, or an environment with named rewards",
        ),
        "agents": (
            len(getattr(cls, "agents", ())) > 1,
            f"compares the turns of several agents, and {s.env} has one",
            "--env nim, or another environment of several agents",
        ),
        "tools": (
            bool(plan.env_spec.tools or s.tools),
            f"compares rollouts with tools and without, and {s.env} has none",
            "--env calculator, or --tools beside --data",
        ),
        "difficulties": (
            len(s.difficulty) > 1,
            "begins with easy tasks, and there is one difficulty",
            "several (--difficulty 1,2,3), which an environment of its own must offer",
        ),
        "other runs": (
            shared.is_dir() and any(shared.iterdir()),
            f"trains on groups of other runs, and the pool {shared} holds none yet",
            "start other runs with the same folder beside this one",
        ),
    }
    for word in sorted(recipe.idle_without):
        name = kind_and_name(word)[1]
        silent = f"treats turns by the fact {name!r}, which {s.env} does not tell"
        fact = (name in getattr(cls, "facts", ()), silent, f"a fact {name!r} of its turns")
        there, lacking, cure = words.get(word, fact)
        if not there and not s.offline:
            yield "warning", f"{s.title} {lacking}: that part of it does nothing here; it needs {cure}"
    changed = changed_slots(recipe)
    on_policy = recipe.control == Passes() and s.staleness.synchronous and recipe.replay == NoReplay()
    if changed and changed <= {"ratio", "gate"} and on_policy and isinstance(recipe.gate, Clip | NoGate):
        pieces = " and ".join(sorted(changed))
        yield "warning", f"{s.title} differs from the base method in its {pieces} alone, which needs {SLOTS['gate'][1]}"


def staleness_notes(settings: Settings, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(level, text) of what a run says at its start about its staleness."""
    staleness, steps = settings.staleness, settings.steps
    if settings.offline or staleness.deterministic:
        return
    if staleness.synchronous:
        yield (
            "info",
            "staleness 0,continuous: on-policy, but batches depend on how fast tools answer; a repeated run may differ",
        )
        return
    if staleness.limit > steps:
        groups = staleness.capacity(recipe.budget.groups, steps)
        yield (
            "info",
            f"staleness is {staleness.limit}, and the run has {steps} step{'s' * (steps > 1)}: it issues at most {groups} "
            f"group{'s' * (groups > 1)} at once, all that it can train on, and is never held back by the limit",
        )
    if staleness.late != KEEP:
        return
    begin = f"staleness {staleness}: groups older than {staleness.limit} versions are trained on, too"
    from turnwise.algebra.piece import text

    # the slots whose pieces compare the policy with the one that sampled the data
    pieces = [f"ratio {text(recipe.ratio)}"] * bool(recipe.ratio.corrects_off_policy)
    slots = {name: getattr(recipe, name) for name in ("gate", "keep")}
    pieces += [f"{name} {text(piece)}" for name, piece in slots.items() if Signal.PROXIMAL in piece.signals]
    pieces += [f"penalty {text(weighted)}" for weighted in recipe.penalties if Signal.PROXIMAL in weighted.signals]
    if pieces:
        yield "info", f"{begin}; the loss corrects for their age by {', '.join(pieces)}"
        return
    yield (
        "warning",
        f"{begin}, and nothing in the loss compares the policy with the one that sampled them (ratio {text(recipe.ratio)}); take "
        f"a method with an importance ratio, or write --staleness {staleness.limit},drop",
    )
