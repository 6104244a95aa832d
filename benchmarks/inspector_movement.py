"""How well what the inspector shows agrees with how far tokens really moved.

    python benchmarks/inspector_movement.py RUN     # of a finished run; without RUN the default run is trained first

Correlations of pushes with the measured movement, step by step, and their means. For the last step, whose weights are the run's
model, the log-probabilities are computed a second time by the stock forward pass of Transformers.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import turnwise
from turnwise.inspector.factors.movement import agreement, correlation, movements, pushes
from turnwise.inspector.queries import RunReader


def second_opinion(run: RunReader, step: int) -> float:
    """The correlation of the stored movement of a step with that under the run's model, computed by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float32).eval()
    stated, real = [], []
    for update in run.token_columns(step):
        for name in update.trajectories:
            columns, ids, after = update.of(name), list[int](), list[float]()
            for turn in run.trajectory(name).turns:
                ids = [*([] if turn.restart else ids), *turn.context, *turn.tokens]
                with torch.no_grad():
                    logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                after += [float(logp[at - 1, ids[at]]) for at in range(len(ids) - len(turn.tokens), len(ids))]
            if np.isfinite(columns["after"]).all():
                stated.append(columns["after"] - columns["logp"])
                real.append(np.array(after) - columns["logp"])
    return correlation(np.concatenate(stated), np.concatenate(real)) if stated else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="")
    path = parser.parse_args().run or turnwise.train(remeasure_tokens=512, out=tempfile.mkdtemp(), quiet=True)["run"]
    with RunReader(path) as run:
        rows, steps = list[tuple[float, ...]](), run.kept_steps()
        for step in steps:
            for update in run.token_columns(step):
                one, moved, push = agreement(update), movements(update), pushes(update)
                seen = np.isfinite(moved)
                rows.append((one.measured, correlation(push[seen], moved[seen]), one.tokens, one.trajectories, one.same_sign))
        measured, push, logit, sums, same = np.nanmean(np.array(rows, float), axis=0)
        seconds = [(r["seconds/measured_after"] or 0.0, r["seconds"]) for r in run.metrics() if r["seconds"]]
        part, whole = map(sum, zip(*seconds))
        print(f"{len(rows)} updates, {measured:.0f} tokens measured in each; {part:.1f} s, {part / whole:.1%} of the steps")
        print(f"push of a token                      {push:.2f}")
        print(f"push on its own logit                {logit:.2f}")
        print(f"the same, summed over a trajectory   {sums:.2f}")
        print(f"pushed tokens that moved the same way {same:.0%}")
        print(f"stored movement and Transformers, step {steps[-1]}: {second_opinion(run, steps[-1]):.4f}")


if __name__ == "__main__":
    main()
