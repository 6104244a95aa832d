"""Twelve small runs and a digest of the weights each ends with, to compare two checkouts of the source on one machine.

    python -m trials.same_weights --write before.json            # in the first checkout
    python -m trials.same_weights --against before.json          # in the second: says which runs differ, exit status 1

A refactoring must not move a bit on a CPU. Digests of one kind of processor say nothing about another's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = {
    "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 6, "cold_batch": 8, "steps": 4, "groups": 3,
    "group_size": 4, "max_tokens": 12, "context": 320, "eval_tasks": 4, "trackers": [], "threads": 1,
    "warmup": 0, "lr": 1e-3, "quiet": True,
}  # fmt: skip
PARTS = '''
from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, text_action, user_message


class Letters(Environment):
    """Pays for any text by the sum of its characters, so that rewards differ among the answers of an untrained model."""

    max_turns = 3
    inline = deterministic = True
    suggests = {"max_tokens": 8, "context": 200}

    def reset(self, seed):
        self.seed, self.turn, self.last = seed, 0, 0
        return [user_message(f"say a word, {seed % 7}")]

    def step(self, action):
        self.turn += 1
        self.last = (sum(map(ord, action.text)) + self.seed) % 5
        over = self.turn == 3 or self.last == 4
        return Step([] if over else [user_message(f"{self.last}, again")], self.last / 4, over, False, {"success": self.last > 2})

    def state_key(self):
        return f"{self.turn} {self.last}"

    def oracle(self):
        return text_action("word")

    def random_action(self, rng):
        return text_action(rng.choice(["red", "blue", "green ball", "white"]))

    def demonstrate(self, rng):
        return self.random_action(rng)


async def solve(task, client):
    messages = list(task.messages)
    while not task.done:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=list(task.tools))
        messages += [reply.choices[0].message, *await task.step(reply.choices[0].message)]
'''
RUNS: dict[str, dict] = {
    "grpo": {"method": "grpo"},
    "gspo": {"method": "gspo", "groups": 4},
    "sapo": {"method": "sapo"},
    "gigpo": {"method": "gigpo"},
    "dapo": {"method": "dapo", "env": "calculator", "cold_steps": 60},
    "critic": {"method": "ppo"},
    "replay": {"method": "digirl"},
    "forks": {"method": "spo_tree", "group_size": 6},
    "agent": {"method": "rloo", "agent": "same_weights_parts:solve"},
    "preferences": {"method": "dpo", "env": "guess", "data": "pairs.jsonl"},
    "generator local": {"method": "grpo", "generator": "local"},
    "ranks 2": {"method": "grpo", "ranks": 2},
}


def digest(name: str) -> str:
    """Train ``name`` in a fresh process and folder; the SHA-256 of its last weights, or how the process failed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "same_weights_parts.py").write_text(PARTS)
        settings = {**SMALL, "env": "same_weights_parts:Letters", **RUNS[name], "out": folder, "name": "run"}
        code = (
            "import json,sys; from turnwise.cli import sharing; from pathlib import Path\n"
            "from turnwise import train\n"
            "s=json.loads(sys.argv[1])\n"
            "if s.get('data'): sharing.export('guess','pairs',Path('pairs.jsonl'),tasks=30)\n"
            "train(**s)"
        )
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-c", code, json.dumps(settings)]
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
        weights = Path(folder, "run", "model", "model.safetensors")
        if ended.returncode or not weights.is_file():
            return f"failed: {ended.stderr.strip().splitlines()[-1:]}"
        return hashlib.sha256(weights.read_bytes()).hexdigest()[:32]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a file for the digests")
    parser.add_argument("--against", type=Path, help="digests of another checkout")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="some of the runs")
    given = parser.parse_args()
    before = json.loads(given.against.read_text()) if given.against else {}
    digests: dict[str, str] = {}
    for name in given.only:
        digests[name] = digest(name)
        verdict = (
            "" if not before else "equal" if before.get(name) == digests[name] else f"DIFFERENT: was {before.get(name)}"
        )
        print(f"{name:16} {digests[name]}  {verdict}", flush=True)
    if given.write:
        given.write.write_text(json.dumps(digests, indent=1) + "\n")
    return int(any(before[name] != digests[name] for name in digests if name in before))


if __name__ == "__main__":
    sys.exit(main())
