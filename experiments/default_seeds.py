"""Five seeds of the default run: success before and after, time and memory. The table behind the README's claim.

    python experiments/default_seeds.py                      the default method, seeds 0-4
    python experiments/default_seeds.py --methods rloo grpo  several methods from the same cold starts, side by side

Runs are sequential: one run uses two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from turnwise.config.settings import Settings


def run(method: str, seed: int, out: Path, steps: int, initial: Path | None) -> dict:
    """One whole run in its own process, so that memory and time are measured separately."""
    command = [sys.executable, "-m", "turnwise.cli.main", "train", method, "--seed", str(seed), "--steps", str(steps)]
    command += ["--out", str(out), "--name", f"{method}-{seed}", "--json"]
    if initial is not None:
        command += ["--model", str(initial), "--cold-steps", "0"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    summary = json.loads(done.stdout)
    return {
        "method": method,
        "seed": seed,
        "before": summary["success_before"]["success"],
        "after": summary["success_after"]["success"],
        "interval": summary["success_after"]["interval"],
        "seconds": round(time.perf_counter() - began, 1),
        "tokens": summary["tokens"],
        "peak_mb": summary["peak_memory_mb"],
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| method | seed | before | after | 95 % interval | points | s | sampled tokens | peak MB |",
        "|" + "---|" * 9,
    ]
    for r in rows:
        low, high = r["interval"]
        gain = 100 * (r["after"] - r["before"])
        lines.append(
            f"| {r['method']} | {r['seed']} | {r['before']:.1%} | {r['after']:.1%} | {low:.1%} – {high:.1%} | {gain:+.1f} "
            f"| {r['seconds']:.0f} | {r['tokens']:,} | {r['peak_mb']:.0f} |"
        )
    good = sum(r["after"] >= 0.95 and r["after"] - r["before"] >= 0.40 for r in rows)
    return "\n".join([*lines, "", f"{good} of {len(rows)} reach 95 % and gain 40 points."])


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="+", default=[default.method])
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"seeds-{int(time.time())}")
    parser.add_argument("--write", type=Path, help="write the table here as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, started = [], {}
    for seed in options.seeds:
        for method in options.methods:
            rows.append(run(method, seed, options.out, options.steps, started.get(seed)))
            started.setdefault(seed, options.out / f"{method}-{seed}" / "initial")  # later methods share its cold start
            print(json.dumps(rows[-1]) if options.json else table(rows[-1:]).splitlines()[2], flush=True)
    if not options.json:
        print(table(rows))
    if options.write:
        options.write.write_text(f"# Seeds\n\n`python experiments/default_seeds.py`\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
