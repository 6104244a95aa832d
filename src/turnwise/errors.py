"""Every error a user can cause, in one tree.

    TurnwiseError
    ├── SettingError (ValueError)       a setting, method or file name is wrong: the message says what was seen and what to write
    ├── LevelError (ValueError)         values of different trees or levels were combined
    ├── RecordError (ValueError)        a task, turn or trajectory is inconsistent
    ├── RecipeError (ValueError)        pieces that cannot be combined, or hyper-parameters out of range
    ├── SignalError (KeyError)          a piece reads a signal that was not measured
    ├── RenderError (ValueError)        a tokenizer or chat template that cannot encode a dialogue
    ├── EnvironmentFault (RuntimeError) an environment raised, hung or returned invalid data: recorded on its trajectory
    ├── ToolFault (RuntimeError)        a tool could not be started; a mistake of the *model* is a tool answer, not a fault
    ├── ServerFault (RuntimeError)      a model behind an address cannot be reached, refuses, or replies nonsense
    │   ├── GeneratorLost               no server that samples for a run is left: the run stops and can be resumed
    │   └── RequestRefused              it refuses one request; others may succeed
    │       └── ContextOverflow         the dialogue is longer than what that model reads: its episode is truncated
    ├── RankFault (RuntimeError)        a process of a learner over several ranks died, hung or could not be started
    ├── PolicyMismatch (RuntimeError)   generator and learner compute different policies
    └── StoreError (RuntimeError)       a run directory is missing, damaged, full or in use

A mistake of the user raises one of these. A bug in Turnwise is an ``assert``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TurnwiseError(Exception):
    """Root of all errors that Turnwise raises."""


class SettingError(TurnwiseError, ValueError):
    """A setting, name or path given by the user is wrong."""


class LevelError(TurnwiseError, ValueError):
    """Values of different trees or levels were combined."""


class RecordError(TurnwiseError, ValueError):
    """A record is inconsistent."""


class RecipeError(TurnwiseError, ValueError):
    """Pieces that cannot be combined, or a hyper-parameter out of its range."""


class SignalError(TurnwiseError, KeyError):
    """A piece reads a signal or column that is not on the batch."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RenderError(TurnwiseError, ValueError):
    """A tokenizer or chat template that cannot encode a dialogue."""


class EnvironmentFault(TurnwiseError, RuntimeError):
    """An environment raised, hung or returned invalid data."""


class ToolFault(TurnwiseError, RuntimeError):
    """A tool could not be started or kept alive."""


class ServerFault(TurnwiseError, RuntimeError):
    """A model behind an address cannot be reached, refuses a request, or replies nonsense."""


class GeneratorLost(ServerFault):
    """No server that samples for a run is left."""


class RequestRefused(ServerFault):
    """A served model refuses one request; others may succeed."""


class ContextOverflow(RequestRefused):
    """The dialogue is longer than what a served model reads."""


class RankFault(TurnwiseError, RuntimeError):
    """A process of a learner over several ranks died, hung or could not be started."""


class PolicyMismatch(TurnwiseError, RuntimeError):
    """Generator and learner give different log-probabilities with the same weights."""


class StoreError(TurnwiseError, RuntimeError):
    """A run directory is missing, damaged, full or in use."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of an error message about an unknown name.

    >>> nearest("grop", ["grpo", "gspo"])
    "did you mean 'grpo'? known: grpo, gspo"
    """
    names = sorted(choices)
    bare = {name.lstrip("-"): name for name in names}  # the dashes of two flags are no resemblance
    close = [bare[match] for match in difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.6)]
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    return f"{hint}known: {shown or '(none)'}"
