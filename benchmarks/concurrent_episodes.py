"""Many episodes at once, whose environments mostly sleep: processor time of a turn, and memory of an episode in flight. The
policy answers at once, so that only episodes, rendering and calls into environments are measured; then what a look of the run's
watch costs beside them.

    python benchmarks/concurrent_episodes.py --episodes 1000 --turns 4
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from turnwise.core.protocols import Step
from turnwise.core.records import Completion, Sampling, Stop, Task
from turnwise.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.training.watch import RunEvents, RunWatch

REPLY = "the door is still closed; there is a key on the table and a window to the left"
KINDS = ("async", "thread")
BARS = {"ms": 2.0, "kB": 100.0}


class Answers:
    """A policy that always says the same."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def generate(self, ids: list[int], sampling: Sampling) -> Completion:
        n = len(self.tokens)
        return Completion(list(self.tokens), [-0.5] * n, [0.0] * n, [3] * n, Stop.TOKEN)

    def close(self) -> None: ...


class Sleeping:
    """An environment that awaits for ``seconds`` in every step."""

    def __init__(self, seconds: float, turns: int) -> None:
        self.seconds, self.left = seconds, turns

    async def reset(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Room {seed}. Leave it."}]

    async def step(self, action: Any) -> Step:
        await asyncio.sleep(self.seconds)
        return self._reply()

    def _reply(self) -> Step:
        self.left -= 1
        return Step(messages=[{"role": "user", "content": REPLY}], reward=0.0, terminated=self.left == 0)


class Blocking(Sleeping):
    """The same, blocking a thread."""

    def reset(self, seed: int) -> list[dict[str, str]]:  # type: ignore[override]
        return [{"role": "user", "content": f"Room {seed}. Leave it."}]

    def step(self, action: Any) -> Step:  # type: ignore[override]
        time.sleep(self.seconds)
        return self._reply()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def play(kind: str, episodes: int, turns: int, seconds: float) -> dict[str, float]:
    renderer = Renderer(_tokenizer())
    tokens = renderer.encode_turn("<think>look around</think>take the key and open the door")
    limits = EpisodeLimits(turns=turns + 1, context=10**6)
    make = Sleeping if kind == "async" else Blocking

    async def one(n: int) -> None:
        episode = Episode(f"g.{n}", Task("x", n), make(seconds, turns), Answers(tokens), renderer, Sampling(), limits)  # type: ignore[arg-type]
        trajectory = await episode.run()
        assert len(trajectory.turns) == turns, trajectory.reason

    peak, looks = [0], list[float]()

    async def observe(before: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            watch = RunWatch(Path(folder), RunEvents(), "sleeping")
            while True:
                await asyncio.sleep(seconds / 2)
                peak[0] = max(peak[0], resident() - before)
                began = time.thread_time()
                watch._write(watch._look())
                looks.append(time.thread_time() - began)

    await asyncio.gather(*(one(n) for n in range(20)))  # what is imported and cached at the first episode
    gc.collect()
    observer = asyncio.create_task(observe(resident()))
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(episodes)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    observer.cancel()
    used = cpu - sum(looks)
    return {
        "ms": used / (episodes * turns) * 1e3,
        "kB": peak[0] / episodes / 1e3,
        "seconds": wall,
        "threads": float(threading.active_count()),
        "look": median(looks) * 1e3,
    }


def _tokenizer() -> Any:
    tokenizer = tiny_tokenizer([REPLY], 300)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure many concurrent episodes.")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a step of the environment sleeps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", default="", choices=("", *KINDS), help="measure one kind here and print JSON")
    n = parser.parse_args()
    if n.kind:
        print(json.dumps(asyncio.run(play(n.kind, n.episodes, n.turns, n.seconds))))
        return 0
    print(f"{n.episodes} episodes at once, {n.turns} turns of {n.seconds:g} s each, medians of {n.repeats}")
    for kind in KINDS:
        command = [sys.executable, __file__, "--kind", kind, "--episodes", str(n.episodes)]
        command += ["--turns", str(n.turns), "--seconds", str(n.seconds)]
        rows = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(n.repeats)]
        m = {name: median(row[name] for row in rows) for name in rows[0]}
        kept = all(m[name] < bar for name, bar in BARS.items())
        print(
            f"{kind:<7} {m['ms']:.2f} ms of CPU per turn, {m['kB']:.0f} kB per episode ({'kept' if kept else 'MISSED'}), "
            f"{m['threads']:.0f} threads, {m['seconds']:.1f} s in all; a look of the watch {m['look']:.2f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
