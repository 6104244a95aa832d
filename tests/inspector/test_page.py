"""The page as data, as HTML and over HTTP: every view of a real run, hostile texts, the token, and nothing outside the run."""

import html as html_module
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.core.records import Fork, Group, Task, Trajectory, Turn
from turnwise.errors import SettingError, StoreError
from turnwise.inspector.factors.movement import agreement, pushes_in_context
from turnwise.inspector.factors.stored_step import StoredStep
from turnwise.inspector.page.blocks import DataTable, ViewPage, ViewQuery, as_json, curves
from turnwise.inspector.page.render import render_export, render_page
from turnwise.inspector.page.serving import export_view, find_runs, view_json
from turnwise.inspector.page.views.groups import classify
from turnwise.inspector.page.views.opening import telling_step
from turnwise.inspector.page.views.table import OTHER_PAGES, VIEWS, show_view
from turnwise.inspector.page.views.tokens import impossible_methods, movement_sentence, push_sentence
from turnwise.inspector.page.views.transcripts import transcript
from turnwise.inspector.queries import RunReader, StepMetrics, TaskRow
from turnwise.observe.charts import LineChart, Series, line_chart
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.store.token_columns import TokenColumns

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\u202eabc\x1b[2J\x00 </div>{{ 7*7 }}"


@pytest.fixture(scope="module")
def trained(finished):
    with RunReader(finished("grpo")) as run:
        yield run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run nobody trained: hostile texts everywhere, a tree of forks, a turn of one megabyte, no metrics."""
    folder = RunDir.create(tmp_path_factory.mktemp("hostile"), "bad", {"method": HOSTILE, "env": HOSTILE})
    task, long = Task(f"x{HOSTILE}", 1), Turn((1,), tuple(range(250_000)), reward=1.0)
    messages = ({"role": HOSTILE, "content": HOSTILE}, {"role": "user", "content": "a" * 1_000_000})
    turn = Turn((1, 2), (3, 4), (-1.0, -2.0), reward=0.5, agent=HOSTILE)
    root = Trajectory("root", task, (turn, turn), messages=messages, reason=HOSTILE, success=True)
    forks = [replace(root, id=f"fork{i}", fork=Fork("root", 0, 1), turns=(turn,), success=False) for i in range(3)]
    group = Group("g<b>", task, (root, *forks, replace(root, id="long", turns=(long,))))
    with SqliteLedger(folder.ledger) as ledger:
        ledger.issue(group.id, task, 0, 0)
        ledger.finish(group, 0)
        ledger.drop(group.id, HOSTILE, 0)
    with RunReader(folder.path) as run:
        yield run


def is_harmless(html: str) -> bool:
    tags = re.findall(r"<(script|img|iframe|object|b)\b[^>]*>", html)
    inline = [
        t for t in re.findall(r"<script\b[^>]*>", html) if "/static/page.js" not in t and "application/json" not in t
    ]
    return not inline and "img" not in tags and "b" not in tags and "\x1b" not in html and "\u202e" not in html


@pytest.mark.parametrize("view", [*VIEWS, *OTHER_PAGES])
def test_every_view_of_a_run(trained, view):
    for query in (ViewQuery(), ViewQuery(step=2, token=1, search="guess")):
        page = show_view(view, trained, query)
        assert page.blocks
        assert json.loads(json.dumps(as_json(page)))["title"] == page.title
        assert page.title in render_page(page, trained.name, [("/r/0/overview", trained.name)])


@pytest.mark.parametrize("view", [*VIEWS, *OTHER_PAGES])
def test_a_transcript_is_text(hostile, view):
    for query in (ViewQuery(), ViewQuery(step=1, search="a", trajectory="root", group="g<b>", token=1)):
        page = show_view(view, hostile, query)
        html = render_page(page, hostile.name, [("/r/0/overview", hostile.name)])
        assert is_harmless(html)
        assert is_harmless(render_export(page, hostile.name))
        assert len(html) < 3_000_000


def test_a_long_turn_is_cut_and_the_rest_a_link_away(hostile):
    first = render_page(show_view("why", hostile, ViewQuery(trajectory="long")), "bad", [])
    assert "tokens 2000 to 250000" in first
    later = show_view("why", hostile, ViewQuery(trajectory="long", offset=4000))
    assert "[4000]" in render_page(later, "bad", [])


def test_forks_are_drawn_as_a_tree(hostile):
    html = render_page(show_view("siblings", hostile, ViewQuery(group="g<b>")), "bad", [])
    assert html.count('class="branch"') == 3


def test_the_factors_agree_with_the_step(trained):
    trajectory = trained.trajectories(step=1, limit=1)[0].id
    text = view_json(trained, "why", ViewQuery(trajectory=trajectory, step=1, token=0))
    assert "The recomputed push equals the one that the step applied" in text
    assert '"Factors"' in text and '"Siblings"' in text and "``" not in text
    right = next(block for block in json.loads(text)["blocks"] if block["kind"] == "SideBySide")["right"]
    chain = next(block for block in right if block.get("title") == "Factors")["rows"]
    value, numbers = next((row[1], row[3]) for row in chain if row[0] == "advantage")
    shown = re.match(r"\((.+) − (.+)\) / \((.+) \+ (.+)\);", numbers)
    r, mean, deviation, eps = map(float, shown.groups())
    assert value == pytest.approx((r - mean) / (deviation + eps), abs=1e-3)


def test_an_export_is_one_file_without_links(trained, tmp_path):
    path = export_view(trained, "overview", ViewQuery(), str(tmp_path / "page.html"))
    html = path.read_text(encoding="utf-8")
    assert "<link" not in html and "href=" not in html and "<style>" in html
    assert json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])["kind"] == "ViewPage"
    with pytest.raises(SettingError, match="not overwritten"):
        export_view(trained, "overview", ViewQuery(), str(path))


def test_wrong_views_and_numbers_are_refused(trained, tmp_path):
    with pytest.raises(SettingError, match="overview"):
        show_view("overvew", trained, ViewQuery())
    with pytest.raises(SettingError, match="whole number"):
        ViewQuery.parse({"step": "three"})
    assert ViewQuery.parse({"utm_source": "x", "step": "3"}) == ViewQuery(step=3)
    assert trained.name in [run.name for run in find_runs([str(trained.path.parent)])]
    assert [run.name for run in find_runs([str(trained.path)])] == [trained.name]


def test_histories_of_tasks():
    rows = lambda rates: [TaskRow("t", i + 1, 4, round(4 * r), r) for i, r in enumerate(rates)]  # noqa: E731
    assert [classify(rows(r)) for r in ((0, 0.5, 1), (1, 0.5, 0), (1, 0, 1, 0, 0.5), (1, 1), (0, 0), (1,))] == [
        "learned", "forgotten", "flipping", "solved", "unsolved", "seen once",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "low, high", [(0.0, 1.5e-13), (0.9999990, 1.0000001), (0.0, 0.0), (-3.0, 5.0), (0.0, 250_000.0)]
)
def test_axes_have_distinct_labels_and_lines_fill_the_chart(low, high):
    drawn = str(line_chart(LineChart("x", (Series("x", [1.0, 2.0], [low, high]),), "")))
    labels = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    heights = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]+)"', drawn)[1].split()]
    assert len(labels) >= 2 and len(set(labels)) == len(labels)
    assert low == high or max(heights) - min(heights) > 100
    assert "-" not in labels[0] or low < 0 or "e-" in labels[0]


def test_a_transcript_opens_on_the_token_with_the_largest_push(trained):
    update = trained.token_columns(2)[0]
    page = json.loads(view_json(trained, "why", ViewQuery(step=2)))
    shown = dict(next(block for block in page["blocks"] if block["kind"] == "FactList")["rows"])["trajectory"]
    peaks = {one: abs(update.of(one)["slope"] * -np.expm1(update.of(one)["logp"])).max() for one in update.trajectories}
    assert peaks[shown] == max(peaks.values())


def rows_of(**metrics):
    return [StepMetrics(i + 1, 0.0, dict(zip(metrics, values))) for i, values in enumerate(zip(*metrics.values()))]


def test_a_run_opens_on_its_most_telling_step():
    """Not on the last one: a solved run ends without a gradient."""
    rows = rows_of(**{"grad_norm": [0.5, 0.4, 0.9, 0.0], "groups/zero_variance": [0.5, 0.1, 0.1, 1.0]})
    assert telling_step(rows, [1, 2, 3, 4]) == 3
    assert telling_step(rows, [1, 2]) == 2
    assert telling_step(rows, [4]) == 4  # none has a gradient
    assert telling_step([], []) == 0


def solved_run(folder):
    """A run whose last five steps were all solved."""
    run = RunDir.create(folder, "solved", {"method": "grpo", "env": "guess", "steps": 9})
    rows = [{"step": n, "seconds": 1.0, "groups": 2, "success": 0.5 if n < 5 else 1.0, "reward": 0.5 if n < 5 else 1.0,
             "groups/zero_variance": float(n >= 5), "grad_norm": float(n < 5)} for n in range(1, 10)]  # fmt: skip
    run.metrics.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return run.path


def test_a_solved_run_says_so(tmp_path):
    with RunReader(solved_run(tmp_path)) as run:
        text = view_json(run, "overview", ViewQuery())
        assert "This run is solved: since step 5 every trajectory got the highest reward" in text


def test_the_overview_begins_with_the_result_on_held_out_tasks(tmp_path):
    path = solved_run(tmp_path)
    for when, success, interval in (("before", 0.31, [0.25, 0.38]), ("after", 0.985, [0.957, 0.995])):
        summary = {"success": success, "interval": interval}
        (path / f"evaluation_{when}.json").write_text(json.dumps({"summary": summary, "rows": []}))
    with RunReader(path) as run:
        assert show_view("overview", run, ViewQuery()).blocks[0].text == "31 % → 98.5 % of held-out tasks, solved."


def test_a_step_that_a_run_does_not_have_is_refused_with_those_it_has(trained):
    last = trained.steps()[-1]
    for view, step in (("why", 9999), ("step", -1), ("overview", last + 1)):
        with pytest.raises(StoreError, match=f"no step {step}: it has steps 1 to {last}"):
            show_view(view, trained, ViewQuery.parse({"step": str(step)}))


def stored(trajectories, columns):
    sizes = tuple(len(columns["logp"]) // len(trajectories) for _ in trajectories)
    return TokenColumns(0, 0, trajectories, sizes, {name: np.array(x, "<f4") for name, x in columns.items()})


def test_what_the_page_says_is_what_was_measured():
    """A token that was pushed up and fell is said to have fallen: the sign of the push is not the movement."""
    assert "became less likely" in movement_sentence(-1.0, -1.5) and "measured" in movement_sentence(-1.0, -1.5)
    assert "became more likely" in movement_sentence(-1.5, -1.0)
    assert "not measured" in movement_sentence(-1.0, math.nan)
    assert "pushed it up" in push_sentence(0.1, 0.01, -0.5) and "moved the other way" in push_sentence(0.1, 0.01, -0.5)
    assert "other way" not in push_sentence(-0.1, 0.01, -0.5)
    columns = {"slope": [-1.0, 1.0, 0.0, -2.0], "logp": [-0.7, -0.7, -0.1, -3.0], "after": [-0.5, -0.9, -0.1, -2.0]}
    one = agreement(stored(("a", "b"), columns))
    assert one.measured == 4 and one.same_sign == 1.0 and one.tokens > 0.9 and one.trajectories == pytest.approx(1.0)
    nothing = agreement(stored(("a",), {"slope": [0.0], "logp": [-1.0]}))
    assert nothing.measured == 0 and math.isnan(nothing.tokens)


def test_pushes_on_a_logit_are_those_of_automatic_differentiation(trained):
    """Tokens that were sampled after the same text share their logits: the sum over them is the derivative of Σ push · log π."""
    step = StoredStep(trained, 1)
    factors = step.factors()
    name = step.update.trajectories[0]
    rows = pushes_in_context(step, factors, name, 0)
    assert rows[0].trajectory == name and rows[0].token == 0
    # the vocabulary is the chosen token and the rest: enough for the derivative with respect to its logit
    chosen = torch.tensor(float(step.update.of(name)["logp"][0])).double().exp()
    logits = torch.stack([chosen.log(), (1 - chosen).log()]).requires_grad_()
    objective = sum(row.push * logits.log_softmax(0)[0 if row.id == rows[0].id else 1] for row in rows)
    objective.backward()
    assert sum(row.on_logit for row in rows) == pytest.approx(float(logits.grad[0]), abs=1e-7)
    siblings = {t.id for t in trained.group(trained.trajectory_row(name).group).trajectories}
    assert {row.trajectory for row in rows} == siblings, "siblings read the same prompt before their first token"


def test_what_cannot_run_is_greyed_out_with_its_reason(trained, tmp_path):
    page = show_view("what-if", trained, ViewQuery())
    html = render_page(page, trained.name, [])
    assert re.search(r'<option disabled title="reads [^"]*old_value[^"]*">ppo</option>', html)
    assert "<option>gspo</option>" in html
    with RunReader(RunDir.create(tmp_path, "cold", {"method": "grpo", "env": "guess", "steps": 3}).path) as cold:
        html = render_page(show_view("overview", cold, ViewQuery()), "cold", [])
        assert html.count('class="empty"') == len(VIEWS) - 1 and "no rollouts yet" in html


@pytest.fixture
def app(trained):
    pytest.importorskip("starlette")
    from turnwise.inspector.page.serving import InspectorApp

    return InspectorApp([trained], "secret")


@pytest.fixture
def client(app):
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    return TestClient(app.application(), base_url="http://127.0.0.1")


def test_nothing_is_read_without_the_token(client, app):
    overview = f"{app.place}/r/0/overview"
    assert client.get(overview).status_code == 403
    assert client.get("/").status_code == client.get("/?token=wrong").status_code == 403
    assert client.get("/?token=secret", headers={"host": "evil.example"}).status_code == 403
    answer = client.get("/?token=secret")
    assert answer.status_code == 200 and "Overview" in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert client.get(overview, headers={"host": "evil.example"}).status_code == 403


def test_the_cookie_goes_to_no_other_server_of_this_machine(client, app):
    """A browser sends a cookie to every port of a host, but only below the cookie's path, which is a secret."""
    client.get("/?token=secret")
    paths = {cookie.path for cookie in client.cookies.jar}
    assert paths == {app.place} and len(app.place) > 8
    assert "cookie" not in client.build_request("GET", "http://127.0.0.1:9/r/0/overview").headers


def test_a_browser_that_we_start_uses_its_address_once(client, app):
    first = f"/?token={app.once}"
    assert client.get(first).status_code == 200
    assert client.get(first).status_code == 403
    assert client.get("/?token=").status_code == 403


def test_requests_stay_inside_the_run(client, app):
    client.get("/?token=secret")
    runs = f"{app.place}/r"
    for path in (f"{runs}/7/overview", f"{runs}/0/nope", "/static/app.py", f"{runs}/0/why?trajectory=nope"):
        assert client.get(path).status_code == 404
    assert client.get("/static/../app.py").status_code == 403
    assert client.get(f"{runs}/0/step?step=x").status_code == 400
    assert client.post(f"{runs}/0/overview").status_code == 405
    assert "attachment" in client.get(f"{runs}/0/export/overview").headers["content-disposition"]


def played(name, answer, success=False):
    messages = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer})
    return Trajectory(name, Task("sum", 1), (Turn((1,), (2,)),), messages=messages, success=success)


