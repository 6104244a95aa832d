"""Your own method: one new piece, checked by hand on padded tensors, then trained with.

The piece is a gate, the part of a method that limits how far one update may move the policy. PPO's clip removes the gradient
of a token at once when its importance ratio leaves 1 ± 0.2; `Taper` lets it fade linearly instead. Everything else (baseline,
averaging, sampling) is taken from `grpo`. The environment is that of `own_environment.py`.

    python examples/own_method.py               about 20 seconds on two cores
"""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

from turnwise import Field, recipes, train
from turnwise.algebra.gate import Gate, score_function
from turnwise.algebra.piece import MicroBatchView
from turnwise.integrations import padded


class Taper(Gate):
    """w = max(0, 1 − |ρ − 1| / width), with the gradient of log π.

    A gate maps the importance ratio ρ and the advantage A to a weight; the objective is weight · A. Both are fields: they
    know their level, so there is no mask and no shape to handle.
    """

    width: float = 0.5

    def __call__(self, rho: Field, adv: Field, now: MicroBatchView) -> Field:
        distance = (rho.detach() - 1).map(torch.abs)
        return (1 - distance / self.width).clamp(low=0.0) * score_function(now)


def gradient_by_ratio() -> list[float]:
    """The gradient of one token at several ratios: 1 at ρ = 1, fading to 0 at ρ = 1 ± width."""
    recipe = replace(recipes.build("grpo", beta=0.0), gate=Taper(0.5))
    mask, rewards, group = torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    found = []
    for ratio in (1.0, 1.25, 1.5):
        old = torch.full((2, 1), -2.0)
        logp = (old + torch.tensor([[ratio], [1.0]]).log()).requires_grad_()
        loss, _ = padded.loss(recipe, logp, old, mask, reward=rewards, group=group)
        loss.backward()
        found.append(abs(float(logp.grad[0, 0])))
    return [value / found[0] for value in found]


def main(steps: int = 12, cold_steps: int = 100, eval_tasks: int = 60) -> dict:
    """Print the gradient by ratio, then train; returns the summary of the run."""
    print("gradient at ρ = 1, 1.25, 1.5 (relative):", [round(value, 3) for value in gradient_by_ratio()])
    recipe = replace(recipes.build("grpo", beta=0.0), gate=Taper(0.5))
    print("slots:", {slot: piece for slot, piece in recipe.slots().items() if slot in ("advantage", "ratio", "gate")})
    with tempfile.TemporaryDirectory() as folder:
        summary = train(
            recipe=recipe, env="own_environment:Shop", difficulty=(1,), steps=steps, epochs=2, groups=4, group_size=8, hidden=128,
            cold_steps=cold_steps, eval_tasks=eval_tasks, trackers=(), out=folder,
        )  # fmt: skip
    before, after = summary["success_before"], summary["success_after"]
    low, high = after["interval"]
    print(
        f"success: {before['success']:.0%} before RL, {after['success']:.0%} [{low:.0%}, {high:.0%}] after {steps} steps"
    )
    return summary


if __name__ == "__main__":
    main()
