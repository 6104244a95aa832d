"""Command-line flags: every setting of a run, the method's hyper-parameters and, as ``--credit-...``, those of the method whose
credit it uses; settings of a config file lie under them. An unknown flag raises with the nearest known one. Does not know what a
command does with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from turnwise.config.convert import convert
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.named_object import TRUST_RUN
from turnwise.config.settings import (
    OTHER_NAMES,
    SAME_SETTING,
    SECTIONS,
    Settings,
    default_of,
    setting_type,
    split_method,
)
from turnwise.errors import SettingError, nearest
from turnwise.recipes import signatures

if TYPE_CHECKING:
    from turnwise.training.evaluation import ServedPolicy

FEW_FLAGS = 12  # that many are listed in a message
NO_FLAGS = {"method", "method_options", "credit_options"}  # settings that are given in another way
COMMON = {  # what --help shows, within one screen: a line for each; --help all and --help SECTION tell the rest
    "what to train": {
        "env": "NAME, module:Class or file.py:Class",
        "agent": "your agent: module:function, file.py:function or a command",
        "model": "a folder, a Hub id, smollm2, or `tiny`, created here",
        "data": "prompts (with --reward), preference pairs or dialogues",
        "reward": "file.py:function, exact, math, code, several by commas",
    },
    "how it learns": {
        "steps": "training steps",
        "groups": "tasks per step; 0: the method's own",
        "group_size": "trajectories per task; 0: the method's own",
        "max_tokens": "tokens sampled per turn, at most",
        "context": "tokens of a dialogue, at most",
        "lr": "learning rate",
        "lora_rank": "rank of LoRA adapters; 0: all weights",
    },
    "measuring and output": {
        "eval_tasks": "held-out tasks to evaluate on, before and after",
        "seed": "random seed of the whole run",
        "device": "cpu, cuda, or auto: cuda when present",
    },
}  # fmt: skip
SECTION_NAMES = {section.__name__.removesuffix("Section").lower(): section for section in SECTIONS}
HELP_ALL = "all"
CONFIG_HELP = "YAML or TOML file of settings; flags win over it"
DEFAULT_METHOD = str(default_of(next(f for f in fields(Settings) if f.name == "method")))
METHOD_HELP = f"METHOD, written first, is a name of `turnwise list` [{DEFAULT_METHOD}]."
MORE_HELP = (
    "{name} METHOD --help: its hyper-parameters; --help all: every setting; --help SECTION: those of one of "
    + ", ".join(SECTION_NAMES)
)


class Once(argparse._StoreAction):
    """A flag with one value; given again with another one, it would silently lose the first."""

    given: Any = None

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string and self.given not in (None, values):
            raise SettingError(f"{option_string} is given twice: {self.given} and {values}; write it once")
        self.given = values
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """Raises :class:`SettingError` instead of exiting: what was seen, and the nearest flag that exists. ``json``: the help of
    the flag of that name; empty: there is none."""

    add = argparse.ArgumentParser.add_argument

    def __init__(self, command: str, about: str = "", json: str = "print the result as JSON", **more: Any) -> None:
        super().__init__(prog=f"turnwise {command}", description=about, allow_abbrev=False, **more)
        for action in (None, "store"):
            self.register("action", action, Once)
        if json:
            self.add_argument("--json", action="store_true", help=json)

    def add_trust(self) -> None:
        help_ = (
            "import the code that the run names, too: its method or environment. Read it first; no run remembers this"
        )
        self.add_argument(TRUST_RUN, action="store_true", help=help_)

    def error(self, message: str) -> NoReturn:
        name = message.removeprefix("argument ").partition(": expected one argument")[0].split("/")[-1]
        if message.endswith("expected one argument"):
            message += f"; write {name} VALUE, or {name}=VALUE where it begins with a dash"
        elif "arguments are required" in message:
            message += f"; see: {self.prog} --help"
        raise SettingError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
        namespace, unknown = self.parse_known_args(list(argv))
        for word in unknown:
            name = word.split("=")[0]
            raise SettingError(
                f"unknown setting {name!r}; {self._hint(name, options)}"
                if word.startswith("-")
                else f"unexpected {word!r}"
            )
        return namespace

    def _hint(self, name: str, options: Sequence[str]) -> str:
        """The flag that was meant, where one is near; a hundred flags in a message would hide it."""
        other = flag(OTHER_NAMES.get(name.lstrip("-").replace("-", "_"), ""))
        if other in options:
            return f"it is called {other} here"
        hint, _, listed = nearest(name, options).partition("known: ")
        if not hint and "--lr" in options:  # a slip in a name of TRL's is not near to ours
            hint = nearest(name, map(flag, SAME_SETTING)).partition("known: ")[0]
        return hint.strip() or (f"known: {listed}" if len(options) <= FEW_FLAGS else f"see: {self.prog} --help")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _our_flag(word: str) -> str:
    """A flag by its name here, where it has TRL's; the other words as they are.

    >>> _our_flag("--learning-rate=1e-5")
    '--lr=1e-5'
    """
    name, equals, value = word.partition("=")
    ours = SAME_SETTING.get(name[2:].replace("-", "_")) if name.startswith("--") else None
    return f"{flag(ours)}{equals}{value}" if ours else word


def with_flags(message: str) -> str:
    """A message that begins with the name of a setting, with its flag instead: a reader of the command line typed the flag.

    >>> with_flags("checkpoint_every is 0; write a number >= 1")
    '--checkpoint-every is 0; write a number >= 1'
    """
    name, verb, rest = message.partition(" is ")
    with_flag = {f.name for f in fields(Settings)} - NO_FLAGS
    return f"{flag(name)}{verb}{rest}" if name in with_flag else message


def value_of(argv: Sequence[str], name: str) -> str:
    """The value of a flag, before the other flags are defined; empty if it is absent."""
    for word, following in zip(argv, [*argv[1:], ""]):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.split("=", 1)[1]
    return ""


def add_settings(parser: Parser, method: str, credit: str = "", topic: str = HELP_ALL) -> None:
    """Add every field of Settings, the hyper-parameters of the method, and those of the method whose credit it uses. The help
    shows what ``topic`` names: every setting, those of a section, or, where it is empty, those that are ``COMMON``."""
    by_name = {f.name: f for f in fields(Settings) if f.name not in NO_FLAGS}
    shown: Mapping[str, Mapping[str, str]] = COMMON
    if topic:
        sections = SECTIONS if topic == HELP_ALL else (SECTION_NAMES[topic],)
        shown = {str(s.__doc__).rstrip(".").lower(): dict.fromkeys((f.name for f in fields(s)), "") for s in sections}
    for title, names in shown.items():
        group = parser.add_argument_group(title)
        for name, brief in names.items():
            if name in by_name:
                add_setting(group, by_name.pop(name), brief)
    for f in by_name.values():  # accepted, but not shown
        add_setting(parser, f, argparse.SUPPRESS)
    for owner, prefix, title in ((method, "method", f"hyper-parameters of {method}"),
                                 (credit, "credit", f"hyper-parameters of the credit of {credit}")):  # fmt: skip
        visible = topic in ("", HELP_ALL, "method")
        to = parser.add_argument_group(title) if owner and visible else parser
        for name, parameter in signatures.parameters(owner).items() if owner else ():
            option = flag(name if prefix == "method" else f"credit_{name}")
            try:
                to.add_argument(option, dest=f"{prefix}.{name}", metavar="X",
                                help=f"[{parameter.default}]" if visible else argparse.SUPPRESS)  # fmt: skip
            except argparse.ArgumentError:  # of a user's own recipe; a test keeps the built-in ones apart
                raise SettingError(
                    f"{owner} has a parameter {name!r}, which is also a flag of the command; rename it"
                ) from None


def add_setting(group: Any, f: Field[Any], help_: str = "") -> None:
    """The flag of one setting. A switch needs no value (``--profile``), a list may be given by the flag repeated."""
    more: dict[str, Any] = {"nargs": "?", "const": "true"} if setting_type(f.name) is bool else {}
    default, several = default_of(f), ""
    if isinstance(default, tuple):
        more, several = {"action": "append"}, "; several: separated by commas, or the flag repeated"
    text = ",".join(map(str, default)) if isinstance(default, tuple | dict) else str(default)
    text = f" [{text}]" if text else ""
    shown = help_ if help_ == argparse.SUPPRESS else f"{help_ or f.metadata['help'] + several}{text}"
    group.add_argument(flag(f.name), metavar="X", default=None, help=shown, **more)


def settings_from(namespace: argparse.Namespace, method: str, credit: str = "") -> dict[str, Any]:
    """The flags given, as typed settings; the others keep their defaults."""
    types = {f.name: setting_type(f.name) for f in fields(Settings)}
    flags = {k: ",".join(v) if isinstance(v, list) else v for k, v in vars(namespace).items() if v is not None}
    values = {k: convert(flag(k), v, types[k]) for k, v in flags.items() if k in types and k != "method"}
    values["method"] = method
    for owner, prefix in ((method, "method"), (credit, "credit")):  # hyper-parameters of each
        options = {k.partition(".")[2]: v for k, v in flags.items() if k.startswith(f"{prefix}.")}
        if owner and (typed := signatures.typed_options(owner, options)):
            values[f"{prefix}_options"] = typed
    return values


def add_policy_flags(parser: Parser) -> None:
    """The flags of ``turnwise eval`` that name a served model."""
    parser.add("--policy", default="", metavar="URL", help="a served model: http://HOST/v1 (OpenAI-compatible)")
    parser.add("--policy-model", default="", metavar="NAME", help="its name there; empty: the only one it serves")
    key = "environment variable that holds the key; empty: no key"
    parser.add("--policy-key-env", default="", metavar="VARIABLE", help=key)
    parser.add("--policy-seconds", default="120", help="time limit of one reply, in seconds [120]")
    parser.add("--policy-parallel", default="16", help="requests under way at the same time [16]")


def served_policy(namespace: argparse.Namespace) -> ServedPolicy | None:
    """What the flags of :func:`add_policy_flags` say; None if no served model is named."""
    from turnwise.training.evaluation import ServedPolicy

    if not namespace.policy:
        if namespace.policy_model or namespace.policy_key_env:
            raise SettingError("--policy-model and --policy-key-env belong to --policy URL, which is missing")
        return None
    seconds = convert("--policy-seconds", namespace.policy_seconds, float)
    parallel = convert("--policy-parallel", namespace.policy_parallel, int)
    return ServedPolicy(namespace.policy, namespace.policy_model, namespace.policy_key_env, seconds, parallel)


@dataclass(frozen=True)
class RunFlags:
    """What the user gave: ``values`` are settings, ``origins`` say where each came from."""

    namespace: argparse.Namespace
    values: Mapping[str, Any]
    origins: Mapping[str, str]


def _help_topic(command: str, argv: Sequence[str]) -> str:
    """The word behind --help: ``all``, or a section; empty: none."""
    topic = value_of(argv, "--help") or value_of(argv, "-h")
    if not topic or topic.startswith("-"):
        return ""
    if topic not in (HELP_ALL, *SECTION_NAMES):
        raise SettingError(
            f"--help {topic}: no such section; {nearest(topic, [HELP_ALL, *SECTION_NAMES])}; the hyper-parameters of a method: "
            f"turnwise {command} METHOD --help"
        )
    return topic


def read_run_flags(
    command: str,
    about: str,
    argv: Sequence[str],
    add: Callable[[Parser], None] = lambda parser: None,
    positional: bool = True,
    json: str = "print what comes out as JSON",
) -> RunFlags:
    """Parse ``turnwise COMMAND [METHOD] [--config FILE] [flags]``. ``add`` defines the command's own flags."""
    argv = [_our_flag(word) for word in argv]
    topic = _help_topic(command, argv)
    if topic:
        argv = ["--help" if word.startswith(("-h", "--help")) else word for word in argv if word != topic]
    # before the other flags are defined: the file may name the method, whose hyper-parameters are flags
    path = value_of(argv, "--config")
    file = read_config(path) if path else ConfigFile("")
    if positional and argv and not argv[0].strip():
        raise SettingError("the method is an empty text; write its name, or leave it out (`turnwise list` shows all)")
    word = argv[0] if positional and argv and not argv[0].startswith("-") else ""
    method, credit = split_method(word or file.values.get("method", DEFAULT_METHOD))
    signatures.check_method(method)
    credit = value_of(argv, "--credit") or credit or str(file.values.get("credit", ""))
    if credit:
        signatures.check_method(credit)
    name = f"{command} {method}" if positional else command
    about = f"{about} {METHOD_HELP}" if positional else about
    parser = Parser(name, about, json, epilog="" if topic else MORE_HELP.format(name=f"turnwise {command}"))
    if positional:
        parser.usage = f"turnwise {command} [METHOD] [--config FILE] [flags]"
        parser.add("method", nargs="?", help=argparse.SUPPRESS)
    parser.add("--config", default="", metavar="FILE", help=CONFIG_HELP)
    add(parser)
    add_settings(parser, method, credit, topic)
    namespace = parser.parse(argv)
    if positional and namespace.method not in (None, word):  # its hyper-parameters were not defined when it was found
        raise SettingError(f"write the method first: turnwise {command} {namespace.method} ...")
    flags = settings_from(namespace, method, credit)
    if not word:
        flags.pop("method")
    elif "+" in word:
        flagged, flags["credit"] = flags.get("credit", ""), split_method(word)[1]
        if flagged not in ("", flags["credit"]):
            raise SettingError(f"{word} names the credit {flags['credit']}, and --credit is {flagged}; name one credit")
    values = merge_config(file, flags)
    method, credit = split_method(values.get("method", DEFAULT_METHOD))
    for name, owner in (("method_options", method), ("credit_options", values.get("credit") or credit)):
        if not values.get(name) or not owner:
            continue
        try:
            values[name] = signatures.typed_options(owner, values[name])
        except SettingError as wrong:  # a mistake in the file is refused with its line
            raise SettingError(f"{file.place(name)}: {wrong}" if name in file.values else str(wrong)) from None
    origins = {name: file.place(name) for name in file.values} | dict.fromkeys(flags, "flag")
    return RunFlags(namespace, values, {name: origins[name] for name in values if name in origins})
