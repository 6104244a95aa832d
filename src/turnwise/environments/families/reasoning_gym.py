"""Any dataset of the package reasoning-gym as an environment of one turn: its question, one answer, its own score.

    load("reasoning_gym:chain_sum")                              a class like any other
    load("reasoning_gym:chain_sum,max_terms=2,max_digits=2")     with fields of the dataset's own configuration

The difficulty is the level of the dataset's own curriculum, from 1, easier levels included; a dataset that has none, and one
whose levels its own configuration refuses, has difficulty 1 alone: its defaults. Reward is the dataset's score, and an episode
succeeds when that is 1. Splits share no question.

The package is imported when a dataset is first asked for: that takes two seconds, and only who asks needs it. This file knows
nothing of what any dataset asks, except which of them run an answer as a program.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, draw, say, user
from turnwise.errors import SettingError, nearest

PROBLEMS = 10_000  # of one level, both splits together; some datasets make all of theirs at once
SEED = 1
LONGEST = 4000  # characters of an answer: some scores take long over longer ones
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
WHOLE = re.compile(r"-?[0-9]{1,9}")
SLIPS = (-10, -2, -1, 1, 2, 10)
FORM = "Say only the answer, or end with <answer>ANSWER</answer>."
OURS = ("seed", "size")  # fields of a configuration that the splits and seeds of a run decide
RUN_ANSWERS = frozenset(
    (
        "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
        "simple_integration", "spiral_matrix", "string_insertion",
    )
)  # fmt: skip
Entry = dict[str, Any]  # question, answer (None where there is no single one), metadata


class Puzzle(Environment):
    """One question of a dataset. A class is made for each dataset by ``environment``, with a reference answer or without."""

    max_turns = 1
    suggests: ClassVar[Mapping[str, Any]] = {"difficulty": (1,)}
    levels: ClassVar[Mapping[int, Callable[[], Any]]]  # difficulty: its dataset, made when first asked for
    entry: Entry

    def reset(self, seed: int) -> Sequence[Message]:
        self.entry = drawn(self.levels[self.difficulty], seed, self.split)
        return [user(f"{self.entry['question']}\n{FORM}")]

    def step(self, action: Action) -> Step:
        score = self.score(read(action.text))
        gold = self.entry["answer"]
        text = "right." if score >= 1 else f"wrong: it is {gold}." if gold is not None else "wrong."
        info = {"success": score >= 1, "tool_errors": len(action.faults)}
        return Step([user(text)], score, terminated=True, info=info)

    def score(self, answer: str) -> float:
        if not answer or len(answer) > LONGEST:
            return 0.0
        try:
            return float(self.levels[self.difficulty]().score_answer(answer, self.entry))
        except Exception:  # its reader stumbled over what the model wrote, which is then no right answer
            return 0.0


class Answered(Puzzle):
    """A puzzle with a reference answer, so that it can be shown and told."""

    def answer(self) -> str:
        return str(self.entry["answer"])

    def oracle(self) -> Action:
        return say(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """The right answer of some other question."""
        return say(str(item(self.levels[self.difficulty], rng.randrange(PROBLEMS))["answer"]))

    def demonstrate(self, rng: random.Random) -> Action:
        """Half of the time right. A whole number is missed narrowly: who imitates must still read the question."""
        if rng.random() < 0.5:
            return self.oracle()
        right = self.answer()
        return say(str(int(right) + rng.choice(SLIPS))) if WHOLE.fullmatch(right) else self.random_action(rng)


def read(text: str) -> str:
    """The answer in what was said: what stands between the last tags, or all of it."""
    found = TAGGED.findall(text)
    return str(found[-1] if found else text).strip()


@lru_cache(maxsize=4096)
def item(dataset: Callable[[], Any], number: int) -> Entry:
    return dict(dataset()[number])


@lru_cache(maxsize=4096)  # all episodes of a group ask for one task
def drawn(dataset: Callable[[], Any], seed: int, split: str) -> Entry:
    return draw(lambda rng: item(dataset, rng.randrange(PROBLEMS)), seed, split, lambda entry: entry["question"])


@cache  # one class for each name, so that its datasets are made once
def environment(spec: str) -> type[Puzzle]:
    """The class of ``DATASET`` or ``DATASET,field=value,...``."""
    name, *pairs = spec.split(",")
    factory = package()
    kinds = factory.DATASETS
    offered = sorted(set(kinds) - RUN_ANSWERS - {"composite"})
    if name in RUN_ANSWERS:
        raise SettingError(f"reasoning_gym:{name} would run what a model writes as a program; take another dataset")
    if name not in offered:
        raise SettingError(f"reasoning-gym has no dataset {name!r}; {nearest(name, offered)}; write reasoning_gym:NAME")
    make, config = kinds[name]
    given = {**settings(name, config, pairs), "seed": SEED, "size": PROBLEMS}
    curriculum = factory.create_curriculum(name) if factory.has_curriculum(name) else None
    configs = levels(name, config, curriculum, given)
    made: dict[int, Callable[[], Any]] = {n: once(make, each) for n, each in enumerate(configs, start=1)}
    base = Puzzle if item(made[1], 0)["answer"] is None else Answered
    body = {"difficulties": tuple(made), "levels": made, "__doc__": f"{name} of reasoning-gym.", "__module__": __name__}
    return type(f"reasoning_gym:{spec}", (base,), body)


def package() -> Any:
    """The package's table of datasets."""
    try:
        import reasoning_gym  # noqa: F401 - fills the table
        from reasoning_gym import factory
    except ImportError as missing:
        raise SettingError(
            f"reasoning_gym:... needs the package reasoning-gym ({missing}); write pip install 'turnwise[reasoning]'"
        ) from missing
    return factory


