"""An environment without any reward of its own, and a judge that scores what was said in it by a rule."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from tests.support.chat_servers import Reply, text
from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, text_action, user_message


class Unpaid(Environment):
    """Asks for a digit and pays nothing."""

    max_turns = 1
    inline = True
    suggests: ClassVar = {"max_tokens": 4, "context": 64}

    def reset(self, seed):
        return [user_message("digit?")]

    def step(self, action):
        return Step([], 0.0, True)

    def oracle(self):
        return text_action("9")

    def demonstrate(self, rng):
        return text_action(str(rng.randrange(10)))

    random_action = demonstrate


def rule(material: str, compared: bool) -> str:
    """The verdict on the material of a request: a tenth of the last digit of each transcript."""
    fence = material.splitlines()[0][:24]
    parts = re.split(rf"^{re.escape(fence)} (?:transcript (\w+)|the transcript)$", material, flags=re.MULTILINE)
    rows = []
    for name, body in zip(parts[1::2], parts[2::2]):
        own = re.sub(rf"^{re.escape(fence)}.*$", "", body, flags=re.MULTILINE)
        score = int((re.findall(r"[0-9]", own) or ["0"])[-1]) / 10
        rows.append({"id": name, "reason": f"ends with {own.strip()[-1:]}", "score": score})
    if compared:
        return json.dumps({"verdicts": rows})
    return json.dumps({k: v for k, v in rows[0].items() if k != "id"})


def judge(body: dict[str, Any]) -> Reply:
    """A served judge that follows the rule."""
    material = body["messages"][1]["content"]
    return text(rule(material, "transcript A" in material))
