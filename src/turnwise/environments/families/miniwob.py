"""Web pages of MiniWoB++: a task in words, a page to click and type in, a reward by the page itself.

    load("miniwob:click-test")
    load("miniwob:enter-text,turns=6,browser=/usr/bin/chromium")

The page is told as a list of its elements, each with a number: ``2 button "ok"``. An action is one line: ``click 2``, ``type 3
some words``, ``select 4 an option``. The reward is the page's own without its penalty for time: from -1 to 1; an episode succeeds
above 0. The seed decides the task. The pages of the package run in a headless Chromium through Playwright; its own wrapper, which
needs Selenium, is not used.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import random
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import LimitedEpisode, text_action, user_message
from turnwise.environments.families import adapter
from turnwise.errors import EnvironmentFault, SettingError

OPTIONS = ("turns", "browser")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
TURNS = 8
MAX_ELEMENTS, MAX_LABEL = 40, 40
ACTION = re.compile(r"(click|type|select) +([0-9]+)(?: +(.*))?", re.IGNORECASE)
HELP = "write: click NUMBER, type NUMBER WORDS, or select NUMBER OPTION"
# without its clock a page neither ends by itself nor pays less to a slow model
START = """seed => { core.EPISODE_MAX_TIME = 1e9; Math.seedrandom(seed); core.startEpisodeReal();
  const told = core.getUtterance(); return typeof told === 'string' ? told : told.utterance; }"""
READY = "() => typeof WOB_TASK_READY === 'undefined' || WOB_TASK_READY !== false"
OUTCOME = "() => ({done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL})"
ELEMENTS = """limits => { const found = [];
  const wanted = 'button,input,textarea,select,a,label,td,li,h3,span,div,p,text,rect,circle,polygon';
  for (const e of document.querySelectorAll('#area *')) {
    const box = e.getBoundingClientRect(), tag = e.tagName.toLowerCase();
    if (!box.width || !box.height || !e.matches(wanted) || getComputedStyle(e).visibility === 'hidden') continue;
    const active = e.matches('button,input,textarea,select,a');
    if (!active && e.children.length) continue;
    const words = (e.tagName === 'SELECT' ? [...e.options].map(o => o.text).join(' | ') : e.value || e.textContent || '').trim();
    if (!active && !words && !e.matches('rect,circle,polygon')) continue;
    e.setAttribute('data-number', found.length + 1);
    const ticked = e.checked ? ' (ticked)' : '';
    found.push([tag + (e.type && tag === 'input' ? ' ' + e.type : ''), words.slice(0, limits[1]), ticked]);
    if (found.length === limits[0]) break;
  }
  return found; }"""


class Browser:
    """The headless browser of this process. A thread of its own drives it, because Playwright's objects belong to the thread that
    made them; ``call`` runs a function there and waits for the result."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.jobs: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="turnwise-browser").start()

    def call(self, work: Callable[[Any], Any], seconds: float = 60.0) -> Any:
        result: Future[Any] = Future()
        self.jobs.put((work, result))
        return result.result(seconds)

    def _serve(self) -> None:
        from playwright.sync_api import sync_playwright

        flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # its own sandbox refuses to start for root
        with sync_playwright() as playwright:
            browser = None
            while True:
                work, result = self.jobs.get()
                try:
                    browser = browser or playwright.chromium.launch(executable_path=self.program, args=flags)
                    result.set_result(work(browser))
                except Exception as fault:  # of one page: the others go on
                    result.set_exception(fault)


@cache
def shared_browser(program: str) -> Browser:
    """The browser of this process; ``program`` names one that is not on the path."""
    adapter.import_package("playwright.sync_api", "miniwob")
    path = shutil.which(program) if program else next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SettingError(
            f"miniwob:... needs a browser, and there is no {program or BROWSERS[0]}; install one (Debian: apt install "
            "chromium), or write browser=PATH"
        )
    return Browser(path)


