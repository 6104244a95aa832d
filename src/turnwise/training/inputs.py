"""What the caller of ``train`` gave: settings by name, and objects where the settings can only hold a name.

A class or function that another process can import is recorded as ``module:name``, so that the run can be resumed from the
command line. Any other object is recorded by a name that says that it was an object. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise import environments
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.named_object import GIVEN_OBJECT, importable_name
from turnwise.config.values import ModelName
from turnwise.errors import SettingError
from turnwise.training.agents import name_agent
from turnwise.training.given_rows import name_rewards, name_rows

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe

OWN = "own"  # the recorded method of a run whose recipe was given as an object


@dataclass(frozen=True)
class GivenObjects:
    """What the caller gave as objects, where the settings hold only a name."""

    env_class: type | None = None
    model: Any = None
    tokenizer: Any = None
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by the name the settings hold
    agent: Callable[..., Any] | None = None


@dataclass(frozen=True)
class RunInputs:
    """``values`` are settings by name; ``recipe`` replaces the method they name."""

    values: Mapping[str, Any]
    recipe: Recipe | None = None
    given: GivenObjects = field(default_factory=GivenObjects)


def collect_inputs(
    settings: Mapping[str, Any], config: str | Path = "", recipe: Any = None, tokenizer: Any = None
) -> RunInputs:
    """Names and objects of a run. ``settings`` win over the file ``config``."""
    values = dict(settings)
    if recipe is not None and values.get("method", OWN) != OWN:
        raise SettingError(f"recipe and method={values['method']!r} are both given; leave one of them out")
    if recipe is not None:
        values["method"] = recipe
    own = _name_method(values)
    env_class = _name_env(values)
    model = _name_model(values, tokenizer)
    rewards = name_rewards(values)
    name_rows(values)
    agent = name_agent(values)
    file = read_config(config) if config else ConfigFile("")
    return RunInputs(merge_config(file, values), own, GivenObjects(env_class, model, tokenizer, rewards, agent))


def _name_method(values: dict[str, Any]) -> Recipe | None:
    """Replace a recipe or recipe function by its name; the recipe itself where it has none."""
    method = values.get("method", "")
    if isinstance(method, str):
        return None
    name = importable_name(method) if isinstance(method, Callable) else ""  # type: ignore[arg-type]
    values["method"] = name or OWN
    if name:
        return None
    from turnwise.recipes.recipe import Recipe

    recipe = method(**values.get("method_options", {})) if callable(method) else method
    if not isinstance(recipe, Recipe):
        raise SettingError(f"method is {method!r}; write a name, a Recipe, or a function that returns one")
    return recipe


def _name_env(values: dict[str, Any]) -> type | None:
    env = values.get("env", "")
    if isinstance(env, str):
        return None
    values["env"], env_class = environments.name_of(env)
    return env_class


def _name_model(values: dict[str, Any], tokenizer: Any) -> Any:
    """Replace a model by a name that says that it was an object. The run keeps it in its folder ``initial``."""
    model = values.get("model", "")
    if isinstance(model, str | Path | ModelName):
        if tokenizer is not None:
            raise SettingError(
                "a tokenizer is given without a model object; write train(model=MODEL, tokenizer=TOKENIZER)"
            )
        return None
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel):
        raise SettingError(
            f"model is a {type(model).__name__}; write a name, a folder, or a Transformers model (adapters: merge them first)"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SettingError("a model object needs its tokenizer: train(model=MODEL, tokenizer=TOKENIZER)")
    values["model"] = f"{GIVEN_OBJECT}{type(model).__name__}"
    return model
