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
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.environments.families.adapter import split_options, world_seed
from turnwise.environments.families.browser import Browser, shared_browser
from turnwise.errors import EnvironmentFault, SettingError, nearest

OPTIONS = ("turns", "browser")
TURNS = 8
MAX_ELEMENTS, MAX_LABEL = 40, 40
ACTION = re.compile(r"(click|type|select) +([0-9]+)(?: +(.*))?", re.IGNORECASE)
HELP = "write: click NUMBER, type NUMBER WORDS, or select NUMBER OPTION"
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


class MiniwobEnvironment(Environment):
    """One page. ``environment`` makes a subclass for each task."""

    suggests: ClassVar[Mapping[str, Any]] = {"context": 512, "max_tokens": 16, "history": 1}
    page_file: ClassVar[Path]
    browser: ClassVar[Browser]
    page: Any = None
    task: str
    elements: list[list[str]]
    turns: int
    done: bool

    def reset(self, seed: int) -> Sequence[Message]:
        self.turns, self.done = 0, False
        self.task, self.elements = self.browser.call(lambda browser: self._open(browser, world_seed(seed, self.split)))
        return [user_message(self.task), user_message(self._view())]

    def _open(self, browser: Any, seed: int) -> tuple[str, list[list[str]]]:
        """In the browser's thread."""
        self.page = browser.new_page()
        self.page.set_default_timeout(2000)
        self.page.goto(self.page_file.as_uri())
        task = str(self.page.evaluate(START, str(seed)))
        self.page.wait_for_function(READY)
        return " ".join(task.split()), self.page.evaluate(ELEMENTS, [MAX_ELEMENTS, MAX_LABEL])

    def _view(self) -> str:
        lines = [f"{n} {kind} {json.dumps(words)}{ticked}" for n, (kind, words, ticked) in enumerate(self.elements, 1)]
        return "\n".join([*lines, HELP])

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], 0.0, terminated=True)
        self.turns += 1
        match = ACTION.fullmatch(action.text.strip())
        if match is None or not 1 <= int(match[2]) <= len(self.elements):
            return self._bounded(Step([user_message(f"that is no action.\n{self._view()}")], info={"tool_errors": 1}))
        outcome, fault = self.browser.call(lambda _: self._act(match[1].lower(), int(match[2]), match[3] or ""))
        if outcome["done"]:
            self.done = True
            reward = float(outcome["reward"])
            return Step([user_message("it is over.")], reward, True, False, {"success": reward > 0})
        info = {"tool_errors": 1} if fault else {}
        return self._bounded(Step([user_message(f"{fault}\n{self._view()}" if fault else self._view())], info=info))

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

    def _bounded(self, step: Step) -> Step:
        if self.turns < self.max_turns:
            return step
        self.done = True
        return Step(step.messages, 0.0, False, True, {**step.info, "success": False})

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
        named = [n for n, _, words in labels if words in quoted]
        buttons = [n for n, kind, _ in labels if kind.startswith(("button", "input submit"))]
        return text_action(f"click {(named or buttons or [1])[-1 if not named else 0]}")

    def random_action(self, rng: random.Random) -> Action:
        return text_action(f"click {rng.randint(1, max(1, len(self.elements)))}")


@cache
def environment(spec: str) -> type[MiniwobEnvironment]:
    """The class of a task's name."""
    name, options = split_options("miniwob", spec)
    for key in options:
        if key not in OPTIONS:
            raise SettingError(f"miniwob:{name} has no option {key!r}; {nearest(key, OPTIONS)}")
    folder = pages()
    offered = sorted(page.stem for page in folder.glob("*.html"))
    if name not in offered:
        raise SettingError(f"MiniWoB++ has no task {name!r}; {nearest(name, offered)}")
    body = {
        "page_file": folder / f"{name}.html",
        "browser": shared_browser("miniwob", "miniwob", str(options.get("browser", ""))),
        "max_turns": int(options.get("turns", TURNS)),
        "__doc__": f"{name} of MiniWoB++.",
        "__module__": __name__,
    }
    return type(f"miniwob:{spec}", (MiniwobEnvironment,), body)


def pages() -> Path:
    """The folder of the package's pages; the package itself, which loads Selenium, is not imported."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise SettingError("miniwob:... needs the package miniwob; write pip install 'turnwise[miniwob]'")
    return Path(next(iter(spec.submodule_search_locations))) / "html" / "miniwob"
