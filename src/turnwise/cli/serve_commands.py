"""Commands that serve a policy, and that print files which start servers and a run on a cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

from turnwise.cli.flags import DEFAULT_METHOD, Parser, RunFlags, add_setting, flag, read_run_flags, settings_from
from turnwise.cli.output import print_json
from turnwise.config.settings import Settings
from turnwise.errors import SettingError, nearest

OF_SERVERS = (
    "env", "difficulty", "max_turns", "context", "slots", "threads", "device", "rollout_dtype", "template", "tool_syntax",
    "seed", "hidden", "layers", "vocabulary", "copying",
)  # fmt: skip
KINDS = ("slurm", "k8s")
LAUNCH_ABOUT = (
    "Print the file that would start `turnwise serve` on some machines of a cluster and `turnwise train` on another, with the "
    "arguments of `turnwise train`. Nothing is submitted. The files were checked for their form, and not run on a cluster."
)
USAGE = "turnwise launch slurm|k8s [METHOD] [--servers N] [--ranks N] [--nodes N] [flags of turnwise train] > FILE"
GIVEN_BY_LAUNCH = ("generator", "generator_key_env", "generator_weights")


def endpoint(argv: Sequence[str]) -> int:
    """``turnwise endpoint``"""
    parser = Parser(
        "endpoint",
        "Serve the policy of a run by the chat completions, Responses and Anthropic Messages protocols. Agents on "
        "other machines need a token, read from the variable TURNWISE_ENDPOINT_TOKEN.",
    )
    parser.add("run", help="the run directory")
    parser.add("--address", default="127.0.0.1:8700", metavar="HOST:PORT", help="where to listen [127.0.0.1:8700]")
    parser.add("--seconds", type=float, default=3600.0, help="how long a session may stay open [3600]")
    namespace = parser.parse(argv)
    from turnwise.rollout.certificate import certificate_lines
    from turnwise.training.agents import TOKEN_VARIABLE
    from turnwise.training.serve import serve_run

    tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    token = os.environ.get(TOKEN_VARIABLE, "")
    served = serve_run(namespace.run, namespace.address, token, namespace.seconds, tell)
    if namespace.json:
        print_json(served)
        return 0
    print(f"{served['sessions']} sessions were finished; rows: {served['file']}")
    for line in certificate_lines(served["exactness"])[:-1]:  # nothing is trained here
        print(f"  {line}")
    return 0


def serve(argv: Sequence[str]) -> int:
    """``turnwise serve``"""
    parser = Parser(
        "serve",
        "Sample for `turnwise train --generator URL` by vLLM's own wire: token ids in, token ids out, pauses, weights. The "
        "trainer sends the weights. Trainers on other machines need a token, read from the variable TURNWISE_ENDPOINT_TOKEN.",
    )
    parser.add(
        "model",
        help="a folder in Hugging Face format, a Hub id, a run directory, or tiny (with the run's --env and --difficulty)",
    )
    parser.add("--address", default="127.0.0.1:8800", metavar="HOST:PORT", help="where to listen [127.0.0.1:8800]")
    group = parser.add_argument_group("settings")
    for f in fields(Settings):
        if f.name in OF_SERVERS:
            add_setting(group, f)
    namespace = parser.parse(argv)
    from turnwise.training.agents import TOKEN_VARIABLE
    from turnwise.training.serve import serve_model

    tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    values = {name: value for name, value in settings_from(namespace, DEFAULT_METHOD).items() if name in OF_SERVERS}
    served = serve_model(namespace.model, namespace.address, os.environ.get(TOKEN_VARIABLE, ""), values, tell)
    if namespace.json:
        print_json(served)
    else:
        print(f"{served['answered']} requests were answered; the last weights: {served['weights']}")
    return 0


def launch(argv: Sequence[str]) -> int:
    """``turnwise launch``"""
    if not argv or argv[0].startswith("-"):
        about = f"{LAUNCH_ABOUT} All flags: turnwise launch slurm --help"
        parser = Parser("launch", about, json="", usage=USAGE)
        parser.add("kind", help="slurm or k8s")
        parser.parse(argv)
    if argv[0] not in KINDS:
        raise SettingError(f"no kind of cluster {argv[0]!r}; {nearest(argv[0], KINDS)}")
    from turnwise.training.cluster.job_files import NOT_RUN, ClusterJob, kubernetes_file, slurm_script

    job_flags, train = _split(argv[1:])
    run = read_run_flags(
        f"launch {argv[0]}", LAUNCH_ABOUT, train if job_flags is not None else argv[1:], _own_flags, json=""
    )
    assert job_flags is not None  # --help has ended the program
    settings = Settings.of(run.values)
    if named := [name for name in GIVEN_BY_LAUNCH if name in run.origins]:
        raise SettingError(f"{flag(named[0])} is written by launch, for the servers that it starts; leave it out")
    if settings.cluster:
        raise SettingError(
            "--cluster lets Ray start the generators of a run, and launch starts servers for them; leave --cluster out, or write "
            "turnwise train ... --cluster without launch"
        )
    job = ClusterJob(
        name=settings.name or ("" if argv[0] == "slurm" else f"{settings.title}-{settings.env}".split(":")[-1]),
        train=_without(train, "--name"),
        serve=_serve_words(settings, run),
        out=settings.out,
        ranks=settings.ranks,
        on_gpus=not settings.device.startswith("cpu"),
        **vars(job_flags),
    )
    print({"slurm": slurm_script, "k8s": kubernetes_file}[argv[0]](job), end="")
    print(f"turnwise: nothing was submitted. {NOT_RUN}", file=sys.stderr)
    return 0


def _own_flags(parser: Parser) -> None:
    from turnwise.training.cluster.job_files import ClusterJob

    group = parser.add_argument_group("cluster")
    group.add_argument("--dry-run", action="store_true", help="print the file; there is no other way")
    for f in fields(ClusterJob):
        if f.metadata:
            text = f"{f.metadata['help']} [{f.default}]" if f.default else f.metadata["help"]
            group.add_argument(flag(f.name), type=type(f.default), default=f.default, help=text)


def _split(argv: Sequence[str]) -> tuple[argparse.Namespace | None, list[str]]:
    """The flags of launch, and the words for train. None where help is asked for."""
    if "-h" in argv or "--help" in argv:
        return None, []
    parser = Parser("launch", json="", add_help=False)
    _own_flags(parser)
    job_flags, train = parser.parse_known_args(list(argv))
    del job_flags.dry_run
    return job_flags, train


def _serve_words(settings: Settings, run: RunFlags) -> list[str]:
    """Model and settings of a server: those that it shares with the run, where the user gave them."""
    words = [str(settings.model)]
    for f in fields(Settings):
        if f.name in OF_SERVERS and (f.name in run.origins or (f.name == "env" and settings.model.tiny)):
            value = getattr(settings, f.name)
            words += [flag(f.name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


def _without(words: Sequence[str], name: str) -> list[str]:
    """The words without one flag and its value: launch gives it again."""
    rest, skip = list[str](), False
    for word in words:
        if not skip and word != name and not word.startswith(f"{name}="):
            rest.append(word)
        skip = word == name and not skip
    return rest
