"""BabyAI and other worlds of the package minigrid, in words: the mission, and what the agent sees from where it stands.

    load("minigrid:BabyAI-GoToRedBall-v0")

An observation lists the objects in the 7 x 7 view, nearest first, by steps ahead and to a side: "red ball 2 ahead 1 left". The
package's own bot is the oracle of BabyAI missions. The reward is the package's, which falls with the turns taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import text_action, user_message
from turnwise.environments.families import adapter
from turnwise.environments.families.adapter import WordWorld
from turnwise.environments.families.gymnasium import GymnasiumEnvironment, maker

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle")  # in the package's order; "done" is left out
AGENT = (3, 6)  # its cell in the view; it looks towards row 0
HIDDEN = ("unseen", "empty", "floor", "agent")
DOORS = ("open", "closed", "locked")
SEEN = 6  # objects that an observation lists


class MiniGridEnvironment(GymnasiumEnvironment):
    """One episode of one world. ``environment`` makes a subclass for each id."""

    max_turns = 64
    deterministic = True
    suggests: ClassVar[Mapping[str, Any]] = {
        "history": 1, "context": 192, "max_tokens": 6, "hidden": 128, "copying": True, "cold_steps": 200, "cold_batch": 24,
    }  # fmt: skip
    words = ACTIONS
    bot: Any  # None until the oracle is first asked
    advice: str  # its next action

    def begin(self, seed: int) -> Sequence[Message]:
        self.world, self.bot = type(self).make(), None
        self.observation, _ = self.world.reset(seed=adapter.world_seed(seed, self.split))
        self.max_turns = int(self.world.unwrapped.max_steps)  # some worlds set it for each mission
        return [user_message(f"{self._view(self.observation)}\nsay {', '.join(ACTIONS)}")]

    def move(self, word: str) -> Step:
        action = ACTIONS.index(word)
        self.observation, reward, terminated, truncated, _ = self.world.step(action)
        ended = terminated or truncated
        if self.bot is not None and not ended:
            self._plan(action)
        info = {"success": reward > 0} if ended else {}
        return Step([user_message(self._view(self.observation))], float(reward), terminated, truncated, info)

    def _view(self, observation: Any) -> str:
        from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

        image = observation["image"]
        objects: list[tuple[int, str]] = []  # distance and description of each, and of the wall straight ahead
        walls: list[tuple[int, str]] = []
        for x in range(image.shape[0]):
            for y in range(image.shape[1]):
                kind = IDX_TO_OBJECT[int(image[x, y, 0])]
                ahead, side = AGENT[1] - y, x - AGENT[0]
                if kind in HIDDEN or (kind == "wall" and (side or ahead <= 0)):
                    continue
                state = f"{DOORS[int(image[x, y, 2])]} " if kind == "door" else ""
                colour = "" if kind in ("wall", "lava") else f"{IDX_TO_COLOR[int(image[x, y, 1])]} "
                place = f" {ahead} ahead" if ahead else ""
                place += f" {abs(side)} {'right' if side > 0 else 'left'}" if side else ""
                text = f"{state}{colour}{kind}{place or ' here'}"
                (walls if kind == "wall" else objects).append((ahead + abs(side), text))
        seen = "; ".join(text for _, text in sorted(objects + sorted(walls)[:1])[:SEEN])
        carried = self.world.unwrapped.carrying
        holding = f" you carry the {carried.color} {carried.type}." if carried else ""
        return f"{observation['mission']}.{holding} you see {seen or 'nothing'}."

    # ---- scripted policies
    def oracle(self) -> Action:
        """The next action of the package's bot, which remembers what it explored and follows the actions really taken."""
        if self.bot is None:
            self._plan(None)
        return text_action(self.advice)

    def _plan(self, taken: int | None) -> None:
        from minigrid.utils.baby_ai_bot import BabyAIBot

        try:
            if self.bot is None:
                self.bot = BabyAIBot(self.world)
            self.advice = ACTIONS[int(self.bot.replan(taken))]
        except Exception:
            # the bot asserts that a mission can be solved, and a random action may have made it impossible
            self.bot, self.advice = None, "forward"


@cache
def environment(spec: str) -> type[MiniGridEnvironment]:
    """The class of an id such as ``BabyAI-GoToObj-v0``, with options of its constructor."""
    name, options = adapter.split_options("minigrid", spec)
    gymnasium = adapter.import_package("gymnasium", "minigrid")
    adapter.import_package("minigrid", "minigrid")
    generator = adapter.import_package("minigrid.envs.babyai.core.roomgrid_level", "minigrid")
    generator.print = lambda *_: None  # it prints every layout that it rejects
    offered = [key for key, entry in gymnasium.registry.items() if "minigrid" in str(entry.entry_point)]
    adapter.require_offered(name, offered, "minigrid has no world")
    make = maker(gymnasium, name, options)
    with adapter.refusing(f"minigrid:{spec}", (TypeError, ValueError)):
        world = make()
        world.reset(seed=0)
    attributes = {"make": staticmethod(make), "max_turns": 2 * int(world.unwrapped.max_steps)}
    if not name.startswith("BabyAI"):  # only BabyAI missions have a bot
        attributes["oracle"] = WordWorld.oracle
    return adapter.member_class("minigrid", spec, MiniGridEnvironment, f"{name} of minigrid.", **attributes)
