"""Records of papers and code: what a file may say, that a recipe does what its record says, and that nothing claims more."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from support import facts

from turnwise import recipes
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.gate import CappedWeight, Clip
from turnwise.algebra.penalty import KL, WeightedPenalty
from turnwise.algebra.ratio import Importance, Product
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN
from turnwise.errors import RecipeError
from turnwise.recipes import experience, provenance
from turnwise.recipes.catalogue import family_of, record_of
from turnwise.recipes.provenance import UNKNOWN, ClipBounds, KLTerm, Optimiser

RECORDED = [name for name in recipes.METHODS if record_of(name)]
UNRECORDED: dict[str, int] = {}  # methods of a family without a record, whose docstring still says what they are sure of: none

MINIMAL = """
[repositories]
verl = { address = "github.com/volcengine/verl", commit = "b178a3cd56f58b2d502255daba591e92833930a7", whose = "trainer" }
[grpo]
paper = "arXiv 2402.03300"
code = { verl = ["core_algos.py: agg_loss"] }
origin = "paper"
ratio = "token"
average = "trajectory"
kl = { estimator = "k3", weight = 0.04, place = "loss" }
normaliser = "std"
clip = { low = 0.2, high = 0.2 }
rows = "trajectory"
optimiser = { epochs = 1, minibatches = 1 }
"""


# ------------------------------------------------------------------ the facts


def same(said: object, does: object) -> bool:
    """A fact of a record beside what was measured on the pieces."""
    if isinstance(said, ClipBounds) and isinstance(does, ClipBounds):
        pairs = [(said.low, does.low), (said.high, does.high), (said.dual or 0.0, does.dual or 0.0)]
        return all(a == pytest.approx(b, rel=1e-3, abs=1e-6) for a, b in pairs)
    if isinstance(said, Optimiser):
        return said.updates in (None, does)
    return said == does


def deviations(name: str) -> dict[str, str]:
    """Each fact of a method in which recipe and record disagree."""
    record, does = record_of(name), facts.read(recipes.build(name))
    compared = {fact: said for fact, said in record.facts.items() if said != UNKNOWN and does[fact] is not None}
    return {fact: f"{said} there, {does[fact]} here" for fact, said in compared.items() if not same(said, does[fact])}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recipe_does_what_its_record_says(name):
    """Or the record says in which fact it differs, and why; a difference that is not there is a mistake, too."""
    record, does, found = record_of(name), facts.read(recipes.build(name)), deviations(name)
    silent = {fact: what for fact, what in found.items() if fact not in record.differs}
    assert not silent, f"mend the recipe, or say why it differs: {silent}"
    readable = {fact for fact in record.differs if does[fact] is not None}
    assert readable <= set(found), f"the recipe does what the record says: {sorted(readable - set(found))}"


CHANGES = {  # a recipe, changed in one slot: the probe sees it, and only it
    "ratio": [
        ({"ratio": Importance(TRAJECTORY)}, "trajectory"),
        ({"ratio": Importance(TURN)}, "turn"),
        ({"ratio": Product(TRAJECTORY)}, "trajectory product"),
    ],
    "average": [({"aggregate": Mean(TOKEN)}, "token"), ({"aggregate": Sum(TURN)}, "sum over turn"),
                ({"aggregate": Sum(TRAJECTORY, length=7.0)}, "constant")],
    "clip": [({"gate": Clip(0.1, 0.28, 3.0)}, ClipBounds(low=0.1, high=0.28, dual=3.0)), ({"gate": CappedWeight(2.0)}, "none")],
    "kl": [({"penalties": ()}, "none"),
           ({"penalties": (WeightedPenalty(0.5, KL("k2")),)}, KLTerm(estimator="k2", weight=0.5, place="loss"))],
}  # fmt: skip


def test_a_changed_slot_is_seen():
    base = recipes.build("grpo")
    before = facts.read(base)
    assert (
        before["ratio"] == "token"
        and before["average"] == before["rows"] == "trajectory"
        and before["normaliser"] == "std"
    )
    for fact, changes in CHANGES.items():
        for slots, expected in changes:
            found = facts.read(dataclasses.replace(base, **slots))
            assert same(expected, found.pop(fact)), (fact, slots)
            assert {f: v for f, v in found.items() if not same(v, before[f])} == {}


def test_normalisers_and_votes_are_told_apart():
    read = lambda name, **hyper: facts.read(recipes.build(name, **hyper))  # noqa: E731
    assert [read(name)["normaliser"] for name in ("rloo", "grpo", "ppo", "vcpo")] == [
        "none",
        "std",
        "batch std",
        "population std",
    ]
    assert read("gigpo", rows="turn")["rows"] == "turn" and read("gigpo", rows="trajectory")["rows"] == "trajectory"
    assert read("rloo_kl")["kl"] == KLTerm(estimator="k1", weight=0.03, place="reward")


# ----------------------------------------------------------------- the files


def test_every_record_is_of_a_method_or_piece():
    names: dict[str, set[str]] = {}
    for slot, module in experience.MODULES.items():
        names[module.__name__.rsplit(".", 1)[-1]] = set(experience.SLOTS[slot])
    for name in recipes.METHODS:
        names.setdefault(family_of(name), set()).add(name)
    for path in sorted(provenance.FOLDER.glob("*.toml")):
        assert set(provenance.records(path.stem)) <= set(names[path.stem]), path.name
        of_methods = (r for name, r in provenance.records(path.stem).items() if name in recipes.METHODS)
        assert all(record.facts for record in of_methods) or path.stem not in map(family_of, recipes.METHODS), path.name


def test_a_record_reads_back():
    record = provenance.read(MINIMAL, "x")["grpo"]
    assert record.facts["clip"] == ClipBounds(low=0.2, high=0.2) and record.facts["optimiser"].updates == 1
    assert record.sure_of.startswith("the formula, ratio, average over, KL") and record.sure_of.endswith("(paper)")
    assert "github.com/volcengine/verl at b178a3cd56f5: core_algos.py: agg_loss" in record.lines()["Code"]


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('ratio = "token"', 'ratio = "tokn"', "ratio = 'tokn'; write one of: none, token"),
        ('ratio = "token"', "", "name all of"),
        ('rows = "trajectory"', 'rows = "trajectory"\nspeed = 3', "Record has"),
        ("low = 0.2, ", "", "missing ['low']"),
        ("code = { verl =", "code = { other =", "no repository 'other'"),
        ("b178a3cd56f58b2d502255daba591e92833930a7", "main", "is not 40 hex digits"),
        ('origin = "paper"', 'origin = "hearsay"', "no origin 'hearsay'"),
        ('place = "loss"', 'place = "gate"', "not in 'gate'"),
        ('origin = "paper"', 'origin = "paper"\ndiffers = { clip = "why" }', "a sentence"),
        ('origin = "paper"', 'origin = "paper"\ndiffers = { speed = "Because." }', "no fact 'speed'"),
        (
            'code = { verl = ["core_algos.py: agg_loss"] }\norigin = "paper"',
            'origin = "code"',
            "code without its files",
        ),
    ],
)
def test_a_wrong_record_is_refused(old, new, words):
    assert old in MINIMAL
    with pytest.raises(RecipeError, match=re.escape(words)):
        provenance.read(MINIMAL.replace(old, new), "x")


def test_claims_stand_in_records():
    """A method without a record says less every time; one with a record leaves "Sure of" to it."""
    waiting: dict[str, int] = {}
    for name in recipes.METHODS:
        doc = recipes.method(name).__doc__ or ""
        assert ("Sure of:" in doc) is not bool(record_of(name)), f"{name}: its record says that, or nothing does"
        if not record_of(name):
            waiting[family_of(name)] = waiting.get(family_of(name), 0) + 1
    assert waiting == {family: count for family, count in UNRECORDED.items() if count}


PIECES = [(slot, name) for slot, pieces in experience.SLOTS.items() for name in pieces]


@pytest.mark.parametrize("slot, name", PIECES)
def test_a_published_piece_has_its_record(slot, name):
    """Who says what stands there and nowhere else; without a paper there is nothing to record."""
    doc = experience.find(slot, name).__doc__ or ""
    record = provenance.records(experience.MODULES[slot].__name__.rsplit(".", 1)[-1]).get(name)
    assert bool(record) is ("Paper:" in doc), "write its record, or name its paper"
    assert "Sure of:" not in doc and "official code" not in doc, "its record says that"
    described = experience.describe_piece(slot, name)
    assert described["sure of"] == (record.sure_of if record else "–")
    if record:
        assert re.findall(r"\d{4}\.\d{5}", doc) == re.findall(r"\d{4}\.\d{5}", record.paper), "one paper in both"
        assert {"Left out": described["deviation"]} | described["sources"] == {"Left out": "–"} | record.lines()


def test_a_changed_default_of_a_piece_is_seen():
    """Numbers that the released configurations have, by the file of the record that names them."""
    defaults = lambda slot, name: experience.describe_piece(slot, name)["parameters"]  # noqa: E731
    released = {
        ("strategy", "arpo"): {"width": 2, "chance": 0.5, "weight": 0.2},  # ARPO_7B_Reasoning_1node.sh
        ("strategy", "latr"): {"near": 0.4},  # BranchDynamicParam
        ("strategy", "echo"): {"high": 3.5, "confident": 1.2, "most": 4},  # ppo_trainer.yaml
        ("guidance", "ghpo"): {"shares": "0.25/0.5/0.75", "begin": 0},  # config_ghpo.yaml, the trainer's three prompts
        ("replay", "arpo_gui"): {"capacity": 8, "least": 0.1, "spread": 0.05, "mean": 0.2},  # apply_replay
        ("replay", "spear"): {"oldest": 10, "size": 2048},  # ppo_trainer.yaml
        ("sampler", "spo"): {"floor": 0.05, "keep": 0.96},  # EXPLORATION_EPSILON, the upper bound of rho
        ("sampler", "mmr1"): {"share": 0.5, "momentum": 0.0},  # mmr1.yaml
        ("sampler", "gain_rl"): {"step": 500.0, "slope": 2.0, "target": 0.5, "inter": 8.0},  # update_dataset, main
    }
    for place, numbers in released.items():
        assert {key: defaults(*place)[key] for key in numbers} == numbers, place


def test_pages_claim_no_code_without_a_record():
    docs = Path(__file__).parents[2] / "docs"
    pages = [page for page in docs.glob("*.md") if page.name != "changelog.md"]
    assert [page.name for page in pages if "official code" in page.read_text(encoding="utf-8")] == []
