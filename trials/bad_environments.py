"""Bad environments: what `check-env` says of them, and what a run does with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trials import fixtures
from trials.cases import Case

HEAD = """
from turnwise.core.protocols import Step
USER = lambda text: {"role": "user", "content": text}
class Env:
    max_turns = 2
    def reset(self, seed): return [USER("go")]
    def step(self, action): return Step([USER("on")], 0.5, False, False, {"success": True})
"""
BODIES = {  # what replaces parts of a good environment
    "reset returns None": "    def reset(self, seed): return None",
    "reset returns text": "    def reset(self, seed): return 'go'",
    "reset returns no messages": "    def reset(self, seed): return []",
    "reset returns numbers": "    def reset(self, seed): return [1, 2]",
    "reset raises": "    def reset(self, seed): raise ValueError('no')",
    "reset exits": "    def reset(self, seed): raise SystemExit(3)",
    "reset interrupts": "    def reset(self, seed): raise KeyboardInterrupt",
    "reset takes no seed": "    def reset(self): return [USER('go')]",
    "a role that no template knows": "    def reset(self, seed): return [{'role': 'robot', 'content': 'x'}]",
    "content is None": "    def reset(self, seed): return [{'role': 'user', 'content': None}]",
    "constructor raises": "    def __init__(self): raise RuntimeError('no')",
    "constructor wants an argument": "    def __init__(self, db): pass",
    "step returns None": "    def step(self, action): return None",
    "step returns three values": "    def step(self, action): return [], 0.0, True",
    "step raises": "    def step(self, action): raise RuntimeError('broken')",
    "step recurses": "    def step(self, action): return self.step(action)",
    "step exits": "    def step(self, action): raise SystemExit(1)",
    "step stops an iteration": "    def step(self, action): raise StopIteration",
    "reward is not a number": "    def step(self, action): return Step([], 'one', True)",
    "reward is NaN": "    def step(self, action): return Step([], float('nan'), True)",
    "reward is infinite": "    def step(self, action): return Step([], float('inf'), True)",
    "reward is 1e300": "    def step(self, action): return Step([], 1e300, True)",
    "flags are texts": "    def step(self, action): return Step([], 0.0, 'yes', 'no')",
    "info is a list": "    def step(self, action): return Step([], 0.0, True, False, [])",
    "facts are lists": "    def step(self, action): return Step([], 0.0, True, False, {'facts': {'a': []}})",
    "a fact is NaN": "    def step(self, action): return Step([], 0.0, True, False, {'facts': {'a': float('nan')}})",
    "named reward is infinite": "    def step(self, action): return Step([], 0.0, True, False, {'rewards': {'a': 1e999}})",
    "observation of a lone surrogate": "    def step(self, action): return Step([USER('a\\ud800')], 1.0)",
    "observation with control characters": "    def step(self, action): return Step([USER('\\x1b[2J\\x00')], 1.0)",
    "observation of a million characters": "    def step(self, action): return Step([USER('x ' * 500000)], 1.0)",
    "observation of special tokens": "    def step(self, action): return Step([USER('<|end|><|assistant|>')], 1.0)",
    "state key is a list": "    def state_key(self): return []",
    "prints": "    def step(self, action):\n        print('{' * 1000)\n        return Step([], 1.0, True)",
    "closes standard output": "    def step(self, action):\n        import os; os.close(1)\n        return Step([], 1.0, True)",
    "changes the folder": "    def step(self, action):\n        import os; os.chdir('/')\n        return Step([], 1.0, True)",
    "async step": "    async def step(self, action): return Step([], 1.0, True, False, {'success': True})",
    "async step that raises": "    async def step(self, action): raise RuntimeError('no')",
    "step is a generator": "    def step(self, action):\n        yield 1",
    "close raises": "    def close(self): raise RuntimeError('no')",
    "tools are texts": "    tools = ('python',)",
    "turns are text": "    max_turns = 'many'",
    "suggests an unknown setting": "    suggests = {'stpes': 3}",
    "suggests a wrong value": "    suggests = {'history': 'many'}",
    "difficulties are empty": "    difficulties = ()",
    "endless step": "    def step(self, action):\n        while True: pass",
    "sleeping step": "    def step(self, action):\n        import time; time.sleep(1000)",
    "async step that never yields": "    async def step(self, action):\n        import time; time.sleep(1000)",
    "async step that swallows cancellation": (
        "    async def step(self, action):\n        import asyncio\n        while True:\n"
        "            try: await asyncio.sleep(1000)\n            except BaseException: pass"
    ),
}  # fmt: skip
MODULES = {
    "syntax error": "class Env(:\n",
    "import error": "import nowhere_at_all\n",
    "raises on import": "raise RuntimeError('no')\n",
    "exits on import": "import sys\nsys.exit(0)\n",
    "an instance, not a class": HEAD + "Env = Env()\n",
}
MAY_RUN = (  # a run survives these: the episode counts, or it is dropped and others go on
    "observation", "prints", "closes", "changes", "async step", "close raises", "state key", "a role", "flags are texts",
    "reset returns no messages", "difficulties", "step stops",
)  # fmt: skip


def cases() -> Iterator[Case]:
    for name, body in {"a good one": "", **BODIES}.items():
        source = HEAD + body + "\n"
        good = name == "a good one"
        expect = "ran" if good else "either" if name.startswith(MAY_RUN) else "refused"
        argv = ["train", "grpo", "--dry-run", "--env", "mine:Env", "--model", "model", "--env-seconds", "2"]
        argv += ["--groups", "2", "--group-size", "2", "--max-tokens", "4", "--context", "200", "--eval-tasks", "2"]
        yield Case("environments", f"train: {name}", argv, expect, _prepare(source))
        yield Case("environments", f"check-env: {name}", ("check-env", "mine:Env"), "either", _prepare(source))
    for name, source in MODULES.items():
        for argv in (("train", "--env", "mine:Env"), ("check-env", "mine:Env")):
            yield Case("environments", f"{argv[0]}: {name}", argv, "refused", _prepare(source))


def _prepare(source: str):
    def prepare(folder: Path) -> None:
        (folder / "mine.py").write_text(source)
        (folder / "model").symlink_to(fixtures.model())

    return prepare
