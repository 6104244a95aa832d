"""Refusals that need neither torch nor a model: they come at once. ``plan.validate`` makes the others.

Settings check their own ranges; here are the checks that need the disk, the network or a second room.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.core.records import Sampling
from turnwise.errors import SettingError, nearest
from turnwise.models.fetch import resolve
from turnwise.models.hub import check_model
from turnwise.observe.trackers import SERVICES
from turnwise.recipes import signatures
from turnwise.rollout.parsers.table import check_name
from turnwise.store.rundir import check_run_name
from turnwise.training.cluster.options import check_cluster
from turnwise.training.env_spec import EnvSpec
from turnwise.training.inputs import OWN, GivenObjects
from turnwise.training.remote_generators import check_generators
from turnwise.training.rewards import check_judge, check_reward_functions

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe

FOUR_BIT = "nf4"
TRACKERS = ("tensorboard", *SERVICES)
TEMPLATES = ("chatml",)
DEVICES = r"auto|(cpu|cuda|mps|xpu)(:\d+)?"
GPU_FILES = ("nvidia[0-9]*", "nvhost-*", "dxg", "kfd")


def check_at_once(settings: Settings, given: GivenObjects) -> None:
    """Refuse what can be refused without torch, with what to write instead."""
    s = settings
    if s.method != OWN:
        signatures.typed_options(s.method, s.method_options)
    if s.credit:
        signatures.typed_options(s.credit, s.credit_options)
    env_spec = EnvSpec.from_settings(s, given.env_class, given.agent)
    if s.eval_tasks and not env_spec.first_tasks("held_out", 1):
        raise SettingError(
            "no rows are held out to evaluate on; write --eval-tasks 0, --eval-data FILE or a --held-out-share"
        )
    if s.reward:
        check_reward_functions(s, env_spec.env_class, given.rewards)
    check_judge(s)
    check_generators(s, on_gpu=_has_gpu() and not s.device.startswith("cpu"))
    check_cluster(s)
    for temperature in (s.temperature, s.eval_temperature):
        Sampling(temperature=temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, max_tokens=s.max_tokens)
    if s.name:
        check_run_name(s.out, s.name)
    _check_writable(Path(s.out))
    check_device(s.device)
    _check_packages(s)
    if given.model is None:
        check_model_name(s.model)
    check_model_name(s.teacher)
    if s.teacher.cache:
        raise SettingError("the teacher samples nothing, so it has no KV cache; write cache= after --model")
    check_name(s.tool_syntax)
    if s.template and s.template not in TEMPLATES and not Path(s.template).is_file():
        raise SettingError(f"no chat template {s.template!r}; write chatml or the path of a .jinja file")


def check_device(name: str) -> None:
    """Refuse a device that is none, and a GPU on a machine that has none. Torch has the last word on the others."""
    if not re.fullmatch(DEVICES, name):
        raise SettingError(f"no device {name!r}; write cpu, cuda or auto")
    if name.startswith("cuda") and sys.platform in ("linux", "darwin") and not _has_gpu():
        raise SettingError(f"device is {name}, but this machine has no usable GPU; write --device cpu")


def _has_gpu() -> bool:
    """Whether a driver shows a device: NVIDIA's, also of embedded boards and of Linux inside Windows, or AMD's."""
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in GPU_FILES)


def _check_writable(folder: Path) -> None:
    """Refuse an output folder in which nothing can be written. Creates no folder."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as fault:
        raise SettingError(
            f"nothing can be written to {folder} ({fault.strerror}); write --out another folder"
        ) from None


def check_with_recipe(settings: Settings, recipe: Recipe, env_spec: EnvSpec) -> None:
    """Refuse what the recipe shows to be wrong: requirements, precision, and rows that the method cannot learn from."""
    from turnwise.training.data_sources import DataSources
    from turnwise.training.requirements import check_cold_start, check_precision, check_ranks, check_requirements

    check_requirements(recipe, settings, env_spec)
    check_ranks(recipe, settings)
    check_precision(recipe, settings)
    DataSources.from_settings(settings, env_spec, recipe)
    check_cold_start(settings, env_spec)


def _check_packages(settings: Settings) -> None:
    for tracker in settings.trackers:
        if tracker not in TRACKERS:
            raise SettingError(f"there is no tracker {tracker!r}; {nearest(tracker, TRACKERS)}")
        if tracker in SERVICES and importlib.util.find_spec(tracker) is None:
            raise SettingError(f"tracking with {tracker} needs it installed: pip install 'turnwise[{tracker}]'")
    if settings.lora_rank and importlib.util.find_spec("peft") is None:
        raise SettingError("lora_rank needs the package peft: pip install 'turnwise[peft]'; or write --lora-rank 0")
    if settings.dtype == FOUR_BIT:
        _check_four_bit(settings)


def _check_four_bit(settings: Settings) -> None:
    if not settings.lora_rank:
        raise SettingError(
            "dtype nf4 keeps frozen weights in 4 bits, and without adapters every weight is trained; write --lora-rank 16, or "
            "--dtype auto"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SettingError("dtype nf4 needs bitsandbytes: pip install 'turnwise[quantized]'; or write --dtype auto")


def check_model_name(model: ModelName) -> None:
    """Refuse a model that cannot be loaded, as far as its name and its files show."""
    if model.tiny or not model:
        return
    if model.given_object:
        raise SettingError(
            f"the model {model.given_object} was given to train() as an object; write the folder `initial` of that "
            "run instead, or give it again in Python: train(model=MODEL, tokenizer=TOKENIZER)"
        )
    check_model(resolve(model.name))
