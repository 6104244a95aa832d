"""What adapters of families share: the import of an optional package, ``NAME,key=value`` options, the class of a member, worlds
in which an action is one of a list of words, games of several seats.

Knows no package.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from turnwise.core.protocols import Action, Step
from turnwise.environments.base import Environment, LimitedEpisode, plain_words, text_action, user_message
from turnwise.errors import SettingError, nearest

LISTED = 24  # actions that a message lists; the others are counted
Kind = TypeVar("Kind", bound=type[Environment])


def import_package(module: str, family: str, install: str = "") -> Any:
    """An optional module, or a message that says how to install it: by the extra of the family's name, by another extra, or by
    the words of a command."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        command = f"pip install {install}" if " " in install else f"pip install 'turnwise-rl[{install or family}]'"
        raise SettingError(f"{family}:... needs a package ({missing}); write {command}") from missing


def split_options(family: str, spec: str, allowed: Collection[str] | None = None) -> tuple[str, dict[str, Any]]:
    """``"NAME,size=3"`` as the name and its options; values are JSON, or text where they are not. ``allowed``: which options
    there are, where the adapter and not the package decides that."""
    name, *pairs = spec.split(",")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise SettingError(f"{family}:{name} is followed by {pair!r}; write key=value, separated by commas")
        if allowed is not None and key not in allowed:
            hint = nearest(key, allowed) if allowed else "leave it out"
            raise SettingError(f"{family}:{name} has no option {key!r}; {hint}")
        try:
            options[key] = json.loads(text)
        except ValueError:
            # a word that is no JSON is meant as text
            options[key] = text
    if not name:
        raise SettingError(f"{family}: names nothing; write {family}:NAME (`turnwise environments` lists them)")
    return name, options


def require_offered(name: str, offered: Collection[str], where: str) -> None:
    """Refuse a name that is not offered; ``where`` says what has no such name."""
    if name not in offered:
        raise SettingError(f"{where} {name!r}; {nearest(name, list(offered))}")


def member_class(family: str, spec: str, base: Kind, about: str, **attributes: Any) -> Kind:
    """The class of a member of a family: a subclass of ``base`` with these attributes."""
    body = {"__doc__": about, "__module__": base.__module__, **attributes}
    return type(f"{family}:{spec}", (base,), body)  # type: ignore[return-value]


def world_seed(seed: int, split: str) -> int:
    """The seed of a generated world: even for training, odd for held-out tasks, so that no seed is in both splits."""
    return 2 * (seed % 2**30) + (split != "train")


def clean_word(text: str) -> str:
    """An action as its world spells it: one line, lower case, without a final stop."""
    lines = text.strip().splitlines()
    return " ".join(plain_words(lines[-1]).split()) if lines else ""


def listed(actions: Sequence[str]) -> str:
    """Actions as a message names them."""
    more = f" and {len(actions) - LISTED} more" if len(actions) > LISTED else ""
    return " | ".join(actions[:LISTED]) + more


@contextlib.contextmanager
def refusing(member: str, faults: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """What a package has against a member or its options, as a refusal."""
    try:
        yield
    except faults as fault:
        words = " ".join(str(fault).split()) or type(fault).__name__
        raise SettingError(f"{member} cannot be made: {words[:300]}") from fault


class WordWorld(LimitedEpisode):
    """A world in which an action is one of the texts in ``legal()``. Any other text is answered with the legal ones and costs a
    turn."""

    @abstractmethod
    def legal(self) -> Sequence[str]:
        """The actions of the current state."""

    @abstractmethod
    def move(self, word: str) -> Step:
        """Apply a legal action."""

    def act(self, action: Action) -> Step:
        word = clean_word(action.text)
        return self.move(word) if word in self.legal() else self.refuse()

    def refuse(self) -> Step:
        """The answer to a text that is no action."""
        return Step([user_message(f"that is no action. write one of: {listed(self.legal())}")], info={"tool_errors": 1})

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(list(self.legal())))


class SeatedGame(LimitedEpisode):
    """A game of several seats. The policy holds all of them, or one where ``opponent`` says who holds the others."""

    opponent: ClassVar[str] = "self"
    seats: ClassVar[int]
    first_seat: ClassVar[int] = 0  # how the package counts them
    rng: random.Random  # of chance and of scripted seats
    seat: int  # the policy's own, where the others are scripted

    @classmethod
    def seat_name(cls, number: int) -> str:
        return f"player {number + cls.first_seat}"

    def sit_down(self, seed: int) -> int:
        """Draw the policy's seat; returns the seed of the match."""
        number = world_seed(seed, self.split)
        self.rng, self.seat = random.Random(number), number // 2 % self.seats
        return number

    def is_scripted(self, number: int) -> bool:
        return self.opponent != "self" and number != self.seat

    def pay(self, mover: int, returns: Mapping[int, float], text: str, errors: int = 0) -> Step:
        """The last step pays each seat; a scripted seat earns nothing that is trained on. ``{}`` in the text: all returns."""
        results = ", ".join(f"{self.seat_name(n)} {value:+g}" for n, value in returns.items())
        earned = {number: 0.0 if self.is_scripted(number) else float(value) for number, value in returns.items()}
        paid = {self.seat_name(n): value for n, value in earned.items() if n != mover and not self.is_scripted(n)}
        # of self-play only one seat can be judged: the first
        success = returns.get(0 if self.opponent == "self" else self.seat, 0) > 0
        info = {"success": success, "tool_errors": errors, "paid": paid}
        return Step([user_message(text.replace("{}", results))], earned.get(mover, 0.0), terminated=True, info=info)
