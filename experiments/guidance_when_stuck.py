"""Guidance on tasks that the cold-started model does not solve: success without help after the same number of steps.

    python experiments/guidance_when_stuck.py OUT [steps] > experiments/results/guidance_when_stuck.json

Runs of `dr_grpo` on hard tasks of an environment, from the same cold-started model, with and without guidance. A pool of few
tasks comes back often. ``never`` is the number of tasks of the pool that the cold-started model solved in none of 64 tries;
``solved`` is the success rate on those after training, without help.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from turnwise import train
from turnwise.config.settings import Settings
from turnwise.core.seeds import stable_seed
from turnwise.training import build, engines
from turnwise.training.env_spec import EnvSpec

POOL, TRIES = 24, 64
RUN = {
    "method": "dr_grpo", "env": "countdown", "difficulty": (2,), "groups": 8, "group_size": 8, "cold_steps": 60, "eval_tasks": 0,
    "max_tokens": 16, "context": 256, "sampler": f"cycle,pool={POOL}", "trackers": (), "schedule": "constant", "seed": 1,
}  # fmt: skip
GUIDANCE = ("none", "ghpo", "scaf,warmup=0", "pope", "prefix", "adhint")


def success(settings: Settings, model_at: Path, tries: int) -> dict[str, float]:
    """Success rate without help by task of the pool."""
    env_spec = EnvSpec.from_settings(settings)
    renderer = build.make_renderer(settings, build.load_tokenizer(settings, env_spec, model_at))
    generator = engines.make_local_generator(settings, build.load_model(settings, 0, model_at), renderer)
    play, tasks = build.make_play(env_spec, renderer, build.sampling_settings(settings)), env_spec.tasks("train")
    drawn = [tasks.draw(n) for n in range(POOL)]

    async def run() -> list:
        plays = [(t, generator.open(stable_seed("try", t.key, i))) for t in drawn for i in range(tries)]
        return await asyncio.gather(*(play(f"{t.key}.{i}", t, s) for i, (t, s) in enumerate(plays)))

    played = asyncio.run(run())
    return {t.key: sum(bool(e.success) for e in played if e.task == t) / tries for t in drawn}


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    rows, never = [], list[str]()
    for spec in GUIDANCE:
        name = spec.split(",")[0]
        train(**RUN, steps=steps, guidance=spec, out=str(out), name=name, quiet=True)
        settings = Settings.of({**RUN, "steps": steps, "model": "tiny"})
        if not rows:
            before = success(settings, out / name / "initial", TRIES)
            never = [key for key, rate in before.items() if rate == 0]
        after = success(settings, out / name / "model", 16)
        solved = sum(after[key] for key in never) / max(1, len(never))
        pool = sum(after.values()) / POOL
        rows.append({"guidance": spec, "never": len(never), "solved": round(solved, 3), "pool": round(pool, 3)})
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"run": {**RUN, "steps": steps}, "rows": rows}, indent=1, default=list))


if __name__ == "__main__":
    main()