def test_failures_are_counted_by_cause_and_equal_transcripts_are_one_row(tmp_path):
    folder = RunDir.create(tmp_path, "failing", {"method": "grpo", "env": "sum"})
    first = [played("0.0", "5"), played("0.1", "5"), played("0.2", "6")]
    steps = {0: first, 1: [played("1.0", "4", True), played("1.1", "7")]}
    with SqliteLedger(folder.ledger) as ledger:
        for step, members in steps.items():
            ledger.issue(f"g{step}", members[0].task, 0, step)
            ledger.finish(Group(f"g{step}", members[0].task, tuple(members)), step)
            ledger.drop(f"g{step}", "test", step)
    folder.metrics.write_text("".join(json.dumps({"step": n + 1, "seconds": 1.0}) + "\n" for n in steps))
    row = {"task": "sum/held_out/1/9", "success": False, "reward": 0.0, "messages": played("", "5").messages}
    for when, failed in (("before", {"failure": "ran out of turns"}), ("after", {"success": True})):
        (folder.path / f"evaluation_{when}.json").write_text(json.dumps({"summary": {}, "rows": [{**row, **failed}]}))
    with RunReader(folder.path) as run:
        facts, causes, *examples = show_view("failures", run, ViewQuery()).blocks
        assert dict(facts.rows) == {
            "held-out before": "1 of 1", "held-out after": "0 of 1", "training, step 1": "3 of 3", "training, step 2": "1 of 2",
        }  # fmt: skip
        assert [r[0] for r in causes.rows] == ["wrong answer, no tool called", "ran out of turns"]
        assert causes.rows[0][1:5] == ("0", "0", "3 (100 %)", "1 (50 %)")
        assert [r[1] for r in examples[0].rows] == [1, 2, 1]
        assert examples[0].rows[1][0].href == "why?trajectory=0.1"
        assert any(getattr(b, "title", "") == "How episodes failed" for b in show_view("overview", run, ViewQuery()).blocks)
        sides = show_view("failures", run, ViewQuery.parse({"trajectory": "before.0"})).blocks[-1]
        assert "ran out of turns" in sides.left[0].about and "solved" in sides.right[0].about
        for name in ("after.1", "after.x", "before.²", "else.0", "after." + "1" * 400):
            note = show_view("failures", run, ViewQuery.parse({"trajectory": name})).blocks[0]
            assert "no held-out episode" in note.text


