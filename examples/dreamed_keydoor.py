"""Learning in a dream: a tiny world model of `keydoor`, and a policy trained on what it predicts. The pipeline of DynaWeb.

1. Episodes of the imperfect demonstrator in the real environment are recorded: observation, action, next observation.
2. A tiny language model learns to continue an observation and an action with the next observation (a supervised cold start).
3. A policy is trained with `dynaweb`: its rollouts start at a real observation and go on in the world model; success is what the
   judge, a rule, reads in a predicted observation. Half of each group are real expert trajectories. Evaluations are real.

    python examples/dreamed_keydoor.py     540 seconds on one core
"""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from pathlib import Path
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise import Action, Environment, Step, train
from turnwise.environments.base import is_held_out, text_action, user_message
from turnwise.environments.builtin.keydoor import KeyDoor
from turnwise.environments.dreamed import Dreamed

LONGEST = 48  # ids of a predicted observation


def asked(seen: str, action: str) -> str:
    """What the world model reads."""
    return f"{plain(seen)}. do {action}"


def plain(observation: str) -> str:
    """An observation without the words that only answer a refused action."""
    return re.sub(r"^(you cannot|that is no move)\. ", "", observation)


def record(path: Path, episodes: int, difficulty: int = 1) -> None:
    """Write the transitions of scripted episodes, without repetitions."""
    found = {}
    for seed in range(episodes):
        env, rng = KeyDoor(difficulty=difficulty), random.Random(f"record/{seed}")
        seen, over = env.reset(seed)[-1]["content"], False
        while not over:
            action = env.demonstrate(rng)
            step = env.step(action)
            then = step.messages[-1]["content"]
            found.setdefault(f"{asked(seen, action.text)}|{then}", {"asked": asked(seen, action.text), "then": then})
            seen, over = then, step.terminated or step.truncated
    path.write_text("\n".join(map(json.dumps, found.values())), encoding="utf-8")


@functools.lru_cache(maxsize=4)
def transitions(path: str) -> dict[str, list[dict]]:
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {
        split: [r for r in rows if is_held_out(r["asked"]) == (split == "held_out")] for split in ("train", "held_out")
    }


class Transitions(Environment):
    """One transition: predict the next observation. Reward 1 for its exact words."""

    max_turns = 1
    inline = True
    symbols = KeyDoor.symbols
    suggests: ClassVar = {"context": 128, "max_tokens": LONGEST, "cold_batch": 64}

    def __init__(self, *, rows: str, split: str = "train") -> None:
        super().__init__(split=split)
        self.rows = transitions(rows)[split]

    def reset(self, seed: int):
        self.row = random.Random(f"transition/{seed}").choice(self.rows)
        return [user_message(self.row["asked"])]

    def step(self, action: Action) -> Step:
        right = action.text.strip() == self.row["then"]
        return Step([], float(right), terminated=True, info={"success": right})

    def oracle(self) -> Action:
        return text_action(self.row["then"])

    demonstrate = lambda self, rng: self.oracle()  # noqa: E731
    random_action = lambda self, rng: text_action(rng.choice(self.rows)["then"])  # noqa: E731


class WorldModel:
    """Continues an observation and an action. Equal questions of one variant have equal answers, so each is sampled once."""

    def __init__(self, folder: str) -> None:
        self.tokenizer, self.model = (
            AutoTokenizer.from_pretrained(folder),
            AutoModelForCausalLM.from_pretrained(folder).eval(),
        )
        self.end = self.tokenizer.convert_tokens_to_ids("<|end|>")
        self.known: dict[tuple[str, str, int], str] = {}

    def __call__(self, seen: str, action: str, variant: int) -> str:
        key = (plain(seen), action, variant)
        if key not in self.known:
            self.known[key] = self._sample(asked(seen, action), torch.Generator().manual_seed(hash_of(key)))
        return self.known[key]

    @torch.inference_mode()
    def _sample(self, text: str, dice: torch.Generator) -> str:
        messages = [user_message(text)]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([self.tokenizer.encode(prompt, add_special_tokens=False)])
        said, past = [], None
        for _ in range(LONGEST):
            out = self.model(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            token = torch.multinomial(out.logits[0, -1].float().softmax(-1), 1, generator=dice)
            if int(token) == self.end:
                break
            said.append(int(token))
            ids = token[None]
        return self.tokenizer.decode(said)


def hash_of(key: tuple) -> int:
    return random.Random(repr(key)).getrandbits(48)


world_model = functools.lru_cache(maxsize=2)(WorldModel)


class DreamedKeyDoor(Dreamed, KeyDoor):
    """KeyDoor in the world model of a folder."""

    def __init__(self, *, model: str, difficulty: int = 1, split: str = "train", horizon: int = 28) -> None:
        super().__init__(difficulty=difficulty, split=split, horizon=horizon)
        self.model = model

    def predict(self, seen: str, action: str, variant: int) -> str:
        return world_model(self.model)(seen, action, variant)

    def judge(self, observation: str) -> bool:
        return "goal here" in observation


def main(
    episodes: int = 2000,
    world_steps: int = 600,
    steps: int = 30,
    world: dict | None = None,
    name: str = "dynaweb",
    **more,
) -> dict:
    """Returns the summaries of the world model and of the policy."""
    with tempfile.TemporaryDirectory() as folder:
        rows, shared = Path(folder) / "transitions.jsonl", {"trackers": (), "out": folder}
        record(rows, episodes)
        module = DreamedKeyDoor.__module__
        dreams = train(
            env=f"{module}:Transitions,rows={rows}", method="grpo", name="world", steps=1, cold_steps=world_steps,
            cold_demos=20000, **{"eval_tasks": 200, **shared, **(world or {})},
        )  # fmt: skip
        policy = train(
            env=f"{module}:DreamedKeyDoor,model={folder}/world/initial", method=name, demos="oracle", name="policy", steps=steps,
            **{"eval_tasks": 200, **shared, **more},
        )  # fmt: skip
    exact = dreams["success_before"]["success"]  # after the cold start; the one step of RL that follows is not used
    before, after = (policy[f"success_{when}"]["success"] for when in ("before", "after"))
    print(f"world model: {exact:.0%} of held-out transitions predicted word for word")
    print(f"policy trained in the dream: {before:.0%} of real tasks before, {after:.0%} after")
    return {"world": dreams, "policy": policy}


if __name__ == "__main__":
    main()
