"""What partial rollouts gain: episodes with heavy-tailed turns and tools, sampled by the real generator. No learner.

    python benchmarks/partial_rollouts.py [--steps 30]                                     # two threads of a CPU
    python benchmarks/partial_rollouts.py --device cuda --groups 32 --hidden 512 --layers 8

A step takes ``--groups`` whole groups of 8 episodes and publishes new weights; learning takes no time, so all that differs is
rollouts. Tokens of a turn and seconds of a tool are log-normal. Every arm has the same generator, cache and episodes:

wave       as many groups as a step needs; the next are issued when all of them have ended (``--staleness 0``)
in order   twice as many; a step waits for the oldest
partial 1  the same with ``--staleness 1``: those that end first, but none may wait for more than one step
twice      twice as many; a step takes those that end first, and the others go on under the new weights, for up to 4 steps
partial 4  the same with five times as many (``--staleness 4``)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from turnwise.bench.models import SMALL, llama
from turnwise.core.records import Sampling
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.training.collector import StalenessPolicy

SIZE, TURNS, CONTEXT = 8, 3, 384
TOKENS, TOKEN_SPREAD, LONGEST = 12, 1.0, 96  # of a turn
SECONDS, TOOL_SPREAD, SLOWEST = 0.03, 1.5, 2.0  # of a tool's answer


class InOrder(StalenessPolicy):
    """As many groups in flight, and none overtakes another."""

    def select(self, oldest: Mapping[str, int], ready: Sequence[str], count: int, step: int) -> list[str] | None:
        first = list(oldest)[:count]
        return first if len(first) == count and set(first) <= set(ready) else None


class Twice(StalenessPolicy):
    """Twice as many groups in flight as a step needs, whatever the limit of their age."""

    def admit(self, running: int, outstanding: int, per_step: int, trainable: int | None = None) -> int:
        return max(0, 2 * per_step - outstanding)


ARMS = {
    "wave": StalenessPolicy(0),
    "in order": InOrder(1),
    "partial 1": StalenessPolicy(1),
    "twice": Twice(4),
    "partial 4": StalenessPolicy(4),
}


@dataclass
class Rollouts:
    """Groups of episodes, each from its own random numbers, so that all arms play the same."""

    generator: LocalGenerator
    vocabulary: int
    tokens: int = 0

    async def group(self, number: int) -> None:
        await asyncio.gather(*(self.episode(number * SIZE + n) for n in range(SIZE)))

    async def episode(self, seed: int) -> None:
        rng, session = random.Random(seed), self.generator.open(seed)
        draw = lambda count: [rng.randrange(self.vocabulary) for _ in range(count)]  # noqa: E731
        ids = draw(16)
        for _ in range(TURNS):
            length = int(min(LONGEST, max(1.0, rng.lognormvariate(math.log(TOKENS), TOKEN_SPREAD))))
            done = await session.generate(ids, Sampling(max_tokens=length))
            self.tokens += len(done.tokens)
            ids += [*done.tokens, *draw(8)]
            await asyncio.sleep(min(SLOWEST, rng.lognormvariate(math.log(SECONDS), TOOL_SPREAD)))
        session.close()


async def measure(
    policy: StalenessPolicy, rollouts: Rollouts, groups: int, steps: int, warm_up: int
) -> dict[str, float]:
    """Seconds of a step, tokens per second, and the largest age of a group, after the first steps."""
    weights = {name: p.detach() for name, p in rollouts.generator.model_runner.model.named_parameters()}
    running, issued, ready = dict[asyncio.Future[None], str](), dict[str, int](), list[str]()
    number, oldest, began, tokens = 0, 0, 0.0, 0
    for step in range(steps):
        if step == warm_up:
            began, tokens = time.perf_counter(), rollouts.tokens
        while True:
            for _ in range(policy.admit(len(running), len(running) + len(ready), groups)):
                issued[str(number)] = step
                running[asyncio.ensure_future(rollouts.group(number))] = str(number)
                number += 1
            chosen = policy.select(issued, ready, groups, step)
            if chosen is not None:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ready += [running.pop(task) for task in done]
        oldest = max(oldest, *(step - issued.pop(key) for key in chosen))
        ready = [key for key in ready if key not in set(chosen)]
        await rollouts.generator.publish({name: w.clone() for name, w in weights.items()}, step + 1)
    seconds, sampled = time.perf_counter() - began, rollouts.tokens - tokens
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {"seconds": seconds / (steps - warm_up), "tokens": sampled / seconds, "oldest": oldest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="of the generator; tools and publication have the other core"
    )
    options = parser.parse_args()
    shape = {**SMALL, "hidden_size": options.hidden, "num_hidden_layers": options.layers}
    shape |= {
        "num_attention_heads": options.hidden // 32,
        "num_key_value_heads": options.hidden // 32,
        "intermediate_size": 3 * options.hidden,
    }
    model, dtype = llama(shape), torch.bfloat16 if options.device != "cpu" else None
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(options.repeats):
        for arm, policy in ARMS.items():
            slots = 2 * SIZE * options.groups
            generator = LocalGenerator(
                model, slots=slots, context=CONTEXT, stop_ids=(), deterministic=False, device=options.device, dtype=dtype,
                threads=options.threads,
            )  # fmt: skip
            rollouts = Rollouts(generator, int(shape["vocab_size"]))
            found = asyncio.run(measure(policy, rollouts, options.groups, options.steps, options.steps // 5))
            results[arm].append(found)
            print(json.dumps({"arm": arm, **{k: round(v, 3) for k, v in found.items()}}), flush=True)
    median = lambda arm, key: statistics.median(found[key] for found in results[arm])  # noqa: E731
    print("| rollouts | s a step | steps/s, of the wave | tokens/s | oldest group, steps |\n|---|---|---|---|---|")
    for arm in ARMS:
        ratio, rate = median("wave", "seconds") / median(arm, "seconds"), f"{median(arm, 'tokens'):,.0f}"
        print(f"| {arm} | {median(arm, 'seconds'):.3f} | {ratio:.2f} × | {rate} | {median(arm, 'oldest'):.0f} |")


if __name__ == "__main__":
    main()
