"""Function calling of the Berkeley leaderboard (package bfcl-eval): questions, tool schemas and reference answers.

    load("bfcl:simple_python")       one question, one call; also multiple, parallel, parallel_multiple, live_simple, ...
    load("bfcl:irrelevance")         no tool fits: the right answer calls none
    load("bfcl:multi_turn_base")     several requests to simulated programs (a file system, a travel agency, ...)

Calls are compared with the reference argument by argument, where any of its listed values is right. A multi-turn episode
succeeds when the programs end in the state that the reference calls leave; what they reply is not compared, which the leaderboard
does too. Tenths of the questions, by a hash of their ids, are held out.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments import base
from turnwise.environments.base import Environment, LimitedEpisode
from turnwise.environments.families.adapter import import_package, member_class, require_offered, split_options

FILES = "BFCL_v4_{}.json"
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "String": "string"}
MAX_CALLS = 20  # in one request of a multi-turn episode
MISSED = 0.1  # share of the calls that the demonstrator does not make
MAX_REPLY = 2000  # characters of a program's reply
IGNORED = str.maketrans("", "", " ,./-_*^'\"")  # what the leaderboard does not compare either
Entry = dict[str, Any]


class CallEnvironment(Environment):
    """One question, answered by one turn of calls. ``environment`` makes a subclass for each category."""

    max_turns = 1
    suggests: ClassVar[Mapping[str, Any]] = {"context": 2048, "max_tokens": 128}
    entries: ClassVar[Mapping[str, Sequence[Entry]]]  # by split

    def reset(self, seed: int) -> Sequence[Message]:
        self.entry = base.listed_task(self.entries, self.split, seed)
        self.tools = tuple(tool_schema(function) for function in self.entry["function"])
        return list(self.entry["question"][0])

    def step(self, action: Action) -> Step:
        right = not action.faults and calls_match(action.calls, self.entry.get("ground_truth", []))
        info = {"success": right, "tool_calls": len(action.calls), "tool_errors": len(action.faults)}
        return Step([], float(right), terminated=True, info=info)

    def oracle(self) -> Action:
        references = [next(iter(reference.items())) for reference in self.entry.get("ground_truth", [])]
        calls = [ToolCall(name, first_value(arguments)) for name, arguments in references]
        return base.call_action(*calls) if calls else Action("None of these tools fits.")

    def demonstrate(self, rng: random.Random) -> Action:
        """The reference, but one call in ten is not made."""
        action = self.oracle()
        made = [call for call in action.calls if rng.random() >= MISSED]
        if len(made) == len(action.calls):
            return action
        return base.call_action(*made) if made else Action("done")


class ProgramEnvironment(LimitedEpisode, CallEnvironment):
    """Several requests in a row, answered by calls into simulated programs. A turn without a call ends a request."""

    max_turns = 40
    suggests: ClassVar[Mapping[str, Any]] = {"context": 8192, "max_tokens": 128}
    calls: int  # in this request
    planned: list[ToolCall]  # what the oracle has left to call in this request

    def begin(self, seed: int) -> Sequence[Message]:
        self.entry = entry = base.listed_task(self.entries, self.split, seed)
        self.programs, self.request, self.calls = start_programs(entry), 0, 0
        backends = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        folder, documents = data_folder() / "multi_turn_func_doc", backends.MULTI_TURN_FUNC_DOC_FILE_MAPPING
        functions = [f for name in entry["involved_classes"] for f in read_lines(folder / documents[name])]
        excluded = entry.get("excluded_function", ())
        self.tools = tuple(tool_schema(function) for function in functions if function["name"] not in excluded)
        self.planned = self._reference(0)
        return list(self.entry["question"][0])

    def act(self, action: Action) -> Step:
        if action.calls and self.calls < MAX_CALLS:
            self.calls += len(action.calls)
            replies = [run_call(self.programs, call) for call in action.calls]
            for call in action.calls:
                if self.planned and self.planned[0].name == call.name:
                    self.planned.pop(0)  # the oracle need not call it any more
            messages = [
                base.tool_message(call.name, text[:MAX_REPLY]) for call, (text, _) in zip(action.calls, replies)
            ]
            return Step(messages, info={"tool_calls": len(messages), "tool_errors": sum(bad for _, bad in replies)})
        self.request, self.calls = self.request + 1, 0
        counts = {"tool_errors": len(action.faults)}
        if self.request < len(self.entry["question"]):
            self.planned = self._reference(self.request)
            return Step(list(self.entry["question"][self.request]), info=counts)
        reference = start_programs(self.entry)  # what the reference calls leave
        for request in range(len(self.entry["question"])):
            for call in self._reference(request):
                run_call(reference, call)
        right = states(self.programs) == states(reference)
        return Step([], float(right), terminated=True, info=counts | {"success": right})

    def _reference(self, request: int) -> list[ToolCall]:
        """The calls of a request, which are written as Python; positional arguments are named by the function's signature."""
        calls = []
        for text in self.entry["ground_truth"][request]:  # "mv(source='a', destination='b')"
            node = ast.parse(text, mode="eval").body
            assert isinstance(node, ast.Call), text
            name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
            owner = next(program for program in self.programs.values() if hasattr(type(program), name))
            names = list(inspect.signature(getattr(owner, name)).parameters)
            arguments = {names[n]: ast.literal_eval(value) for n, value in enumerate(node.args)}
            arguments |= {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
            calls.append(ToolCall(name, arguments))
        return calls

    def oracle(self) -> Action:
        return base.call_action(self.planned[0]) if self.planned else Action("done")


# ------------------------------------------------------------------ calls


def tool_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's description in the OpenAI form."""
    described = {k: v for k, v in function.items() if k in ("name", "description")}
    return {"type": "function", "function": {**described, "parameters": json_types(function["parameters"])}}


def json_types(schema: Any) -> Any:
    """A schema with the type names of JSON Schema instead of Python's."""
    if isinstance(schema, list):
        return [json_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {key: json_types(value) for key, value in schema.items() if key != "optional"}
    kind = changed.get("type")
    return {**changed, "type": JSON_TYPES.get(kind, kind)} if isinstance(kind, str) else changed


def required(values: Sequence[Any]) -> bool:
    """Whether an argument must be there: an empty text, or no value at all, means that it may be left out."""
    return bool(values) and "" not in values


def first_value(value: Any) -> Any:
    """A reference value, where the values inside an object are lists of choices."""
    if isinstance(value, list):
        return [first_value(item) for item in value]
    return {k: first_value(v[0]) for k, v in value.items() if required(v)} if isinstance(value, Mapping) else value


def calls_match(calls: Sequence[ToolCall], references: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every call fits one reference and every reference one call, in any order."""
    left = list(references)
    for call in calls:
        for reference in left:
            name, arguments = next(iter(reference.items()))
            offered = call.name in (name, name.replace(".", "_")) and set(call.arguments) <= set(arguments)
            if offered and value_matches(dict(call.arguments), arguments):
                left.remove(reference)
                break
        else:
            return False
    return not left


def value_matches(given: Any, wanted: Any) -> bool:
    """Whether a value fits one of the reference: texts without case, spaces and punctuation, whole numbers as decimals, each
    value of an object one of several choices."""
    if isinstance(wanted, Mapping):
        return isinstance(given, dict) and all(
            any(value_matches(given[key], v) for v in choices) if key in given else not required(choices)
            for key, choices in wanted.items()
        )
    if isinstance(wanted, list):
        same = isinstance(given, list) and len(given) == len(wanted)
        return same and all(value_matches(g, w) for g, w in zip(given, wanted))
    if isinstance(wanted, str) and isinstance(given, str):
        one, other = (text.lower().translate(IGNORED) for text in (given, wanted))
        return one == other
    if isinstance(wanted, bool) or isinstance(given, bool):  # in Python, True == 1
        return given is wanted
    return bool(given == wanted)


# --------------------------------------------------------------- programs


def start_programs(entry: Entry) -> dict[str, Any]:
    """The simulated programs of an entry, in their initial state."""
    paths = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    programs = {}
    for name in entry["involved_classes"]:
        program = getattr(importlib.import_module(paths.CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in paths.STATELESS_CLASSES:
            program._load_scenario(copy.deepcopy(entry["initial_config"].get(name, {})), long_context=False)
        programs[name] = program
    return programs


def run_call(programs: Mapping[str, Any], call: ToolCall) -> tuple[str, bool]:
    """The reply of the program that has this function, and whether the call failed."""
    # a private method is no tool: it would change the state behind the rules
    owner = next((p for p in programs.values() if not call.name.startswith("_") and hasattr(type(p), call.name)), None)
    if owner is None:
        return f"error: there is no function {call.name!r}", True
    try:
        reply = getattr(owner, call.name)(**call.arguments)
    except Exception as fault:  # wrong arguments, or a rule of the program
        return f"error: {fault}", True
    failed = isinstance(reply, dict) and "error" in reply
    return reply if isinstance(reply, str) else json.dumps(reply, default=str), failed


def states(programs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of every program that a call can change, as text."""
    return {name: {k: repr(v) for k, v in vars(p).items() if not k.startswith("_")} for name, p in programs.items()}


# ------------------------------------------------------------------- files


def data_folder() -> Path:
    package = import_package("bfcl_eval", "bfcl", "--no-deps bfcl-eval")  # its other dependencies are not used
    return Path(next(iter(package.__path__))) / "data"


def read_lines(path: Path) -> list[Entry]:
    return [row for _, row in base.read_json_lines(str(path), "an object")]


@cache
def environment(spec: str) -> type[CallEnvironment]:
    """The class of a category."""
    name, _ = split_options("bfcl", spec, ())
    folder, (prefix, suffix) = data_folder(), FILES.split("{}")
    categories = sorted(p.name.removeprefix(prefix).removesuffix(suffix) for p in folder.glob(FILES.format("*")))
    unsupported = ("java", "web_search", "memory", "format_sensitivity", "long_context", "miss_func")
    offered = [category for category in categories if not any(word in category for word in unsupported)]
    require_offered(name, offered, "bfcl has no category")
    entries, answers = read_lines(folder / FILES.format(name)), folder / "possible_answer" / FILES.format(name)
    if answers.is_file():
        truth = {row["id"]: row["ground_truth"] for row in read_lines(answers)}
        entries = [{**entry, "ground_truth": truth[entry["id"]]} for entry in entries if entry["id"] in truth]
    kind = ProgramEnvironment if name.startswith("multi_turn") else CallEnvironment
    splits = base.split_by_content(entries, lambda entry: str(entry["id"]))
    return member_class("bfcl", spec, kind, f"{name} of BFCL.", entries=splits)
