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

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache, partial
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import AnsweredEnvironment, Environment, sample_problem, user_message
from turnwise.environments.families.adapter import import_package, member_class, split_options
from turnwise.errors import SettingError, nearest
from turnwise.rewards.process import CallFailed, ProcessSettings, ScoringPool

PROBLEMS = 10_000  # per level, both splits together; some datasets generate all of them at once
SEED = 1
MAX_ANSWER = 4000  # characters: some scores take long for longer answers
SCORE_SECONDS = 2.0  # for the score of one answer
SCORING_PROCESSES = 2
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ANSWER_FORMAT = "Say only the answer, or end with <answer>ANSWER</answer>."
RUN_FIELDS = ("seed", "size")  # configuration fields that the run sets
INVALID = (AssertionError, ValueError, TypeError)  # what configurations raise
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
    dataset: ClassVar[str]  # its name and fields
    levels: ClassVar[Mapping[int, Callable[[], Any]]]  # by difficulty: returns its dataset, generated at the first call

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
        # not worth a process
        if not answer or len(answer) > MAX_ANSWER:
            return 0.0
        level = (self.dataset, self.difficulty)
        try:
            reply = scoring_pool().call(level, args=(*level, answer, self.entry))
        except CallFailed:  # the dataset's parser failed on model output, or did not end: a wrong answer
            return 0.0
        return float(reply["value"])


class AnsweredReasoningGymEnvironment(AnsweredEnvironment, ReasoningGymEnvironment):
    """A question with a reference answer."""

    def answer(self) -> str:
        return str(self.entry["answer"])

    def other_answer(self, rng: random.Random) -> str:
        return str(dataset_entry(self.levels[self.difficulty], rng.randrange(PROBLEMS))["answer"])


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
    make = lambda rng: dataset_entry(dataset, rng.randrange(PROBLEMS))  # noqa: E731
    return sample_problem(make, seed, split, lambda entry: entry["question"])


@cache  # one class per name, so that its datasets are generated once
def environment(spec: str) -> type[ReasoningGymEnvironment]:
    """The class of ``DATASET`` or ``DATASET,field=value,...``."""
    name, *pairs = spec.split(",")
    factory = import_factory()
    if name in RUN_ANSWERS:
        raise SettingError(f"reasoning_gym:{name} would execute model output as a program; choose another dataset")
    offered = sorted(set(factory.DATASETS) - RUN_ANSWERS - {"composite"})
    if name not in offered:
        raise SettingError(f"reasoning-gym has no dataset {name!r}; {nearest(name, offered)}; write reasoning_gym:NAME")
    make, config = factory.DATASETS[name]
    for key in (pair.partition("=")[0] for pair in pairs):
        if key in RUN_FIELDS:
            raise SettingError(f"reasoning_gym:{name}: {key} is set by the run; leave it out")
    allowed = [field.name for field in fields(config) if field.name not in RUN_FIELDS]
    values = {**split_options("reasoning_gym", spec, allowed)[1], "seed": SEED, "size": PROBLEMS}
    curriculum: Any = factory.create_curriculum(name) if factory.has_curriculum(name) else None
    defaults: list[Any] = []
    for level in range(max((len(a.levels) for a in curriculum.attributes.values()), default=0) if curriculum else 0):
        curriculum.set_global_level(level)
        try:
            defaults.append(validated(curriculum.generate_configuration()))
        except INVALID:
            break  # difficulties have no gaps
    configs: list[Any] = []
    for default in defaults or [config()]:
        try:
            made = validated(replace(default, **values))
            configs += [made] * (made not in configs)  # the given fields may fix all that the levels would vary
        except INVALID as fault:
            if configs:
                break  # the given fields are not valid at the harder levels
            user_values = ", ".join(f"{key}={value}" for key, value in values.items() if key not in RUN_FIELDS)
            about = f"with {user_values or 'its defaults'} it says {str(fault) or repr(fault)!r}, and it would have {default}"
            raise SettingError(f"reasoning_gym:{name} cannot be made: {about}") from fault
    # each dataset is generated at its first use
    levels: dict[int, Callable[[], Any]] = {
        number: lru_cache(maxsize=1)(partial(make, level)) for number, level in enumerate(configs, start=1)
    }
    base = ReasoningGymEnvironment if dataset_entry(levels[1], 0)["answer"] is None else AnsweredReasoningGymEnvironment
    about = f"{name} of reasoning-gym."
    return member_class("reasoning_gym", spec, base, about, dataset=spec, difficulties=tuple(levels), levels=levels)


def import_factory() -> Any:
    """The module ``reasoning_gym.factory``, which holds the table of datasets."""
    import_package("reasoning_gym", "reasoning_gym", "reasoning")  # registers the datasets
    return import_package("reasoning_gym.factory", "reasoning_gym", "reasoning")


def validated(config: Any) -> Any:
    """The configuration, after its own validation."""
    if hasattr(config, "validate"):
        config.validate()
    return config
