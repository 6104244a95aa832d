"""Any dataset of the package reasoning-gym as a one-turn environment: its question, one answer, its own score.

    load("reasoning_gym:chain_sum")                              a class like any other
    load("reasoning_gym:chain_sum,max_terms=2,max_digits=2")     with fields of the dataset's configuration

The difficulty is the level of the dataset's curriculum, from 1, easier levels included. A dataset without a curriculum, or whose
levels its configuration rejects, has only difficulty 1: its defaults. The reward is the dataset's score, and an episode succeeds
when that is 1. Splits share no question.

The package is imported when a dataset is first loaded, which takes two seconds. Knows nothing of what any dataset asks, except
which of them execute an answer as a program.
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
from turnwise.environments.base import Environment, sample_problem, text_action, user_message
from turnwise.errors import SettingError, nearest
from turnwise.rewards.process import CallFailed, ProcessSettings, ScoringPool

PROBLEMS = 10_000  # per level, both splits together; some datasets generate all of them at once
SEED = 1
MAX_ANSWER = 4000  # characters: some scores take long for longer answers
SCORE_SECONDS = 2.0  # for the score of one answer
SCORING_PROCESSES = 2
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INTEGER = re.compile(r"-?[0-9]{1,9}")
NEAR_MISSES = (-10, -2, -1, 1, 2, 10)
ANSWER_FORMAT = "Say only the answer, or end with <answer>ANSWER</answer>."
RUN_FIELDS = ("seed", "size")  # configuration fields that the run sets
RUN_ANSWERS = frozenset(
    (
        "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
        "simple_integration", "spiral_matrix", "string_insertion",
    )
)  # fmt: skip
Entry = dict[str, Any]  # question, answer (None where there is no single one), metadata


class ReasoningGymEnvironment(Environment):
    """One question of a dataset. ``environment`` makes a subclass for each dataset, with or without a reference answer."""

    max_turns = 1
    suggests: ClassVar[Mapping[str, Any]] = {"difficulty": (1,)}
    spec: ClassVar[str]  # name and fields of the dataset
    levels: ClassVar[Mapping[int, Callable[[], Any]]]  # by difficulty: returns its dataset, generated at the first call
    entry: Entry

    def reset(self, seed: int) -> Sequence[Message]:
        self.entry = sample_entry(self.levels[self.difficulty], seed, self.split)
        return [user_message(f"{self.entry['question']}\n{ANSWER_FORMAT}")]

    def step(self, action: Action) -> Step:
        score = self.score(extract_answer(action.text))
        gold = self.entry["answer"]
        text = "right." if score >= 1 else f"wrong: it is {gold}." if gold is not None else "wrong."
        info = {"success": score >= 1, "tool_errors": len(action.faults)}
        return Step([user_message(text)], score, terminated=True, info=info)

    def score(self, answer: str) -> float:
        """The dataset's score, from a process that can be killed: some parsers compute for minutes on a short answer."""
        if not answer or len(answer) > MAX_ANSWER:
            return 0.0
        try:
            reply = scoring_pool().call(
                (self.spec, self.difficulty), args=(self.spec, self.difficulty, answer, self.entry)
            )
        except CallFailed:  # the dataset's parser failed on model output, or did not end: a wrong answer
            return 0.0
        return float(reply["value"])


