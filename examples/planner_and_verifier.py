"""Several roles in one episode, one of them trained: a planner, an executor, a verifier and a generator with a shared memory.

The planner names a sub-goal, the executor searches for it, the verifier says `stop` or `continue`, and the generator answers
from the memory. Planner and verifier are played by the policy, each with a prompt of its own that shows the memory; executor and
generator are programs. `flow_grpo` reads the fact `planner` and trains the planner's turns alone.

    python examples/planner_and_verifier.py     90 seconds on one core
"""

from __future__ import annotations

import random
import tempfile
from typing import ClassVar

from turnwise import Action, Environment, Step, train
from turnwise.environments.base import sample_problem, text_action, user_message
from turnwise.environments.builtin.lookup import RELATIONS, SYMBOLS, WORLDS, fictional_world, sample_question

ALL_RELATIONS = sorted({relation for each in RELATIONS.values() for relation in each})


class PlannerLoop(Environment):
    """A question of one or two hops over the notes of a fictional encyclopedia."""

    difficulties = (1, 2)
    agents = ("planner", "verifier")
    facts = ("planner",)  # 1 in the planner's turns, 0 in the verifier's
    max_turns = 8
    inline = True
    suggests: ClassVar = {
        "difficulty": (1, 2), "max_tokens": 8, "context": 160, "copying": True, "cold_steps": 80, "cold_demos": 2400,
    }  # fmt: skip
    symbols = SYMBOLS

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.max_turns = 4 * difficulty

    def reset(self, seed: int):
        def make(rng):
            world = fictional_world(self.split, rng.randrange(WORLDS))
            return world, sample_question(world, self.difficulty, rng)

        self.world, self.question = sample_problem(make, seed, self.split, lambda drawn: drawn[1].content)
        self.memory: list[str] = []  # what each search found: the shared memory
        self.agent, self.turns = "planner", 0
        return [self.prompt()]

    def prompt(self):
        """What the role that acts next reads: the task, and the memory in place of all earlier turns."""
        says = "say RELATION of NAME" if self.agent == "planner" else "say stop or continue"
        return user_message(f"{self.agent}. {self.question.text} {says}. memory: {' '.join(self.memory) or 'empty'}")

    def step(self, action: Action) -> Step:
        self.turns += 1
        role, said = self.agent, action.text.strip().lower().rstrip(".")
        facts = {"planner": float(role == "planner")}
        if role == "planner":
            self.execute(said)
            self.agent = "verifier"
        elif said.startswith("stop") or self.turns >= self.max_turns:
            right = self.generate() == self.question.answer
            return Step([], float(right), terminated=True, info={"success": right, "facts": facts})
        else:
            self.agent = "planner"
        out_of_turns = self.turns >= self.max_turns
        info = {"facts": facts, **({"success": False} if out_of_turns else {})}
        return Step(
            [self.prompt()], truncated=out_of_turns, info=info, context=[]
        )  # the next role reads its prompt alone

    def execute(self, query: str) -> None:
        """The executor: a search; what it finds enters the memory."""
        self.memory += [self.world.notes[note] for note in self.world.index.top(query, 1)] or ["nothing found."]

    def generate(self) -> str:
        """The generator: the name at the end of the last note."""
        return self.memory[-1].split()[-1].rstrip(".") if self.memory else ""

    # Scripted players of both roles: the check uses the first two, the cold start imitates the third.
    def found(self) -> int:
        """How many hops of the question the memory covers, in order."""
        hops = zip(self.question.names, self.question.relations)
        notes = [self.world.notes[self.world.number[hop]] for hop in hops]
        return next((n for n, note in enumerate(notes) if note not in self.memory), len(notes))

    def oracle(self) -> Action:
        hop = min(self.found(), self.difficulty - 1)
        if self.agent == "planner":
            return text_action(f"{self.question.relations[hop]} of {self.question.names[hop]}")
        return text_action("stop" if self.generate() == self.question.answer else "continue")

    def random_action(self, rng: random.Random) -> Action:
        if self.agent == "planner":
            return text_action(f"{rng.choice(ALL_RELATIONS)} of {rng.choice(self.question.names[:-1])}")
        return text_action(rng.choice(("stop", "continue")))

    def demonstrate(self, rng: random.Random) -> Action:
        """A planner that is right in two turns of five, and a verifier that is nearly always right."""
        skill = 0.4 if self.agent == "planner" else 0.95
        return self.oracle() if rng.random() < skill else self.random_action(rng)


def main(steps: int = 40, eval_tasks: int = 100, **settings) -> dict:
    """Train the planner; returns the summary of the run."""
    with tempfile.TemporaryDirectory() as folder:
        summary = train(
            env=f"{PlannerLoop.__module__}:PlannerLoop", method="flow_grpo", steps=steps, eval_tasks=eval_tasks, trackers=(),
            out=folder, **settings,
        )  # fmt: skip
    for when in ("before", "after"):
        found = summary[f"success_{when}"]
        print(f"success {when} RL: {found['success']:.0%} [{found['interval'][0]:.0%}, {found['interval'][1]:.0%}]")
    return summary


if __name__ == "__main__":
    main()