def test_what_siblings_share_is_marked_up_to_the_fork(tmp_path):
    """Three answers to one task: the first is compared with the one that leaves it first, the others with the first."""
    folder = RunDir.create(tmp_path, "forking", {"method": "grpo", "env": "sum"})
    answers = {"a": ((5, 6, 7), 1.0), "b": ((5, 6, 8), 0.0), "c": ((5, 9), 0.0)}
    members = [Trajectory(n, Task("sum", 1), (Turn((1,), ids, reward=r),), success=r > 0) for n, (ids, r) in answers.items()]
    with SqliteLedger(folder.ledger) as ledger:
        ledger.issue("g", members[0].task, 0, 0)
        ledger.finish(Group("g", members[0].task, tuple(members)), 0)
        ledger.drop("g", "test", 0)
    with RunReader(folder.path) as run:
        page = show_view("siblings", run, ViewQuery(group="g"))
        sides = next(block for block in page.blocks if hasattr(block, "left"))
        cells = {t.title[0]: [c for turn in t.turns for c in turn.tokens] for t in (*sides.left, *sides.right)}
        # a text of these tokens is [5], so two different ones share the bracket
        assert {n: [c.shared for c in row] for n, row in cells.items()} == {"a": [3, 1, 0], "b": [3, 3, 1], "c": [3, 1]}
        assert '<span class="same">[5]</span>' in render_page(page, run.name, [])


