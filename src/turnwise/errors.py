"""Every error a user can cause, in one tree.

    TurnwiseError
    ├── SettingError (ValueError)       a setting, method or file name is wrong: the message says what was seen and what to write
    │   └── GrammarError                a schema, regular expression or grammar that cannot be obeyed, or whose library is missing
    ├── LevelError (ValueError)         values of different trees or levels were combined
    ├── RecordError (ValueError)        a task, turn or trajectory is inconsistent
    ├── RecipeError (ValueError)        pieces that cannot be combined, or hyper-parameters out of range
    ├── SignalError (KeyError)          a piece reads a signal that was not measured
    ├── RenderError (ValueError)        a tokenizer or chat template that cannot encode a dialogue
    ├── EnvironmentFault (RuntimeError) an environment raised, hung or returned invalid data: recorded on its trajectory
    ├── HostFault (RuntimeError)        the machine ran out of something, or a process of ours is gone: no outcome of an episode
    │   └── ToolFault                   a tool could not be started; a mistake of the *model* is a tool answer, not a fault
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

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator


class TurnwiseError(Exception):
    """Root of all errors that Turnwise raises."""


class SettingError(TurnwiseError, ValueError):
    """A setting, name or path given by the user is wrong."""


class GrammarError(SettingError):
    """What a text should match cannot be read, or cannot be obeyed here."""


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


class HostFault(TurnwiseError, RuntimeError):
    """The machine ran out of files, processes, memory or disk, or a process or server of ours is gone. Not an outcome of an
    episode, which is played again from the same seed; never trained on."""


class ToolFault(HostFault):
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
    letters = [
        match for match in bare if sorted(match) == sorted(name.lstrip("-"))
    ]  # two that changed places come first
    close = [bare[match] for match in [*letters, *difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.6)]]
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    return f"{hint}known: {shown or '(none)'}"


# ----------------------------------------------------------------- faults of the machine

SCARCE = {  # errno: the limit of a process that may be behind it, and what to say
    errno.EMFILE: ("NOFILE", "too many open files{}: raise the limit (ulimit -n 65536), or write a smaller --groups or --slots"),
    errno.ENFILE: ("", "the machine has too many open files{}; end other programs"),
    errno.EAGAIN: ("NPROC", "no more threads or processes{}: raise the limits (ulimit -u, ulimit -v, a container's "
                   "--pids-limit), or write --threads 1"),
    errno.ENOMEM: ("AS", "no memory left{}: write a smaller --micro-batch-tokens, --slots, --groups or model"),
    errno.ENOSPC: ("", "no space left on the disk{}: free some, or write --keep-checkpoints 1"),
    errno.EDQUOT: ("", "the disk quota is used up{}: free some space, or write --keep-checkpoints 1"),
    errno.EFBIG: ("FSIZE", "a file would become larger than allowed{}: raise the limit (ulimit -f unlimited)"),
}  # fmt: skip
NO_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory", "bad_alloc")
NO_LIBRARY = ("failed to map segment", "cannot open shared object", "cannot allocate")
NO_THREAD = "can't start new thread"
ROOM = 64 << 20  # bytes: where so much can still be had, a call that got no memory wanted too much itself


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def scarcity(error: BaseException, of_call: bool = False) -> str:
    """What the machine ran out of, with its limit and what to do; empty for an error of another kind. ``of_call``: of code that
    may itself have wanted too much memory, which is then no fault of the machine."""
    return next(filter(None, (_scarce(cause, of_call) for cause in causes(error))), "")


def host_fault(error: BaseException) -> str:
    """What is wrong with the machine or with a server, where that ended a call; empty where the code called, or who asked for it,
    is to blame. Words that a guest or a served model wrote do not count: only types and error numbers of our own side do."""
    if any(isinstance(cause, RequestRefused | GeneratorLost) for cause in causes(error)):
        return ""  # the request is to blame; or the run stops anyway
    lost = (cause for cause in causes(error) if isinstance(cause, ServerFault | ConnectionError))
    return scarcity(error, of_call=True) or next((f"{cause}" or type(cause).__name__ for cause in lost), "")


def _scarce(error: BaseException, of_call: bool) -> str:
    if isinstance(error, HostFault):
        return str(error)
    if isinstance(error, TurnwiseError):  # its words may quote anybody
        return ""
    if isinstance(error, OSError) and error.errno in SCARCE:
        return _shortage(error.errno, error.filename)
    if isinstance(error, MemoryError):
        return "" if of_call and _has_room() else _shortage(errno.ENOMEM)
    text = str(error)
    if isinstance(error, ImportError) and any(words in text for words in NO_LIBRARY):
        return (
            f"no memory left for a library ({text.splitlines()[0]}); raise the limit of the address space (ulimit -v)"
        )
    if isinstance(error, RuntimeError | ImportError | OSError) and any(words in text.lower() for words in NO_MEMORY):
        return _shortage(errno.ENOMEM)
    if isinstance(error, RuntimeError) and NO_THREAD in text:
        return _shortage(errno.EAGAIN)
    return _shortage(errno.ENOSPC) if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL" else ""


def _shortage(number: int, path: object = None) -> str:
    name, words = SCARCE[number]
    facts = [str(path)] * bool(path)
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):  # a system without such limits
        import resource

        if number == errno.EAGAIN and resource.getrlimit(resource.RLIMIT_AS)[0] > 0 and not _has_room():
            name, facts = "AS", [*facts, "ulimit -v"]  # a thread found no room for its stack
        soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        facts += [f"the limit is {soft}"] * (soft != resource.RLIM_INFINITY)
    return words.format(f" ({', '.join(facts)})" if facts else "")


def _has_room() -> bool:
    with contextlib.suppress(MemoryError):
        return bool(bytearray(ROOM))
    return False
