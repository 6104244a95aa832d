"""Questions rewarded by what their answers are worth: Shapley values of facts, estimated by a model, then trained with `promed`.

A first short run gives a model that answers questions from notes. The worth of a note is its Shapley value for v(S), the log
probability of the answer given the notes S, by random orders of the notes. Then `promed` rewards each search by the worth of the
notes it found.

    python examples/shapley_of_facts.py     75 seconds on one core
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from turnwise import Action, Step, train
from turnwise.environments.base import tool_action
from turnwise.environments.builtin.lookup import Lookup
from turnwise.models.loading import load_causal_lm, load_tokenizer
from turnwise.rollout.renderer import Renderer


def shapley(
    value: Callable[[frozenset[int]], float],
    count: int,
    rng: random.Random,
    most: int = 50,
    least: int = 3,
    near: float = 0.01,
) -> list[float]:
    """Shapley values of ``count`` facts: mean marginal gains over random orders. Ends after ``least`` orders once no mean moved
    by ``near``, or after ``most``. Within an order, facts that come after v is within ``near`` of its end gain nothing."""
    means, full = [0.0] * count, value(frozenset(range(count)))
    for n in range(1, most + 1):
        known, before, gains = frozenset[int](), value(frozenset()), [0.0] * count
        for fact in rng.sample(range(count), count):
            if abs(before - full) < near:
                break
            known |= {fact}
            after = value(known)
            gains[fact], before = after - before, after
        moved = [(gain - mean) / n for gain, mean in zip(gains, means)]
        means = [mean + step for mean, step in zip(means, moved)]
        if n >= least and max(map(abs, moved), default=0.0) < near:
            break
    return means


class AnswerModel:
    """A frozen model that says how likely the right answer is after some of the notes."""

    def __init__(self, folder: Path) -> None:
        self.model = load_causal_lm(str(folder)).eval()
        self.renderer = Renderer(load_tokenizer(str(folder)))

    def value(self, env: Lookup, known: Sequence[int]) -> float:
        """log π(answer | the question and the notes of these hops), as a dialogue in which they were searched for."""
        messages = list(env.reset(env.seed))
        for hop in known:
            query = f"{env.question.relations[hop]} of {env.question.names[hop]}"
            note = env.world.notes[env.path[hop]]
            messages += [
                tool_action("search", query=query).message,
                {"role": "tool", "name": "search", "content": note},
            ]
        prompt = self.renderer.open(messages, env.tools).ids
        answer = self.renderer.encode(env.answer())
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        return float(chosen.sum())

    def worths(self, env: Lookup) -> list[float]:
        """The Shapley value of each note that leads to the answer."""
        seen: dict[frozenset[int], float] = {}

        def value(known: frozenset[int]) -> float:
            if known not in seen:
                seen[known] = self.value(env, sorted(known))
            return seen[known]

        return shapley(value, len(env.path), random.Random(env.seed))


class WorthyLookup(Lookup):
    """Lookup that tells what each note on the way is worth: the facts `worth 0` and `worth 1`, estimated once for each task."""

    facts = (*Lookup.facts, "worth 0", "worth 1")
    model: ClassVar[AnswerModel | None] = None
    estimated: ClassVar[dict[tuple[str, int, int], list[float]]] = {}

    def step(self, action: Action) -> Step:
        step = super().step(action)
        facts = {f"worth {k}": worth for k, worth in enumerate(self.worths())}
        step.info["facts"] = {**step.info.get("facts", {}), **facts}
        return step

    def worths(self) -> list[float]:
        key = (self.split, self.difficulty, self.seed)
        if key not in self.estimated:
            twin = Lookup(difficulty=self.difficulty, split=self.split)
            twin.reset(self.seed)
            assert self.model is not None, "main() loads the model"
            self.estimated[key] = self.model.worths(twin)
        return self.estimated[key]


def main(first_steps: int = 14, steps: int = 20, eval_tasks: int = 100, **settings) -> dict:
    """Train a model that answers, estimate worths with it, train on them; returns the summary of the second run."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"difficulty": (1, 2), "eval_tasks": eval_tasks, "trackers": (), "out": folder, **settings}
        train(env="lookup", method="dr_grpo", steps=first_steps, name="first", **common)
        model = Path(folder) / "first" / "model"
        WorthyLookup.model, WorthyLookup.estimated = AnswerModel(model), {}
        summary = train(
            env=f"{WorthyLookup.__module__}:WorthyLookup", method="promed", steps=steps, name="second",
            **{**common, "model": str(model), "cold_steps": 0, "sampler": "cycle,pool=64"},
        )  # fmt: skip
    for when in ("before", "after"):
        found = summary[f"success_{when}"]
        print(f"success {when} RL: {found['success']:.0%} [{found['interval'][0]:.0%}, {found['interval'][1]:.0%}]")
    two = [worths for worths in WorthyLookup.estimated.values() if len(worths) == 2]
    if two:
        means = [sum(w[k] for w in two) / len(two) for k in range(2)]
        print(f"mean worth of the first and the last note of {len(two)} tasks with two: {means[0]:.2f}, {means[1]:.2f}")
    return summary


if __name__ == "__main__":
    main()