def test_a_token_that_was_not_measured_is_hatched(trained):
    one = Trajectory("a", Task("sum", 1), (Turn((1,), (5, 6, 7)),))
    cut = transcript(trained, one, [0.5, math.nan], lambda i: "", lambda i: None, full=1.0)
    assert cut.unmeasured and [math.isnan(c.tone) for c in cut.turns[0].tokens] == [False, True, True]
    html = render_page(ViewPage("why", "Why", "", [cut]), "run", [])
    assert html.count('class="tok unmeasured"') == 3 and "not measured</span>" in html  # two tokens and the legend
    whole = transcript(trained, one, [0.5, 0.1, 0.0], lambda i: "", lambda i: None, full=1.0)
    assert not whole.unmeasured and not transcript(trained, one, [], lambda i: "", lambda i: None).unmeasured


def test_views_with_nothing_to_tell_say_so_in_one_sentence(tmp_path):
    """Two steps of two groups, all trained on, each with a task of its own."""
    folder = RunDir.create(tmp_path, "even", {"method": "grpo", "env": "sum"})
    with SqliteLedger(folder.ledger) as ledger:
        for step in (0, 1):
            names = [f"g{step}{n}" for n in (0, 1)]
            for n, name in enumerate(names):
                task = Task("sum", 10 * step + n)
                ledger.issue(name, task, 0, step)
                ledger.finish(Group(name, task, (replace(played(f"{name}.0", "4", True), task=task),)), step)
            ledger.train(names, step)
    with RunReader(folder.path) as run:
        text = view_json(run, "prompts", ViewQuery())
        assert "Every step trained on all of its 2 groups" in text and '"DataTable"' not in text
        text = view_json(run, "tasks", ViewQuery())
        assert "Every task was seen once (4 tasks)" in text and '"DataTable"' not in text