def settings(name: str, config: type[Any], pairs: Sequence[str]) -> dict[str, Any]:
    """``["max_terms=2"]`` as fields of the configuration."""
    plain = [f.name for f in fields(config) if f.name not in OURS]
    given: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise SettingError(f"reasoning_gym:{name} is followed by {pair!r}; write field=value, separated by commas")
        if key in OURS:
            raise SettingError(f"reasoning_gym:{name}: {key} is decided by the run; leave it out")
        if key not in plain:
            raise SettingError(f"reasoning_gym:{name} has no field {key!r}; {nearest(key, plain)}")
        try:
            given[key] = json.loads(text)
        except ValueError:  # a word
            given[key] = text
    return given


def levels(name: str, config: type[Any], curriculum: Any, given: Mapping[str, Any]) -> list[Any]:
    """The configurations of all difficulties, with the given fields in each."""
    found: list[Any] = []
    for plain in steps(curriculum) or [config()]:
        try:
            made = valid(replace(plain, **given))
            found += [made] * (made not in found)  # fields given may leave nothing that a level could change
        except (AssertionError, ValueError, TypeError) as wrong:
            if found:
                break  # the fields given do not go with the harder levels
            own = ", ".join(f"{key}={value}" for key, value in given.items() if key not in OURS)
            about = f"with {own or 'its defaults'} it says {str(wrong) or repr(wrong)!r}, and it would have {plain}"
            raise SettingError(f"reasoning_gym:{name} cannot be made: {about}") from wrong
    return found


def steps(curriculum: Any) -> list[Any]:
    """The curriculum's levels, up to the first that is not valid: difficulties have no gaps."""
    found: list[Any] = []
    for level in range(max((len(a.levels) for a in curriculum.attributes.values()), default=0) if curriculum else 0):
        curriculum.set_global_level(level)
        try:
            found.append(valid(curriculum.generate_configuration()))
        except (AssertionError, ValueError, TypeError):
            break
    return found


def valid(config: Any) -> Any:
    if hasattr(config, "validate"):
        config.validate()
    return config


def once(make: Callable[[Any], Any], config: Any) -> Callable[[], Any]:
    """``make(config)``, when it is first called."""
    return lru_cache(maxsize=1)(lambda: make(config))
