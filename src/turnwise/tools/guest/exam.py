"""The two ends of a test, each in a sandboxed process of its own: the program's, and the examiner's, which runs the test.

The source of this file is sent into both. The examiner never executes a line of the program: a name that the test does not define
stands for the program's, each call of it is a question that the host carries over, and what comes back is plain data. The program
never sees the test, only the arguments of its calls. So whatever it does to its own process, it can only change what it answers.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, KeysView, ValuesView
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from queue import SimpleQueue
from typing import Any

MAX_ITEMS = 10_000  # of an iterator that is returned; it is read to its end
SINGLE: dict[str, Any] = {"Decimal": Decimal, "Fraction": Fraction, "bytes": bytes.fromhex, "complex": complex}
MANY: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "dict": dict, "iterator": iter,
}  # fmt: skip


class Text(str):
    """A value whose ``repr``, which a session shows, is the text itself."""

    def __repr__(self) -> str:
        return str(self)


class Refused(Exception):
    """The test asks for what cannot be sent as plain data."""


def encode(value: Any, of_object: Callable[[Any], int]) -> Any:
    """A value as JSON; a container is a list that begins with its type. Of a subclass only the data goes over."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, int | float | str):
        base: Any = next(base for base in (int, float, str) if isinstance(value, base))
        return base.__getnewargs__(value)[0]
    if isinstance(value, bytes | complex | Decimal | Fraction):
        kind = next(name for name in SINGLE if name in [base.__name__ for base in type(value).__mro__])
        return [kind, value.hex() if isinstance(value, bytes) else str(value)]
    if isinstance(value, dict):
        return ["dict", *(["tuple", encode(k, of_object), encode(v, of_object)] for k, v in dict.items(value))]
    if isinstance(value, Iterator | KeysView | ValuesView | range):
        items = list(islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise ValueError(f"an iterator of more than {MAX_ITEMS} items cannot be sent")
        return ["list" if isinstance(value, range) else "iterator", *(encode(item, of_object) for item in items)]
    name = next((n for n, kind in MANY.items() if isinstance(kind, type) and isinstance(value, kind)), "")
    if name:
        return [name, *(encode(item, of_object) for item in value)]
    return ["object", of_object(value)]


def decode(data: Any, of_object: Callable[[int], Any]) -> Any:
    """The value that JSON stands for; raises for anything that ``encode`` does not write."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    kind, *items = data
    if kind == "object":
        return of_object(items[0])
    return SINGLE[kind](items[0]) if kind in SINGLE else MANY[kind]([decode(item, of_object) for item in items])


def unlimited_digits() -> None:
    sys.set_int_max_str_digits(0)  # a factorial is plain data too; time and memory of the session are limited


# ------------------------------------------------------------------- the program's process


def read_and_print(program: str, text: str) -> None:
    """Run a program that reads ``text``. What it writes to descriptor 1 is the session's output; errors are nobody's answer."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogatepass")), "utf-8", "surrogatepass")
    # the descriptor, not the text that the session captures: sys.stdout.buffer and os.write work as anywhere
    sys.stdout = out = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    with contextlib.suppress(SystemExit):
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    out.flush()


class Program:
    """A program whose functions are called by questions; what it prints is dropped."""

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        unlimited_digits()
        self.names, self.objects = names, list[Any]()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
        exec(compile(source, "program", "exec"), names)

    def answer(self, question: str) -> Text:
        """The value of a name, an attribute or a call, or the exception that it raised."""
        verb, subject, *rest = decode(json.loads(question), self.objects.__getitem__)
        try:
            if verb == "name" and subject not in self.names:
                raise NameError(f"name {subject!r} is not defined")
            if verb == "call":
                value = subject(*rest[0], **rest[1])
            else:
                value = self.names[subject] if verb == "name" else getattr(subject, rest[0])
            return Text(json.dumps(["value", encode(value, self._number)]))
        except Exception as fault:
            kinds = [kind.__name__ for kind in type(fault).__mro__ if kind.__module__ == "builtins"]
            return Text(json.dumps(["raised", kinds[0], str(fault)[:1000]]))

    def _number(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


# ------------------------------------------------------------------- the examiner's process


class Remote:
    """A function or another object of the program: it can be called and its attributes read, and says nothing by itself. A
    comparison would be the program's word for its own answer."""

    def __init__(self, number: int, ask: Callable[..., Any]) -> None:
        self._number, self._ask = number, ask

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self, name)

    def __str__(self) -> str:
        text = self._ask("attribute", self, "__str__")()
        return text if type(text) is str else self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("an object of the program is not plain data: it cannot be compared or tested")

    __eq__ = __ne__ = __bool__ = __hash__ = __repr__ = _refuse