def test_sampler_and_learner_that_agree_are_one_sentence(trained):
    blocks = show_view("policy", trained, ViewQuery(step=2)).blocks
    assert any(b.text.startswith("Step 2: sampler and learner agree") for b in blocks if hasattr(b, "level")), blocks
    assert not [b for b in blocks if isinstance(b, DataTable)]


def test_rows_with_sentences_become_cards_in_a_narrow_window():
    assert DataTable("t", ("a",), [("x" * 41,)]).wordy and not DataTable("t", ("a", "b"), [("x" * 40, 1.0)]).wordy


def test_what_if_opens_on_a_method_that_the_run_can_compute(trained):
    choice = next(b for b in show_view("what-if", trained, ViewQuery()).blocks if getattr(b, "name", "") == "method")
    assert choice.value not in impossible_methods(trained, 1) and choice.value != trained.settings["method"]


def test_a_line_chart_carries_its_points_for_the_script_and_an_export_none():
    chart = LineChart("<b>", (Series('"x"', [1.0, 2.0, 3.0], [0.5, float("nan"), 2.0]),))
    text = str(line_chart(chart))
    (points,) = re.findall(r'data-series="([^"]*)"', text)
    (series,) = json.loads(html_module.unescape(points))
    assert series["name"] == '"x"' and [p[:2] for p in series["points"]] == [[1.0, "0.5"], [3.0, "2"]]
    assert "data-series" not in line_chart(chart, live=False)


def test_a_page_shows_no_empty_column_and_no_chart_of_rounding():
    table = DataTable("t", ("a", "b", "c"), [(1, "", None), (0, "", None)])
    assert table.filled == [0] and DataTable("t", ("a", "b"), []).filled == [0, 1]
    rows = [StepMetrics(n, 0.0, {"noise": 1e-13 * n, "real": 0.1 * n}) for n in range(3)]
    chart, note = curves(rows, [("noise", "Noise", ""), ("real", "Real", "")])
    assert chart.title == "Real" and "Noise" in note.text
