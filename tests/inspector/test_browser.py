"""The views in a real browser: chromium drives them over real small runs of every kind and a run of hostile texts.

Needs the package playwright and a chromium (Debian: apt-get install chromium); skipped where one is missing. Run it with
``python -m pytest tests/inspector/test_browser.py``.
"""

import contextlib
import shutil
import socket
import threading
from dataclasses import replace

import pytest

import turnwise
from turnwise.cli import sharing as export
from turnwise.core.records import Fork, Group, Task, Trajectory, Turn
from turnwise.inspector.page.serving import InspectorApp
from turnwise.inspector.page.views.table import KEYS, VIEWS
from turnwise.inspector.queries import RunReader
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
uvicorn = pytest.importorskip("uvicorn")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
SIZES = ((420, 900), (1024, 768), (1600, 1000))
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
)
SMALL = {
    "steps": 2, "groups": 2, "group_size": 4, "cold_steps": 2, "eval_tasks": 0, "layers": 1, "max_tokens": 12, "trackers": (),
}  # fmt: skip
RUNS = {
    "single-turn": {"method": "grpo", "env": "calculator"},
    "tools": {"method": "dr_grpo", "env": "lookup"},
    "self-play": {"method": "reinforce", "env": "nim"},
    "tree": {"method": "dr_grpo", "env": "guess", "strategy": "spo_tree,factors=2/2,segment=2"},
    "pairs": {"method": "dpo", "env": "guess"},
    "failing": {"method": "grpo", "env": "guess", "cold_steps": 1},
    "cold": {"method": "grpo", "env": "guess"},
}
CRASHING = ("failing", "cold")
NAMES = (*RUNS, "hostile")
OVERFLOWING = """
[...document.querySelectorAll("h1, h2, h3, dd, dt, th, td, .about, .note, .legend, .label")]
  .filter((e) => e.scrollWidth > e.clientWidth + 2 && e.clientWidth > 0 && getComputedStyle(e).display !== "inline")
  .map((e) => e.textContent.slice(0, 40))
"""
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u202eabc\x07</div>"


def hostile_run(folder):
    """Hostile texts, a turn of a megabyte, and a tree of forks."""
    run = RunDir.create(folder, "hostile", {"method": HOSTILE, "env": HOSTILE})
    task, turn = Task("x", 1), Turn((1,), (2, 3), (-1.0, -2.0), reward=1.0, agent=HOSTILE)
    messages = ({"role": "user", "content": HOSTILE + "a" * 1_000_000},)
    root = Trajectory("root", task, (turn, turn), messages=messages, success=True)
    forks = [replace(root, id=f"fork{i}", turns=(turn,), fork=Fork("root", 0, 1)) for i in range(2)]
    with SqliteLedger(run.ledger) as ledger:
        ledger.issue("g", task, 0, 0)
        ledger.finish(Group("g", task, (root, *forks)), 0)
        ledger.drop("g", HOSTILE, 0)
    return run.path


class CrashError(Exception):
    """Ends the failing run."""


