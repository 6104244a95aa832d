"""The views over runs of other kinds: rows of a file without rollouts, a run that crashed, trees of forked rollouts."""

from __future__ import annotations

import json

import pytest
from support.finished_runs import SMALL

from turnwise.inspector.page import step_cache
from turnwise.inspector.page.blocks import ViewQuery, as_json
from turnwise.inspector.page.render import render_page
from turnwise.inspector.page.views.table import OF_ROLLOUTS, OTHER_PAGES, VIEWS, show_view
from turnwise.inspector.queries import RunReader
from turnwise.store.rundir import RunDir
from turnwise.training import api

pytestmark = pytest.mark.slow(tier="test")


class Crash(Exception):
    """What ends the crashing run."""


def crash(event, facts):
    if event == "step" and facts.get("step") == 2:
        raise Crash


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("crashed")
    with pytest.raises(Crash):
        api.train(crash, method="grpo", out=str(out), name="crashed", **{**SMALL, "cold_steps": 1, "quiet": False})
    readers = {name: RunReader(path) for name, path in
               (("pairs", finished("pairs")), ("crashed", out / "crashed"), ("tree", finished("tree")))}  # fmt: skip
    yield readers
    for reader in readers.values():
        reader.close()


@pytest.mark.parametrize("name", ["pairs", "crashed", "tree"])
@pytest.mark.parametrize("view", [*VIEWS, *OTHER_PAGES])
def test_every_view_opens(runs, name, view):
    for query in (ViewQuery(), ViewQuery(step=1, token=0)):
        page = show_view(view, runs[name], query)
        assert page.blocks and json.loads(json.dumps(as_json(page)))["title"] == page.title
        assert page.title in render_page(page, name, [])


@pytest.mark.parametrize("view", OF_ROLLOUTS)
def test_rows_of_a_file_are_named_where_rollouts_are_missing(runs, view):
    assert "rows of a file" in render_page(show_view(view, runs["pairs"], ViewQuery()), "pairs", [])
    assert "rows of a file" not in render_page(show_view(view, runs["tree"], ViewQuery()), "tree", [])


def test_a_real_tree_is_drawn_as_a_tree(runs):
    group = runs["tree"].groups(step=1)[0]
    forks = sum(t.fork is not None for t in runs["tree"].group(group.id).trajectories)
    html = render_page(show_view("siblings", runs["tree"], ViewQuery(group=group.id)), "tree", [])
    assert forks > 0 and html.count('class="branch"') == forks


def test_a_crashed_run_has_no_summary_and_shows_its_steps(runs):
    assert runs["crashed"].summary is None and runs["crashed"].steps()


@pytest.mark.parametrize("view", [*VIEWS, *OTHER_PAGES])
def test_a_run_without_rollouts_opens(tmp_path, view):
    """A run at its cold start has no ledger."""
    with RunReader(RunDir.create(tmp_path, "cold", {"method": "grpo", "env": "guess", "steps": 3}).path) as run:
        html = render_page(show_view(view, run, ViewQuery()), "cold", [])
        assert ("no rollouts yet" if view != "overview" else "not finished a step") in html


def test_the_factors_of_an_update_are_computed_once(runs):
    run = runs["tree"]
    step, trajectory = run.kept_steps()[-1], run.token_columns(run.kept_steps()[-1])[0].trajectories[0]
    step_cache._factors.cache_clear()
    for token in (0, 1):
        show_view("why", run, ViewQuery(step=step, trajectory=trajectory, token=token))
    assert step_cache._factors.cache_info().misses == 1


def test_many_trajectories_are_read_at_once(runs):
    run = runs["tree"]
    ids = [row.id for row in run.trajectories()]
    assert run.stored_trajectories(ids) == {one: run.trajectory(one) for one in ids}
