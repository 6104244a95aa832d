"""Python objects named in text: ``package.module:name`` or ``folder/file.py:name``. Knows no kind of object.

A name may be followed by arguments: ``shop:Shop,db=x,size=3``. ``call_arguments`` converts them by the signature of what they
are given to, and refuses those it does not take.

Names come from a user, or from a run that is only read and that a stranger may have written: inside ``reading`` they are refused.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwise.config.convert import convert
from turnwise.errors import SettingError, nearest

GIVEN_OBJECT = "object:"  # begins the recorded name of what was given as an object, which no name refers to
TYPED_ARGUMENTS = (bool, int, float, str)  # values that text can hold exactly
TRUST_RUN = "--trust-run"
_readable: ContextVar[Callable[[str], bool] | None] = ContextVar("readable", default=None)  # None: nothing is only read


@contextmanager
def reading(typed: str = "", trusted: bool = False) -> Iterator[None]:
    """Inside, no name is resolved but ``typed``, which the user wrote beside the command; ``trusted``: all are. The outermost
    block decides. A name is refused even if its module is loaded: ``shutil:rmtree`` needs no import to do harm."""
    token = _readable.set(_readable.get() or (lambda name: trusted or name == typed))
    try:
        yield
    finally:
        _readable.reset(token)


def check_reading(name: str, what: str) -> None:
    """Refuse to run the code that ``name`` refers to while a run is only read."""
    readable = _readable.get()
    if readable is not None and not readable(name):
        raise SettingError(
            f"{what}: reading a run imports no code, and {name} is code that the run names; read it, then write {TRUST_RUN}"
        )


def import_from_current_folder() -> None:
    """Let ``module:name`` find modules of the current folder, as ``python -m`` does. A console script does not by itself."""
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def load_object(name: str, what: str, accepts: Callable[[Any], bool], noun: str) -> Any:
    """The object that ``name`` refers to. ``what`` begins the messages ("environment 'x:Y'"); ``accepts`` and ``noun`` say
    which objects of the module are of the right kind ("class")."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise SettingError(f"{what} cannot be read; write module:{noun} or file.py:{noun}")
    check_reading(name, what)
    module = load_module(module_name, what)
    value = module
    for part in attribute.split("."):
        value = getattr(value, part, None)  # type: ignore[assignment]
    if value is None or not accepts(value):
        offered = [key for key, held in vars(module).items() if not key.startswith("_") and accepts(held)]
        raise SettingError(f"{what}: {module_name} has no {noun} {attribute!r}; {nearest(attribute, offered)}")
    return value


def load_module(name: str, what: str) -> ModuleType:
    """A module by its dotted name, or by the path of its file; what its import raises becomes one line."""
    import_from_current_folder()  # not before: a folder that is only read, a run's among them, is no place to import from
    try:
        return _load_file(Path(name), what) if name.endswith(".py") else importlib.import_module(name)
    except SettingError:
        raise
    except (Exception, SystemExit) as fault:  # a module of the user's may even end the program
        text = f"{name} cannot be imported: {type(fault).__name__}: {fault}"
        if isinstance(fault, ModuleNotFoundError):
            text = f"no module {fault.name!r}; is it installed, or in the current folder?"
        elif isinstance(fault, SyntaxError):
            text = f"{fault.filename} line {fault.lineno}: {fault.msg}"
        raise SettingError(f"{what}: {text}") from fault


def _load_file(path: Path, what: str) -> ModuleType:
    """Execute a file once per process. Its folder goes on the path, so that it can import its neighbours."""
    if not path.is_file():
        raise SettingError(f"{what}: there is no file {path}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # two folders may hold files of one name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def importable_name(value: Any) -> str:
    """``module:name`` under which another process finds this class or function; empty where there is none.

    A class of a script or notebook (``__main__``) or of a function's body has none."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if not name or module in ("", "__main__", None) or "<locals>" in name:
        return ""
    loaded = sys.modules.get(module)
    named: Any = loaded
    for part in name.split("."):
        named = getattr(named, part, None)
    if named is not value:  # the name means another object by now
        return ""
    file = getattr(loaded, "__file__", None)
    by_path = file is not None and module.startswith(f"{Path(file).stem}_")  # loaded by `_load_file`
    return f"{os.path.relpath(file) if by_path and file else module}:{name}"


# ------------------------------------------------------------------ arguments


def split_arguments(spec: str) -> tuple[str, dict[str, str]]:
    """Name and arguments of a specification.

    >>> split_arguments("shop:Shop,db=x,size=3")
    ('shop:Shop', {'db': 'x', 'size': '3'})
    """
    name, *parts = spec.split(",")
    arguments: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or key in arguments:
            twice = f"{spec!r} gives {key!r} twice"
            wrong = f"{spec!r}: {part!r} is not an argument; write NAME,key=value,key=value"
            raise SettingError(twice if key in arguments and equals else wrong)
        arguments[key] = value
    return name, arguments


def join_arguments(name: str, arguments: Mapping[str, Any]) -> str:
    """The specification that ``split_arguments`` reads; empty if an argument cannot be written as text."""
    if not all(type(value) in TYPED_ARGUMENTS and "," not in str(value) for value in arguments.values()):
        return ""
    return ",".join([name, *(f"{key}={value}" for key, value in arguments.items())])


def call_arguments(
    called: Callable[..., Any], arguments: Mapping[str, Any], what: str, reserved: tuple[str, ...] = ()
) -> dict[str, Any]:
    """``arguments`` converted by the signature of ``called``; unknown ones are refused with the nearest name. ``reserved``
    names belong to the run."""
    parameters = signature_of(called)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for key in arguments:
        wrong = ""
        if key in reserved:
            wrong = f"takes {key!r} from the run; write --{key.replace('_', '-')} instead"
        elif key not in named and not accepts_any:
            wrong = f"has no argument {key!r}; {nearest(key, [n for n in named if n not in reserved])}"
        if wrong:
            raise SettingError(f"{what} {wrong}")
    return {
        key: typed_value(key, value, parameters.get(key)) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def signature_of(called: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters with resolved annotations; none for a class written in C, no annotations where one cannot be resolved."""
    try:
        return inspect.signature(called, eval_str=True).parameters
    except (TypeError, ValueError):
        return {}
    except Exception:  # an annotation names what does not exist at run time
        parameters = inspect.signature(called).parameters
        return {key: p.replace(annotation=inspect.Parameter.empty) for key, p in parameters.items()}


def typed_value(key: str, value: Any, parameter: inspect.Parameter | None) -> Any:
    """Convert by the annotation; without one, by the type of the default; else to a number where the text is one."""
    if parameter is None:
        return value
    if parameter.annotation is not inspect.Parameter.empty:
        return convert(key, value, parameter.annotation)
    if not isinstance(value, str):
        return value
    if type(parameter.default) in TYPED_ARGUMENTS:
        return convert(key, value, type(parameter.default))
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
