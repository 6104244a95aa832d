"""The page as data, as HTML and over HTTP: every view of a real run, hostile texts, the token, and nothing outside the run."""

import json
import re
from dataclasses import replace

import pytest

from turnwise.core.records import Fork, Group, Task, Trajectory, Turn
from turnwise.errors import SettingError
from turnwise.inspector.page.blocks import ViewQuery, as_json
from turnwise.inspector.page.render import render_export, render_page
from turnwise.inspector.page.serving import export_view, find_runs, view_json
from turnwise.inspector.page.views.groups import classify
from turnwise.inspector.page.views.table import OTHER_PAGES, VIEWS, show_view
from turnwise.inspector.queries import RunReader, TaskRow
from turnwise.observe.charts import LineChart, Series, line_chart
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir

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
    assert "Recomputed gradient equals what the step stored" in text
    assert '"Factors"' in text and '"Peers"' in text and "``" not in text
    chain = next(block for block in json.loads(text)["blocks"] if block.get("title") == "Factors")["rows"]
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


def test_the_view_of_a_token_opens_where_the_gradient_is_largest(trained):
    update = trained.token_columns(2)[0]
    page = json.loads(view_json(trained, "why", ViewQuery(step=2)))
    shown = dict(page["blocks"][0]["rows"])["trajectory"]
    peaks = {one: abs(update.of(one)["slope"]).max() for one in update.trajectories}
    assert peaks[shown] == max(peaks.values())


@pytest.fixture
def client(trained):
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    from turnwise.inspector.page.serving import InspectorApp

    return TestClient(InspectorApp([trained], "secret").application(), base_url="http://127.0.0.1")


def test_nothing_is_read_without_the_token(client):
    assert client.get("/r/0/overview").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    assert client.get("/?token=secret", headers={"host": "evil.example"}).status_code == 403
    answer = client.get("/?token=secret")
    assert answer.status_code == 200 and "Overview" in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert client.get("/r/0/overview", headers={"host": "evil.example"}).status_code == 403


def test_requests_stay_inside_the_run(client):
    client.get("/?token=secret")
    for path in ("/r/7/overview", "/r/0/nope", "/static/../app.py", "/static/app.py", "/r/0/why?trajectory=nope"):
        assert client.get(path).status_code == 404
    assert client.get("/r/0/step?step=x").status_code == 400
    assert client.post("/r/0/overview").status_code == 405
    assert "attachment" in client.get("/r/0/export/overview").headers["content-disposition"]