class MiniwobEnvironment(LimitedEpisode):
    """One page. ``environment`` makes a subclass for each task."""

    deterministic = False  # a page may ask a server; MiniWoB's own do not: miniwob:TASK,deterministic=true
    suggests: ClassVar[Mapping[str, Any]] = {"context": 512, "max_tokens": 16, "history": 1}
    page_file: ClassVar[Path]
    browser: ClassVar[Browser]
    page: Any = None

    def begin(self, seed: int) -> Sequence[Message]:
        self.browser.call(lambda browser: self._open(browser, adapter.world_seed(seed, self.split)))
        return [user_message(self.task), user_message(self._view())]

    def _open(self, browser: Any, seed: int) -> None:
        """In the browser's thread."""
        self.page = browser.new_page()
        self.page.set_default_timeout(2000)
        self.page.goto(self.page_file.as_uri())
        self.task = " ".join(str(self.page.evaluate(START, str(seed))).split())
        self.page.wait_for_function(READY)
        self.elements = self.page.evaluate(ELEMENTS, [MAX_ELEMENTS, MAX_LABEL])

    def _view(self) -> str:
        lines = [f"{n} {kind} {json.dumps(words)}{ticked}" for n, (kind, words, ticked) in enumerate(self.elements, 1)]
        return "\n".join([*lines, HELP])

    def act(self, action: Action) -> Step:
        match, fault = ACTION.fullmatch(action.text.strip()), "that is no action."
        if match and 1 <= int(match[2]) <= len(self.elements):
            outcome, fault = self.browser.call(lambda _: self._act(match[1].lower(), int(match[2]), match[3] or ""))
            if outcome["done"]:
                reward = float(outcome["reward"])
                return Step([user_message("it is over.")], reward, terminated=True, info={"success": reward > 0})
        text = f"{fault}\n{self._view()}" if fault else self._view()
        return Step([user_message(text)], info={"tool_errors": 1} if fault else {})

    def _act(self, kind: str, number: int, words: str) -> tuple[dict[str, Any], str]:
        """In the browser's thread: what the page says after the action, and why it could not be made."""
        target, fault = self.page.locator(f"[data-number='{number}']"), ""
        try:
            if kind == "click":
                target.click(force=True)
            elif kind == "type":
                target.fill(words)
            else:
                target.select_option(label=words)
        except Exception as error:  # not that kind of element, hidden, or gone
            fault = f"that is not possible: {str(error).splitlines()[0][:100]}"
        outcome = self.page.evaluate(OUTCOME)
        if not outcome["done"]:
            self.elements = self.page.evaluate(ELEMENTS, [MAX_ELEMENTS, MAX_LABEL])
        return outcome, fault

    def close(self) -> None:
        page, self.page = self.page, None
        if page is not None:
            self.browser.call(lambda _: page.close())

    # ---- scripted policies
    def oracle(self) -> Action:
        """Click what the task quotes, or the last button: right for the tasks of one click, a guess for others."""
        if not self.elements:
            raise EnvironmentFault("the page has no element to click")
        quoted = [words.strip().lower() for words in re.findall(r'"([^"]+)"', self.task)]
        labels = [(n, kind, words.lower()) for n, (kind, words, _) in enumerate(self.elements, 1)]
        # what the task quotes comes before any button
        named = [n for n, _, words in labels if words in quoted]
        buttons = [n for n, kind, _ in labels if kind.startswith(("button", "input submit"))]
        return text_action(f"click {(named or buttons or [1])[-1 if not named else 0]}")

    def random_action(self, rng: random.Random) -> Action:
        return text_action(f"click {rng.randint(1, max(1, len(self.elements)))}")


@cache
def environment(spec: str) -> type[MiniwobEnvironment]:
    """The class of a task's name."""
    name, options = adapter.split_options("miniwob", spec, OPTIONS)
    folder = pages()
    adapter.require_offered(name, sorted(page.stem for page in folder.glob("*.html")), "MiniWoB++ has no task")
    browser, turns = shared_browser(str(options.get("browser", ""))), int(options.get("turns", TURNS))
    page = {"page_file": folder / f"{name}.html", "browser": browser, "max_turns": turns}
    return adapter.member_class("miniwob", spec, MiniwobEnvironment, f"{name} of MiniWoB++.", **page)


def pages() -> Path:
    """The folder of the package's pages; the package itself, which loads Selenium, is not imported."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise SettingError("miniwob:... needs the package miniwob; write pip install 'turnwise-rl[miniwob]'")
    return Path(next(iter(spec.submodule_search_locations))) / "html" / "miniwob"
