"""Drafts explore, the exact policy samples the extremes again: who is kept, with which random numbers, by which engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.episodes import Resting

from turnwise import recipes
from turnwise.core.records import Status, Task, Trajectory, Turn
from turnwise.engines.generator.paired_generators import DraftingGenerator
from turnwise.errors import RecipeError, SettingError
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import DraftSelection, GroupRequest, Independent, extremes
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec, RunPlan, resolve_settings
from turnwise.training.refusals import LOADED, WITH_RECIPE, refuse
from turnwise.training.step_records import describe

TASK = Task("x", 0)


def grown(rewards, size, drafts=0, failed=()):
    """A group whose i-th draft earns ``rewards[i]``, and the sessions it opened: (drafts, exact ones)."""
    opened = {True: [], False: []}

    def open_session(i, draft=False):
        assert i == len(opened[draft])
        opened[draft].append(Resting())
        return opened[draft][-1]

    async def play(key, task, session):
        draft = session in opened[True]
        i = opened[draft].index(session)
        status = Status.FAILED if i in failed else Status.FINISHED
        return Trajectory(key, task, (Turn((1,), (i,), (-0.1,), version=(0,), reward=rewards[i]),), status=status)

    grow = DraftSelection(drafts).begin(GroupRequest("g", TASK, size, open_session, play))
    assert len(opened[True]) == len(opened[False]) == (drafts or 4 * size), "the whole wave is known at once"
    return asyncio.run(grow), opened


def test_the_best_and_the_worst_are_played_again():
    group, opened = grown([0.2, 0.9, 0.1, 0.5, 0.9, 0.0, 0.3, 0.4], 4, drafts=8)
    assert [t.id for t in group.trajectories] == ["g.1", "g.2", "g.4", "g.5"]
    assert [t.facts["draft"] for t in group.trajectories] == [0.9, 0.1, 0.9, 0.0]
    assert sum(t.facts["draft_tokens"] for t in group.trajectories) == 8
    assert describe([group], 0)["tokens/drafts"] == 8 and describe([group], 0)["tokens"] == 4
    assert all(s.parked for s in opened[False]) and not any(s.parked for s in opened[True])
    assert [i for i, s in enumerate(opened[False]) if not s.closed] == [1, 2, 4, 5]


def test_failed_drafts_are_the_last_resort():
    group, _ = grown([0.5, 0.9, 0.1, 0.2], 2, drafts=4, failed={1, 2})
    assert [t.id for t in group.trajectories] == ["g.0", "g.3"]
    group, _ = grown([0.5, 0.9, 0.1, 0.2], 3, drafts=4, failed={1, 2, 3})
    assert [t.id for t in group.trajectories] == ["g.0", "g.1", "g.2"]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=12), st.integers(1, 12))
def testextremes(values, size):
    """Law: as many as asked for, each once; nobody left out is better than one of the best, or worse than one of the worst."""
    chosen = extremes(values, size)
    assert len(set(chosen)) == len(chosen) == min(size, len(values))
    if len(values) > size:
        best, worst = chosen[: (size + 1) // 2], chosen[(size + 1) // 2 :]
        left = [values[i] for i in range(len(values)) if i not in chosen]
        assert max(left) <= min(values[i] for i in best)
        assert not worst or min(left) >= max(values[i] for i in worst)


def test_too_few_drafts_are_refused():
    with pytest.raises(RecipeError, match="3 drafts for groups of 4; write at least as many"):
        few = {"method": "sol_rl", "env": "calculator", "group_size": 4, "method_options": {"drafts": 3}}
        refuse(RunPlan(resolve_settings(few)), WITH_RECIPE)
    with pytest.raises(RecipeError, match="drafts is -1"):
        DraftSelection(-1)


# ------------------------------------------------------------------- real engines


@pytest.fixture(scope="module")
def stage():
    chosen = replace(
        resolve_settings({"env": "calculator"}), hidden=32, layers=1, slots=16, max_tokens=12, eval_tasks=2
    )
    env_spec = EnvSpec.from_settings(chosen)
    tokenizer = build.load_tokenizer(chosen, env_spec)
    return chosen, env_spec, Renderer(tokenizer), build.load_model(chosen, len(tokenizer))


def played(stage, strategy, drafts):
    chosen, env_spec, renderer, model = stage
    recipe = replace(recipes.build("sol_rl"), precision=replace(recipes.build("sol_rl").precision, drafts=drafts))
    generator = engines.make_generator(chosen, recipe, model, renderer, True, 8)
    play = build.make_play(env_spec, renderer, build.sampling_settings(chosen))
    open_session = lambda i, draft=False: generator.open(i, draft)  # noqa: E731
    group = asyncio.run(_alone(strategy.begin(GroupRequest("0", Task("calculator", 3), 4, open_session, play))))
    return group, generator


async def _alone(grow):
    return await grow


def test_an_exact_draft_is_given_back_to_the_letter(stage):
    """Identity: in equal numbers the second sampling is the first, and with as many drafts as trajectories nothing is chosen."""
    screened, generator = played(stage, DraftSelection(4), "float32")
    plain, _ = played(stage, Independent(), "")
    said = lambda group: [[turn.tokens for turn in t.turns] for t in group.trajectories]  # noqa: E731
    assert said(screened) == said(plain) and len(said(plain)) == 4
    assert all(t.facts["draft"] == t.reward for t in screened.trajectories)
    assert isinstance(generator, DraftingGenerator) and "drafts: " in generator.describe()


def test_drafts_are_sampled_in_fp8_and_what_is_kept_is_not(stage):
    model = stage[-1]
    _, generator = played(stage, DraftSelection(8), "fp8")
    drawn = generator.stats()
    assert drawn["drafts/tokens"] > drawn["tokens"] > 0
    assert "fp8" in generator.second.describe() and "fp8" not in generator.main.describe()

    async def publish():
        await generator.publish({n: p * 0 for n, p in model.named_parameters()}, 5)

    asyncio.run(publish())
    assert generator.version == generator.main.version == generator.second.version == 5
    for engine in (generator.main, generator.second):
        assert not any(p.any() for p in engine.model_runner.model.parameters())


@pytest.mark.parametrize(("method", "precision"), [("jet_rl", ("fp8", "auto")), ("sol_rl", ("auto", "auto"))])
def test_a_method_says_in_which_numbers_unless_somebody_else_does(method, precision):
    chosen = resolve_settings({"method": method, "env": "calculator"})
    made = RunPlan.from_settings(chosen).settings
    assert (made.dtype, made.rollout_dtype) == precision
    other = replace(chosen, dtype="float32", rollout_dtype="bfloat16")
    assert RunPlan.from_settings(other).settings == other


def test_fp8_rollouts_need_a_learner_or_a_method_that_knows():
    for method, more in (("reinforce", {"dtype": "fp8"}), ("grpo", {}), ("tis", {}), ("jet_rl", {})):
        chosen = resolve_settings({"method": method, "env": "calculator", "rollout_dtype": "fp8", **more})
        refuse(RunPlan.from_settings(chosen), (*WITH_RECIPE, *LOADED))
    for method in ("reinforce", "rloo_kl"):  # the second measures the learner's old policy, for its reward alone
        with pytest.raises(SettingError, match="--dtype fp8"):
            chosen = resolve_settings({"method": method, "env": "calculator", "rollout_dtype": "fp8"})
            refuse(RunPlan(chosen), WITH_RECIPE)
    assert torch.float8_e4m3fn == engines.rollout_dtype(resolve_settings({"dtype": "fp8"}))
