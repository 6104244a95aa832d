"""Our own rewards as environments, for ``turnwise probe-reward``. A rule of its own says what is right."""

from __future__ import annotations

import random
import re

from trials.rewards.single_turn import OneAnswer, Sum
from turnwise.core.protocols import Action
from turnwise.environments.base import text_action
from turnwise.rewards import builtin


class ExactReward(Sum):
    """``exact``: one number."""

    form = "answer: N"

    def draw(self) -> str:
        return super().draw().replace("answer: N", self.form)

    def oracle(self) -> Action:
        return text_action(self.form.replace("N", self.answer()))

    def random_action(self, rng: random.Random) -> Action:
        return text_action(self.form.replace("N", str(rng.randint(20, 98))))

    def score(self, text: str) -> float:
        outcome = builtin.exact(text.removeprefix("answer:"), self.answer())
        return float(outcome["score"]) if isinstance(outcome, dict) else float(outcome or 0.0)

    def pay(self, text: str) -> tuple[float, bool]:
        # one number, however often it is said
        return self.score(text), {float(number) for number in re.findall(r"\d+\.?\d*", text)} == {float(self.answer())}


class TaggedReward(ExactReward):
    """``exact``: one number in a tag."""

    form = "<answer>N</answer>"

    def score(self, text: str) -> float:
        outcome = builtin.exact(text, self.answer())
        return float(outcome["score"]) if isinstance(outcome, dict) else float(outcome or 0.0)


class MathReward(TaggedReward):
    """``math``: one number in a box."""

    form = "\\boxed{N}"

    def score(self, text: str) -> float:
        return float(builtin.math(text, self.answer())["score"])


class PatternReward(ExactReward):
    """``regex``, all of the answer."""

    def score(self, text: str) -> float:
        return builtin.regex(text, pattern=rf"answer: {self.answer()}", full=True)


class SchemaReward(ExactReward):
    """``json_schema``: an object with one value that fits."""

    form = '{"sum": N}'

    def score(self, text: str) -> float:
        schema = {"type": "object", "properties": {"sum": {"const": int(self.answer())}}, "required": ["sum"]}
        return float(builtin.json_schema(text, {**schema, "additionalProperties": False}) or 0.0)


class CodeReward(OneAnswer):
    """``code``: a function, tested in both directions. Right is what computes the sum in a process of ours, as text of a term."""

    def draw(self) -> str:
        self.a = self.rng.randint(10, 99)
        return f"write f(x), which adds {self.a} to x"

    def oracle(self) -> Action:
        return text_action(f"```python\ndef f(x): return x + {self.a}\n```")

    def random_action(self, rng: random.Random) -> Action:
        return text_action(f"```python\ndef f(x): return x + {rng.randint(10, 99)}\n```")

    def pay(self, text: str) -> tuple[float, bool]:
        tests = [f"assert f({n}) == {n + self.a}" for n in (0, 1, 50)]
        return float(builtin.code(text, tests)["score"]), f"x + {self.a}" in text


BUILT_IN = (ExactReward, TaggedReward, MathReward, PatternReward, SchemaReward, CodeReward)
NEEDS = {MathReward: "math_verify", SchemaReward: "jsonschema"}
