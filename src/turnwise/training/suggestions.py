"""Settings that fit the model and the task: a table of rules, each with its reason. The user's own values always win.

The defaults of ``Settings`` and what an environment ``suggests`` are made for the tiny model. For larger models the rules below
replace what would keep them from learning. Nothing is loaded, so that ``turnwise config`` can print it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.environments.contract import turn_limit
from turnwise.models.facts import ModelFacts

SMALL_MODEL = 20_000_000  # parameters; below, a model is treated like the tiny one, of which it may be a trained copy
LEARNING_RATES = (  # parameters below this number, and the rate. 1e-5 and 2e-5 trained 135 M parameters on four tasks
    (100e6, 5e-5),
    (1e9, 1e-5),
    (10e9, 2e-6),
    (float("inf"), 1e-6),
)
LORA_FACTOR = 10  # adapters start at zero and are few: they take a ten times higher rate
ONE_ANSWER, ONE_OF_MANY = 512, 128  # tokens of an only turn, which holds all reasoning, and of one turn of several
PROMPT, REPLY = 256, 64  # tokens to expect of a first prompt and of an environment's reply
MAX_CONTEXT = 4096
LARGE = 50_000_000  # parameters from which a micro-batch on a CPU is made smaller


@dataclass(frozen=True)
class Suggestion:
    """A value for a setting that the user did not give, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value}: {self.reason}"


@dataclass(frozen=True)
class SuggestionContext:
    """What a rule may read. ``values``: the user's settings, and what earlier rules suggested."""

    values: Mapping[str, Any]
    model: ModelFacts
    env_class: Any

    def number(self, name: str, default: int = 0) -> int:
        """A whole-number setting; ``default`` if it is not given, or not a number, which ``Settings`` then refuses."""
        try:
            return int(self.values.get(name, default))
        except (TypeError, ValueError):
            return default

    @property
    def turns(self) -> int:
        return max(1, self.number("max_turns") or turn_limit(self.env_class))

    @property
    def on_cpu(self) -> bool:
        """Whether the run computes on a CPU, as far as that is known before torch is imported."""
        device = self.values.get("device", "auto")
        return device == "cpu" or (device == "auto" and not any(Path("/dev").glob("nvidia[0-9]*")))

    @property
    def lora(self) -> bool:
        return self.number("lora_rank") > 0


@dataclass(frozen=True)
class SuggestionRule:
    """``value`` and ``reason`` are asked for only where ``applies`` says so and the user gave no value."""

    name: str
    value: Callable[[SuggestionContext], Any]
    reason: Callable[[SuggestionContext], str]
    applies: Callable[[SuggestionContext], bool] = lambda _: True


def _learning_rate(context: SuggestionContext) -> float:
    size = context.model.parameters or LARGE * 2
    rate = next(rate for limit, rate in LEARNING_RATES if size < limit)
    return float(f"{rate * (LORA_FACTOR if context.lora else 1):.3g}")


def _context(context: SuggestionContext) -> int:
    needed = PROMPT + context.turns * (context.number("max_tokens", ONE_OF_MANY) + REPLY)
    limit = context.model.max_positions or MAX_CONTEXT
    return min(limit, max(-(-needed // 64) * 64, 512), max(MAX_CONTEXT, PROMPT + context.number("max_tokens")))


RULES = (
    SuggestionRule(
        "lr",
        _learning_rate,
        lambda c: f"the model has {c.model.size} parameters" + (", and LoRA takes a ten times higher rate" * c.lora),
    ),
    SuggestionRule(
        "max_tokens",
        lambda c: ONE_ANSWER if c.turns == 1 else ONE_OF_MANY,
        lambda c: "an episode is one answer" if c.turns == 1 else f"an episode has up to {c.turns} turns",
        applies=lambda c: "context" not in c.values,
    ),
    SuggestionRule(
        "max_tokens",
        lambda c: max(1, min(ONE_ANSWER if c.turns == 1 else ONE_OF_MANY, c.number("context", 320) // 2)),
        lambda c: f"at most half of the context of {c.values['context']}",
        applies=lambda c: "context" in c.values,
    ),
    SuggestionRule(
        "context",
        _context,
        lambda c: (
            f"room for a prompt and {c.turns} turn{'s' * (c.turns > 1)} of {c.values.get('max_tokens')} tokens"
            + (f"; the model reads at most {c.model.max_positions}" if c.model.max_positions else "")
        ),
    ),
    SuggestionRule(
        "micro_batch_tokens",
        lambda c: 2048,
        lambda c: f"on a CPU, activations of {c.model.size} parameters for more tokens take several GB",
        applies=lambda c: c.model.parameters >= LARGE and c.on_cpu,
    ),
)


def is_small(model: ModelFacts) -> bool:
    """Whether the settings made for the tiny model suit this one."""
    return 0 < model.parameters < SMALL_MODEL


def suggest(values: Mapping[str, Any], model: ModelFacts, env_class: Any) -> list[Suggestion]:
    """Suggestions for a model that is not small, in the order of ``RULES``. ``values``: the user's settings.

    What the environment suggests for models (``suggests_for_models``) comes before the rules."""
    found = [
        Suggestion(name, value, f"suggested by {env_class.__name__}")
        for name, value in getattr(env_class, "suggests_for_models", {}).items()
        if name not in values
    ]
    known = {**values, **{s.name: s.value for s in found}}
    for rule in RULES:
        context = SuggestionContext(known, model, env_class)
        if rule.name not in known and rule.applies(context):
            found.append(Suggestion(rule.name, rule.value(context), rule.reason(context)))
            known[rule.name] = found[-1].value
    return found
