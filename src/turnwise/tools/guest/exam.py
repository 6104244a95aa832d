"""The two ends of a test, each in a sandboxed process of its own: the program's, and the examiner's, which runs the test.

The source of this file is sent into both. The examiner never executes a line of the program: a name that the test does not define
stands for the program's, each call of it is a question that the host carries over, and what comes back is plain data. The program
never sees the test, only the arguments of its calls. So whatever it does to its own process, it can only change what it answers.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import importlib
import json
import operator
import os
import sys
import threading
from array import array
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterator, KeysView, MutableSequence, MutableSet, ValuesView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any

MAX_ITEMS = 10_000  # of an iterator that is returned: it is read to its end; a longer one goes over item by item
SINGLE: dict[str, Any] = {  # by the name of a type, how it is made of text
    "Decimal": Decimal, "Fraction": Fraction, "bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "complex": complex,
    "datetime": datetime.fromisoformat, "date": date.fromisoformat, "time": time.fromisoformat,
    "timedelta": lambda microseconds: timedelta(microseconds=int(microseconds)),
}  # fmt: skip
MANY: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "dict": dict,
    "iterator": iter, "Counter": lambda pairs: Counter(dict(pairs)),
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
    if type(value) is Remote:
        return ["object", of_object(value)]
    if isinstance(value, int | float | str):
        base: Any = next(base for base in (int, float, str) if isinstance(value, base))
        return base.__getnewargs__(value)[0]
    if isinstance(value, bytes | bytearray | complex | Decimal | Fraction | date | time | timedelta):
        kind = next(name for name in SINGLE if name in [base.__name__ for base in type(value).__mro__])
        if isinstance(value, timedelta):
            return [kind, str(value // timedelta(microseconds=1))]
        return [
            kind,
            value.hex()
            if isinstance(value, bytes | bytearray)
            else value.isoformat()
            if isinstance(value, date | time)
            else str(value),
        ]
    if isinstance(value, dict):
        pairs = (["tuple", encode(k, of_object), encode(v, of_object)] for k, v in dict.items(value))
        return ["Counter" if isinstance(value, Counter) else "dict", *pairs]
    if isinstance(value, Iterator | KeysView | ValuesView | range | array):
        items = list(islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS and isinstance(value, Iterator):
            return ["object", of_object(chain(items, value))]
        return [
            "list" if isinstance(value, range | array) else "iterator",
            *(encode(i, of_object) for i in (*items, *islice(value, len(items), None))),
        ]
    if isinstance(value, tuple) and isinstance(fields := getattr(value, "_fields", None), tuple):
        return ["namedtuple", encode(fields, of_object), *(encode(item, of_object) for item in value)]
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
    if kind == "namedtuple":
        fields, *values = (decode(item, of_object) for item in items)
        return namedtuple("Row", fields)(*values)
    return SINGLE[kind](items[0]) if kind in SINGLE else MANY[kind]([decode(item, of_object) for item in items])


def unlimited_digits() -> None:
    sys.set_int_max_str_digits(0)  # a factorial is plain data too; time and memory of the session are limited


# ------------------------------------------------------------------- the program's process


def read_and_print(program: str, text: str) -> None:
    """Run a program that reads ``text``. What it writes to descriptor 1 is the session's output; errors are nobody's answer."""
    # a file, as a judge gives it: open(0), /dev/stdin and os.read(0, os.fstat(0).st_size) work as anywhere
    file = os.open("input", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink("input")
    with open(os.dup(file), "wb") as whole:
        whole.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
    # the descriptor, not the text that the session captures: sys.stdout.buffer and os.write work as anywhere
    sys.stdout = out = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    builtins.exit = builtins.quit = os._exit = sys.exit  # type: ignore[assignment]  # the session goes on, to send the output
    before = set(threading.enumerate())
    with contextlib.suppress(SystemExit):
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    out.flush()


class Program:
    """A program whose functions are called by questions; what it prints is dropped."""

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        unlimited_digits()
        self.names, self.objects = names, list[Any]()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
        names["__name__"] = "program"  # imported by a test, not run
        sys.modules["program"] = sys.modules["__main__"]  # where dataclasses look for its names
        exec(compile(source, "program", "exec"), names)

    def answer(self, question: str) -> Text:
        """The value of a name, an attribute or a call, or the exception that it raised."""
        verb, subject, *rest = decode(json.loads(question), self.objects.__getitem__)
        try:
            if verb == "name" and subject not in self.names:
                raise NameError(f"name {subject!r} is not defined")
            if verb == "name":
                value = self.names[subject]
            elif verb == "call":
                value = subject(*rest[0], **rest[1])
            else:
                value = OPERATIONS[verb](subject, *rest)
            changed = (
                rest[0] if verb == "call" and value is None else ()
            )  # a function that works in place returns nothing
            return Text(json.dumps(["value", encode(value, self._number), encode(tuple(changed), self._number)]))
        except Exception as fault:
            kinds = [kind.__name__ for kind in type(fault).__mro__ if kind not in (object, BaseException)]
            return Text(json.dumps(["raised", kinds, str(fault)[:1000]]))

    def _number(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


# ------------------------------------------------------------------- the examiner's process


# what a test may do with an object of the program, beside calling it; none of them is given what the test expects and says
# whether it is right
OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr, "set": setattr, "len": len, "item": operator.getitem, "set item": operator.setitem,
    "del item": operator.delitem, "iter": iter, "next": next, "isinstance": lambda kind, value: isinstance(value, kind),
    "enter": lambda value: type(value).__enter__(value), "exit": lambda value: type(value).__exit__(value, None, None, None),
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "matmul", "neg")},
}  # fmt: skip


class Remote:
    """A function or another object of the program: it can be called, read and changed, and says nothing by itself. A
    comparison would be the program's word for its own answer."""

    def __init__(self, number: int, ask: Callable[..., Any]) -> None:
        self.__dict__.update(_number=number, _ask=ask)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __str__(self) -> str:
        text = self._ask("attribute", self, "__str__")()
        return text if type(text) is str else self._refuse()

    def __iter__(self) -> Any:
        return self._ask("iter", self)

    def __next__(self) -> Any:
        try:
            return self._ask("next", self)
        except EndOfItems:
            raise StopIteration from None

    def __exit__(self, *fault: Any) -> None:
        self._ask("exit", self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._ask("isinstance", self, value) is True

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("an object of the program is not plain data: it cannot be compared or tested")

    __eq__ = __ne__ = __bool__ = __hash__ = __repr__ = __contains__ = _refuse


def _operation(verb: str, of_objects: bool = False) -> Any:
    def operation(self: Remote, *others: Any) -> Any:
        """Arithmetic is for objects, and makes one: what is given a number could say that the difference is 0."""
        if of_objects and not all(isinstance(other, Remote) for other in others):
            return NotImplemented
        value = self._ask(verb, self, *others)
        return value if not of_objects or isinstance(value, Remote) else self._refuse()

    return operation


for _name, _verb in (
    ("len", "len"),
    ("getitem", "item"),
    ("setitem", "set item"),
    ("delitem", "del item"),
    ("enter", "enter"),
):
    setattr(Remote, f"__{_name}__", _operation(_verb))
for _name in ("add", "sub", "mul", "truediv", "matmul", "neg"):
    setattr(Remote, f"__{_name}__", _operation(_name, of_objects=True))


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
BUILT_IN = frozenset(dir(builtins))


def _called(tree: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


class Names(dict[str, Any]):
    """The names of a test. One that it does not define is the program's; built-in functions and modules never are, nor a function
    of the standard library that is given what the program said: it takes part in the verdict."""

    def __init__(self, tree: ast.AST, ask: Callable[..., Any], refuse: Callable[[str], Any]) -> None:
        super().__init__(__name__="__main__")
        nodes = list(ast.walk(tree))
        names = {n.id for n in nodes if isinstance(n, ast.Name)}
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        # each call of a name, and the names that are called in its arguments
        calls = [
            (n.func.id, _called(n) - {n.func.id})
            for n in nodes
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        bases -= {name for name, _ in calls}
        self._modules = {name: name for name in bases & sys.stdlib_module_names}
        self._modules |= {name: PACKAGES[name] for name in bases & PACKAGES.keys()}
        # a test that uses built-in names alone is of a function with such a name: the one that is called first
        alone = names <= stored | BUILT_IN
        self._tested = {name for name, inside in calls if alone and not inside} & BUILT_IN
        # a class of errors of the program's, by which its errors are caught
        caught = [n.type for n in nodes if isinstance(n, ast.ExceptHandler) and n.type is not None]
        errors = {n.id for kind in caught for n in ast.walk(kind) if isinstance(n, ast.Name)} - BUILT_IN
        self.errors: dict[str, type[Exception]] = {name: type(name, (Exception,), {}) for name in errors}
        self._tools = {name for name, inside in calls if inside - BUILT_IN}
        self._ask, self._refuse = ask, refuse

    def __missing__(self, name: str) -> Any:
        if name in self.errors:
            return self.errors[name]
        if (name in BUILT_IN and name not in self._tested) or name.startswith("__"):
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


class EndOfItems(Exception):
    """A StopIteration of the program: it ends the iteration of an object of the program, nothing of the test's own. An exception
    that ends a loop without an error would let map() swallow the rest of a test."""


RAISED: dict[str, type[Exception]] = {"StopIteration": EndOfItems} | {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, StopIteration | StopAsyncIteration)
}


def _assign(argument: Any, now: Any) -> None:
    """Make an argument of a call what a function that works in place has made of its copy."""
    if type(argument) is not type(now):
        return
    if isinstance(argument, MutableSequence):
        argument[:] = now
    elif isinstance(argument, dict | MutableSet):
        argument.clear()
        argument |= now


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
            names = Names(tree, self._ask, self._refuse)
            self._errors = names.errors
            exec(compile(tree, "test", "exec"), names)
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
            known = self._errors | RAISED
            raise next((known[name] for name in rest[0] if name in known), RuntimeError)(rest[1])
        value, changed = (decode(part, lambda number: Remote(number, self._ask)) for part in rest)
        if value is None and question[0] == "call":
            for argument, now in zip(question[2], changed):
                _assign(argument, now)
        return value

    def _number(self, value: Any) -> int:
        if isinstance(value, Remote):
            return value._number
        return self._refuse(f"it passes a {type(value).__name__} to the program, which can be sent only plain data")
