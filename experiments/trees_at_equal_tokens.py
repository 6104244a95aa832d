"""Complete trajectories for the same number of sampled tokens: trees against independent sampling, and the time they take.

    python experiments/trees_at_equal_tokens.py RUN [groups] > experiments/results/trees_KEYDOOR.json

RUN is a run directory: its initial model (after the cold start) plays. Each strategy grows groups of 16 on the same tasks;
``per_token`` is complete trajectories for each 1,000 sampled tokens, ``gain`` that number over independent sampling, and
``prefill`` the prompt tokens the generator computed, without those it found in its cache.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from turnwise.config.settings import Settings
from turnwise.core.seeds import stable_seed
from turnwise.recipes.experience import piece
from turnwise.rollout.strategies import GroupRequest
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec

SIZE = 16
STRATEGIES = (
    "independent", "branch,trunks=4,where=even", "arpo,trunks=8", "arpo,trunks=4", "spo_tree,factors=4/2/2,segment=8",
    "spo_tree,factors=2/2/2/2,segment=8", "latr,share=0.75,look=4",
)  # fmt: skip


def grow(spec: str, settings: Settings, model_at: Path, groups: int) -> dict[str, float]:
    env_spec = EnvSpec.from_settings(settings)
    tokenizer = build.load_tokenizer(settings, env_spec, model_at)
    renderer = build.make_renderer(settings, tokenizer)
    generator = engines.make_local_generator(settings, build.load_model(settings, 0, model_at), renderer)
    play = build.make_play(env_spec, renderer, build.sampling_settings(settings))
    tasks, strategy = env_spec.tasks("train"), piece("strategy", spec)

    def request(g: int) -> GroupRequest:
        return GroupRequest(str(g), tasks.draw(g), SIZE, lambda i, draft=False: generator.open(stable_seed(g, i)), play)

    async def run() -> list:
        return await asyncio.gather(*[strategy.begin(request(g)) for g in range(groups)])

    began = time.perf_counter()
    members = [t for group in asyncio.run(run()) for t in group.trajectories]
    sampled = generator.stats()["tokens"]  # with those of forks that were dropped
    return {
        "trajectories": len(members), "tokens": sampled, "per_token": round(1000 * len(members) / sampled, 2),
        "successes": sum(bool(t.success) for t in members), "prefill": generator.stats()["prefill_tokens"],
        "seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


def main() -> None:
    run, groups = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16
    stored = json.loads((run / "run.json").read_text())
    settings = Settings.of(stored.get("settings", stored))
    rows = []
    for spec in STRATEGIES:
        rows.append({"strategy": spec, **grow(spec, settings, run / "initial", groups)})
        rows[-1]["gain"] = round(rows[-1]["per_token"] / rows[0]["per_token"], 2)
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"env": settings.env, "groups": groups, "size": SIZE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