def crash(event, facts):
    """At the second step: of training, or of the cold start where that has two."""
    if event == "step" and facts.get("step") == 2:
        raise CrashError


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of a server over all runs."""
    folder = tmp_path_factory.mktemp("browser")
    export.export("guess", "pairs", folder / "pairs.jsonl", tasks=12)
    for name, settings in RUNS.items():
        more = {"data": str(folder / "pairs.jsonl")} if name == "pairs" else {}
        with pytest.raises(CrashError) if name in CRASHING else contextlib.nullcontext():
            observer = (crash,) if name in CRASHING else ()
            turnwise.train(*observer, out=str(folder), name=name, **SMALL | settings | more)
    readers = [RunReader(folder / name) for name in RUNS] + [RunReader(hostile_run(folder))]
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = InspectorApp(readers, "secret")
    server = uvicorn.Server(uvicorn.Config(app.application(), log_level="error"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}{app.place}"
    server.should_exit = True
    thread.join(10)
    for reader in readers:
        reader.close()


@pytest.fixture(scope="module")
def browser_page(site):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda message: page.faults.append(message.text) if message.type == "error" else None)
        page.goto(f"{site.rpartition('/')[0]}/?token=secret")
        yield page
        browser.close()


@pytest.fixture
def page(browser_page):
    browser_page.faults.clear()
    return browser_page


@pytest.mark.parametrize("name", NAMES)
def test_all_views_open_by_key_at_three_sizes(site, page, name):
    page.goto(f"{site}/r/{NAMES.index(name)}/overview")
    for key, (view, (title, _)) in zip(KEYS, VIEWS.items(), strict=True):
        page.keyboard.press(key)
        page.wait_for_url(f"**/r/{NAMES.index(name)}/{view}")
        assert page.locator("h1").inner_text() == title
        assert page.locator(".blocks > *").count() > 0
        assert page.locator("svg.chart:empty").count() == 0
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow <= 1, f"{view} is wider than a window of {width}"
            hidden = page.evaluate(OVERFLOWING)
            assert hidden == [], f"{view} cuts text off in a window of {width}"
    assert page.faults == []


@pytest.mark.parametrize("name", ["single-turn", "tools", "self-play", "tree", "failing"])
def test_a_click_on_a_token_explains_it(site, page, name):
    page.goto(f"{site}/r/{NAMES.index(name)}/why")
    page.locator("a.tok").first.click()
    assert page.get_by_role("heading", name="Factors").count() == 1
    page.wait_for_url("**token=0**")
    assert "equals the one that the step applied" in page.locator(".note.good").inner_text()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**token=1**")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**token=0**")
    assert page.faults == []


@pytest.mark.parametrize("name", ["single-turn", "tools", "self-play", "tree"])
def test_another_method_is_chosen(site, page, name):
    page.goto(f"{site}/r/{NAMES.index(name)}/what-if")
    page.locator("select[name=method]").select_option("rloo")
    page.wait_for_url("**method=rloo**")
    text = page.locator("main").inner_text()
    assert "cosine of the pushes on all tokens" in text and "Slots that differ" in text


def test_forked_rollouts_are_drawn_as_trees(site, page):
    page.goto(f"{site}/r/{NAMES.index('tree')}/siblings")
    assert page.locator("path.branch").count() > 0
    box = page.locator("path.branch").first.bounding_box()
    assert box["width"] > 0 and box["height"] > 0


def test_pairs_say_what_they_are(site, page):
    """Rows of a file have no rollouts: a view says why it has nothing."""
    page.goto(f"{site}/r/{NAMES.index('pairs')}/siblings")
    assert "rows of a file" in page.locator(".note").first.inner_text()
    page.goto(f"{site}/r/{NAMES.index('pairs')}/overview")
    assert page.locator("svg.chart").count() > 0


def test_keys_search_theme_and_another_method(site, page):
    page.goto(f"{site}/r/0/overview")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") in ("light", "dark")
    page.keyboard.press("/")
    page.keyboard.type("say")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?search=say")
    page.keyboard.press("3")
    page.wait_for_url("**/what-if")
    page.locator("select[name=method]").select_option("reinforce")
    page.wait_for_url("**method=reinforce**")
    assert "cosine" in page.locator("main").inner_text()


def test_a_chart_shows_the_step_under_the_pointer_and_opens_it(site, page):
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(f"{site}/r/{NAMES.index('tools')}/overview")
    chart = page.locator("svg[data-series]").first
    chart.scroll_into_view_if_needed()
    assert chart.locator(".probe text").count() == 0
    chart.hover(position={"x": 80, "y": 60})
    assert chart.locator(".probe text").first.inner_html() == "step 1"
    assert float(chart.locator(".probe text").last.inner_html()) >= 0
    page.mouse.move(0, 0)
    assert chart.locator(".probe text").count() == 0
    chart.click(position={"x": 80, "y": 60})
    page.wait_for_url("**/step?step=1")
    assert page.faults == []


def test_failures_lead_to_their_transcripts(site, page):
    page.goto(f"{site}/r/{NAMES.index('tools')}/overview")
    page.keyboard.press("f")
    page.wait_for_url("**/failures")
    page.locator("section:has(h2:text-is('How episodes failed')) td a").first.click()
    page.wait_for_url("**/why?trajectory=**")
    assert page.locator(".transcript").count() > 0
    assert page.faults == []


def test_hostile_texts_do_nothing(site, page):
    page.goto(f"{site}/r/{NAMES.index('hostile')}/why?trajectory=root")
    assert "owned" not in page.title()
    assert "<script>document.title" in page.locator(".transcript").inner_text()
    page.goto(f"{site}/r/{NAMES.index('hostile')}/siblings?group=g")
    assert page.locator("path.branch").count() == 2
    assert page.faults == []


def test_an_exported_page_stands_alone(site, page, tmp_path):
    page.goto(f"{site}/r/1/overview")
    with page.expect_download() as download:
        page.locator("#export").click()
    file = tmp_path / "page.html"
    download.value.save_as(file)
    page.goto(file.as_uri())
    assert page.locator("h1").inner_text() == "Overview"
    assert page.faults == []
