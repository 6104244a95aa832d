"""Every error a user can cause, in one tree.

    TurnwiseError
    ├── SettingError (ValueError)       a setting, method or file name is wrong: says what was seen and what to write
    ├── LevelError (ValueError)         values of different trees or levels were combined
    ├── RecordError (ValueError)        a task, turn or trajectory does not hold together
    ├── RecipeError (ValueError)        pieces that cannot be combined, or hyper-parameters out of range
    ├── SignalError (KeyError)          a piece asked for a signal that nobody measured
    ├── RenderError (ValueError)        a tokenizer or chat template that cannot carry a dialogue
    ├── EnvironmentFault (RuntimeError) an environment raised, hung or returned nonsense: recorded on its trajectory
    ├── ToolFault (RuntimeError)        a tool could not be started; what a *model* does wrong is an answer, not a fault
    ├── PolicyMismatch (RuntimeError)   generator and learner are not the same policy
    └── StoreError (RuntimeError)       a run directory is missing, damaged, full or in use

A mistake of the user raises one of these. A mistake of ours is an ``assert``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TurnwiseError(Exception):
    """Root of everything Turnwise raises on purpose."""


class SettingError(TurnwiseError, ValueError):
    """A setting, name or path given by the user is wrong."""


class LevelError(TurnwiseError, ValueError):
    """Values of different trees or levels were combined."""


class RecordError(TurnwiseError, ValueError):
    """A record does not hold together."""


class RecipeError(TurnwiseError, ValueError):
    """Pieces that cannot be combined, or a hyper-parameter out of its range."""


class SignalError(TurnwiseError, KeyError):
    """A piece asked for a signal that was not measured."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RenderError(TurnwiseError, ValueError):
    """A tokenizer or chat template that cannot carry a dialogue."""


class EnvironmentFault(TurnwiseError, RuntimeError):
    """An environment raised, hung or returned nonsense."""


class ToolFault(TurnwiseError, RuntimeError):
    """A tool could not be started or kept alive."""


class PolicyMismatch(TurnwiseError, RuntimeError):
    """Generator and learner disagree about the same weights."""


class StoreError(TurnwiseError, RuntimeError):
    """A run directory is missing, damaged, full or in use."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about a wrong name.

    >>> nearest("grop", ["grpo", "gspo"])
    "did you mean 'grpo'? known: grpo, gspo"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    return f"{hint}known: {shown or '(none)'}"
