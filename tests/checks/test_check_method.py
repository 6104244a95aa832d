"""A method that breaks the contract in one way is told so in words. Built-in ones: tests/recipes/test_every_method.py."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.batches import records_of

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.gate import Clip, Gate
from turnwise.algebra.term import Term
from turnwise.checks.method import check_method, sign_fault
from turnwise.cli.main import main
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe

# ------------------------------------------------------------- broken pieces


@dataclass(frozen=True)
class GainClip(Gate):
    """A clip as papers write it: the gain min(ρA, clip(ρ)A), where a gate must return the weight."""

    def __call__(self, rho, adv, view):
        return Clip(0.2, 0.2)(rho, adv, view) * adv


@dataclass(frozen=True)
class Backwards(Term):
    """The outcome with the wrong sign."""

    def __call__(self, batch):
        return -1.0 * batch.reward.sum(TRAJECTORY)


@dataclass(frozen=True)
class NoEpsilon(Term):
    """A z-score that divides by a spread of zero."""

    def __call__(self, batch):
        outcome = batch.reward.sum(TRAJECTORY)
        centred = outcome - outcome.mean(BATCH)
        return centred / (centred * centred).mean(BATCH).map(torch.sqrt)


@dataclass(frozen=True)
class MicroBatchMean(Gate):
    """Divides by the mean ratio of the micro-batch, which depends on the cut."""

    def __call__(self, rho, adv, view):
        return rho / rho.detach().mean(BATCH)


@dataclass(frozen=True)
class ByPosition(Term):
    """Weights a trajectory by its place in the batch."""

    def __call__(self, batch):
        place = Field(batch.tree, TRAJECTORY, torch.arange(1.0, 1.0 + batch.tree.count(TRAJECTORY)))
        return batch.reward.sum(TRAJECTORY) * place


@dataclass(frozen=True)
class Undeclared(Term):
    """Reads the critic without declaring it."""

    def __call__(self, batch):
        return batch.reward.sum(TRAJECTORY) - batch[Signal.OLD_VALUE].mean(TRAJECTORY)


calls = itertools.count(1)


@dataclass(frozen=True)
class HiddenState(Term):
    """Counts batches in a module variable, which no checkpoint holds."""

    def __call__(self, batch):
        return batch.reward.sum(TRAJECTORY) * float(next(calls))


@dataclass(frozen=True)
class AllPairs(Term):
    """Compares every token with every other."""

    def __call__(self, batch):
        x = batch.reward.at(TOKEN).x
        return batch.reward.at(TOKEN) + Field(batch.tree, TOKEN, (x[:, None] - x[None, :]).mean(1) * 0)


class Mutable(Term):
    """Holds a list, so it cannot be a key of the memory."""

    weights: list = field(default_factory=list)

    def __call__(self, batch):
        return batch.reward.sum(TRAJECTORY)


@dataclass(frozen=True)
class OfBatch(Term):
    def __call__(self, batch):
        return batch.reward.mean(BATCH)


@dataclass(frozen=True)
class BareTensor(Term):
    def __call__(self, batch):
        return batch.reward.x


GOOD = Recipe(advantage=Standardise(), gate=Clip(0.2, 0.28))
own_recipe = replace(GOOD, gate=Clip(0.1, 0.1))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (replace(GOOD, gate=GainClip()), "reinforces failures (12 of 12 become more likely)"),
        (replace(GOOD, gate=GainClip()), "the gate returns a gain"),
        (replace(GOOD, advantage=Backwards()), "the advantage of successes is below that of failures"),
        (replace(GOOD, advantage=NoEpsilon()), "not finite for rewards all equal"),
        (replace(GOOD, gate=MicroBatchMean()), "compute what depends on the whole step in `plan`"),
        (replace(GOOD, advantage=ByPosition()), "with the order of the trajectories"),
        (replace(GOOD, advantage=Undeclared()), "must declare it"),
        (replace(GOOD, advantage=HiddenState()), "keep it in `next_state`"),
        (replace(GOOD, advantage=AllPairs()), "times as large"),
        (replace(GOOD, advantage=Mutable()), "record: TypeError: unhashable type"),
        (replace(GOOD, advantage=OfBatch()), "the advantage is at BATCH"),
        (replace(GOOD, advantage=BareTensor()), "levels: AttributeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_method_is_told_what_is_wrong(recipe, words):
    report = check_method(recipe)
    assert not report.ok and any(words in problem for problem in report.problems), report.text()


def test_a_sound_recipe_passes_and_says_what_it_reads():
    report = check_method(replace(GOOD, advantage=Standardise() + 0.5 * Standardise()))
    assert report.ok and report.checked["gradient"].startswith("successes rise"), report.text()
    assert report.requires == () and "logp" in report.signals
    assert set(report.as_dict()) >= {"ok", "problems", "checked", "requires"}


def test_a_method_that_requires_something_says_so():
    assert "pairs" in check_method("dpo").requires
    assert check_method("sapo+hgpo").ok


@pytest.mark.parametrize(
    ("pushes", "words"),
    [
        ([1.0, -1.0], ""),
        ([1.0, 0.0], ""),  # learns from successes only
        ([0.0, -1.0], ""),
        ([0.0, 0.0], "no trajectory gets a gradient"),
        ([1.0, 0.1], "reinforces failures (1 of 1"),
        ([-0.1, -1.0], "discourages successes (1 of 1"),
        ([float("nan"), 1.0], "not finite"),
    ],
)
def test_signs(pushes, words):
    fault = sign_fault(torch.tensor(pushes), torch.tensor([True, False]))
    assert fault.startswith(f"it {words}" if words[:3] in ("rei", "dis") else "") and words in fault
    assert bool(fault) == bool(words)


# ------------------------------------------------------------------ command


def test_the_command_prints_the_report(capsys):
    assert main(["check-method", "grpo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grpo: ok\n") and "successes rise, failures fall" in out
    assert main(["check-method", f"{__name__}:own_recipe", "--json"]) == 0
    assert '"ok": true' in capsys.readouterr().out


def wrong() -> Recipe:
    return replace(GOOD, gate=GainClip())


def test_the_command_fails_for_a_broken_method(capsys):
    assert main(["check-method", f"{__name__}:wrong"]) == 1
    assert "reinforces failures" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["grop", "no_such_module:x", f"{__name__}:no_such_name", "grpo:", ""])
def test_an_unknown_name_is_refused_in_words(name, capsys):
    assert main(["check-method", name]) == 2
    assert "turnwise: " in capsys.readouterr().err
    with pytest.raises(SettingError):
        check_method(name)


def test_synthetic_groups_are_the_same_every_time_and_not_shared():
    one, two = (records_of([[[2], [1]]], 4) for _ in range(2))
    assert one == two and one is not two
    assert one[0].trajectories[0].turns[0].state is not None and TURN < TRAJECTORY