# what many data sets leave to the imports of the program
PACKAGES = {"np": "numpy", "pd": "pandas", **{name: name for name in ("numpy", "pandas", "scipy", "sympy", "torch")}}
TOOLS = (
    "math",
    "cmath",
    "collections",
    "itertools",
    "functools",
    "operator",
    "statistics",
    "fractions",
    "decimal",
    "copy",
)


class Names(dict[str, Any]):
    """The names of a test. One that it does not define is the program's; built-in functions and modules never are, nor a function
    of the standard library that is given what the program said: it takes part in the verdict."""

    def __init__(self, tree: ast.AST, ask: Callable[..., Any], refuse: Callable[[str], Any]) -> None:
        super().__init__(__name__="__main__")
        nodes = list(ast.walk(tree))
        calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        bases -= {n.func.id for n in calls}
        self._modules = {name: name for name in bases & sys.stdlib_module_names}
        self._modules |= {name: PACKAGES[name] for name in bases & PACKAGES.keys()}
        of_builtins = lambda call: hasattr(builtins, call.func.id)  # noqa: E731
        self._tools = {
            c.func.id for c in calls if any(n in calls and n is not c and not of_builtins(n) for n in ast.walk(c))
        }
        self._ask, self._refuse = ask, refuse

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        if name in self._modules:
            try:
                return self.setdefault(name, importlib.import_module(self._modules[name]))
            except ImportError:
                self._refuse(f"it uses {name}, which it does not import, and which the sandbox does not have")
        if name.startswith("assert"):  # the program would say whether its own answer is right
            self._refuse(f"it does not define {name}")
        tools = (importlib.import_module(tool) for tool in TOOLS if name in self._tools)
        tool = next((getattr(module, name) for module in tools if callable(getattr(module, name, None))), None)
        value = self._ask("name", name) if tool is None else tool
        if tool is None and not isinstance(value, Remote):
            return value  # a variable, which a later call may change
        return self.setdefault(name, value)


# an exception that ends a loop without an error would let map() swallow the rest of a test
RAISED = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, StopIteration | StopAsyncIteration)
}


class Examiner:
    """One test, in a thread that stops at each question until the host brings the answer."""

    def __init__(self, test: str) -> None:
        unlimited_digits()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        self._says, self._answers = SimpleQueue[str](), SimpleQueue[str]()
        self._asked, self._refusal = False, ""
        threading.Thread(target=self._run, args=(test,), daemon=True).start()

    def next(self, answer: str | None = None) -> Text:
        """The next question as JSON, or the end: ``passed``, ``failed`` or ``refused: why``."""
        if answer is not None:
            self._answers.put(answer)
        return Text(self._says.get())

    def _run(self, test: str) -> None:
        verdict = "failed"
        try:
            tree = ast.parse(test)
            exec(compile(tree, "test", "exec"), Names(tree, self._ask, self._refuse))
            verdict = "passed"
            if not self._asked:
                self._refuse("it uses no name of the program; a function such as check(candidate) must be called, too")
        except BaseException:
            pass
        self._says.put(f"refused: {self._refusal}" if self._refusal else verdict)

    def _refuse(self, reason: str) -> Any:
        self._refusal = reason
        raise Refused(reason)

    def _ask(self, *question: Any) -> Any:
        self._asked = True
        self._says.put(json.dumps(encode(question, self._number)))
        kind, *rest = json.loads(self._answers.get())
        if kind == "raised":
            raise RAISED.get(rest[0], RuntimeError)(rest[1])
        return decode(rest[0], lambda number: Remote(number, self._ask))

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._number
        return self._refuse(f"it passes a {type(value).__name__} to the program, which can be sent only plain data")