class AnsweredReasoningGymEnvironment(ReasoningGymEnvironment):
    """A question with a reference answer, which gives it ``answer`` and scripted policies."""

    def answer(self) -> str:
        return str(self.entry["answer"])

    def oracle(self) -> Action:
        return text_action(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        """The reference answer of a random question."""
        return text_action(str(dataset_entry(self.levels[self.difficulty], rng.randrange(PROBLEMS))["answer"]))

    def demonstrate(self, rng: random.Random) -> Action:
        """Right in half of the episodes. Otherwise a near miss of a whole number, so that an imitator must still read the
        question, or a random answer."""
        if rng.random() < 0.5:
            return self.oracle()
        reference = self.answer()
        if INTEGER.fullmatch(reference):
            return text_action(str(int(reference) + rng.choice(NEAR_MISSES)))
        return self.random_action(rng)


@cache
def scoring_pool() -> ScoringPool:
    """The processes that score answers, for all datasets."""
    settings = ProcessSettings(f"{__name__}:AnswerScorer", "reasoning_gym", is_factory=True, seconds=SCORE_SECONDS)
    return ScoringPool(settings, SCORING_PROCESSES)


class AnswerScorer:
    """Scores answers in a scoring process."""

    def __init__(self) -> None:
        import_factory()

    def prepare(self, spec: str, difficulty: int) -> None:
        """Generate a dataset: some do so for all questions at once, which must not count as the time of an answer."""
        environment(spec).levels[difficulty]()

    def __call__(self, spec: str, difficulty: int, answer: str, entry: Entry) -> float:
        return float(environment(spec).levels[difficulty]().score_answer(answer, entry))


def extract_answer(text: str) -> str:
    """The answer of a turn: the text between the last tags, or all of it."""
    tagged = TAGGED.findall(text)
    return str(tagged[-1] if tagged else text).strip()


@lru_cache(maxsize=4096)
def dataset_entry(dataset: Callable[[], Any], number: int) -> Entry:
    """Entry ``number`` of a dataset; cached."""
    return dict(dataset()[number])


@lru_cache(maxsize=4096)  # all episodes of a group share one task
def sample_entry(dataset: Callable[[], Any], seed: int, split: str) -> Entry:
    """The entry of ``seed`` in ``split``; cached."""
    return sample_problem(
        lambda rng: dataset_entry(dataset, rng.randrange(PROBLEMS)), seed, split, lambda entry: entry["question"]
    )


@cache  # one class per name, so that its datasets are generated once
def environment(spec: str) -> type[ReasoningGymEnvironment]:
    """The class of ``DATASET`` or ``DATASET,field=value,...``."""
    name, *pairs = spec.split(",")
    factory = import_factory()
    datasets = factory.DATASETS
    offered = sorted(set(datasets) - RUN_ANSWERS - {"composite"})
    if name in RUN_ANSWERS:
        raise SettingError(f"reasoning_gym:{name} would execute model output as a program; choose another dataset")
    if name not in offered:
        raise SettingError(f"reasoning-gym has no dataset {name!r}; {nearest(name, offered)}; write reasoning_gym:NAME")
    make, config = datasets[name]
    values = {**parse_fields(name, config, pairs), "seed": SEED, "size": PROBLEMS}
    curriculum = factory.create_curriculum(name) if factory.has_curriculum(name) else None
    configs = level_configs(name, config, curriculum, values)
    levels: dict[int, Callable[[], Any]] = {n: lazy(make, config) for n, config in enumerate(configs, start=1)}
    base = ReasoningGymEnvironment if dataset_entry(levels[1], 0)["answer"] is None else AnsweredReasoningGymEnvironment
    body = {
        "spec": spec,
        "difficulties": tuple(levels),
        "levels": levels,
        "__doc__": f"{name} of reasoning-gym.",
        "__module__": __name__,
    }
    return type(f"reasoning_gym:{spec}", (base,), body)


def import_factory() -> Any:
    """The module ``reasoning_gym.factory``, which holds the table of datasets."""
    try:
        import reasoning_gym  # noqa: F401 - registers the datasets
        from reasoning_gym import factory
    except ImportError as missing:
        raise SettingError(
            f"reasoning_gym:... needs the package reasoning-gym ({missing}); write pip install 'turnwise[reasoning]'"
        ) from missing
    return factory


def parse_fields(name: str, config: type[Any], pairs: Sequence[str]) -> dict[str, Any]:
    """``["max_terms=2"]`` as fields of the configuration."""
    allowed = [f.name for f in fields(config) if f.name not in RUN_FIELDS]
    values: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise SettingError(f"reasoning_gym:{name} is followed by {pair!r}; write field=value, separated by commas")
        if key in RUN_FIELDS:
            raise SettingError(f"reasoning_gym:{name}: {key} is set by the run; leave it out")
        if key not in allowed:
            raise SettingError(f"reasoning_gym:{name} has no field {key!r}; {nearest(key, allowed)}")
        try:
            values[key] = json.loads(text)
        except ValueError:  # not JSON: a plain string
            values[key] = text
    return values


def level_configs(name: str, config: type[Any], curriculum: Any, values: Mapping[str, Any]) -> list[Any]:
    """The configurations of all difficulties, each with the given field values."""
    configs: list[Any] = []
    for default in curriculum_configs(curriculum) or [config()]:
        try:
            made = validated(replace(default, **values))
            configs += [made] * (made not in configs)  # the given fields may fix all that the levels would vary
        except (AssertionError, ValueError, TypeError) as fault:
            if configs:
                break  # the given fields are not valid at the harder levels
            user_values = ", ".join(f"{key}={value}" for key, value in values.items() if key not in RUN_FIELDS)
            about = f"with {user_values or 'its defaults'} it says {str(fault) or repr(fault)!r}, and it would have {default}"
            raise SettingError(f"reasoning_gym:{name} cannot be made: {about}") from fault
    return configs


def curriculum_configs(curriculum: Any) -> list[Any]:
    """The configurations of the curriculum's levels, up to the first invalid one: difficulties have no gaps."""
    configs: list[Any] = []
    for level in range(max((len(a.levels) for a in curriculum.attributes.values()), default=0) if curriculum else 0):
        curriculum.set_global_level(level)
        try:
            configs.append(validated(curriculum.generate_configuration()))
        except (AssertionError, ValueError, TypeError):
            break
    return configs


def validated(config: Any) -> Any:
    """The configuration, after its own validation."""
    if hasattr(config, "validate"):
        config.validate()
    return config


def lazy(make: Callable[[Any], Any], config: Any) -> Callable[[], Any]:
    """A function that returns ``make(config)``, evaluated at its first call."""
    return lru_cache(maxsize=1)(lambda: make(config))
